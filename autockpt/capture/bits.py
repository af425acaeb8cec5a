"""Equality of tensors to the bit, and identity of their storages."""

from __future__ import annotations

import torch


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, layout included (a NaN equals itself)."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    if left.layout is not torch.strided:
        return torch.equal(left.detach().to_dense(), right.detach().to_dense())
    if left.stride() != right.stride():
        return False
    if left.is_meta or torch.equal(left.detach(), right.detach()):
        return True
    return bool(torch.equal(as_bytes(left), as_bytes(right)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def storage_id(tensor: torch.Tensor) -> int | None:
    """Return what identifies a tensor's storage while it lives; None where it has none."""
    if tensor.layout is not torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)
