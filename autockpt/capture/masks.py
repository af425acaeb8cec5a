"""Dropout taken apart: the draw, which is one bit of news an element, and what is made of it.

On a CPU torch draws dropout's noise in the type of its input and saves it: four bytes an element
that cost more to draw again than most other ops cost to run. Apart, the draw is an op of its own
whose result is a mask of booleans. A region that keeps the mask makes the noise of it again with
a cast and a division, and draws nothing. Attention with dropout, which no fused kernel serves
there, hides the same noise beside scores and weights; it comes apart the same way.

The functions with a result are ops of the captured graph. Where nobody else needs the mask, what is
emitted is the call as the model makes it. Under a compiler, which takes another way than eager
torch (a fused dropout, whose mask is scaled with the result), the parts follow that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend

from autockpt.capture.autograd_graph import graph_difference
from autockpt.capture.bits import identical
from autockpt.capture.freeze import layout_of

Call = Callable[..., Any]
Whole = tuple[Call, tuple[Any, ...], dict[str, Any]]
_DEVICES = ("cpu", "meta")
_HALF = (torch.float16, torch.bfloat16)


def drawn_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """Draw what dropout leaves of a tensor: booleans, from the stream that dropout draws from."""
    if torch.compiler.is_compiling():
        return torch.native_dropout(like.detach(), p, True)[1]
    return torch.empty_like(like, dtype=torch.bool, requires_grad=False).bernoulli_(1 - p)


def drawn_attention_mask(
    query: torch.Tensor, key: torch.Tensor, p: float, wide: torch.dtype
) -> torch.Tensor:
    """Draw what dropout leaves of the weights of attention, which are of type ``wide``."""
    shape = (*_batch(query, key), query.shape[-2], key.shape[-2])
    return drawn_mask(torch.empty(shape, dtype=wide, device=query.device), p)


def noise_of(mask: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Make of a mask what dropout multiplies by."""
    if torch.compiler.is_compiling():
        return mask
    return mask.to(dtype).div_(1 - p)


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


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    wide: torch.dtype,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention as torch composes it, with dropout by a mask that is drawn.

    Autocast casts what goes into the whole, and nothing inside. Query and key are each scaled by
    the root of the scale, for stability; reduced precision is widened first, and the scores are
    masked in place.
    """
    query, key, value = _cast(query), _cast(key), _cast(value)
    attn_mask = None if attn_mask is None else _cast(attn_mask)
    with torch.autocast("cpu", enabled=False):
        return _composed(
            query, key, value, mask, wide, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )


def _composed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    wide: torch.dtype,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    aten = torch.ops.aten
    narrow = query.dtype
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    query = aten.mul.Scalar(query, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        size = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        outside, inside = (
            torch.scalar_tensor(number, dtype=wide, device=query.device)
            for number in (-math.inf, 0.0)
        )
        attn_mask = torch.where(attn_mask, inside, outside)
    if enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ aten.mul.Scalar(key.transpose(-2, -1), factor)
    if attn_mask is not None:
        scores = scores.add_(attn_mask)
    # Under the same name, so that none outlives the next.
    scores = aten._safe_softmax.default(scores, -1)
    scores = dropped(scores, noise_of(mask, dropout_p, wide), dropout_p)
    return (scores @ value).to(narrow)


def _whole_dropout(tensor: Any, noise: Any, p: float) -> Whole:
    return torch.dropout, (tensor, p, True), {}


def _whole_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    wide: torch.dtype,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Whole:
    how = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    said = {name: value for name, value in how.items() if value is not None and value is not False}
    return F.scaled_dot_product_attention, (query, key, value), said


# The last part of a call, the parts right before it, and the call that they come to, made of the
# arguments of the last: what runs where nobody else needs what lies between.
WHOLE: dict[Any, tuple[tuple[Call, ...], Callable[..., Whole]]] = {
    dropped: ((drawn_mask, noise_of), _whole_dropout),
    attention: ((drawn_attention_mask,), _whole_attention),
}

# The ops, by the names that reports show.
SHOWN: dict[Any, str] = {
    attention: "torch.nn.functional.scaled_dot_product_attention",
    drawn_attention_mask: "torch.nn.functional.scaled_dot_product_attention.draw",
    drawn_mask: "torch.dropout.draw",
    noise_of: "torch.dropout.noise",
    dropped: "torch.dropout",
}


def comes_apart(graph: fx.Graph) -> bool:
    """Tell whether a graph holds parts of a call."""
    return any(node.target is own for node in graph.nodes for own in SHOWN)


class Masks:
    """Tells which calls come apart, to the bit; remembers the kinds it has tried.

    A call is tried on its own arguments: result, random state and autograd graph must be those
    of torch's own. So another version of torch, which composes it otherwise, costs the finer
    graph and nothing else.
    """

    def __init__(self) -> None:
        self._tried: dict[Any, bool] = {}

    def steps(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Give what runs a call in steps, given what runs one step; None if it stays whole."""
        found = _STEPS.get(func)
        if found is None or not torch.is_grad_enabled():
            return None
        serves, steps = found
        if not serves(*args, **kwargs):
            return None
        kind = (
            func,
            tuple(map(_layout, args)),
            tuple((name, _layout(value)) for name, value in sorted(kwargs.items())),
            _reduces(),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        )
        if kind not in self._tried:
            self._tried[kind] = _same(func, steps, args, kwargs)
        return steps if self._tried[kind] else None


