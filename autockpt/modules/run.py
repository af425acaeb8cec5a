"""One forward of a model whose chosen submodules run under ``checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from autockpt.modules.kinds import Trail
from autockpt.modules.parts import Forward, calling
from autockpt.modules.state import Effects, Entered
from autockpt.regions.recomputation import Explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Which calls of which modules are regions, as plain data.

    Attributes
    ----------
    calls : mapping
        From module path to the numbers of those of its calls that are regions.
    counts : mapping
        From module path to how often it was called when the plan was made. Later calls are
        run as the last of them.
    effects : mapping
        From module path to what its calls do besides computing.
    python : bool
        Whether the forward draws from python's or numpy's generators.
    device_types : tuple of str
    """

    calls: Mapping[str, frozenset[int]]
    counts: Mapping[str, int]
    effects: Mapping[str, Effects] = field(default_factory=dict)
    python: bool = False
    device_types: tuple[str, ...] = ("cpu",)

    def holds(self, path: str, number: int) -> bool:
        """Whether a call is a region."""
        found = self.calls.get(path)
        if found is None:
            return False
        return min(number, self.counts.get(path, 1) - 1) in found


class Run:
    """The caller during one forward of a root, or during the recomputation of a region.

    Parameters
    ----------
    root : nn.Module
    names : mapping
        From ``id`` to path, for the root's modules.
    regions : Regions
    calls : dict, optional
        How often each module was called before.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        regions: Regions,
        calls: dict[str, int] | None = None,
    ) -> None:
        self.root = root
        self.names = names
        self.regions = regions
        self.calls = {} if calls is None else calls
        self.trail = Trail()

    def call(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a submodule, as a region if the plan says so."""
        path = self.names.get(id(module))
        if path is None:
            return forward(module, *args, **kwargs)
        if not torch.is_grad_enabled():
            # A pass without grad (a teacher's, self-conditioning) comes and goes from step to step:
            # the calls that hold something must have the same numbers with it and without.
            self.trail.without_grad(path)
            return forward(module, *args, **kwargs)
        number = self.calls.get(path, 0)
        self.calls[path] = number + 1
        self.trail.enter(path, number, args, kwargs)
        try:
            if not self.regions.holds(path, number):
                return forward(module, *args, **kwargs)
            return self._region(path, module, forward, args, kwargs)
        finally:
            self.trail.leave()

    def enter(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Entered, Run]:
        """Take down what a call finds, and give the caller of its recomputations."""
        effects = self.regions.effects.get(path, Effects())
        entered = Entered(
            path,
            module,
            (args, kwargs),
            effects,
            [(other, self.root.get_submodule(other)) for other in effects.modules],
            python=self.regions.python,
            device_types=self.regions.device_types,
        )
        return entered, self.copy()

    def copy(self) -> Run:
        """Give a caller that goes on from here."""
        return Run(self.root, self.names, self.regions, dict(self.calls))

    def _region(
        self,
        path: str,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # What is given twice is one object in the recomputation too: attention asks for that.
        distinct = {id(leaf): leaf for leaf in leaves}
        numbers = {key: number for number, key in enumerate(distinct)}
        places = [numbers[id(leaf)] for leaf in leaves]
        entered, again = self.enter(path, module, args, kwargs)
        # In forward the call is given its own arguments: it may write to the lists among them.
        given = [(args, kwargs)]

        def region(*saved: Any) -> Any:
            if given:
                own_args, own_kwargs = given.pop()
                return forward(module, *own_args, **own_kwargs)
            own_args, own_kwargs = pytree.tree_unflatten([saved[i] for i in places], spec)
            with calling(again.copy()):
                return forward(module, *own_args, **own_kwargs)

        return torch_checkpoint.checkpoint(
            region,
            *distinct.values(),
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (
                Explained(f"Module {path}", _CAUSES, entered.left),
                entered.again(),
            ),
        )


_CAUSES = (
    "Usual causes: the module reads something that changes between forward and backward and is "
    "neither its parameter, buffer, attribute nor argument (a global, a file, the time), a draw "
    "from a generator of its own, an op without a deterministic implementation. Make that value "
    "an attribute or a buffer of the module."
)
