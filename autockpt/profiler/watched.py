"""Bare runs of an op with the allocator watched.

A dispatch mode changes what autograd does in place, so none is active here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.meters import Meter
from autockpt.profiler.subject import Subject, as_it_is, differentiate, rest, results_of

Backward = Literal["none", "plain", "lets go"]


def watched_run(subject: Subject, watch: Meter, differentiable: list[int]) -> Backward:
    """Run bare under the meter; say what backward was run.

    An op of several steps that begins with copies of the gradients that arrive, for they lie
    otherwise than its results, then lets go of them, and so does one that writes a part in
    place; unless another op has them too, as here.
    """
    leaves, args, kwargs, edges = subject.stand_ins()
    watch.mark(f"{subject.name}.forward")
    out = subject.call(*args, **kwargs)
    watch.mark(f"{subject.name}.forward.end")
    torch.clear_autocast_cache()
    wanted = [edge for edge in edges if edge is not None]
    if not differentiable or not wanted:
        return "none"
    results, _ = results_of(subject, leaves, out)
    lets_go = subject.writes_part or _copies_gradients(subject, results, differentiable)
    held: list[torch.Tensor] = []

    def arrived(gradients: tuple[torch.Tensor, ...]) -> None:
        held.extend(gradients if lets_go else ())
        watch.mark(f"{subject.name}.backward")

    end = rest(subject, results, differentiable, arrived)
    del out, results, leaves, args, kwargs
    got = differentiate(end, wanted)
    watch.mark(f"{subject.name}.backward.end")
    held.clear()
    del got
    return "lets go" if lets_go else "plain"


def _copies_gradients(
    subject: Subject, results: list[torch.Tensor], differentiable: list[int]
) -> bool:
    """Whether an op is several nodes to autograd, and gradients lie otherwise than results."""
    if not any(subject.layouts[i] for i in differentiable if subject.layouts):
        return False
    found = (results[i].grad_fn for i in differentiable)
    nodes = [node for node in found if node is not None]
    earlier = [earlier for node in nodes for earlier, _ in node.next_functions]
    return any(node is not None and node.next_functions for node in earlier)


def alone_run(subject: Subject, watch: Meter, differentiable: list[int]) -> None:
    """Run backward as where no other op has the gradients that arrive."""
    leaves, args, kwargs, edges = subject.stand_ins()
    out = subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    results, _ = results_of(subject, leaves, out)
    end = rest(subject, results, differentiable, lambda _: watch.mark(f"{subject.name}.alone"))
    del out, results, leaves, args, kwargs
    got = differentiate(end, [edge for edge in edges if edge is not None])
    watch.mark(f"{subject.name}.alone.end")
    del got


def stopped_run(subject: Subject, watch: Meter) -> int:
    """Run forward, marking each tensor that is packed; return how many there were.

    A recomputation that ends in this op ends at the last mark.
    """
    _, args, kwargs, _ = subject.stand_ins()
    packs = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packs
        packs += 1
        watch.mark(f"{subject.name}.stop.{packs}")
        return tensor.detach()

    watch.mark(f"{subject.name}.stop")
    with saved_tensors_hooks(pack, as_it_is):
        subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    return packs


def dropped_run(subject: Subject, watch: Meter) -> None:
    """Run forward as in a region: what is packed is thrown away at once."""
    _, args, kwargs, _ = subject.stand_ins()
    watch.mark(f"{subject.name}.dropped")
    with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        subject.call(*args, **kwargs)
    watch.mark(f"{subject.name}.dropped.end")
    torch.clear_autocast_cache()


class _Unpacked(Exception):
    """Backward has asked for something saved: there is no more to see."""


def unpacked_run(
    subject: Subject, watch: Meter, differentiable: list[int], *, shared: bool
) -> bool:
    """Run backward up to where it first asks for something saved; say whether it does.

    ``shared`` says whether another op has the gradients that arrive.
    """
    leaves, args, kwargs, edges = subject.stand_ins()
    early = "early" if shared else "early alone"

    def unpack(_: torch.Tensor) -> torch.Tensor:
        watch.mark(f"{subject.name}.{early}.end")
        raise _Unpacked

    with saved_tensors_hooks(torch.Tensor.detach, unpack):
        out = subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    wanted = [edge for edge in edges if edge is not None]
    if not differentiable or not wanted:
        return False
    results, _ = results_of(subject, leaves, out)
    held: list[torch.Tensor] = []

    def arrived(gradients: tuple[torch.Tensor, ...]) -> None:
        held.extend(gradients if shared else ())
        watch.mark(f"{subject.name}.{early}")

    end = rest(subject, results, differentiable, arrived)
    del out, results, leaves, args, kwargs
    try:
        differentiate(end, wanted)
    except _Unpacked:
        return True
    return False
