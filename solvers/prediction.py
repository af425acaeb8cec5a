"""What ``simulate`` predicts of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Memory and recomputation of one step under a plan. All numbers are exact integers.

    Attributes
    ----------
    peak_bytes : int
        Most bytes alive at once, fixed bytes included: the larger of the next two.
    resident_peak_bytes, fresh_peak_bytes : int
        The peak of a step that starts with parameter gradients resident, and of one that
        starts without them (``set_to_none``).
    activation_peak_bytes : int
        ``resident_peak_bytes`` less the fixed bytes.
    peak_op : int
        Index of the op at the peak.
    peak_phase : {"forward", "backward", "recompute"}
    kept_bytes : int
        Alive right after forward above the fixed bytes, what the caller holds included.
    recompute_cost, recompute_flops : int
        Of all ops that run again, early stop counted.
    recomputed_ops : int
        How many times an op runs again.
    forward_cost : int
        Cost of one plain forward.
    timeline : tuple of (phase, op index, bytes)
        Resident level at every instant, fixed bytes included; empty unless asked for.
    """

    peak_bytes: int
    resident_peak_bytes: int
    fresh_peak_bytes: int
    activation_peak_bytes: int
    peak_op: int
    peak_phase: Phase
    kept_bytes: int
    recompute_cost: int
    recompute_flops: int
    recomputed_ops: int
    forward_cost: int
    timeline: tuple[tuple[Phase, int, int], ...] = ()

    @property
    def recompute_share(self) -> float:
        """Recompute cost over the cost of one plain forward."""
        return self.recompute_cost / self.forward_cost if self.forward_cost else 0.0
