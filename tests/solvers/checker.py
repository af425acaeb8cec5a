"""An independent check of the judge: a toy eager runtime that really runs the step.

Shares no code with ``solvers``. Storages are Python objects that move a meter when they are
made and when they die, tensors hold them, autograd nodes hold what was saved, and checkpoint
frames, holders and the replay are those of ``torch.utils.checkpoint``. Nothing here computes a
lifetime: CPython's reference counts do.
"""

from __future__ import annotations

import contextlib
import weakref

from tests.solvers.resting import resting


class Meter:
    def __init__(self):
        self.level = 0
        self.peak = 0
        self.muted = False

    def note(self, extra=0):
        if not self.muted:
            self.peak = max(self.peak, self.level + extra)


class Buffer:
    def __init__(self, meter, nbytes):
        self.meter, self.nbytes = meter, nbytes
        meter.level += nbytes
        meter.note()

    def __del__(self):
        self.meter.level -= self.nbytes


class Tensor:
    def __init__(self, buffer, node):
        self.buffer, self.node = buffer, node


class Node:
    """A node of the autograd graph: what it saved, and the nodes it leads to."""

    def __init__(self, index, saved, hook, parents):
        self.index, self.saved, self.hook, self.parents = index, saved, hook, parents


class Holder:
    pass


class Frame:
    def __init__(self, region, resting):
        self.region, self.resting = region, resting
        self.arguments = None
        self.state = None
        self.kept = {}
        self.holders = []
        self.recomputed = weakref.WeakKeyDictionary()
        self.counter = 0
        self.replayed = False


class Stop(Exception):
    pass


class ForwardHook:
    def __init__(self, frame):
        self.frame = frame

    def pack(self, payload):
        holder = Holder()
        self.frame.holders.append(weakref.ref(holder))
        return holder

    def is_last(self):
        return False

    def unpack(self, runtime, holder):
        frame = self.frame
        if not frame.replayed:
            arguments = {}
            for packed, hook in frame.arguments:
                arguments.update(hook.unpack(runtime, packed) if hook else packed)
            with contextlib.suppress(Stop):
                runtime.replay(frame, arguments)
            frame.replayed = True
        return frame.recomputed.pop(holder)


class ReplayHook:
    def __init__(self, frame):
        self.frame = frame

    def pack(self, payload):
        frame = self.frame
        holder = frame.holders[frame.counter]()
        frame.counter += 1
        if holder is not None:
            frame.recomputed[holder] = payload
        if frame.counter == len(frame.holders):
            raise Stop
        return payload

    def is_last(self):
        return self.frame.counter + 1 == len(self.frame.holders)

    def unpack(self, runtime, packed):
        raise AssertionError("the graph of a replay is never differentiated")


