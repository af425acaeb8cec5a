"""Dropout taken apart: the draw, which is one bit of news an element, and what is made of it.

On a CPU torch draws dropout's noise in the type of its input and saves it: four bytes an element
that cost more to draw again than most other ops cost to run. Apart, the draw is an op of its own
whose result is a mask of booleans. A region that keeps the mask makes the noise of it again with
a cast and a division, and draws nothing.

Attention with dropout, which no fused kernel serves there, comes apart down to its products: what
lies between them, scaled queries and keys, noise, weights with their noise, is made again for next
to nothing by a region that keeps weights and mask.

Where nobody else needs the parts, what is emitted is the call as the model makes it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend

from autockpt.capture.autograd_graph import graph_difference, leaf_order
from autockpt.capture.bits import identical
from autockpt.capture.freeze import layout_of
from autockpt.capture.mask_parts import (
    Call,
    attention_scores,
    attention_weights,
    drawn_attention_mask,
    drawn_mask,
    dropped,
    noise_of,
    repeated,
    retyped,
    rows_of_values,
    scaled_key,
    scaled_query,
    weighted,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The call that some nodes are the parts of, in ``node.meta["whole"]`` of each.

    Attributes
    ----------
    target : callable
    args, kwargs : tuple, dict
        With the nodes of a graph for tensors.
    parts : tuple of fx.Node
        In program order; the last has its result.
    alike : bool
        Whether it needs as much memory as its parts: what torch holds until attention returns,
        wide copies of what it was given, is then what autograd saves.
    """

    target: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parts: tuple[fx.Node, ...]
    alike: bool


_DEVICES = ("cpu", "meta")
_HALF = (torch.float16, torch.bfloat16)


def comes_apart(graph: fx.Graph) -> bool:
    """Tell whether a graph holds parts of a call."""
    return any("whole" in node.meta for node in graph.nodes)


def needs_alike(args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[fx.Node]) -> bool:
    """Tell whether a call as a whole needs as much memory as its parts: ``Whole.alike``."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    bias = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    trained = all(tensor.requires_grad for tensor in given if tensor is not bias)
    return trained and all(part.target not in (retyped, repeated) for part in parts)


class Masks:
    """Tells which calls come apart, to the bit; remembers the kinds it has tried.

    A call is tried on its own arguments: result, random state, autograd graph and the order in
    which gradients arrive must be those of torch's own. So another version of torch, which
    composes it otherwise, costs the finer graph and nothing else.
    """

    def __init__(self) -> None:
        self._tried: dict[Any, Call | None] = {}

    def steps(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Give what runs a call in steps, given what runs one step; None if it stays whole."""
        found = _STEPS.get(func)
        if found is None or not torch.is_grad_enabled():
            return None
        serves, ways = found
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
            same = (steps for steps in ways if _same(func, steps, args, kwargs))
            self._tried[kind] = next(same, None)
        return self._tried[kind]


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
    *,
    backwards: bool = False,
) -> Any:
    """Take attention apart; ``backwards`` casts the last argument first, as autocast may do."""
    wide = _wide(_autocast(query.dtype))
    narrow = _autocast(query.dtype)
    batch, heads = _batch(query, key), query.shape[-3] if enable_gqa else 1
    mask = call(drawn_attention_mask, query, key, batch, dropout_p, wide)

    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return tensor if tensor.dtype == dtype else call(retyped, tensor, dtype)

    given = {0: query, 1: key, 2: value} | ({} if attn_mask is None else {3: attn_mask})
    for number in reversed(given) if backwards else list(given):
        given[number] = cast(given[number], _autocast(given[number].dtype))
    query, key, value, attn_mask = given[0], given[1], given[2], given.get(3)
    query, key, value = (cast(tensor, wide) for tensor in (query, key, value))
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    signed = -factor if scale is not None and scale < 0 else factor
    grouped = enable_gqa and not heads == key.shape[-3] == value.shape[-3]
    query = call(scaled_query, query, signed, batch)
    if grouped:
        key, value = (call(repeated, t, heads // t.shape[-3]) for t in (key, value))
    key = call(scaled_key, key, factor, batch)
    scores = call(attention_scores, query, key, batch, attn_mask, is_causal)
    weights = call(attention_weights, scores)
    weights = call(dropped, weights, call(noise_of, mask, dropout_p, wide), dropout_p)
    value = call(rows_of_values, value, batch) if batch else value
    return cast(call(weighted, weights, value, batch), narrow)


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


# What tells whether a call may come apart, and the ways to do so, of which one is torch's: in which
# order arguments of C++ are evaluated, casts among them, is up to its compiler.
_STEPS: dict[Any, tuple[Callable[..., bool], tuple[Call, ...]]] = {
    torch.dropout: (_serves_dropout, (_dropout_steps,)),
    F.scaled_dot_product_attention: (
        _serves_attention,
        (_attention_steps, partial(_attention_steps, backwards=True)),
    ),
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
        and all(map(operator.is_, leaf_order(whole), leaf_order(parts)))
    )


def _run(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _apart(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _layout(value: Any) -> Any:
    return layout_of(value) if isinstance(value, torch.Tensor) else value


def _batch(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    if query.ndim == key.ndim > 2 and key.shape[:-3] == query.shape[:-3]:
        return tuple(query.shape[:-2])  # of grouped queries too
    return tuple(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))


def _autocast(dtype: torch.dtype) -> torch.dtype:
    """Give the type to which autocast casts before attention."""
    if not torch.is_autocast_enabled("cpu") or dtype == torch.float64:
        return dtype
    return torch.get_autocast_dtype("cpu") if dtype.is_floating_point else dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF and not _reduces() else dtype


def _reduces() -> bool:
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())
