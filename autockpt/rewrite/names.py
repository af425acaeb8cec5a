"""Names in the emitted code: variables, and regions after the modules that they cover."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Sequence

from torch import fx

RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins))


def unique(name: str, taken: set[str]) -> str:
    """Make ``name`` an identifier that is not in ``taken``, and take it.

    Examples
    --------
    >>> taken = {"h_3"}
    >>> unique("h.3", taken), unique("3", taken), unique("lambda", taken)
    ('h_3_2', '_3', 'lambda_2')
    """
    base = re.sub(r"\W", "_", name) or "_"
    if base[0].isdigit():
        base = "_" + base
    candidate, count = base, 1
    while candidate in taken or candidate in RESERVED:
        count += 1
        candidate = f"{base}_{count}"
    taken.add(candidate)
    return candidate


def common_prefix(modules: Iterable[str]) -> str:
    """Prefix of containers that says nothing, as every repeated layer has it.

    Examples
    --------
    >>> common_prefix(["", "transformer.wte", "transformer.h.0.attn", "transformer.h.1", "head"])
    'transformer'
    >>> common_prefix(["encoder.block.0", "decoder.block.0"])
    ''
    """
    containers = {match.group(1) for m in modules if (match := re.match(r"(.*?)\.?\w+\.\d+", m))}
    return ".".join(_shared([container.split(".") for container in sorted(containers)]))


def region_name(modules: Sequence[str], prefix: str = "") -> str:
    """Name a region after the modules of its ops, in program order.

    Examples
    --------
    >>> region_name(["transformer.h.3.attn.c_attn", "transformer.h.3.attn"], "transformer")
    'h_3_attn'
    >>> region_name(["transformer.h.3.attn", "transformer.h.4.mlp"], "transformer")
    'h_3_to_4'
    >>> region_name(["conv1", "", "layer1.0"])
    'conv1_to_layer1'
    """
    paths = [module.split(".") for module in modules if module]
    if not paths:
        return "region"
    shared = _shared(paths)
    dull = prefix.split(".") if prefix else []
    kept = shared[len(dull) :] if shared[: len(dull)] == dull else shared
    below = [path[len(shared)] for path in paths if len(path) > len(shared)]
    # A list of layers and nothing else in it: say from which one to which.
    if below and len(below) == len(paths) and below[0] != below[-1]:
        kept = [*kept, below[0], "to", below[-1]]
    return "_".join(kept) or "region"


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared


def place_of(ops: Sequence[fx.Node]) -> str:
    """Say where in the model a run of ops lies.

    Examples
    --------
    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> ops = [graph.call_function(torch.tanh, (x,)) for _ in range(2)]
    >>> ops[0].meta.update(module="h.0.mlp", source="net.py:7")
    >>> ops[1].meta.update(module="h.1", source="net.py:9")
    >>> place_of(ops)
    "from 'h.0.mlp' (net.py:7) to 'h.1' (net.py:9)"
    """
    first, last = (_place(node) for node in (ops[0], ops[-1]))
    return f"in {first}" if first == last else f"from {first} to {last}"


def _place(node: fx.Node) -> str:
    source = node.meta.get("source", "")
    where = f" ({source})" if source else ""
    module = node.meta.get("module")
    return f"{module!r}{where}" if module else f"the model itself{where}"
