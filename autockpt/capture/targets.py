"""From a torch function, as a function mode sees it, to the target of a graph node."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# What python asks a tensor for: the kind of the guard.
QUESTIONS = {
    "__bool__": "bool",
    "__int__": "int",
    "__float__": "float",
    "__complex__": "complex",
    "__index__": "index",
    "item": "item",
    "tolist": "tolist",
    "numpy": "numpy",
    "__array__": "numpy",
}

# These answer from the tensor's description, which the key and the shape guards pin.
METADATA = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "nbytes",
        "itemsize",
        "element_size",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "grad_dtype",
        "output_nr",
        "names",
        "is_tensor",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "is_non_overlapping_and_dense",
        "is_conj",
        "is_neg",
        "is_inference",
        "is_pinned",
        "is_shared",
        "is_same_size",
        "is_set_to",
        "is_storage",
        "is_distributed",
        "is_coalesced",
        "is_quantized",
        "is_sparse",
        "is_sparse_csr",
        "is_mkldnn",
        "is_meta",
        "is_cuda",
        "is_cpu",
        "is_xpu",
        "is_mps",
        "is_mtia",
        "is_vulkan",
        "is_xla",
        "is_ipu",
        "is_maia",
        "is_hpu",
        "is_privateuseone",
        "is_vmap",
        "is_nested",
        "retains_grad",
        "storage_offset",
        "data_ptr",
        "storage",
        "storage_type",
        "untyped_storage",
        "type_as_str",
        "get_device",
        "has_names",
        "__len__",
        "__hash__",
        "__dir__",
        "__class__",
        "__format__",
        "__repr__",
        "__str__",
        "_version",
        "_base",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "_is_view",
        "_is_zerotensor",
        "_has_symbolic_sizes_strides",
        "is_grad_enabled",
        "result_type",
        "can_cast",
        "promote_types",
        "dim_order",
        "sparse_dim",
        "dense_dim",
        "_typed_storage",
        "is_autocast_enabled",
        "get_autocast_dtype",
        "__cuda_array_interface__",
        "__dlpack_device__",
        "_use_sdp_kernel_fused",
        "_fused_sdp_choice",
        "_python_dispatch",
        "name",
        "volatile",
    ]
)

# Calls that cannot be part of a graph, and what to do instead.
REFUSED = {
    "backward": "autograd runs inside the forward",
    "grad": "autograd runs, or gradients are read, inside the forward",
    "register_hook": "the model registers a tensor hook inside its forward",
    "register_post_accumulate_grad_hook": "the model registers a tensor hook in its forward",
    "retain_grad": "the model keeps the gradient of a tensor that its forward makes",
    "set_": "the model swaps a tensor's storage",
    "share_memory_": "the model moves a tensor to shared memory",
    "__deepcopy__": "the model deep-copies a tensor inside its forward",
    "__reduce_ex__": "the model pickles or copies a tensor inside its forward",
    "__dlpack__": "the model hands a tensor to another library",
}

_OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {
    "__getitem__": (operator.getitem, False),
    "__setitem__": (operator.setitem, False),
    "__pow__": (operator.pow, False),
    "__rpow__": (operator.pow, True),
    "__rsub__": (operator.sub, True),
    "__rdiv__": (operator.truediv, True),
    "__rtruediv__": (operator.truediv, True),
    "__floordiv__": (operator.floordiv, False),
    "__rfloordiv__": (operator.floordiv, True),
    "__rmod__": (operator.mod, True),
    "__rmatmul__": (operator.matmul, True),
    "__invert__": (operator.invert, False),
    "__and__": (operator.and_, False),
    "__or__": (operator.or_, False),
    "__xor__": (operator.xor, False),
    "__lshift__": (operator.lshift, False),
    "__rshift__": (operator.rshift, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How a torch function is written down.

    Attributes
    ----------
    name : str
        The function's plain name (``layer_norm``, ``mul_``, ``T``).
    op : str
        ``call_method``, ``call_function``, ``get_property`` or ``set_property``.
    target : str or callable
        A method's name, or the function to call.
    swapped : bool
        Whether the two operands change places (``2 - x`` arrives as ``x.__rsub__(2)``).
    """

    name: str
    op: str
    target: str | Callable[..., Any]
    swapped: bool = False


@functools.cache
def _methods() -> dict[Any, str]:
    """Names of the functions that are attributes of ``Tensor``; public names win."""
    table: dict[Any, str] = {}
    for name in sorted(dir(torch.Tensor), key=lambda name: (name.startswith("_"), name)):
        function = getattr(torch.Tensor, name, None)
        if callable(function) and not isinstance(function, type):
            table.setdefault(function, name)
    return table


@functools.cache
def resolve(function: Callable[..., Any]) -> Target:
    """Find the node target of a function that a ``TorchFunctionMode`` was given.

    Parameters
    ----------
    function : callable
        A builtin, a method descriptor, a property accessor or a python function of torch.

    Returns
    -------
    Target
    """
    accessor = getattr(function, "__name__", "")
    if accessor in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(function, "__self__", None), "__name__", "?")
        if accessor == "__get__":
            return Target(name=name, op="get_property", target=getattr)
        return Target(name=name, op="set_property", target=setattr)
    name = _methods().get(function, "")
    if name in _OPERATORS:
        target, swapped = _OPERATORS[name]
        return Target(name=name, op="call_function", target=target, swapped=swapped)
    if name:
        return Target(name=name, op="call_method", target=name)
    return Target(name=accessor or repr(function), op="call_function", target=function)
