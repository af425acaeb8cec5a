"""Layouts of gradients apart from sizes, so that they serve the same calls on other shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from torch import fx

from autockpt.capture import Capture, TensorMeta
from autockpt.profiler.subject import Layout

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""A layout whatever its sizes: dimensions from the outermost in memory, those that are expanded."""

Forms = dict[int, tuple[Form | None, ...]]
"""By number of the op, the forms of its results' gradients; None where they lie as values do."""


def forms_of(capture: Capture, layouts: Mapping[fx.Node, tuple[Layout, ...]]) -> Forms | None:
    """Tell layouts apart from sizes, so that they serve the same calls on other shapes.

    None if one has gaps, or is that of a tensor whose shape is not recorded.
    """
    forms: Forms = {}
    for index, node in enumerate(capture.graph.nodes):
        if node not in layouts:
            continue
        found: list[Form | None] = []
        for meta, strides in zip_longest(_metas(node), layouts[node]):
            form = None if strides is None else _form(meta, strides)
            if strides is not None and form is None:
                return None
            found.append(form)
        forms[index] = tuple(found)
    return forms


def layouts_of(capture: Capture, forms: Forms) -> dict[fx.Node, tuple[Layout, ...]]:
    """Give the layouts that forms come to at a capture's shapes."""
    nodes = list(capture.graph.nodes)
    return {
        nodes[index]: tuple(
            None if form is None else _strides(form, meta.shape)
            for form, meta in zip_longest(found, _metas(nodes[index]))
        )[: len(found)]
        for index, found in forms.items()
    }


def _form(meta: TensorMeta | None, strides: tuple[int, ...]) -> Form | None:
    if meta is None:
        return None
    order = tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))
    form = order, tuple(d for d in order if strides[d] == 0)
    again = _strides(form, meta.shape)
    same = all(
        size <= 1 or one == other
        for size, one, other in zip(meta.shape, strides, again, strict=True)
    )
    return form if same else None


def _strides(form: Form, shape: Sequence[int]) -> tuple[int, ...]:
    order, expanded = form
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        if dimension not in expanded:
            strides[dimension] = step
            step *= max(1, shape[dimension])
    return tuple(strides)


def _metas(node: fx.Node) -> tuple[TensorMeta, ...]:
    metas: tuple[TensorMeta, ...] = node.meta["tensors"]
    return metas
