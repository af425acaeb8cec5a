"""A GPT-2 as the solvers see it, written by hand: DESIGN's sizes, some 45 ops a layer."""

from __future__ import annotations

from solvers.problem import Gradient
from tests.solvers.problems import Builder


class Transformer(Builder):
    def __init__(self, batch, length, width, heads, vocabulary):
        super().__init__()
        self.rows, self.width, self.heads = batch * length, width, heads
        self.batch, self.length, self.vocabulary = batch, length, vocabulary
        self.module = ""

    def call(
        self,
        name,
        inputs,
        size,
        *,
        saves="",
        hidden=(),
        handed=False,
        flops=0,
        weight=0,
        random=False,
        view=False,
    ):
        """Add an op whose first output has ``size`` bytes; return its value."""
        index = len(self.ops)
        storage = self.values[inputs[0]].storage if view else self.storage(size, index)
        out = self.value(storage, size)
        extra = [self.storage(nbytes, index) for nbytes in hidden]
        saved = [self.values[v].storage for v in inputs] if "i" in saves else []
        saved += [storage] if "o" in saves else []
        saved += extra
        own = bool(extra) or "o" in saves
        gradients, fresh = [], []
        for v in inputs:
            if self.values[v].gradient_bytes:
                if handed or view:
                    gradients.append(Gradient(value=v, source=~0))
                else:
                    gradients.append(Gradient(value=v, source=len(fresh)))
                    fresh.append(self.values[v].gradient_bytes)
        names = list(inputs)
        if weight:
            parameter = self.parameter(weight)
            names.append(parameter)
            gradients.append(Gradient(value=parameter, source=len(fresh)))
            fresh.append(weight)
        made = 0 if view else size + sum(hidden)
        cost = flops // 50 + made // 5 + 5000
        self.op(
            name,
            inputs=tuple(names),
            outputs=(out,),
            saved=tuple(dict.fromkeys(saved)),
            packs=bool(saved or weight),
            gradient_bytes=tuple(fresh),
            gradients=tuple(gradients),
            cost=cost,
            stop_cost=cost if own else 0,
            flops=flops,
            stop_flops=flops if own else 0,
            backward_flops=2 * flops,
            random=random,
            module=self.module,
            source="modeling_gpt2.py:1",
        )
        return out

    def linear(self, x, n_in, n_out):
        x = self.call("view", [x], 4 * self.rows * n_in, view=True)
        y = self.call(
            "addmm",
            [x],
            4 * self.rows * n_out,
            saves="i",
            weight=4 * n_in * n_out,
            flops=2 * self.rows * n_in * n_out,
        )
        return self.call("view", [y], 4 * self.rows * n_out, view=True)

    def norm(self, x):
        return self.call(
            "layer_norm",
            [x],
            4 * self.rows * self.width,
            saves="i",
            weight=8 * self.width,
            hidden=(4 * self.rows, 4 * self.rows),
        )

    def dropout(self, x, size):
        return self.call("dropout", [x], size, hidden=(size // 4,), random=True)

    def attention(self, x):
        size = 4 * self.rows * self.width
        scores = 4 * self.batch * self.heads * self.length**2
        flops = 2 * self.batch * self.length**2 * self.width
        qkv = self.linear(x, self.width, 3 * self.width)
        parts = [self.call("getitem", [qkv], size, view=True) for _ in range(3)]
        parts = [self.call("view", [v], size, view=True) for v in parts]
        q, k, v = (self.call("transpose", [p], size, view=True) for p in parts)
        kt = self.call("transpose", [k], size, view=True)
        s = self.call("matmul", [q, kt], scores, saves="i", flops=flops)
        s = self.call("div", [s], scores)
        s = self.call("where", [s], scores, hidden=())
        s = self.call("softmax", [s], scores, saves="o")
        s = self.call("to", [s], scores, view=True)
        s = self.dropout(s, scores)
        y = self.call("matmul", [s, v], size, saves="i", flops=flops)
        y = self.call("transpose", [y], size, view=True)
        y = self.call("contiguous", [y], size)
        y = self.call("view", [y], size, view=True)
        return self.dropout(self.linear(y, self.width, self.width), size)

    def mlp(self, x):
        size = 16 * self.rows * self.width
        h = self.linear(x, self.width, 4 * self.width)
        a = self.call("mul", [h], size)
        p = self.call("pow", [h], size, saves="i")
        p = self.call("mul", [p], size)
        p = self.call("add", [h, p], size, handed=True)
        p = self.call("mul", [p], size)
        t = self.call("tanh", [p], size, saves="o")
        t = self.call("add", [t], size, handed=True)
        g = self.call("mul", [a, t], size, saves="i")
        return self.dropout(self.linear(g, 4 * self.width, self.width), size // 4)

    def block(self, x, layer):
        size = 4 * self.rows * self.width
        self.module = f"transformer.h.{layer}.ln_1"
        h = self.norm(x)
        self.module = f"transformer.h.{layer}.attn"
        h = self.attention(h)
        self.module = f"transformer.h.{layer}"
        x = self.call("add", [h, x], size, handed=True)
        self.module = f"transformer.h.{layer}.ln_2"
        h = self.norm(x)
        self.module = f"transformer.h.{layer}.mlp"
        h = self.mlp(h)
        self.module = f"transformer.h.{layer}"
        return self.call("add", [x, h], size, handed=True)


def gpt2(layers=12, batch=4, length=256, width=256, heads=4, vocabulary=1000):
    b = Transformer(batch, length, width, heads, vocabulary)
    size = 4 * b.rows * width
    tokens = b.value(b.storage(8 * b.rows))
    x = b.call("embedding", [tokens], size, weight=4 * vocabulary * width)
    positions = b.call("embedding", [tokens], size, weight=4 * length * width)
    x = b.call("add", [x, positions], size, handed=True)
    x = b.dropout(x, size)
    for layer in range(layers):
        x = b.block(x, layer)
    b.module = "transformer.ln_f"
    x = b.norm(x)
    b.module = "lm_head"
    logits = b.linear(x, width, vocabulary)
    b.module = ""
    logits = b.call("log_softmax", [logits], 4 * b.rows * vocabulary, saves="o")
    loss = b.call("nll_loss", [logits], 4, saves="i")
    return b.problem(loss, random_state_bytes=5056, batch_bytes=8 * b.rows, signature="gpt2")


def gelu_blocks(blocks):
    """Blocks of ``y = W (x' / 2 (1 + tanh(f(x'))))``, ``x' = V x``: eight ops each."""
    b = Builder()
    x = b.value(b.storage(1000), 0)
    for _ in range(blocks):
        x = _linear(b, x, 4000)
        half = _pointwise(b, "half", (x,), cost=1)
        value = _pointwise(b, "pow", (x,), cost=10, saves="i")
        value = _pointwise(b, "times", (value,), cost=10)
        value = _pointwise(b, "tanh", (value,), cost=10, saves="o")
        value = _pointwise(b, "plus", (value,), cost=1)
        value = _pointwise(b, "mul", (half, value), cost=1, saves="i")
        x = _linear(b, value, 1000)
    loss = b.value(b.storage(4, len(b.ops)), 4)
    source = Gradient(value=x, source=0)
    b.op("loss", inputs=(x,), outputs=(loss,), gradient_bytes=(1000,), gradients=(source,), cost=1)
    return b.problem(loss)


def _linear(b, x, size):
    index = len(b.ops)
    weight = b.parameter(50)
    out = b.value(b.storage(size, index), size)
    gradients = [Gradient(value=weight, source=0)]
    fresh = [50]
    if b.values[x].gradient_bytes:
        gradients.append(Gradient(value=x, source=1))
        fresh.append(b.values[x].gradient_bytes)
    b.op(
        "linear",
        inputs=(x, weight),
        outputs=(out,),
        saved=(b.values[x].storage,),
        packs=True,
        gradient_bytes=tuple(fresh),
        gradients=tuple(gradients),
        cost=50,
    )
    return out


def _pointwise(b, name, inputs, *, cost, saves=""):
    index = len(b.ops)
    storage = b.storage(4000, index)
    out = b.value(storage, 4000)
    saved = [b.values[v].storage for v in inputs] if "i" in saves else []
    saved += [storage] if "o" in saves else []
    b.op(
        name,
        inputs=inputs,
        outputs=(out,),
        saved=tuple(saved),
        packs=bool(saved),
        gradient_bytes=(4000,) * len(inputs),
        gradients=tuple(Gradient(value=v, source=k) for k, v in enumerate(inputs)),
        cost=cost,
        stop_cost=cost if "o" in saves else 0,
    )
    return out


def attention_blocks(blocks):
    """Blocks of ``W f(2 V x)``: f is dear, and saves its argument and its result."""
    b = Builder()
    x = b.value(b.storage(1000), 0)
    for _ in range(blocks):
        x = _linear(b, x, 4000)
        x = _pointwise(b, "times", (x,), cost=1)
        x = _pointwise(b, "attention", (x,), cost=100, saves="io")
        x = _pointwise(b, "tanh", (x,), cost=1, saves="o")
        x = _linear(b, x, 1000)
    loss = b.value(b.storage(4, len(b.ops)), 4)
    source = Gradient(value=x, source=0)
    b.op("loss", inputs=(x,), outputs=(loss,), gradient_bytes=(1000,), gradients=(source,), cost=1)
    return b.problem(loss)


def u_shape(depth, rows=1024, width=64):
    """Layers down, of a linear and a tanh, then layers up that also read what those made."""
    b = Transformer(1, rows, width, 1, 1)
    size = 4 * rows * width
    x = b.value(b.storage(size))
    skipped = []
    for _ in range(depth):
        x = _layer(b, x, width)
        x = b.call("tanh", [x], size, saves="o")
        skipped.append(x)
    for _ in range(depth):
        x = b.call("cat", [x, skipped.pop()], 2 * size, handed=True)
        x = _layer(b, x, 2 * width)
        x = b.call("gelu", [x], size, saves="i")
    return b.problem(b.call("sum", [x], 4), batch_bytes=size)


def _layer(b, x, n_in):
    size, weight = 4 * b.rows * b.width, 4 * n_in * b.width
    flops = 2 * b.rows * n_in * b.width
    return b.call("linear", [x], size, saves="i", weight=weight, flops=flops)
