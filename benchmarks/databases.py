"""Every module and every differentiable op that torch tests itself with, inside regions.

    python -m benchmarks.databases [--emit modules] [--samples 3] [NAME ...]

The databases are ``common_modules.module_db`` and ``common_methods_invocations.op_db`` of
``torch.testing._internal``, their samples those for float32 on a CPU. Each stands in a small
module between calls that save tensors; regions lie over all of it, in one piece, in small pieces,
or nested. Loss, outputs, gradients, buffers, inputs and random states of two steps are compared to
the bit with the plain model's. What cannot be planned has to be refused with a reason.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.common import RESULTS, show
from benchmarks.isolated import outcomes
from benchmarks.trial import BAD, SOLVERS, Subject, Trial, attempt, seed

LIMIT_S = 60.0
WAYS = ("op", "in place", "module", "module in eval")


class Smooth(nn.Module):
    """Adds nothing, but saves tensors: what it is given comes out with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Add zero times something."""
        return x + x.tanh().sin() * self.zero


class Call(nn.Module):
    """Calls a function with tensors put into its nested arguments."""

    def __init__(self, function: Callable[..., Any], call: tuple[Any, ...]) -> None:
        super().__init__()
        self.function = function
        leaves, self.form = pytree.tree_flatten(call)
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        """Call it."""
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        return self.function(*args, **kwargs)


class Body(nn.Module):
    """Calls that save tensors, what the trial is about, and such calls again."""

    def __init__(self, focus: nn.Module) -> None:
        super().__init__()
        self.before, self.focus, self.after = Smooth(), focus, Smooth()

    def forward(self, *tensors: Tensor) -> Any:
        """Run all three."""
        found = self.focus(*(self.before(t) if smooth(t) else t for t in tensors))
        return pytree.tree_map(lambda x: self.after(x) if smooth(x) else x, found)


class Around(nn.Module):
    """The body, and a loss of what it gives."""

    def __init__(self, focus: nn.Module) -> None:
        super().__init__()
        self.body = Body(focus)

    def forward(self, *tensors: Tensor) -> dict[str, Any]:
        """Give outputs and a loss."""
        found = self.body(*tensors)
        leaves = [leaf for leaf in pytree.tree_leaves(found) if smooth(leaf)]
        real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in leaves]
        loss = sum(((x * x.sigmoid()).sum() for x in real), torch.zeros(()))
        return {"loss": loss, "outputs": found}


def smooth(value: Any) -> bool:
    """Whether it is a tensor with a gradient, of the usual layout."""
    return isinstance(value, Tensor) and value.requires_grad and value.layout is torch.strided


def subjects(name: str, samples: int) -> Iterator[Subject]:
    """Give the trials of a name such as ``"op linalg.norm"`` or ``"module Linear"``."""
    way, _, rest = name.partition(": ")
    seed(0)
    found = _of_module(rest, training=way == "module") if "module" in way else _of_op(rest, way)
    yield from itertools.islice(found, samples)


def _of_op(name: str, way: str) -> Iterator[Subject]:
    info = _ops()[name]
    function = info.op if way == "op" else info.get_inplace()
    for sample in info.sample_inputs("cpu", torch.float32, requires_grad=True):
        if way == "in place" and sample.broadcasts_input:
            continue
        call = ((sample.input, *sample.args), sample.kwargs)
        tensors = [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
        if any(map(smooth, tensors)):
            yield Subject(model=Around(Call(function, call)), args=_leaves(tensors), focus=FOCUS)


FOCUS = "body.focus"


def _of_module(name: str, *, training: bool) -> Iterator[Subject]:
    info = _modules()[name]
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    for given in inputs:
        made, sample = given.constructor_input, given.forward_input
        if sample is None:
            continue
        module = info.module_cls(*made.args, **made.kwargs).train(training)
        call = (sample.args, sample.kwargs)
        tensors = [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
        model = Around(Call(module, call)).train(training)
        yield Subject(model=model, args=_leaves(tensors), focus=FOCUS)


def _leaves(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)


@functools.cache
def _ops() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        info.formatted_name: info
        for info in op_db
        if info.supports_autograd and info.supports_dtype(torch.float32, "cpu")
    }


@functools.cache
def _modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def names() -> list[str]:
    """Give all names: ``"WAY: NAME IN THE DATABASE"``."""
    found = [f"op: {name}" for name in _ops()]
    found += [f"in place: {name}" for name, op in _ops().items() if op.get_inplace() is not None]
    found += [f"{way}: {name}" for way in WAYS[2:] for name in _modules()]
    return found


def run(name: str, *, samples: int = 3, emit: str = "auto") -> list[Trial]:
    """Try the first samples of a name, each with another kind of regions."""
    quiet()
    solvers = itertools.cycle(SOLVERS.items())
    return [
        attempt(f"{name} #{number} {how}", subject, emit=emit, solver=solver)
        for number, (subject, (how, solver)) in enumerate(
            zip(subjects(name, samples), solvers, strict=False)
        )
    ]


@functools.cache
def quiet() -> None:
    """Prepare a process: the databases are millions of objects that no collection need look at."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    names()
    gc.freeze()


def sweep(chosen: Iterable[str], samples: int, emit: str, workers: int) -> Iterator[Trial]:
    """Try the names in processes of their own."""
    tried = functools.partial(run, samples=samples, emit=emit)
    for name, found in outcomes(tried, list(chosen), LIMIT_S, workers=workers):
        if isinstance(found, str):
            yield Trial(name=name, kind="crashed", reason=found)
        else:
            yield from found


def counts(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Rows of a table: a way of calling, and how many trials went how."""
    rows: list[dict[str, Any]] = []
    for way, of_way in _by_way(trials).items():
        kinds: Counter[str] = Counter(trial.kind for trial in of_way)
        steps = [t for t in of_way if t.kind not in ("no plain step", "not a function")]
        again = sum(trial.recomputed > 0 for trial in steps)
        rows.append(
            {
                "way": way,
                "trials": len(steps),
                **{k: kinds[k] for k in ("graph", "modules", "refused", *BAD)},
                "runs again": again / max(1, len(steps)),
                "itself in a region": sum(t.covered for t in steps) / max(1, len(steps)),
                "left out": len(of_way) - len(steps),
            }
        )
    return rows


def _by_way(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    found: dict[str, list[Trial]] = {way: [] for way in WAYS}
    for trial in trials:
        found[trial.name.partition(": ")[0]].append(trial)
    return {**found, "all": [trial for of_way in found.values() for trial in of_way]}


def main() -> None:
    """Print counts, what is refused and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names, such as 'op: linalg'")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--emit", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    parts = given.names or [""]
    chosen = [name for name in names() if any(part in name for part in parts)]
    trials = []
    for trial in sweep(chosen, given.samples, given.emit, given.workers):
        trials.append(trial)
        if trial.kind in ("refused", "no plain step", *BAD):
            print(f"{trial.kind}: {trial.name}: {trial.reason}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"databases_{given.emit}_trials.json"
    path.write_text(json.dumps([asdict(trial) for trial in trials], indent=1))
    show("torch's databases inside regions", counts(trials), f"databases_{given.emit}")


if __name__ == "__main__":
    main()
