"""Ambient modes as ``with`` statements around the ops that ran under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch

from autockpt.capture.ambient import Ambient


def contexts(ambient: Ambient, call: Ambient, *, in_region: bool) -> str:
    """Give the context expressions that lead to ``ambient`` where an op is emitted.

    Parameters
    ----------
    ambient : Ambient
        Around the op when it was recorded.
    call : Ambient
        Around the call of the forward.
    in_region : bool
        The op runs again in backward. A region's call brings back grad mode, autocast and
        default device of the call, but neither the default dtype nor the attention backends.

    Returns
    -------
    str
        For one ``with`` statement; empty if nothing differs.
    """
    return ", ".join(_parts(ambient, call, in_region=in_region))


def around_region(ambients: Collection[Ambient], call: Ambient, *, in_region: bool) -> str:
    """Give the contexts to keep open around a region whose ops ran under these modes.

    It enters its contexts itself, where the recomputation meets them too. Autocast is entered
    around it all the same: a weight that it has cast is for all in the block, so that the
    gradients of its uses are added up in the lower precision.
    """
    if len(ambients) != 1:
        return ""
    (ambient,) = ambients
    parts = _parts(ambient, call, in_region=in_region)
    return ", ".join(parts) if all(part.startswith("torch.autocast(") for part in parts) else ""


def _parts(ambient: Ambient, call: Ambient, *, in_region: bool) -> list[str]:
    if in_region:
        call = dataclasses.replace(call, default_dtype=torch.float32, sdpa=(True,) * 4)
    return ambient.describe_difference(call)
