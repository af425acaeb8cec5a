"""What bites a recorder: each is captured right, or refused with the reason and the place."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from autockpt.capture import Capture, GuardMiss, check, record, replay
from autockpt.errors import CaptureError

X = torch.randn


def chain(make: Callable[[], nn.Module], n: int = 3) -> nn.Sequential:
    return nn.Sequential(*[make() for _ in range(n)])


class Mlp(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Fun(nn.Module):
    """A module whose forward is the function it is given; what it needs is `self`'s."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def step(
    forward: Callable[[], Sequence[torch.Tensor]], model: nn.Module, inputs: Sequence[Any]
) -> list[torch.Tensor | None]:
    torch.manual_seed(3)
    outputs = forward()
    terms = [t for t in outputs if t.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    wanted += [t for t in inputs if torch.is_tensor(t) and t.requires_grad and t.is_leaf]
    grads: Sequence[torch.Tensor | None] = ()
    if terms and wanted:
        total = sum((t.sum() for t in terms), torch.zeros(()))
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
    return [*outputs, *grads, torch.get_rng_state(), *(b.clone() for b in model.buffers())]


def assert_captured(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Capture:
    """Record, check, and compare a step through the graph with the plain one."""
    kwargs = dict(kwargs or {})
    capture, _ = record(model, args, kwargs)
    check(capture, model, args, kwargs)
    inputs = capture.inputs.tensors(args, kwargs)
    buffers = [b.clone() for b in model.buffers()]
    ours = step(lambda: replay(capture, model, inputs), model, inputs)
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    describe = type(capture.outputs).describe
    plain = step(lambda: describe(model(*args, **kwargs))[1], model, inputs)
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)  # type: ignore[arg-type]
    return capture


def targets(capture: Capture) -> list[str]:
    return [
        node.target if isinstance(node.target, str) else node.target.__name__  # type: ignore[union-attr]
        for node in capture.graph.nodes
        if node.op in ("call_function", "call_method")
    ]


# Calls that write.


def test_in_place_call_as_a_statement_survives() -> None:  # D3
    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.g = nn.Linear(16, 16), nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.l(x)
            h.mul_(self.g)
            return torch.tanh(h) + x

    capture = assert_captured(chain(B), (X(4, 16),))
    writers = [n for n in capture.graph.nodes if n.meta.get("writes")]
    assert [n.target for n in writers if n.op == "call_method"] == ["mul_"] * 3


def test_in_place_activation() -> None:  # D4
    w = nn.Parameter(0.2 * X(16, 16))
    assert_captured(Fun(lambda self, x: torch.selu_(torch.matmul(x, self.w)), w=w), (X(4, 16),))


def test_setitem_out_and_augmented_assignment() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        table = torch.empty(4, 16)
        table[:] = x.detach()
        table[1:, 2] = 3.0
        torch.mul(table, 2, out=table)
        y = self.l(x) + table
        y += 1
        y[0] -= 2
        y.clamp_(min=-1)
        return y

    capture = assert_captured(Fun(forward, l=nn.Linear(16, 16)), (X(4, 16),))
    assert "setitem" in targets(capture)


def test_input_written_in_place_is_restored() -> None:
    x = X(4, 16)
    before = x.clone()
    model = Fun(lambda self, x: self.l(x.mul_(2)), l=nn.Linear(16, 16))
    capture, _ = record(model, (x,))
    check(capture, model, (x,))
    assert torch.equal(x, before)


# Getters, operators, dunders.


def test_property_getters_and_reflected_operators() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = (2.0 - x.T).mT / (1 + x.T.mT**2)
        h = 2.0 / (h.abs() + 1) + 2.0 ** h.tanh()
        return self.l(h) * ~(x > 0) + (-x).data + x.real

    capture = assert_captured(Fun(forward, l=nn.Linear(16, 16)), (X(4, 16, requires_grad=True),))
    assert "getattr" in targets(capture)


def test_iterating_over_a_tensor() -> None:
    model = Fun(lambda self, x: sum(self.l(row) for row in x), l=nn.Linear(16, 16))
    assert_captured(model, (X(4, 16),))


# Inputs and outputs.


@dataclasses.dataclass
class Out:
    loss: torch.Tensor
    hidden: torch.Tensor


def test_dataclass_output() -> None:  # H1
    def forward(self: Any, x: torch.Tensor) -> Out:
        h = self.m(x)
        return Out(h.pow(2).mean(), h)

    model = Fun(forward, m=chain(Mlp))
    capture = assert_captured(model, (X(4, 16),))
    one = capture.outputs.build([torch.zeros(()), torch.ones(2)])
    assert type(one) is Out
    assert one.hidden.shape == (2,)
    assert capture.outputs.build([torch.zeros(()), torch.ones(2)]) is not one


def test_none_numbers_strings_and_defaults() -> None:  # H2, H4, H12
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.ModuleList([Mlp() for _ in range(3)])

        def forward(
            self, x: Any, mask: Any, rate: float = 0.5, *, name: str = "a", sizes: Any = (1, 2)
        ) -> Any:
            for b in self.m:
                x = x + rate * sizes[1] * b(x) if mask is None else b(x) * mask
            return x

    model, x = Net(), X(4, 16)
    capture = assert_captured(model, (x, None, 0.1))
    assert capture.key.matches(model, (x,), {"mask": None, "rate": 0.1})
    assert not capture.key.matches(model, (x, None), {})
    assert not capture.key.matches(model, (x, None, 0.1), {"name": "b"})
    assert_captured(model, (x, X(16)))


def test_keyword_only_tensor() -> None:  # H3
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m, self.c = Mlp(), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, *, context: torch.Tensor) -> torch.Tensor:
            return self.m(x) + self.c(context)

    assert_captured(Net(), (X(4, 16),), {"context": X(4, 16, requires_grad=True)})


