"""Storages of tensors, and tensors in nested arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a living tensor's storage (layouts without a storage count as their own)."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Allocated bytes of a tensor's storage."""
    if tensor.layout is not torch.strided:
        return int(tensor._nnz()) * tensor.element_size()
    return int(tensor.untyped_storage().nbytes())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once: autograd may add into it."""
    if tensor.layout is not torch.strided:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def settled(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides with those that do not matter as 0: of dimensions of one element, or of none."""
    return tuple(step if size > 1 else 0 for size, step in zip(shape, strides, strict=True))


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors share an element, and not only a storage."""
    if storage_of(first) != storage_of(second):
        return False
    tensors = (first, second)
    if first.dtype != second.dtype or not all(tensor.numel() for tensor in tensors):
        return all(tensor.numel() for tensor in tensors)
    ends = [
        1 + t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for t in tensors
    ]
    touched = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    views = [touched.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors]
    views[0].fill_(True)
    return bool(views[1].any())


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors of a nested result or argument, in order, repeats included."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in order, each object once."""
    return list({id(tensor): tensor for tensor in tensors}.values())
