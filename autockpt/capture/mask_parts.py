"""The parts of dropout, and of attention with dropout: ops of captured graphs, beside torch's own.

Under a compiler, which takes another way than eager torch (a fused dropout, whose mask is scaled
with the result), they follow that one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Call = Callable[..., Any]


def drawn_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """Draw what dropout leaves of a tensor: booleans, from the stream that dropout draws from."""
    if torch.compiler.is_compiling():
        return torch.native_dropout(like.detach(), p, True)[1]
    return torch.empty_like(like, dtype=torch.bool, requires_grad=False).bernoulli_(1 - p)


def drawn_attention_mask(
    query: torch.Tensor, key: torch.Tensor, batch: tuple[int, ...], p: float, wide: torch.dtype
) -> torch.Tensor:
    """Draw what dropout leaves of the weights of attention, which are of type ``wide``."""
    shape = (*batch, query.shape[-2], key.shape[-2])
    return drawn_mask(torch.empty(shape, dtype=wide, device=query.device), p)


def noise_of(mask: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Make of a mask what dropout multiplies by."""
    if torch.compiler.is_compiling():
        return mask
    # Torch casts bytes three times as fast as booleans, and these are bytes of 0 and 1.
    return mask.view(torch.uint8).to(dtype).div_(1 - p)


def dropped(tensor: torch.Tensor, noise: torch.Tensor, p: float) -> torch.Tensor:
    """Multiply by the noise."""
    if torch.compiler.is_compiling():
        apply: Call = _Dropped.apply
        result: torch.Tensor = apply(tensor, noise, 1 / (1 - p))
        return result
    return tensor * noise


class _Dropped(torch.autograd.Function):
    """Torch's fused dropout by a mask that was drawn before: it saves the mask, not the noise."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return tensor * (mask.to(tensor.dtype) * scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(gradients[0], mask, ctx.scale), None, None


def retyped(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast what goes into attention, or comes out of it."""
    return tensor.to(dtype)


def repeated(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """Give every query of a group its keys, or its values."""
    return tensor.repeat_interleave(times, -3)


def scaled_query(query: torch.Tensor, factor: float, batch: tuple[int, ...]) -> torch.Tensor:
    """Scale by the root of attention's scale, which is more stable than to scale the scores."""
    return _rows(torch.ops.aten.mul.Scalar(query, factor), batch)


def scaled_key(key: torch.Tensor, factor: float, batch: tuple[int, ...]) -> torch.Tensor:
    """Turn and scale by the root of attention's scale."""
    return _rows(torch.ops.aten.mul.Scalar(key.transpose(-2, -1), factor), batch)


def attention_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    batch: tuple[int, ...],
    attn_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """Multiply queries with keys, and mask in place."""
    with _without_autocast():
        if is_causal:
            size = (query.shape[-2], key.shape[-1])
            attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            outside = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device)
            inside = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, inside, outside)
        scores = _product(query, key, batch)
        return scores if attn_mask is None else scores.add_(attn_mask)


def attention_weights(scores: torch.Tensor) -> torch.Tensor:
    """Take the softmax, which is zero where all scores of a row are masked."""
    with _without_autocast():
        weights: torch.Tensor = torch.ops.aten._safe_softmax.default(scores, -1)
        return weights


def rows_of_values(value: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """Lay values out as their product with weights reads them."""
    return _rows(value, batch)


def weighted(weights: torch.Tensor, value: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """Add the values up by their weights."""
    with _without_autocast():
        return _product(_rows(weights, batch), value, batch)


def _rows(tensor: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """Lay matrices out as ``matmul`` hands them to the product of batches."""
    if not batch:
        return tensor
    return tensor.expand(*batch, *tensor.shape[-2:]).reshape(-1, *tensor.shape[-2:])


def _product(left: torch.Tensor, right: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    if not batch:
        return left @ right
    product = torch.bmm(left, right)
    whole: torch.Tensor = torch.ops.aten._unsafe_view(
        product, (*batch, left.shape[-2], right.shape[-1])
    )
    return whole


def _without_autocast() -> AbstractContextManager[Any]:
    enabled = torch.is_autocast_enabled("cpu")
    return torch.autocast("cpu", enabled=False) if enabled else contextlib.nullcontext()


_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
# The ops, by the names that reports show.
SHOWN: dict[Any, str] = {
    drawn_mask: "torch.dropout.draw",
    noise_of: "torch.dropout.noise",
    dropped: "torch.dropout",
    drawn_attention_mask: f"{_ATTENTION}.draw",
    retyped: f"{_ATTENTION}.cast",
    repeated: f"{_ATTENTION}.repeat",
    scaled_query: f"{_ATTENTION}.query",
    scaled_key: f"{_ATTENTION}.key",
    attention_scores: f"{_ATTENTION}.scores",
    attention_weights: f"{_ATTENTION}.weights",
    rows_of_values: f"{_ATTENTION}.values",
    weighted: _ATTENTION,
}
