"""A region is not believed, it is checked: run twice in a row, it must give the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autockpt.capture.check import fingerprint
from autockpt.capture.refusals import drop, gone
from autockpt.capture.restore import RandomState
from autockpt.errors import RecomputationError
from autockpt.modules.parts import Forward, calling
from autockpt.modules.rehearsal import plain_forward
from autockpt.modules.run import Regions, Run
from autockpt.modules.unwritten import unwritten


def differing(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], regions: Regions
) -> dict[str, str]:
    """Run each region twice, the second time as backward would; say which differ, and how.

    Parameters
    ----------
    model : nn.Module
    args, kwargs
        The batch.
    regions : Regions

    Notes
    -----
    Costs a forward without grad, and one more of every region. Nested regions are run twice in
    the first run of the outer one.
    """
    if not regions.calls:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    checker = _Checker(model, names, regions)
    hooks = torch.autograd.graph.saved_tensors_hooks(drop, gone)
    with unwritten(model, args, kwargs), torch.enable_grad(), hooks, calling(checker):
        plain_forward(model)(*args, **kwargs)
    return checker.wrong


class _Checker(Run):
    """The caller that runs regions twice in a row."""

    def __init__(self, root: nn.Module, names: Mapping[int, str], regions: Regions) -> None:
        super().__init__(root, names, regions)
        self.wrong: dict[str, str] = {}

    def _region(
        self,
        path: str,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        entered, again = self.enter(path, module, args, kwargs)
        result = forward(module, *args, **kwargs)
        entered.left()
        found = fingerprint(result)
        state = RandomState()
        own_args, own_kwargs = pytree.tree_unflatten(leaves, spec)
        try:
            with entered.again(), calling(again):
                second = fingerprint(forward(module, *own_args, **own_kwargs))
        except RecomputationError as error:
            self.wrong[path] = f"writes its own parameters ({error})"
            return result
        except Exception as error:  # noqa: BLE001, whatever a module does the second time
            self.wrong[path] = f"fails when it runs again ({type(error).__name__}: {error})"
            return result
        if second != found:
            self.wrong[path] = "gives other results when it runs again"
        elif not (state.python_is_same() and state.torch_is(RandomState())):
            self.wrong[path] = "draws other random numbers when it runs again"
        return result
