"""What a replay leaves out, found by asking over and over; shares no code with ``solvers``."""

from __future__ import annotations


def resting(problem, region):
    """Return the ops that a replay leaves out: nothing that it packs hangs on their results."""
    return set() if problem.spans is not None else _Replay(problem, region).resting()


class _Replay:
    def __init__(self, problem, region):
        self.problem, self.region, self.ops = problem, region, problem.ops
        inside = range(region.start, region.stop)
        self.calls = {i: c for c in region.children for i in range(c.start, c.stop)}
        self.maker = {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        self.casts = {problem.storages[s].producer for s in problem.forward_held}
        self.last = max((self.at(i) for i in inside if self.packs(i)), default=-1)
        self.inside = [i for i in inside if self.at(i) <= self.last]

    def at(self, i):
        """Where an op is run: where its region is called."""
        return self.calls[i].start if i in self.calls else i

    def read_by_call(self, child):
        inside = range(child.start, child.stop)
        read = {v for i in inside for v in self.ops[i].inputs}
        return {v for v in read if self.maker.get(v) not in inside}

    def packs(self, i):
        if i not in self.calls:
            return self.ops[i].packs or self.ops[i].saved
        values = self.problem.values
        return any(not values[v].parameter for v in self.read_by_call(self.calls[i]))

    def is_plain(self, i):
        op = self.ops[i]
        return not (op.pinned or op.random or op.copied or i in self.casts)

    def may_rest(self, i):
        if i in self.calls:
            inside = range(self.calls[i].start, self.calls[i].stop)
            return all(self.is_plain(j) and self.ops[j].outputs for j in inside)
        op, problem = self.ops[i], self.problem
        own = {s for s in op.saved if problem.storages[s].producer is not None}
        given = {problem.values[v].storage for v in op.inputs}
        one = len(op.outputs) == 1 or not (op.outputs or op.packs or op.saved)
        uncut = problem.boundaries[i] and problem.boundaries[i + 1]
        return self.is_plain(i) and uncut and one and own <= given

    def wanted(self, i, running):
        op = self.ops[i]
        if i in self.calls:
            return self.read_by_call(self.calls[i])
        if i in running and i not in self.region.kept:
            return set(op.inputs)
        return {v for v in op.inputs if self.may_be_packed(v, op)}

    def may_be_packed(self, v, op):
        """Of what was there before the step, a view that an op makes may be saved untold."""
        storage = self.problem.values[v].storage
        before = self.problem.storages[storage].producer is None
        return storage in op.saved or (before and v in self.maker)

    def running(self):
        running = {i for i in self.inside if not self.may_rest(i)}
        while True:
            wanted = set().union(*(self.wanted(i, running) for i in self.inside))
            more = {self.maker[v] for v in wanted if v in self.maker} & set(self.inside)
            for i in more & self.calls.keys():
                more = more | set(range(self.calls[i].start, self.calls[i].stop))
            if more <= running:
                return running
            running |= more

    def resting(self):
        return set(self.inside) - self.running()
