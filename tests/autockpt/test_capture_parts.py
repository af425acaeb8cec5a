"""The parts of capture, one by one: modes, containers, key, clone, traces, guards."""

from __future__ import annotations

import copy
import functools
import random
import threading
import weakref
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from autockpt.capture import (
    Ambient,
    GuardMiss,
    Inputs,
    Key,
    Template,
    clone_module,
    expect,
    read_path,
    record,
    untraced,
)
from autockpt.capture.ambient import default_dtype
from autockpt.capture.calls import DYNAMIC
from autockpt.capture.check import redrawn
from autockpt.capture.guards import same
from autockpt.errors import CaptureError

NAMESPACE = {"torch": torch, "default_dtype": default_dtype}
MODES = [
    "torch.no_grad()",
    "torch.inference_mode(True)",
    "torch.autocast('cpu', dtype=torch.bfloat16)",
    "torch.autocast('cpu', dtype=torch.float16, cache_enabled=False)",
    "default_dtype(torch.float64)",
    "torch.device('meta')",
    "torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH])",
]


# Ambient modes.


@pytest.mark.parametrize("source", MODES)
def test_modes_are_read_described_and_entered(source: str) -> None:
    base = Ambient.current()
    with eval(source, NAMESPACE):
        inside = Ambient.current()
    assert inside != base
    assert base.describe_difference(base) == []
    with inside.enter():
        assert Ambient.current() == inside
    with inside.enter(), base.enter():
        assert Ambient.current() == base
    assert Ambient.current() == base
    parts = inside.describe_difference(base)
    assert source in parts
    from contextlib import ExitStack

    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(eval(part, NAMESPACE))
        assert Ambient.current() == inside


def test_leaving_autocast_is_described() -> None:
    plain = Ambient.current()
    with torch.autocast("cpu", torch.bfloat16):
        base = Ambient.current()
    assert "torch.autocast('cpu', enabled=False)" in plain.describe_difference(base)


# Templates.

Pair = namedtuple("Pair", "left right")


class Slotted:
    __slots__ = ("other", "t")

    def __init__(self, t: Any) -> None:
        self.t, self.other = t, "x"


class Own(dict):  # type: ignore[type-arg]
    pass


def nested(leaf: Any) -> Any:
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=8,
    )


@given(nested(st.one_of(st.none(), st.integers(), st.just("tensor"))))
def test_template_builds_what_it_described(value: Any) -> None:
    def fill(part: Any) -> Any:
        if part == "tensor":
            return torch.zeros(1)
        if isinstance(part, Pair):
            return Pair(*map(fill, part))
        if isinstance(part, (list, tuple)):
            return type(part)(map(fill, part))
        if isinstance(part, dict):
            return {key: fill(item) for key, item in part.items()}
        return part

    output = fill(value)
    template, tensors = Template.describe(output)
    assert template.count == len(tensors)
    built = template.build(tensors)
    assert repr(built) == repr(output)
    assert type(built) is type(output)


def test_template_keeps_sharing_and_self_reference() -> None:
    t = torch.zeros(1)
    shared = [t]
    loop: dict[str, Any] = {"a": shared, "b": shared, "t": t}
    loop["self"] = loop
    template, tensors = Template.describe(loop)
    assert len(tensors) == 1
    built = template.build([torch.ones(1)])
    assert built is not loop
    assert built["self"] is built
    assert built["a"] is built["b"]
    assert built["t"] is built["a"][0]


def test_template_of_objects() -> None:
    own = Own(k=torch.zeros(1))
    own.extra = torch.ones(1)  # type: ignore[attr-defined]
    settings = object()
    ordered: OrderedDict[str, Any] = OrderedDict(x=torch.zeros(2))
    values = torch.max(torch.zeros(2, 3), 1)
    template, tensors = Template.describe((Slotted(torch.zeros(3)), own, settings, ordered, values))
    fresh = [t + 1 for t in tensors]
    slotted, other, passed, again, struct = template.build(fresh)
    assert torch.equal(slotted.t, torch.ones(3))
    assert slotted.other == "x"
    assert type(other) is Own
    assert torch.equal(other.extra, torch.full((1,), 2.0))
    assert passed is settings
    assert list(again) == ["x"]
    assert type(struct) is type(values)


def test_template_of_model_outputs_and_caches() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    out = transformers.modeling_outputs.CausalLMOutputWithPast(
        loss=torch.zeros(()), past_key_values=cache
    )
    template, tensors = Template.describe(out)
    built = template.build([t + 5 for t in tensors])
    assert type(built) is type(out)
    assert list(built) == list(out)
    assert built["loss"] is built.loss
    assert built.logits is None
    assert built.past_key_values is not cache
    assert built.past_key_values.get_seq_length() == 3
    assert float(built.past_key_values.layers[0].keys[0, 0, 0, 0]) == 5