def _dropout_steps(call: Call, input: torch.Tensor, p: float, train: bool) -> Any:
    mask = call(drawn_mask, input, p)
    return call(dropped, input, call(noise_of, mask, p, input.dtype), p)


def _serves_dropout(*args: Any, **kwargs: Any) -> bool:
    return len(args) == 3 and not kwargs and _drops(args[0], args[1]) and args[2] is True


def _attention_steps(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    wide = _wide(_cast(query).dtype)
    mask = call(drawn_attention_mask, query, key, dropout_p, wide)
    how = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return call(attention, query, key, value, mask, wide, *how)


def _serves_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> bool:
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    # Autocast keeps the cast of a parameter for its next use, of which the steps know nothing.
    if torch.is_autocast_enabled("cpu") and any(t.is_leaf and t.requires_grad for t in tensors):
        return False
    if not _drops(query, dropout_p) or not all(
        type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors
    ):
        return False
    if any(t.layout is not torch.strided or t.device.type not in _DEVICES for t in tensors):
        return False
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return bool(choice == SDPBackend.MATH.value)


_STEPS: dict[Any, tuple[Callable[..., bool], Call]] = {
    torch.dropout: (_serves_dropout, _dropout_steps),
    F.scaled_dot_product_attention: (_serves_attention, _attention_steps),
}


def _drops(tensor: Any, p: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and type(p) is float
        and 0 < p < 1
        and tensor.device.type in _DEVICES
        and tensor.layout is torch.strided
        and tensor.requires_grad
        and tensor.is_floating_point()
        and tensor.numel() > 0
    )


def _same(func: Call, steps: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Try a call and its steps on the same arguments and the same draws."""
    args = tuple(map(_apart, args))
    kwargs = {name: _apart(value) for name, value in kwargs.items()}
    with torch.random.fork_rng(()):
        whole = func(*args, **kwargs)
        left = torch.get_rng_state()
    try:
        with torch.random.fork_rng(()):
            parts = steps(_run, *args, **kwargs)
            right = torch.get_rng_state()
    except RuntimeError:  # shapes that only the whole call knows how to bring together
        return False
    return (
        identical(whole, parts)
        and torch.equal(left, right)
        and not graph_difference((whole,), (parts,))
    )


def _run(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _apart(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _layout(value: Any) -> Any:
    return layout_of(value) if isinstance(value, torch.Tensor) else value


def _batch(query: torch.Tensor, key: torch.Tensor) -> torch.Size:
    if query.ndim == key.ndim > 2 and key.shape[:-3] == query.shape[:-3]:
        return query.shape[:-2]  # of grouped queries too
    return torch.Size(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as autocast does before attention."""
    if not torch.is_autocast_enabled("cpu") or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu")) if tensor.is_floating_point() else tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF and not _reduces() else dtype


def _reduces() -> bool:
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())