def test_arguments_reach_the_block_they_are_for() -> None:  # H8
    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m, self.t = Mlp(), nn.Linear(16, 16)

        def forward(self, x: Any, temb: Any = None, scale: float = 1.0, add: Any = None) -> Any:
            x = self.m(x) * scale
            if temb is not None:
                x = x + self.t(temb)
            return x if add is None else x + add

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.ModuleList([B() for _ in range(4)])

        def forward(self, x: Any, temb: Any) -> Any:
            for i, b in enumerate(self.m):
                x = b(x, temb, add=x if i % 2 else None)
            return x

    assert_captured(Net(), (X(4, 16), X(4, 16)))


class Mask:
    def __init__(self, t: torch.Tensor) -> None:
        self.t = t

    def apply(self, s: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(~self.t, -1e9)


def test_object_holding_tensors_among_the_arguments() -> None:  # H10
    def forward(self: Any, x: Any, mask: Mask) -> Any:
        s = mask.apply(self.q(x) @ x.transpose(1, 2))
        return x + self.o(torch.softmax(s, -1) @ x)

    model = Fun(forward, q=nn.Linear(16, 16), o=nn.Linear(16, 16))
    mask = Mask(torch.ones(5, 5, dtype=torch.bool).tril())
    capture = assert_captured(model, (X(2, 5, 16), mask))
    other = Mask(torch.ones(5, 5, dtype=torch.bool))
    x = X(2, 5, 16)
    assert capture.key.matches(model, (x, other))
    (got,) = replay(capture, model, capture.inputs.tensors((x, other), {}))
    assert torch.equal(got, model(x, other))


def test_optional_object_in_an_output() -> None:  # H13
    class Entry:
        def __init__(self, k: torch.Tensor) -> None:
            self.k = k

    def forward(self: Any, x: Any) -> Any:
        y = self.m(x)
        return y, Entry(y.detach()), None, {"a": [y * 2]}

    capture = assert_captured(Fun(forward, m=Mlp()), (X(4, 16),))
    a, b, c = X(1), X(2), X(3)
    first, entry, nothing, nested = capture.outputs.build([a, b, c])
    assert first is a
    assert type(entry) is Entry
    assert entry.k is b
    assert nothing is None
    assert nested["a"][0] is c


def test_keyword_arguments_and_dict_output() -> None:  # N3
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.m = nn.Embedding(9, 16), nn.ModuleList([Mlp() for _ in range(4)])

        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            if (input_ids is None) == (inputs_embeds is None):
                raise ValueError("give one of the two")
            x = self.emb(input_ids) if inputs_embeds is None else inputs_embeds
            for b in self.m[: kwargs.get("depth", 4)]:
                x = b(x)
            return {"logits": x}

    ids = torch.randint(0, 9, (2, 5))
    capture = assert_captured(Net(), (), {"input_ids": ids, "depth": 2})
    assert targets(capture).count("tanh") == 2
    with pytest.raises(ValueError, match="give one of the two"):
        record(Net(), (), {})


def test_one_tensor_passed_twice_is_part_of_the_key() -> None:
    model = Fun(lambda self, x, y: self.l(x) * y, l=nn.Linear(16, 16))
    x = X(4, 16)
    capture = assert_captured(model, (x, x))
    assert capture.key.matches(model, (y := X(4, 16), y))
    assert not capture.key.matches(model, (x, X(4, 16)))


def test_input_handed_through() -> None:
    capture = assert_captured(Fun(lambda self, x: (x, self.l(x)), l=nn.Linear(16, 16)), (X(4, 16),))
    assert capture.outputs.count == 2


# Autograd functions, the user's checkpoints.


class Stateful(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.x, ctx.w = x, w
        return torch.tanh(x @ w.T) * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g @ ctx.w * 3, g.T @ ctx.x  # not the true gradient: must not be inlined


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        a, b = x * 1, x * 2
        ctx.save_for_backward(x, a, b)
        return a, b

    @staticmethod
    def backward(ctx: Any, ga: Any, gb: Any) -> Any:
        assert len(ctx.saved_tensors) == 3
        return ga + 2 * gb


stateful, pair = Stateful.apply, Pair.apply


@pytest.mark.parametrize("by_name", [False, True])
def test_autograd_function_is_one_node_with_its_backward(by_name: bool) -> None:  # I5, I7, I8
    w = nn.Parameter(0.2 * X(16, 16))
    model = Fun(lambda self, x: x + Pair.apply(Stateful.apply(x, self.w))[0], w=w)
    if by_name:  # bound when the module was imported
        model = Fun(lambda self, x: x + pair(stateful(x, self.w))[0], w=w)
    capture = assert_captured(model, (X(4, 16, requires_grad=True),))
    opaque = [n for n in capture.graph.nodes if n.meta.get("opaque")]
    assert [n.target.__self__ for n in opaque] == [Stateful, Pair]  # type: ignore[union-attr]
    assert "mul" not in targets(capture)
    assert Stateful.apply == opaque[0].target


@pytest.mark.parametrize("reentrant", [False, True])
def test_users_checkpoints_are_dissolved(reentrant: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        return checkpoint(self.m, x, use_reentrant=reentrant)

    model = Fun(forward, m=Mlp())
    capture, _ = record(model, (X(4, 16, requires_grad=True),))
    assert "tanh" in targets(capture)
    assert "dissolved" in capture.notes[0]


def test_multi_head_attention_opens_up() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    capture = assert_captured(model, (X(2, 5, 16),))
    assert "multi_head_attention_forward" not in targets(capture)
    assert {"drawn_attention_mask", "attention_scores", "weighted"} <= set(targets(capture))


# Guards.


def test_branch_on_data_is_a_guard() -> None:  # N2
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dim() == 2
            assert tuple(x.shape) == (4, 16), "bad shape"
            y = self.m(x)
            return y * 0.5 if x.abs().max() > 1 else y

    model, large, small = Net(), 3 + X(4, 16).abs(), 0.01 * X(4, 16)
    capture = assert_captured(model, (large,))
    assert "expect" in targets(capture)
    with pytest.raises(GuardMiss, match="bool"):
        replay(capture, model, (small,))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: int(x.sum()),
        lambda x: x[0].tolist()[0],
        lambda x: float(x[0].numpy()[0]),
        lambda x: float(np.asarray(x[0])[0]),
        lambda x: float(torch.equal(x, torch.ones_like(x))),
        lambda x: float((x > 0).any() and 3.0),
        lambda x: [1.0, 2.0, 3.0][(x[0, 0] > 0).long()],
    ],
)
def test_values_that_leave_torch_are_guards(ask: Callable[[Any], float]) -> None:
    model = Fun(lambda self, x: self.l(x) * ask(x), l=nn.Linear(16, 16))
    x = 1 + X(4, 16).abs()
    capture = assert_captured(model, (x,))
    assert "expect" in targets(capture)
    with pytest.raises(GuardMiss):
        replay(
            capture,
            model,
            (torch.ones(4, 16) * (-1 if "long" in targets(capture) else 1),)
            if "any" not in targets(capture)
            else (-x,),
        )


def test_shapes_that_depend_on_data_are_guarded() -> None:
    model = Fun(lambda self, x: self.l(x[x[:, 0] > 0]), l=nn.Linear(16, 16))
    x = X(6, 16)
    x[:, 0] = torch.tensor([1.0, -1, 1, -1, 1, 1])
    capture = assert_captured(model, (x,))
    with pytest.raises(GuardMiss, match="shape"):
        replay(capture, model, (x.abs(),))


def test_shape_from_a_tensor_is_guarded() -> None:
    model = Fun(lambda self, x, n: self.l(x[: n.max()]), l=nn.Linear(16, 16))
    capture = assert_captured(model, (X(6, 16), torch.tensor([2, 3])))
    with pytest.raises(GuardMiss):
        replay(capture, model, (X(6, 16), torch.tensor([2, 4])))


def test_ties_in_routing() -> None:  # M1, M3
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.w = nn.Linear(16, 4), nn.Parameter(0.2 * X(4, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            v, i = torch.topk(torch.softmax(self.g(x).round(), -1), 2)
            h = torch.tanh(torch.einsum("bd,bkde->bke", x, self.w[i]))
            y = x + torch.einsum("bk,bkd->bd", v, h)
            return torch.where((self.g(y).argmax(-1) == 0)[:, None], y * 2, y)

    assert_captured(chain(Moe), (X(6, 16),))


def test_branch_on_a_parameter_shape() -> None:  # N4
    class B(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.w, self.o = nn.Parameter(0.2 * X(16, d)), nn.Linear(d, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x @ self.w
            if self.w.shape[1] > 16:
                h = torch.tanh(h)
            return x + self.o(h)

    capture = assert_captured(nn.Sequential(B(8), B(32)), (X(4, 16),))
    assert "expect" not in targets(capture)


# Surroundings.


def test_no_grad_and_autocast_inside() -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            h = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(h)
            with torch.autocast("cpu", enabled=False):
                y = self.c(y.float())
        return y

    model = Fun(forward, a=Mlp(), b=nn.Linear(16, 16), c=nn.Linear(16, 16))
    capture = assert_captured(model, (X(4, 16),))
    base = capture.ambient
    seen = {
        tuple(n.meta["ambient"].describe_difference(base))
        for n in capture.graph.nodes
        if n.op in ("call_function", "call_method")
    }
    assert ("torch.no_grad()",) in seen
    assert ("torch.autocast('cpu', dtype=torch.bfloat16)",) in seen


def test_autocast_around() -> None:
    model = chain(Mlp)
    x = X(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        capture = assert_captured(model, (x,))
        assert capture.key.matches(model, (x,))
    assert not capture.key.matches(model, (x,))


def test_default_dtype_inside() -> None:
    def forward(self: Any, x: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        scale = torch.ones(16)
        torch.set_default_dtype(before)
        return self.l(x) * scale.float()

    assert_captured(Fun(forward, l=nn.Linear(16, 16)), (X(4, 16),))


def test_default_device_around() -> None:  # L1
    model, x = chain(Mlp), X(4, 16)
    with torch.device("cpu"):
        assert_captured(model, (x,))


def test_meta_model() -> None:  # L4
    with torch.device("meta"):
        model, x = chain(lambda: nn.Sequential(Mlp(), nn.BatchNorm1d(16))), torch.randn(4, 16)
    capture, _ = record(model, (x,))
    check(capture, model, (x,))
    written = [len(n.meta["writes"]) for n in capture.graph.nodes if n.op == "call_function"]
    assert written.count(2) == 3


def test_harmless_contexts() -> None:  # N5
    def forward(self: Any, x: Any) -> Any:
        with torch.profiler.record_function("block"):
            return self.m(x)

    assert_captured(Fun(forward, m=Mlp()), (X(4, 16),))


def test_dropout_obeys_eval() -> None:  # K1
    model = Fun(lambda self, x: F.dropout(self.m(x), 0.5, self.training), m=Mlp())
    capture = assert_captured(model, (x := X(4, 16),))
    model.eval()
    assert not capture.key.matches(model, (x,))
    model.train()
    assert capture.key.matches(model, (x,))


def test_batch_norm_counters_do_not_split_the_stream() -> None:
    model = chain(lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)))
    capture = assert_captured(model, (X(3, 4, 6, 6),))
    assert targets(capture)[:6] == ["conv2d", "batch_norm"] * 3


def noisy() -> Fun:
    model = Fun(
        lambda self, x: self.l(x) + torch.rand(x.shape, generator=self.generator),
        l=nn.Linear(16, 16),
    )
    model.generator = torch.Generator().manual_seed(0)
    return model


def test_explicit_generator_is_pinned() -> None:
    model = noisy()
    capture, _ = record(model, (X(4, 16),))
    assert [n.target.__name__ for n in capture.graph.nodes if n.meta.get("pinned")] == ["rand"]  # type: ignore[union-attr]


def test_tensors_in_plain_attributes_are_read_again() -> None:
    model = Fun(lambda self, x: self.l(x) * self.scale[1] + self.table["k"], l=nn.Linear(16, 16))
    model.scale, model.table = [None, torch.tensor(2.0)], {"k": torch.ones(16)}
    x = X(4, 16)
    capture = assert_captured(model, (x,))
    model.scale[1] = torch.tensor(5.0)
    (got,) = replay(capture, model, (x,))
    assert torch.equal(got, model(x))


def test_lstm() -> None:
    assert_captured(Fun(lambda self, x: self.r(x)[0], r=nn.LSTM(16, 8, 2)), (X(5, 3, 16),))


# Refusals: the reason, the module, the line, what to do.


def nothing(*_: Any) -> None:
    return None


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m, self.calls = Mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.m(x) / self.calls


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k: nn.Module = nn.Linear(16, 16)
        self.past: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past.append(self.k(x))
        return torch.cat(self.past, 1)


CLOSURE = torch.ones(16)


def energy(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(self.m(x).sum(), x, create_graph=True)
    return g


def hooked(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = self.m(x)
    y.register_hook(nothing)
    return y


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (chain(Counter), "writes attribute 'calls' of '0' (Counter)"),  # E1
        (Growing(), "writes the list 'past'"),  # E2
        (Fun(lambda s, x: s.m(x) * random.random(), m=Mlp()), "draws from python"),
        (Fun(lambda s, x: s.m(x) * np.random.rand(), m=Mlp()), "draws from python"),
        (Fun(lambda s, x: s.m(x) * CLOSURE, m=Mlp()), "comes from outside"),
        (Fun(lambda s, x: s.m(x) + torch.from_numpy(np.ones(16, "f4")), m=Mlp()), "from_numpy"),
        (Fun(lambda s, x: s.m(x) + torch.Tensor([2.0]), m=Mlp()), "comes from outside"),
        (Fun(energy, m=Mlp()), "autograd"),  # I1
        (Fun(hooked, m=Mlp()), "hook"),
        (Fun(lambda s, x: torch.vmap(s.m)(x), m=Mlp()), "torch.func"),
        (Fun(lambda s, x: s.m(torch.jit.script(gelu)(x)), m=Mlp()), "comes from outside"),
        (Fun(lambda s, x: s.m(x) * x.tolist()[0][0], m=Mlp(400)), "values of a tensor"),
    ],
)
def test_refused_with_reason_and_line(model: nn.Module, reason: str) -> None:
    width = 400 if "values" in reason else 16
    x = X(16, width) if "list 'past'" not in reason else X(2, 5, 16)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    # Where python's random state moved is known by module only.
    place = "'" if "draws" in reason else r"test_capture_traps\.py:\d+"
    with pytest.raises(CaptureError, match=place) as caught:
        record(nn.Sequential(model) if "draws" in reason else model, (x,))
    assert reason in str(caught.value)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.7 * x)


def test_refusals_leave_no_trace() -> None:
    counter, growing = Counter(), Growing()
    for model, x in ((counter, X(4, 16)), (growing, X(2, 5, 16))):
        with pytest.raises(CaptureError):
            record(model, (x,))
    assert counter.calls == 0
    assert growing.past == []


def test_scripted_and_compiled_modules() -> None:  # R3
    for part in (torch.jit.script(Mlp()), torch.compile(Mlp())):
        with pytest.raises(CaptureError, match=r"'0' is (scripted|compiled)"):
            record(nn.Sequential(part), (X(4, 16),))


def test_function_mode_around() -> None:  # L2
    class Half(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, a: Any = (), k: Any = None) -> Any:
            return f(*a, **(k or {}))

    with Half(), pytest.raises(CaptureError, match="Half"):
        record(chain(Mlp), (X(4, 16),))


def test_nothing_requires_grad() -> None:
    with pytest.raises(CaptureError, match="requires grad"):
        record(chain(Mlp).requires_grad_(False), (X(4, 16),))


def test_models_own_error_passes() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        record(chain(Mlp), (X(4, 17),))
    # Nothing of ours is left in torch.
    assert torch.nn.Module.__call__ is torch.nn.Module.__dict__["__call__"]
    assert F.has_torch_function is torch.overrides.has_torch_function


def test_loss_outside_the_model() -> None:
    model, x, y = chain(Mlp), X(4, 16), X(4, 16)
    capture, recorded = record(model, (x,), loss=lambda out: F.mse_loss(out, y))
    stages = {n.meta["stage"] for n in capture.graph.nodes if n.op == "call_function"}
    assert stages == {"model", "loss"}
    check(capture, model, (x,))
    expected = F.mse_loss(model(x), y)
    assert torch.equal(recorded.loss, expected)
    *_, loss = replay(capture, model, (x,), loss=True, closures=recorded.closures)
    assert torch.equal(loss, expected)


def test_signature_does_not_depend_on_sizes() -> None:
    model = chain(Mlp)
    one, two = (record(model, (X(n, 16),))[0].signature for n in (4, 9))
    assert one == two
    assert one != record(chain(Mlp, 2), (X(4, 16),))[0].signature


# The check.


def test_check_names_the_call_that_differs() -> None:
    calls = [0]

    def forward(self: Any, x: Any) -> Any:
        calls[0] += 1
        return self.l(torch.tanh(x) * float(calls[0]))

    model = Fun(forward, l=nn.Linear(16, 16))
    capture, _ = record(model, (x := X(4, 16),))
    with pytest.raises(CaptureError, match=r"mul.*test_capture_traps\.py:\d+"):
        check(capture, model, (x,))


def test_check_sees_a_frozen_value_with_the_second_batch() -> None:
    def forward(self: Any, x: Any) -> Any:
        # torch's function mode does not see this read.
        with torch._C.DisableTorchFunction():
            scale = float(x.detach().sum())
        return self.l(x) * scale

    model = Fun(forward, l=nn.Linear(16, 16))
    capture, _ = record(model, (x := X(4, 16),))
    with pytest.raises(CaptureError, match="second batch"):
        check(capture, model, (x,))


def test_check_refuses_a_corrupted_graph() -> None:
    model = chain(Mlp)
    capture, _ = record(model, (x := X(4, 16),))
    node = next(n for n in capture.graph.nodes if n.target is torch.tanh)
    node.target = torch.sin
    with pytest.raises(CaptureError, match="differs"):
        check(capture, model, (x,))


def test_check_compares_autograd_graphs() -> None:
    model = chain(Mlp)
    capture, _ = record(model, (x := X(4, 16),))
    node = next(n for n in capture.graph.nodes if n.target is torch.tanh)
    with capture.graph.inserting_after(node):
        detached = capture.graph.call_method("detach", (node,))
        detached.meta.update(node.meta)
        node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    with pytest.raises(CaptureError, match="graph"):
        check(capture, model, (x,))


# Hooks, and what a forward reaches outside the model.

LOG: list[float] = []


def logging(self: Any, x: torch.Tensor) -> torch.Tensor:
    LOG.append(float(x.shape[0]))
    return self.m(x)  # type: ignore[no-any-return]


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = Mlp()

    forward = logging


def test_effect_on_a_global_is_refused() -> None:  # E6
    with pytest.raises(CaptureError, match="the list 'LOG'"):
        record(chain(Logging), (X(4, 16),))
    assert LOG == []


def test_hook_that_collects_is_refused() -> None:  # F3
    model, feats = chain(Mlp), []
    model[1].register_forward_hook(lambda m, i, o: feats.append(o))
    with pytest.raises(CaptureError, match="the list 'feats'"):
        record(model, (X(4, 16),))
    assert feats == []


def test_hook_that_computes_is_recorded() -> None:
    model = chain(Mlp)
    model[1].register_forward_hook(lambda m, i, o: o * 2)
    model[2].register_forward_pre_hook(lambda m, i: (i[0].relu(),))
    assert "relu" in targets(assert_captured(model, (X(4, 16),)))


def test_backward_hook_on_a_part_is_two_nodes() -> None:  # F1
    model = chain(Mlp)
    model[1].register_full_backward_hook(nothing)
    capture = assert_captured(model, (X(4, 16),))
    names = [name for name in targets(capture) if name.startswith("backward_hooks")]
    assert names == ["backward_hooks_before", "backward_hooks_after"]


def test_saved_tensor_hooks_inside_are_refused() -> None:  # J1
    def forward(self: Any, x: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.m(x)

    with pytest.raises(CaptureError, match="saved-tensor hooks"):
        record(Fun(forward, m=Mlp()), (X(4, 16),))


def test_saved_tensor_hooks_around_see_nothing_of_the_recording() -> None:  # J3
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x):
        assert_count = len(record(chain(Mlp), (X(4, 16),))[0].graph.nodes)
    assert assert_count > 0
    assert packed == []


def test_compiled_function_inside_is_refused() -> None:
    compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")
    with pytest.raises(CaptureError):
        record(Fun(lambda self, x: compiled(self.m(x)), m=Mlp()), (X(4, 16),))


def test_argument_that_grows_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()

    def forward(self: Any, x: Any, cache: Any) -> Any:
        k, _ = cache.update(self.m(x), x, 0)
        return k

    with pytest.raises(CaptureError, match="the arguments"):
        record(Fun(forward, m=nn.Linear(4, 4)), (X(1, 2, 3, 4), cache))
    assert cache.get_seq_length() == 0


def test_fast_path_of_torch_attention() -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            h = self.t(x)
        return self.l(h)

    model = Fun(
        forward,
        t=nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(),
        l=nn.Linear(16, 16),
    )
    capture = assert_captured(model, (X(2, 5, 16),))
    assert "_transformer_encoder_layer_fwd" in targets(capture)


def test_parametrized_weights() -> None:
    parametrizations = nn.utils.parametrizations
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(16, 16)),
        parametrizations.spectral_norm(nn.Linear(16, 16)),
    )
    assert_captured(model, (X(4, 16),))


def test_weight_written_by_an_embedding_is_restored() -> None:
    model = nn.Embedding(9, 16, max_norm=0.5)
    before = model.weight.detach().clone()
    ids = torch.randint(0, 9, (2, 5))
    capture, _ = record(model, (ids,))
    check(capture, model, (ids,))
    assert torch.equal(model.weight, before)


def test_generator_is_put_back() -> None:
    model = noisy()
    state = model.generator.get_state()
    x = X(4, 16)
    capture, _ = record(model, (x,))
    check(capture, model, (x,))
    assert torch.equal(model.generator.get_state(), state)


def test_setting_made_once_stays() -> None:
    class Settling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m: nn.Module = Mlp()
            self.width: int | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.width is None:
                self.width = x.shape[-1]
            return self.m(x) * self.width  # type: ignore[no-any-return]

    model = Settling()
    capture = assert_captured(model, (x := X(4, 16),))
    assert model.width == 16
    assert capture.key.matches(model, (x,))


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(CaptureError, match="lazy"):
        record(nn.Sequential(nn.LazyLinear(3)), (X(4, 16),))


def test_one_layer_many_times() -> None:  # O3, P5
    def forward(self: Any, xs: Any) -> Any:
        return torch.stack([self.m(x) for x in xs.unbind(0)]).mean()

    assert_captured(Fun(forward, m=Mlp()), (X(50, 1, 16),))


def test_recording_holds_no_activation() -> None:
    import weakref

    alive: list[weakref.ref[Any]] = []
    most = [0]

    def forward(self: Any, x: Any) -> Any:
        for part in self.m:
            x = part(x)
            alive.append(weakref.ref(x))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return x

    capture, recorded = record(
        Fun(forward, m=chain(lambda: nn.Sequential(Mlp(), nn.Tanh()), 8)), (X(4, 16),)
    )
    assert most[0] == 1
    assert sum(ref() is not None for ref in alive) <= 1
    assert len(recorded.outputs) == 1
    assert capture.outputs.count == 1


class Lazy(nn.Module):
    """Builds something at its first call; `kind` says what."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.m: nn.Module = Mlp()
        self.kind, self.ready = kind, False
        self.scale = nn.Parameter(torch.ones(16))
        self.made: torch.Tensor | None = None
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "actnorm" and not self.ready:
            with torch.no_grad():
                self.scale.copy_(x.std(0))
            self.ready = True
        if self.kind == "table" and self.made is None:
            self.made = torch.arange(16) * 2.0
        if self.kind == "first batch" and self.made is None:
            self.made = x.mean(0)
        if self.kind == "noise" and self.made is None:
            self.made = torch.randn(16)
        if self.kind == "sum":
            s = torch.ones(16)
            if self.made is None:
                self.made = s
            else:
                self.made += s
        if self.kind == "cache" and x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
        y = self.m(x) * self.scale + self.cache.get(16, 0)
        return y if self.made is None else y * self.made  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["table", "cache"])
def test_constants_made_at_the_first_call_are_read_again(kind: str) -> None:
    model, x = Lazy(kind), X(4, 16)
    capture = assert_captured(model, (x,))
    assert capture.key.matches(model, (x,))
    assert "arange" not in targets(capture)
    assert "linspace" not in targets(capture)
    assert any(n.meta.get("kind") == "attribute" for n in capture.graph.nodes)


@pytest.mark.parametrize("kind", ["first batch", "noise"])
def test_what_the_first_batch_makes_is_left_in_its_attribute(kind: str) -> None:
    model, x = Lazy(kind), X(4, 16)
    capture, _ = record(model, (x,))
    check(capture, model, (x,))
    assert capture.left == (("", "made"),)
    assert model.made is None
    model(x)
    assert not capture.key.matches(model, (x,))
    model.made = torch.ones(16)
    assert assert_captured(model, (x,)).left == ()


@pytest.mark.parametrize("kind", ["actnorm", "sum"])
def test_what_depends_on_the_first_batch_is_refused(kind: str) -> None:  # E5
    model = Lazy(kind)
    before = model.scale.detach().clone()
    with pytest.raises(CaptureError, match=r"writes|initializes"):
        record(model, (X(4, 16),))
    assert torch.equal(model.scale, before)
    assert model.made is None
    assert not model.ready


def test_gradient_transforms_are_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        return torch.func.grad(lambda y: self.m(y).sum())(x)

    with pytest.raises(CaptureError, match="torch.func"):
        record(Fun(forward, m=Mlp()), (X(4, 16),))


def test_unknown_tensor_in_an_output_says_so() -> None:
    model = Fun(lambda self, x: (self.m(x), torch.from_numpy(np.ones(3))), m=Mlp())
    with pytest.raises(CaptureError, match=r"at the output of the model \(tuple\)"):
        record(model, (X(4, 16),))


def test_rebound_buffer_is_named() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = Mlp()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.m(x)
            self.mean = self.mean * 0.9 + h.detach().mean(0)
            return h

    with pytest.raises(CaptureError, match=r"buffer 'mean' of '0', at test_capture_traps.py:\d+"):
        record(nn.Sequential(Ema()), (X(4, 16),))


def test_buffers_written_in_place_and_sparse_ones() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = torch.sparse.mm(self.a, self.l(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h

    model = Fun(forward, l=nn.Linear(16, 16), a=torch.eye(4).to_sparse(), mean=torch.zeros(16))
    capture, _ = record(model, (x := X(4, 16),))
    check(capture, model, (x,))
    assert torch.equal(model.mean, torch.zeros(16))


@torch.library.custom_op("autockpt_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


def test_custom_op_that_writes() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.l(x)
        scale = h.detach().clone()
        double_(scale)
        return h * scale

    capture = assert_captured(Fun(forward, l=nn.Linear(16, 16)), (X(4, 16),))
    assert sum(bool(n.meta.get("writes")) for n in capture.graph.nodes) == 1


def test_routing_by_index() -> None:
    def forward(self: Any, x: Any) -> Any:
        out, w = torch.zeros_like(x), self.g(x).softmax(-1)
        for i, expert in enumerate(self.e):
            (rows,) = torch.where(w.argmax(-1) == i)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * w[rows, i, None])
        return out

    experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
    capture = assert_captured(Fun(forward, g=nn.Linear(16, 2), e=experts), (x := X(9, 16),))
    with pytest.raises(GuardMiss, match="shape"):
        replay(capture, Fun(forward, g=nn.Linear(16, 2), e=experts), (x[:1].expand(9, 16),))


def test_an_expanded_batch_before_statistics() -> None:
    """A copy of a tensor whose elements share their memory lies otherwise; nothing was written."""
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(16, 8)).train()
    assert_captured(model, (X(1, 5, 16).expand(3, 5, 16),))
