"""Ambient modes as ``with`` statements around the ops that ran under them."""

from __future__ import annotations

import dataclasses

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
        The op runs again in backward. ``checkpoint`` brings back grad mode, autocast and
        default device of the call, but neither the default dtype nor the attention backends.

    Returns
    -------
    str
        For one ``with`` statement; empty if nothing differs.
    """
    if in_region:
        call = dataclasses.replace(call, default_dtype=torch.float32, sdpa=(True,) * 4)
    return ", ".join(ambient.describe_difference(call))
