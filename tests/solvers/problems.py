"""Random small problems and a GPT-2, as the solvers see them."""

from __future__ import annotations

from hypothesis import strategies as st

from solvers.plan import Plan, Region
from solvers.problem import Gradient, Op, Problem, Storage, Value
from tests.prologues import with_random_kept, with_random_prologues


class Builder:
    """Writes a problem op by op."""

    def __init__(self):
        self.ops, self.values, self.storages, self.inplace = [], [], [], []

    def storage(self, nbytes, producer=None):
        self.storages.append(Storage(nbytes=nbytes, producer=producer))
        return len(self.storages) - 1

    def value(self, storage, gradient_bytes=0, leaf=False, parameter=False):
        self.values.append(
            Value(storage=storage, gradient_bytes=gradient_bytes, leaf=leaf, parameter=parameter)
        )
        return len(self.values) - 1

    def parameter(self, nbytes):
        return self.value(self.storage(nbytes), nbytes, leaf=True, parameter=True)

    def op(self, name="op", **fields):
        self.ops.append(Op(name=f"{name}_{len(self.ops)}", **fields))

    def problem(self, loss, outputs=(), **fields):
        boundaries = [True] * (len(self.ops) + 1)
        for start, stop in self.inplace:
            for i in range(start + 1, stop + 1):
                boundaries[i] = False
        parameters = sum(
            self.storages[v.storage].nbytes for v in self.values if v.parameter and v.leaf
        )
        return Problem(
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=tuple(outputs),
            loss=loss,
            boundaries=tuple(boundaries),
            parameter_bytes=parameters,
            gradient_bytes=parameters,
            **fields,
        )


SIZES = st.integers(1, 40)


@st.composite
def problems(draw, max_ops=8):
    """Chains, skips, views, several outputs, hidden storages, random, in-place, pinned."""
    b = Builder()
    external = b.storage(16)
    leaf = draw(st.booleans())
    values = [b.value(external, 16 if leaf else 0, leaf=leaf)]
    weights = [b.parameter(draw(SIZES)) for _ in range(2)]
    count = draw(st.integers(1, max_ops - 1))
    unread = set()
    for _ in range(count):
        kind = draw(st.sampled_from(["unary", "unary", "linear", "add", "view", "two", "inplace"]))
        inputs = [values[-1 - draw(st.integers(0, min(3, len(values) - 1)))]]
        if kind == "add":
            inputs.append(values[-1 - draw(st.integers(0, min(5, len(values) - 1)))])
        unread -= set(inputs)
        made = _random_op(draw, b, kind, inputs, weights)
        values += made
        unread |= set(made)
    held = [v for v in sorted(unread) if len(unread) > 1 and draw(st.integers(0, 5)) == 0]
    sinks = sorted(unread - set(held)) or [values[-1]]
    loss_storage = b.storage(4, producer=len(b.ops))
    loss = b.value(loss_storage, 4)
    own = [draw(SIZES) for _ in sinks]
    b.op(
        "loss",
        inputs=tuple(sinks),
        outputs=(loss,),
        saved=tuple({b.values[v].storage for v in sinks if draw(st.booleans())}),
        packs=draw(st.booleans()),
        gradient_bytes=tuple(own),
        gradients=tuple(Gradient(value=v, source=k) for k, v in enumerate(sinks)),
        cost=draw(st.integers(1, 9)),
    )
    return b.problem(
        loss,
        held,
        random_state_bytes=draw(st.sampled_from([0, 3])),
        region_cost=draw(SIZES),
        number_bytes=draw(st.sampled_from([0, 8])),
        forward_bytes=draw(st.sampled_from([0, 0, 20])),
    )


def _random_op(draw, b, kind, inputs, weights):
    index = len(b.ops)
    source = b.values[inputs[0]].storage
    size = draw(SIZES)
    saved, hidden, packs = [], [], draw(st.booleans())
    if kind in ("view", "inplace"):
        outputs = [b.value(source, size)]
        packs = False
        producer = b.storages[source].producer
        if kind == "inplace" and producer is not None:
            b.inplace.append((producer, index))
    else:
        outputs = [b.value(b.storage(size, producer=index), size)]
        if kind == "two":
            same = draw(st.booleans())
            storage = b.values[outputs[0]].storage if same else b.storage(size, producer=index)
            outputs.append(b.value(storage, size))
    if draw(st.booleans()) and kind not in ("view", "inplace"):
        saved.append(draw(st.sampled_from([source, b.values[outputs[0]].storage])))
    if draw(st.integers(0, 2)) == 0 and kind != "view":
        hidden.append(b.storage(draw(SIZES), producer=index))
        saved += hidden if draw(st.booleans()) else []
    fresh, gradients = [], []
    for value in dict.fromkeys(inputs):
        handed = kind in ("view", "add", "inplace") and draw(st.booleans())
        gradients.append(
            Gradient(value=value, source=~0 if handed else len(fresh), dense=draw(st.booleans()))
        )
        if not handed:
            fresh.append(b.values[value].gradient_bytes or 5)
    if kind == "linear":
        weight = draw(st.sampled_from(weights))
        inputs = [*inputs, weight]
        gradients.append(Gradient(value=weight, source=len(fresh), dense=draw(st.booleans())))
        fresh.append(b.values[weight].gradient_bytes)
        packs = True
    cost = draw(st.integers(1, 9))
    own = any(b.storages[s].producer == index for s in saved)
    b.op(
        kind,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        saved=tuple(saved),
        packs=packs or bool(saved),
        forward_workspace_bytes=draw(st.sampled_from([0, 0, 7])),
        backward_workspace_bytes=draw(st.sampled_from([0, 0, 9])),
        backward_workspace_alone_bytes=draw(st.sampled_from([None, None, 0, 4])),
        dropped_workspace_bytes=draw(st.sampled_from([None, None, 5, -2])),
        stop_peak_bytes=draw(st.sampled_from([0, 60])) if own else 0,
        gradient_bytes=tuple(fresh),
        gradients=tuple(gradients),
        cost=cost,
        stop_cost=cost if own else 0,
        flops=cost,
        stop_flops=cost if own else 0,
        random=draw(st.integers(0, 4)) == 0,
        pinned=draw(st.integers(0, 14)) == 0,
    )
    return outputs


@st.composite
def plans(draw, problem, depth=0, low=0, high=None):
    """Well-formed plans, nested up to three deep, some regions with prologues."""
    plan = Plan(regions=draw(_regions(problem, depth, 0, len(problem.ops), None)))
    rng = draw(st.randoms(use_true_random=False))
    return with_random_kept(problem, with_random_prologues(problem, plan, rng), rng)


@st.composite
def _regions(draw, problem, depth, low, high, parent):
    edges = [i for i in range(low, high + 1) if problem.boundaries[i]]
    regions, position = [], low
    while True:
        starts = [i for i in edges if i >= position]
        pairs = [
            (i, j)
            for i in starts
            for j in starts
            if i < j and (i, j) != parent and not any(op.pinned for op in problem.ops[i:j])
        ]
        if not pairs or draw(st.integers(0, 3)) == 0:
            return tuple(regions)
        start, stop = draw(st.sampled_from(pairs))
        children = ()
        if depth < 2 and stop - start > 1:
            children = draw(_regions(problem, depth + 1, start, stop, (start, stop)))
        regions.append(Region(start=start, stop=stop, children=children))
        position = stop
