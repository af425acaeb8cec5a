"""What a torch call does beyond its result, as far as names and arguments tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autockpt.capture.stream import leaves

# Functions whose result has a shape that depends on values. The tests hold this against the
# tag `dynamic_output_shape` of the ATen ops.
DYNAMIC = frozenset(
    {
        "nonzero",
        "nonzero_static",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "unique_dim",
        "_unique",
        "_unique2",
        "bincount",
        "_pack_padded_sequence",
        "_pad_packed_sequence",
    }
)

# Functions that take a zero-dimensional integer as a number, not as a size.
ELEMENTWISE = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "true_divide", "truediv", "rtruediv", "rdiv"),
        *("floor_divide", "floordiv", "remainder", "fmod", "mod", "pow", "rpow", "clamp"),
        *("eq", "ne", "lt", "le", "gt", "ge", "minimum", "maximum", "masked_fill", "setitem"),
        *("logical_and", "logical_or", "and", "or", "xor", "where", "lerp", "index_fill"),
    }
)

# Functions that write statistics which their schema does not declare as written.
STATISTICS = frozenset(
    {
        *("batch_norm", "instance_norm", "native_batch_norm", "_native_batch_norm_legit"),
        *("_batch_norm_with_update", "_batch_norm_impl_index", "batch_norm_gather_stats"),
        *("batch_norm_gather_stats_with_counts", "fused_moving_avg_obs_fake_quant"),
        *("_fused_moving_avg_obs_fq_helper", "cudnn_batch_norm", "miopen_batch_norm"),
    }
)


def version(tensor: torch.Tensor) -> int:
    """Read a tensor's version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def writes_statistics(name: str, args: Sequence[Any]) -> bool:
    """Whether a call writes running statistics, even where they come out as they were.

    On meta tensors there is nothing to compare; and of a batch that has been seen before the
    statistics may be what they are.
    """
    return name in STATISTICS and len(args) > 5 and args[5] is True


def may_write(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write one of its arguments, going by its name."""
    return (
        name in STATISTICS
        or name == "__setitem__"
        or kwargs.get("out") is not None
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name.endswith("__"))
    )


def depends_on_data(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the shape of a call's result may depend on the values it is given."""
    if name in DYNAMIC:
        return True
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "one_hot":
        return (args[1:2] or (kwargs.get("num_classes", -1),)) == (-1,)
    if name in ("repeat_interleave", "tensor_split"):
        return len(leaves((args, kwargs))) > 1 or len(args) + len(kwargs) == 1
    if name == "__getitem__":
        return any(t.dtype in (torch.bool, torch.uint8) or t.dim() == 0 for t in _index(args[1]))
    if name.strip("_") in ELEMENTWISE:
        return False
    # A zero-dimensional integer where a size is expected: torch reads it without asking.
    others = leaves([*args[1:], kwargs])
    return any(t.dim() == 0 and not t.is_floating_point() for t in others)


def _index(index: Any) -> list[torch.Tensor]:
    if isinstance(index, slice):
        return leaves([index.start, index.stop, index.step])
    if isinstance(index, (tuple, list)):
        return [tensor for item in index for tensor in _index(item)]
    return leaves(index)