class Runtime:
    def __init__(self, problem, fresh):
        self.problem = problem
        self.fresh = fresh
        self.meter = Meter()
        self.hooks = []
        self.recomputed_ops = 0
        self.recompute_cost = 0
        self.replaying = 0

    # -- forward ---------------------------------------------------------------------------

    def run_scope(self, start, stop, children, env, returned):
        items, position = [], start
        for child in children:
            items += [(i, None) for i in range(position, child.start)] + [(child.start, child)]
            position = child.stop
        items += [(i, None) for i in range(position, stop)]
        uses = [self.uses(i, child) for i, child in items]
        for k, (i, child) in enumerate(items):
            later = set().union(*uses[k + 1 :], returned)
            if child is None and self.rests(i):
                self.pack_only(i, env)
            elif child is None:
                self.run_op(i, env)
            else:
                self.call_region(child, env, returned, later)
            for value in [v for v in env if v not in later]:
                del env[value]

    def read_after(self, stop):
        later = range(stop, len(self.problem.ops))
        read = {v for i in later for v in self.problem.ops[i].inputs}
        return read.union(*(self.read_again(r) for r in self.regions if r.start >= stop))

    def read_again(self, region):
        ops = [self.problem.ops[i] for i in region.prologue]
        return {v for op in ops for v in op.inputs} - {v for op in ops for v in op.outputs}

    def uses(self, index, child):
        span = [index] if child is None else range(child.start, child.stop)
        read = {v for i in span for v in self.problem.ops[i].inputs}
        return read if child is None else read | self.read_again(child)

    def rests(self, i):
        hook = self.hooks[-1] if self.hooks else None
        return isinstance(hook, ReplayHook) and i in hook.frame.resting

    def pack_only(self, i, env):
        op = self.problem.ops[i]
        if op.packs or op.saved:
            buffers = {env[v].storage_id: env[v].buffer for v in op.inputs if v in env}
            self.pack(Node(i, None, None, []), op, buffers, self.hooks[-1])
        makes = any(storage.producer == i for storage in self.problem.storages)
        kept = i in self.hooks[-1].frame.region.kept
        if not (makes or kept) and all(v in env for v in op.inputs):
            # To look at what is there costs nothing: views are taken all the same, and may be
            # held to the region's end.
            self.bind(op, env, None, {env[v].storage_id: env[v].buffer for v in op.inputs})

    def run_op(self, i, env, *, grad=True):
        op, problem = self.problem.ops[i], self.problem
        made = {s: None for s, st in enumerate(problem.storages) if st.producer == i}
        saves_inputs_only = not any(s in made for s in op.saved)
        hook = self.hooks[-1] if self.hooks else None
        parents = [env[v].node for v in op.inputs if v in env]
        before = {env[v].storage_id: env[v].buffer for v in op.inputs if v in env}
        packs = grad and (op.packs or op.saved)
        node = Node(i, None, None, parents)
        kept = hook is not None and i in {*hook.frame.region.kept} - hook.frame.resting
        if kept and self.replaying:
            self.take_kept(i, env, node, before, hook)
            return
        if packs and saves_inputs_only and op.stop_cost == 0:
            self.pack(node, op, before, hook)
        if self.replaying:
            self.recomputed_ops += 1
        self.meter.muted = True
        for s in made:
            made[s] = Buffer(self.meter, problem.storages[s].nbytes)
        self.meter.muted = False
        dropped = isinstance(hook, ForwardHook) or not grad
        self.note_peak(op, made, packs, hook, dropped=dropped and not kept)
        if packs and not (saves_inputs_only and op.stop_cost == 0):
            if self.replaying:
                self.recompute_cost += op.stop_cost
            self.pack(node, op, {**before, **made}, hook)
            if self.replaying:
                self.recompute_cost -= op.stop_cost
        if self.replaying:
            self.recompute_cost += op.cost
        if kept:
            self.note_kept(i, made, hook)
        self.bind(op, env, node, {**before, **made})

    def bind(self, op, env, node, buffers):
        for v in op.outputs:
            s = self.problem.values[v].storage
            env[v] = Tensor(buffers.get(s), node)
            env[v].storage_id = s

    def note_peak(self, op, made, packs, hook, *, dropped):
        if packs and op.stop_peak_bytes and hook is not None and hook.is_last():
            self.meter.note(op.stop_peak_bytes - sum(b.nbytes for b in made.values()))
            return
        dropped = dropped and op.dropped_workspace_bytes is not None
        self.meter.note(op.dropped_workspace_bytes if dropped else op.forward_workspace_bytes)

    def note_kept(self, i, made, hook):
        op = self.problem.ops[i]
        shown = {*op.saved, *(self.problem.values[v].storage for v in op.outputs)}
        hook.frame.kept[i] = {s: buffer for s, buffer in made.items() if s in shown}

    def take_kept(self, i, env, node, before, hook):
        op, buffers = self.problem.ops[i], {**before, **hook.frame.kept[i]}
        if op.packs or op.saved:
            self.pack(node, op, buffers, hook)
        self.bind(op, env, node, buffers)

    def pack(self, node, op, buffers, hook):
        payload = [buffers[s] for s in op.saved if self.problem.storages[s].producer is not None]
        node.saved, node.hook = (hook.pack(payload) if hook else payload,), hook

    def call_region(self, region, env, returned, later_here):
        problem = self.problem
        inside = range(region.start, region.stop)
        defined = {v for i in inside for v in problem.ops[i].outputs}
        read = {v for i in inside for v in problem.ops[i].inputs} - defined
        again = {v for i in region.prologue for v in problem.ops[i].outputs}
        made = {v: env[v] for v in read & again}
        read |= self.read_again(region)
        names = [v for v in sorted(read - again) if not problem.values[v].parameter]
        frame = Frame(region, resting(problem, region))
        hook = self.hooks[-1] if self.hooks else None
        if problem.random_state_bytes and any(
            problem.ops[i].random for i in inside if i not in region.kept
        ):
            frame.state = Buffer(self.meter, problem.random_state_bytes)
        saved = []
        for v in names:
            payload = {v: env[v]} if v in env else {}
            payload = {k: detached(t) for k, t in payload.items()}
            saved.append((hook.pack(payload) if hook else payload, hook))
        frame.arguments = saved
        if self.rests(region.start):
            return
        # A call holds its arguments; what can be made again is handed over.
        held = {v: env[v] for v in names if v in env}
        arguments = held | made
        for v in made.keys() - later_here:
            del env[v]
        del made
        later = self.read_after(region.stop) | {*problem.outputs, problem.loss, *returned}
        self.hooks.append(ForwardHook(frame))
        try:
            self.call(region, arguments, defined & later)
            env.update(arguments)
            del held
        finally:
            self.hooks.pop()

    def call(self, region, env, returned):
        """Run a region; what is left in ``env`` is what it returns."""
        self.run_scope(region.start, region.stop, region.children, env, returned)
        for v in env.keys() - returned:
            del env[v]

    def run_prologue(self, region, env):
        ops = self.problem.ops
        for k, i in enumerate(region.prologue):
            self.run_op(i, env, grad=False)
            rest = (*region.prologue[k + 1 :], *range(region.start, region.stop))
            for v in env.keys() - {v for j in rest for v in ops[j].inputs}:
                del env[v]

    def replay(self, frame, arguments):
        region, problem = frame.region, self.problem
        inside = range(region.start, region.stop)
        state = Buffer(self.meter, problem.random_state_bytes) if frame.state else None
        defined = {v for i in inside for v in problem.ops[i].outputs}
        later = self.read_after(region.stop) | {*problem.outputs, problem.loss}
        self.recompute_cost += problem.region_cost
        outer, self.hooks = self.hooks, [ReplayHook(frame)]
        self.replaying += 1
        try:
            env = dict(arguments)
            self.run_prologue(region, env)
            self.call(region, env, defined & later)
        finally:
            self.hooks = outer
            self.replaying -= 1
            del state

    # -- backward --------------------------------------------------------------------------

    def step(self, plan):
        problem = self.problem
        self.meter.level = problem.parameter_bytes + problem.buffer_bytes + problem.batch_bytes
        self.meter.level += problem.number_bytes + problem.forward_bytes
        if not self.fresh:
            self.meter.level += problem.gradient_bytes
        self.regions = plan.regions
        env = {}
        size = len(problem.ops)
        self.run_scope(0, size, plan.regions, env, {*problem.outputs, problem.loss})
        self.meter.level -= problem.forward_bytes
        self.backward(env[problem.loss].node)
        return self

    def backward(self, root):
        problem = self.problem
        graph = {}
        stack = [root]
        while stack:
            node = stack.pop()
            if node is not None and node.index not in graph:
                graph[node.index] = node
                stack += node.parents
        # As loss.backward() holds the gradient that it starts from to the end.
        self.seed = Buffer(self.meter, problem.values[problem.loss].gradient_bytes)
        self.gradients = {problem.loss: (self.seed, True)}
        del node
        self.owned, self.handed = [], {}
        self.expected = self.count_contributions(graph)
        for index in sorted(graph, reverse=True):
            if any(v in self.gradients for v in problem.ops[index].outputs):
                self.run_backward(graph[index])

    def differentiable(self, op):
        return bool(op.gradients or op.packs or op.saved)

    def count_contributions(self, graph):
        """Dry run: how many gradients arrive at each value."""
        arrived = {self.problem.loss: 1}
        for index in sorted(graph, reverse=True):
            op = self.problem.ops[index]
            if self.differentiable(op) and any(v in arrived for v in op.outputs):
                for g in op.gradients:
                    if g.source >= 0 or op.outputs[~g.source] in arrived:
                        arrived[g.value] = arrived.get(g.value, 0) + 1
        return arrived

    def run_backward(self, node):
        problem, op = self.problem, self.problem.ops[node.index]
        if not self.differentiable(op):
            for v in op.outputs:
                self.gradients.pop(v, None)
            return
        self.meter.note()
        unpacked = None
        if node.saved is not None:
            unpacked = node.hook.unpack(self, node.saved[0]) if node.hook else node.saved[0]
        own = [Buffer(self.meter, nbytes) for nbytes in op.gradient_bytes]
        incoming = {k: self.gradients.pop(v, None) for k, v in enumerate(op.outputs)}
        self.meter.note(self.workspace(op, [found[0] for found in incoming.values() if found]))
        out = []
        for g in op.gradients:
            if g.source >= 0:
                out.append((g.value, own[g.source], g.dense))
            elif incoming[~g.source] is not None:
                out.append((g.value, incoming[~g.source][0], g.dense and incoming[~g.source][1]))
        del unpacked, own, incoming
        node.saved = node.hook = None
        touched = []
        while out:
            touched.append(out[0][0])
            self.deliver(out)
        for value in dict.fromkeys(touched):
            if problem.values[value].leaf and not self.expected[value]:
                self.accumulate(value)

    def workspace(self, op, incoming):
        shared = any(
            self.shared(buffer, [], incoming[:k] + incoming[k + 1 :])
            for k, buffer in enumerate(incoming)
        )
        if shared or op.backward_workspace_alone_bytes is None:
            return op.backward_workspace_bytes
        return op.backward_workspace_alone_bytes

    def deliver(self, out):
        problem = self.problem
        value, buffer, dense = out.pop(0)
        self.expected[value] -= 1
        held = self.gradients.pop(value, None)
        if not (problem.values[value].leaf or self.has_node(value)):
            return
        if held is None:
            self.gradients[value] = (buffer, dense)
        elif held[1] and not self.shared(held[0], out, [buffer]):
            self.gradients[value] = held
        else:
            total = Buffer(self.meter, problem.values[value].gradient_bytes)
            self.gradients[value] = (total, True)

    def has_node(self, value):
        return any(value in op.outputs and self.differentiable(op) for op in self.problem.ops)

    def shared(self, buffer, pending, more):
        others = [b for b, _ in self.gradients.values()] + [b for _, b, _ in pending] + more
        others.append(self.seed)
        return any(other is buffer for other in others)

    def accumulate(self, value):
        buffer, dense = self.gradients.pop(value)
        if not self.fresh:
            return
        if dense and not self.shared(buffer, [], []):
            self.owned.append(buffer)
        else:
            self.owned.append(Buffer(self.meter, self.problem.values[value].gradient_bytes))


def detached(tensor):
    copy = Tensor(tensor.buffer, None)
    copy.storage_id = tensor.storage_id
    return copy


def check(problem, plan):
    """Run the step in both modes; return (resident peak, fresh peak, cost, recomputed ops)."""
    resident = Runtime(problem, fresh=False).step(plan)
    fresh = Runtime(problem, fresh=True).step(plan)
    return resident.meter.peak, fresh.meter.peak, resident.recompute_cost, resident.recomputed_ops
