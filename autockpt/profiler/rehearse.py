"""Runs one op apart, forward and backward, on its real arguments, and writes down the facts.

The op is run twice: once under a dispatch mode that counts FLOPs and sees random draws, once
bare with the allocator watched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autockpt.errors import ProfileError
from autockpt.meters import Meter
from autockpt.profiler.aten_log import Tally
from autockpt.profiler.cost import OpWork
from autockpt.profiler.facts import OpFacts
from autockpt.profiler.logged import Logged, logged_run
from autockpt.profiler.subject import Subject
from autockpt.profiler.timed import Timer, Times
from autockpt.profiler.watched import (
    Backward,
    alone_run,
    dropped_run,
    stopped_run,
    unpacked_run,
    watched_run,
)


@dataclass(slots=True)
class Rehearsal:
    """Facts of one op, complete once the meter is closed and ``finish`` was called."""

    facts: OpFacts
    name: str
    measured: bool = False
    backward: Backward = "none"
    packs: int = 0
    hides: bool = False
    unpacks: bool = False

    def finish(self, watch: Meter) -> OpFacts:
        """Add the workspaces."""
        if not self.measured:
            return self.facts
        made = sum(self.facts.hidden_bytes) + sum(
            result.storage_bytes
            for index, result in enumerate(self.facts.results)
            if result.storage == ("result", index)
        )
        forward = watch.span(f"{self.name}.forward", f"{self.name}.forward.end")
        workspace = max(0, forward.peak_bytes - made)
        backward_workspace, alone = 0, None
        if self.backward != "none":
            backward = watch.span(f"{self.name}.backward", f"{self.name}.backward.end")
            fresh = sum(self.facts.fresh_gradient_bytes)
            # Negative where a composite op frees what it hid before its last gradient is made.
            hidden = sum(self.facts.hidden_bytes)
            backward_workspace = max(-hidden, backward.peak_bytes - fresh)
            if self.backward == "lets go":
                backward = watch.span(f"{self.name}.alone", f"{self.name}.alone.end")
                alone = min(backward_workspace, backward.peak_bytes - fresh)
        stop = 0
        if self.packs:
            stop = watch.span(f"{self.name}.stop", f"{self.name}.stop.{self.packs}").peak_bytes
        dropped = workspace
        if self.hides:
            dropped = watch.span(f"{self.name}.dropped", f"{self.name}.dropped.end").peak_bytes
            dropped -= made
        early, early_alone = 0, None
        if self.unpacks:
            early = watch.span(f"{self.name}.early", f"{self.name}.early.end").end_bytes
            name = f"{self.name}.early alone"
            early_alone = watch.span(name, f"{name}.end").end_bytes
        return replace(
            self.facts,
            early_backward_bytes=early,
            early_backward_alone_bytes=early_alone,
            dropped_workspace_bytes=dropped,
            forward_workspace_bytes=workspace,
            backward_workspace_bytes=backward_workspace,
            backward_workspace_alone_bytes=alone,
            stop_peak_bytes=stop,
        )


def rehearse(
    subject: Subject,
    watch: Meter,
    cost: Callable[[OpWork], int],
    *,
    timer: Timer | None,
    measured: bool,
) -> Rehearsal:
    """Run an op apart and return what was seen; costs of a real run only with a timer."""
    try:
        facts = logged_run(subject)
        rehearsal = Rehearsal(facts=facts.facts, name=subject.name)
        if measured:
            rehearsal.measured = True
            rehearsal.backward = watched_run(subject, watch, facts.differentiable)
            if rehearsal.backward == "lets go":
                alone_run(subject, watch, facts.differentiable)
            if facts.at_stop.calls:
                rehearsal.packs = stopped_run(subject, watch)
            if facts.facts.hidden_bytes:
                rehearsal.hides = True
                dropped_run(subject, watch)
            # Either has made something by the time it asks for what it saved: what it hid, or the
            # copies of gradients that it begins with.
            if facts.facts.hidden_bytes or rehearsal.backward == "lets go":
                rehearsal.unpacks = unpacked_run(subject, watch, facts.differentiable, shared=True)
                unpacked_run(subject, watch, facts.differentiable, shared=False)
        times = Times()
        if timer is not None:
            inside = facts.at_stop.calls > 0
            times = timer.times(subject, facts.differentiable, stops_inside=inside)
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            f"The device ran out of memory while '{subject.target}' was measured apart. Plan "
            f"with cost='roofline', or with a smaller batch."
        ) from error
    rehearsal.facts = _priced(facts, subject, cost, times)
    return rehearsal


def _priced(
    logged: Logged,
    subject: Subject,
    cost: Callable[[OpWork], int],
    times: Times,
) -> OpFacts:
    target, forward, at_stop = subject.target, logged.forward, logged.at_stop
    full = cost(
        OpWork(
            target=target,
            flops=forward.flops,
            output_bytes=logged.output_bytes,
            measured_ns=times.forward,
        )
    )
    # Until its last pack an op has done this share of its work; nothing if it packs inputs only.
    share = _share(at_stop, forward)
    if share and times.forward:
        share = min(1.0, times.stop / times.forward)
    stopped = min(full, round(full * share))
    backward = cost(
        OpWork(
            target=target + " backward",
            flops=logged.backward_flops,
            output_bytes=sum(logged.facts.fresh_gradient_bytes),
            measured_ns=times.backward,
        )
    )
    return replace(
        logged.facts,
        cost=full,
        stop_cost=stopped,
        backward_cost=backward if logged.facts.gradients else 0,
        flops=forward.flops,
        stop_flops=at_stop.flops,
        backward_flops=logged.backward_flops,
    )


def _share(done: Tally, total: Tally) -> float:
    if done.calls == 0:
        return 0.0
    if total.flops:
        return done.flops / total.flops if done.flops else done.calls / total.calls
    return done.nbytes / total.nbytes if total.nbytes else 1.0