def test_inputs_are_found_however_they_are_passed() -> None:
    def forward(x: Any, y: Any = None, *more: Any, flag: bool = False, **rest: Any) -> None: ...

    a, b, c, d = (torch.zeros(n) for n in range(4))
    inputs = Inputs.discover(forward, (a, [b, {"k": c}]), {"z": (1, d)})
    assert [str(path) for path in inputs.paths] == ["x", "y[0]", "y[1]['k']", "z[1]"]
    found = inputs.tensors((), {"z": (1, d), "y": [b, {"k": c}], "x": a})
    assert all(x is y for x, y in zip(found, (a, b, c, d), strict=True))
    more = Inputs.discover(forward, (a, None, b, c), {})
    assert [str(path) for path in more.paths] == ["x", "*0", "*1"]
    assert more.tensors((a, None, b, c), {})[2] is c


def test_paths_are_read_from_the_live_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model.table = [None, {"k": torch.ones(2)}]
    assert read_path(model, "table[1]['k']") is model.table[1]["k"]
    assert read_path(model, "0.bias") is model[0].bias


# Key.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.bn = nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4)
        self.alpha, self.sizes, self.config = 0.5, [1, 2], Slotted(3)
        self.options = {"k": 1.0}
        self.table = {"rows": [1, {"k": 2}], "one": (Slotted(3),)}
        self.tied = self.a

    def forward(self, x: Any, scale: float = 1.0, mask: Any = None) -> Any:
        return self.bn(self.drop(self.tied(self.a(x)))) * scale * self.alpha


def changes() -> dict[str, Any]:
    def swap(model: Net) -> None:
        model.a = model.tied = nn.Linear(4, 4, bias=False)

    def untie(model: Net) -> None:
        model.tied = nn.Linear(4, 4)

    return {
        "attribute": lambda m: setattr(m, "alpha", 0.7),
        "eval of a part": lambda m: m.bn.eval(),
        "p": lambda m: setattr(m.drop, "p", 0.2),
        "list": lambda m: m.sizes.append(3),
        "dict": lambda m: m.options.update(k=2.0),
        "list in a dict": lambda m: m.table["rows"].append(3),
        "dict in a list": lambda m: m.table["rows"][1].update(k=3),
        "slot": lambda m: setattr(m.config, "t", 4),
        "buffer": lambda m: setattr(m.bn, "running_mean", torch.zeros(4, dtype=torch.double)),
        "frozen": lambda m: m.a.weight.requires_grad_(False),
        "dtype": lambda m: m.double(),
        "layer": swap,
        "untied": untie,
        "forward hook": lambda m: m.a.register_forward_hook(lambda *a: None),
        "pre-hook": lambda m: m.a.register_forward_pre_hook(lambda *a: None),
        "backward hook": lambda m: m.a.register_full_backward_hook(lambda *a: None),
        "new attribute": lambda m: setattr(m.a, "more", 1),
        "class": lambda m: setattr(m.drop, "__class__", nn.AlphaDropout),
    }


@pytest.mark.parametrize("change", changes())
def test_key_misses_after_a_change(change: str) -> None:
    model, x = Net(), torch.randn(3, 4)
    key = Key.take(model, (x,))
    assert key.matches(model, (torch.randn(3, 4),))
    assert key.matches(model, (), {"x": x, "scale": 1.0})
    changes()[change](model)
    assert not key.matches(model, (x,))


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(4, 4),),
        (torch.randn(4, 3).T,),
        (torch.randn(3, 4, dtype=torch.float64),),
        (torch.randn(3, 4, requires_grad=True),),
        (torch.randn(3, 4), 2.0),
        (torch.randn(3, 4), 1),
        (torch.randn(3, 4), 1.0, torch.ones(1)),
    ],
)
def test_key_misses_for_other_arguments(args: Any) -> None:
    model = Net()
    key = Key.take(model, (torch.randn(3, 4),))
    assert not key.matches(model, args)


def test_key_misses_under_other_modes_and_global_hooks() -> None:
    model, x = Net(), torch.randn(3, 4)
    key = Key.take(model, (x,))
    for source in MODES[:-1]:
        with eval(source, NAMESPACE):
            assert not key.matches(model, (x,)), source
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    assert not key.matches(model, (x,))
    handle.remove()
    assert key.matches(model, (x,))


def test_key_holds_for_what_is_equal() -> None:
    model, x = Net(), torch.randn(3, 4)
    key = Key.take(model, (x,))
    assert key.matches(copy.copy(model), (x,))
    assert key.matches(clone_module(model), (x,))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model.alpha = float("0.5")
    assert key.matches(model, (x,))
    model.autockpt = object()
    assert key.matches(model, (x,))


# Clone.


