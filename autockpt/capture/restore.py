"""Recording leaves no trace: what a forward changed is found out and put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from autockpt.capture.bits import as_bytes, identical, storage_id
from autockpt.capture.externals import attribute_generators, attribute_tensors
from autockpt.capture.paths import generators_within, tensors_within
from autockpt.capture.watch import Change, Watch
from autockpt.errors import CaptureError

_ADVICE = (
    "Such a forward cannot be replayed: move the change out of the forward "
    "(a forward may write tensors in place, such as buffers, and leave results in attributes). "
    "Forward hooks of submodules count as part of it: remove one that fills a list or a dict, or "
    "let it write to an attribute of its module."
)

_PROBE = 1_346_719_527


class Trace:
    """What there was before a forward: states, attributes, contents of containers.

    Parameters
    ----------
    model : torch.nn.Module
        All its modules' attributes are looked after, nested containers and plain objects too.
    args, kwargs : sequence, mapping
        The call's arguments, likewise.
    """

    def __init__(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._random = RandomState()
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._copied: set[int] = set()
        generators = [*attribute_generators(model), *generators_within((args, dict(kwargs)))]
        self._generators = {generator: generator.get_state() for generator in generators}
        # Where each stands as far as draws have moved it.
        self._stands = dict(self._generators)
        for buffer in model.buffers():
            self.before_write(buffer, known=True)
        outside = [*model.parameters(), *(t for _, t in attribute_tensors(model))]
        outside += [t for _, t in tensors_within((args, dict(kwargs)), objects=True)]
        self._storages = {s for t in outside if (s := storage_id(t)) is not None}
        self._model = model
        self._call = (tuple(args), dict(kwargs))
        self._settled: frozenset[int | None] | None = None
        self._probed: RandomState | None = None
        self._before = self._watch = self._look()

    def before_write(self, tensor: torch.Tensor, known: bool = False) -> None:
        """Keep a copy of a tensor that is about to be written, if it is not the forward's own."""
        if id(tensor) in self._copied or tensor.is_inference():
            return
        # Results of the forward vanish with it, unless they share an outside tensor's storage.
        if known or storage_id(tensor) in self._storages:
            self._copied.add(id(tensor))
            with torch.no_grad():
                self._copies.append((tensor, tensor.detach().clone(), tensor._version))

    def written(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Name the parameters and plain attributes whose storage was written."""
        moved = {storage_id(t) for t, copy, n in self._copies if t._version != n} - {None}
        named = (*model.named_parameters(), *attribute_tensors(model))
        return tuple(name for name, tensor in named if storage_id(tensor) in moved)

    def before_draw(self, generator: torch.Generator) -> str | None:
        """Say what no graph can hold of a generator that is about to be drawn from.

        Making it and seeding it are no calls with tensors: nobody sees them happen.
        """
        if generator not in self._stands:
            self._generators[generator] = generator.get_state()
            return (
                "it draws from a torch.Generator that is neither an argument nor an attribute of "
                "a module"
            )
        if not torch.equal(generator.get_state(), self._stands[generator]):
            return "it seeds a torch.Generator"
        return None

    def after_draw(self, generator: torch.Generator) -> None:
        """Take note of where a draw has moved a generator."""
        self._stands[generator] = generator.get_state()

    def probe(self) -> None:
        """Put python's and numpy's generators where no forward leaves them.

        One that seeds them would otherwise find them as an earlier forward has left them, and
        would seem not to touch them.
        """
        random.seed(_PROBE)
        np.random.seed(_PROBE)
        self._probed = RandomState()

    def verify(
        self, drawn_in: str, constant: Callable[[torch.Tensor], bool]
    ) -> tuple[Change, ...] | None:
        """Raise if python's or numpy's random state moved, or python state was written.

        Results that are left in attributes of modules are no matter: the emitted forward
        leaves them there as well.

        Parameters
        ----------
        drawn_in : str
            The module in which python's or numpy's random state moved, if it did.
        constant : callable
            Whether a tensor of the forward depends on no input and no random draw.

        Returns
        -------
        tuple of Change or None
            The results that were left in attributes. None if settings or caches were made, which
            another forward may find made (`settle`).
        """
        if not (self._probed or self._random).python_is_same():
            raise CaptureError(
                "Cannot capture this forward: it draws from python's or numpy's random "
                f"generator, in {drawn_in}. Draw with torch instead (torch.rand(()).item() "
                "becomes a guard)."
            )
        if not all(torch.equal(g.get_state(), state) for g, state in self._stands.items()):
            raise CaptureError(
                f"Cannot capture this forward: it seeds a torch.Generator. {_ADVICE}"
            )
        left: list[Change] = []
        made = False
        for change in self._watch.changes():
            if self._settled is None and change.settles(constant):
                made = True
            elif change.is_left:
                left.append(change)
            else:
                line = f", at {change.place}" if change.place else ""
                raise CaptureError(
                    f"Cannot capture this forward: it writes {change.what}{line}. {_ADVICE}"
                )
        if self._settled not in (None, self._written()):
            raise CaptureError(
                "Cannot capture this forward: the first one initializes the model, and does what "
                "later ones do not. Run one forward before optimizing."
            )
        if made:
            for change in left:
                change.undo()
        return None if made else tuple(left)

    def settle(self) -> None:
        """Take attributes as they are now: they stay, and must not change again."""
        self._settled = self._written()
        self.undo_tensors()
        self._copies = [(tensor, copy, tensor._version) for tensor, copy, _ in self._copies]
        self._watch = self._look()

    def _written(self) -> frozenset[int | None]:
        return frozenset(
            storage_id(tensor)
            for tensor, copy, version in self._copies
            if tensor._version != version or not identical(tensor, copy)
        )

    def _look(self) -> Watch:
        watch = Watch()
        watch.visit_modules(self._model)
        watch.visit("the arguments", self._call, 0)
        return watch

    def undo(self) -> None:
        """Put everything back, attributes to where they were settled."""
        self._watch.undo()
        self.undo_tensors()

    def undo_attributes(self) -> None:
        """Put attributes back to where they were at the very start."""
        self._before.undo()

    def undo_tensors(self) -> None:
        """Put tensors and random states back."""
        with torch.no_grad():
            # Last things first: a tensor may have been copied after a view of it was written.
            for tensor, copy, version in reversed(self._copies):
                put_back(tensor, copy, version)
        self._random.restore()
        for generator, state in self._generators.items():
            generator.set_state(state)


def write_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Give a tensor its content back, without grad."""
    if tensor.shape != copy.shape:
        # Observers of quantization give their buffers a size in the first forward.
        tensor.resize_(copy.shape)
    tensor.detach().copy_(copy)


def put_back(tensor: torch.Tensor, copy: torch.Tensor, version: int) -> None:
    """Give a tensor its content and its version counter back.

    A graph that waits for its backward has saved running statistics, and finds them as they
    were: it must not be told that they were written.
    """
    # The version alone does not tell: batch_norm writes its statistics behind it.
    if tensor._version != version or not _same_elements(tensor, copy):
        write_back(tensor, copy)
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _same_elements(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Compare with a copy, which lies otherwise where elements of the tensor share their memory."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return identical(tensor, copy)
    return torch.equal(as_bytes(tensor), as_bytes(copy))


def default_states() -> list[torch.Tensor]:
    """Return the states of torch's default generators: the CPU's, and those of devices in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


class RandomState:
    """The random states of torch (all devices in use), python and numpy."""

    def __init__(self) -> None:
        self.states = default_states()
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Set the states back."""
        torch.set_rng_state(self.states[0])
        for index, state in enumerate(self.states[1:]):
            torch.cuda.set_rng_state(state, index)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def python_is_same(self) -> bool:
        """Whether python's and numpy's generators are still where they were."""
        now: Any = np.random.get_state()
        before: Any = self._numpy
        numpy_same = now[2:] == before[2:] and bool((now[1] == before[1]).all())
        return random.getstate() == self._python and numpy_same

    def torch_is(self, other: RandomState) -> bool:
        """Whether torch's generators stand where they stood in `other`."""
        return all(map(torch.equal, self.states, other.states))


@contextmanager
def untraced(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Trace]:
    """Run a forward inside a ``with`` block that puts back whatever it changed.

    Parameters
    ----------
    model : torch.nn.Module
    args, kwargs : sequence, mapping
        The call that runs inside.

    Yields
    ------
    Trace
        Tell it with `Trace.before_write` of tensors that are about to be written in place
        (buffers are looked after anyway).
    """
    trace = Trace(model, args, kwargs)
    try:
        yield trace
    except BaseException:
        trace.undo_attributes()
        trace.undo_tensors()
        raise
    trace.undo()
