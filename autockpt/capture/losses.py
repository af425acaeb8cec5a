"""The scalar that is differentiated when no loss is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autockpt.errors import CaptureError


def default_loss(output: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Take the output's ``.loss``, else a scalar output, else the sum of what is differentiable.

    Parameters
    ----------
    output : object
        What the model returned.
    tensors : sequence of Tensor
        The tensors in it.

    Raises
    ------
    CaptureError
        If nothing in the output requires grad.
    """
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor) and found.requires_grad and found.numel() == 1:
        return found
    terms = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    if not terms:
        raise CaptureError(
            f"Nothing in the model's output ({type(output).__name__}) requires grad. "
            "Give a loss, or let a parameter or an input require grad."
        )
    scalars = [t for t in terms if t.dim() == 0]
    if scalars:
        return scalars[0]
    total = terms[0].sum()
    for term in terms[1:]:
        total = total + term.sum()
    return total


def check_loss(loss: object) -> torch.Tensor:
    """Return what the user's ``loss`` gave, if it can be differentiated.

    Raises
    ------
    CaptureError
    """
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"loss(outputs) returned {loss!r} ({type(loss).__name__}), not a tensor of one element."
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"loss(outputs) returned a tensor of shape {tuple(loss.shape)}, not of one element: "
            f"reduce it with .sum() or .mean()."
        )
    if not loss.requires_grad:
        raise CaptureError(
            "loss(outputs) returned a tensor that does not require grad: nothing would be "
            "trained. Compute it from outputs that do, without .detach() or torch.no_grad()."
        )
    return loss