class Reach(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.again = self.a
        self.plain = [nn.Linear(2, 2), {"k": (nn.Linear(2, 2), 1)}]
        self.method = self.a.reset_parameters
        self.part = functools.partial(Reach.size, self)
        self.back = weakref.ref(self.a)
        self.shared = Slotted(1)
        self.register_buffer("b", torch.zeros(1), persistent=False)

    def size(self) -> int:
        return 2

    def forward(self, x: Any) -> Any:
        return self.a(x)


def test_clone_is_new_throughout_and_shares_tensors() -> None:
    model = Reach()
    calls: list[int] = []
    handle = model.a.register_forward_hook(lambda *a: calls.append(1))
    other = clone_module(model)
    assert type(other) is Reach
    assert list(vars(other)) == list(vars(model))
    assert other.a is other.again is not model.a
    assert other.a.weight is model.a.weight
    assert other.b is model.b
    assert list(other.state_dict()) == list(model.state_dict())
    assert other.plain[0] is not model.plain[0]
    assert other.plain[1]["k"][0] is not model.plain[1]["k"][0]
    assert other.plain[0].weight is model.plain[0].weight
    assert other.method.__self__ is other.a
    assert other.part.args == (other,)
    assert other.back() is other.a
    assert other.shared is model.shared
    handle.remove()
    other(torch.zeros(1, 2))
    assert calls == [1]
    model(torch.zeros(1, 2))
    assert calls == [1]


def test_clone_refuses_scripted_modules() -> None:
    with pytest.raises(CaptureError, match="scripted"):
        clone_module(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))


# No trace.


def test_everything_is_put_back() -> None:
    model = Net()
    x = torch.randn(3, 4)
    buffers = [b.clone() for b in model.buffers()]
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    with untraced(model, (x,), {"mask": (mask := [1, 2])}) as trace:
        trace.before_write(x)
        x.add_(1)
        trace.before_write(model.a.weight)
        nn.init.normal_(model.a.weight)
        model(x)
        model.alpha, model.new = 3.0, 1
        model.sizes.append(9)
        model.options["k"] = 5.0
        mask.clear()
        random.random()
        np.random.rand()
    assert (model.alpha, model.sizes, model.options) == (0.5, [1, 2], {"k": 1.0})
    assert not hasattr(model, "new")
    assert mask == [1, 2]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == states[2]
    assert all(map(torch.equal, buffers, model.buffers()))


# Guards.


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("bool", torch.tensor(True), True),
        ("int", torch.tensor(3), 3),
        ("item", torch.tensor(0.5), 0.5),
        ("tolist", torch.tensor([1, 2]), [1, 2]),
        ("shape", torch.zeros(2, 3), (2, 3)),
        ("value", 3, 3),
        ("float", torch.tensor(float("nan")), float("nan")),
    ],
)
def test_guard_passes_and_misses(kind: str, value: Any, expected: Any) -> None:
    expect(kind, value, expected)
    with pytest.raises(GuardMiss, match=kind):
        expect(kind, value, "something else")


@given(st.floats(), st.floats())
def test_floats_compare_by_bits(a: float, b: float) -> None:
    assert same(a, a)
    assert same(a, b) == (np.float64(a).tobytes() == np.float64(b).tobytes())


def test_dynamic_shapes_are_those_that_torch_tags() -> None:
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet = getattr(torch.ops.aten, name.removeprefix("aten::").split(".")[0])
            for overload in packet.overloads():
                if torch.Tag.dynamic_output_shape in getattr(packet, overload).tags:
                    tagged.add(packet.__name__)
    # These write lists, images or outputs that no forward in python calls by this name.
    tagged = {name for name in tagged if not name.startswith(("_", "sym_", "segment_"))}
    unknown = {n for n in tagged if hasattr(torch.Tensor, n) or hasattr(torch, n)} - DYNAMIC
    assert unknown <= {
        "index",
        "repeat_interleave",
        "where",
        "one_hot",
        "masked_select_backward",
        "equal",
        "is_nonzero",
        "item",
        "allclose",
    }


def test_second_batch_is_as_valid_as_the_first() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(9).view(3, 3)
    assert sorted(redrawn(ids, generator).flatten().tolist()) == list(range(9))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert redrawn(mask, generator) is mask
    infinite = torch.tensor([0.0, 1.0, -float("inf")])
    assert redrawn(infinite, generator) is infinite
    x = torch.randn(5, 4).T.requires_grad_()
    other = redrawn(x, generator)
    assert other.stride() == x.stride()
    assert other.requires_grad
    assert not torch.equal(other, x)


def test_other_threads_are_not_disturbed() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(2, 4)
    seen: list[Any] = []
    inside, done = threading.Event(), threading.Event()

    class Wait(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(10)
            return x

    def other() -> None:
        assert inside.wait(10)
        function = torch.autograd.Function.apply
        seen.append((model(x).shape, torch.nn.functional.has_torch_function((x,)), function))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    capture, _ = record(nn.Sequential(nn.Linear(4, 4), Wait()), (x,))
    thread.join()
    assert seen[0][:2] == ((2, 4), False)
    calls = [n for n in capture.graph.nodes if n.op in ("call_function", "call_method")]
    assert len([n for n in calls if n.meta["stage"] == "model"]) == 1
