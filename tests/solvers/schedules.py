"""Every schedule of a small problem: the oracle of the bounds.

Dijkstra over states (whose turn it is, what is alive). At any turn, forward or backward, earlier
ops may run again, whole or up to the last tensor that they pack for their own backward, and
anything may be let go at any time. Shares nothing with ``remat`` and ``bounds`` of the solvers;
the bytes of gradients in flight, which no schedule changes, are the judge's, whom
``test_simulate`` holds against a toy runtime.
"""

from __future__ import annotations

import heapq
from itertools import combinations

from solvers.judge.replay import replay_of


class Schedules:
    """Least cost over schedules of one problem.

    ``ordered`` restricts them to Checkmate's: within a turn each op runs again at most once, in
    program order.
    """

    def __init__(self, problem, *, ordered=False):
        self.problem, self.ordered = problem, ordered
        storages, values, ops = problem.storages, problem.values, problem.ops
        made = [{s for s, st in enumerate(storages) if st.producer == i} for i in range(len(ops))]
        tracked = set().union(*made) if made else set()
        self.held = {values[v].storage for v in (*problem.outputs, problem.loss)} & tracked
        self.saved = [{*op.saved} & tracked for op in ops]
        self.reads = [
            ({values[v].storage for v in op.inputs} | self.saved[i]) & tracked - made[i]
            for i, op in enumerate(ops)
        ]
        self.nbytes = {s: storages[s].nbytes for s in tracked - self.held}
        self.actions = []
        for i, op in enumerate(ops):
            dropped = op.dropped_workspace_bytes
            workspace = op.forward_workspace_bytes
            workspace = workspace if dropped is None else min(workspace, dropped)
            fresh = made[i] - self.held
            self.actions.append((i, self.reads[i] - self.held, fresh, op.cost, workspace))
        self.firsts = list(self.actions)
        self.actions = [action for action in self.actions if action[2]]
        for i, _, fresh, _, workspace in list(self.actions):
            own = fresh & self.saved[i]
            if own:
                op, copy = ops[i], ("own", i)
                self.nbytes[copy] = sum(self.nbytes[s] for s in own)
                whole = sum(self.nbytes[s] for s in fresh) + workspace
                extra = min(op.stop_peak_bytes or whole, whole) - self.nbytes[copy]
                self.actions.append((i, self.reads[i] - self.held, {copy}, op.stop_cost, extra))
        self.actions.sort(key=lambda action: (action[0], ("own", action[0]) in action[2]))
        self.turns = self._turns(made)

    def _turns(self, made):
        """(op, latest op that may run again, room needed by reruns, needs, own bytes, after)."""
        problem, replay = self.problem, replay_of(self.problem)
        storages = problem.storages
        base, held, turns = max(replay.bases), 0, []
        for i, reads, fresh, _, workspace in self.firsts:
            before = base + held
            held += sum(storages[s].nbytes for s in made[i] & self.held)
            needs = [(s,) for s in reads]
            turns.append((i - 1, before, needs, fresh, base + held + workspace))
        seed = problem.values[problem.loss].gradient_bytes
        turns.append((-1, 0, [], set(), base + held + seed))
        for i in reversed(range(len(problem.ops))):
            if not self._reached()[i]:
                continue
            early = max(0, replay.resident.early[i])
            before = held + max(int(level[i]) for level in replay.before) - early
            own = held + max(int(level[i]) for level in replay.instant)
            after = held + max(int(level[i]) for level in replay.after)
            needs = [(s, ("own", i)) if s in made[i] else (s,) for s in self.saved[i] - self.held]
            turns.append((i, before, needs, set(), own))
            turns.append((-1, 0, [], set(), after))
        return turns

    def _reached(self):
        problem = self.problem
        wanted, reached = {problem.loss}, [False] * len(problem.ops)
        for i in reversed(range(len(problem.ops))):
            op = problem.ops[i]
            if (op.gradients or op.packs or op.saved) and wanted & {*op.outputs}:
                reached[i] = True
                wanted |= {
                    g.value
                    for g in op.gradients
                    if g.source >= 0 or op.outputs[~g.source] in wanted
                }
        return reached

    def least_cost(self, budget):
        """Return the least cost of a schedule within ``budget`` bytes, None if there is none."""
        start = (0, -1, frozenset())
        best, queue, ticket = {start: 0}, [(0, 0, start)], 0
        while queue:
            cost, _, state = heapq.heappop(queue)
            if cost > best[state]:
                continue
            if state[0] == len(self.turns):
                return cost
            for more, following in self._steps(state, budget):
                if cost + more < best.get(following, float("inf")):
                    best[following] = cost + more
                    ticket += 1
                    heapq.heappush(queue, (cost + more, -following[0] * 10**6 + ticket, following))
        return None

    def _steps(self, state, budget):
        turn, position, alive = state
        latest, level, needs, fresh, own = self.turns[turn]
        for order, (i, reads, makes, cost, extra) in enumerate(self.actions):
            if i > latest or not reads <= alive or makes <= alive:
                continue
            if self.ordered and order <= position:
                continue
            for rest in self._fitting(alive, reads, makes, budget - level - extra):
                yield cost, (turn, order if self.ordered else -1, rest | makes)
        if all(alive & {*group} for group in needs):
            for kept in self._choices(needs, alive):
                for rest in self._fitting(alive, kept, fresh, budget - own):
                    yield 0, (turn + 1, -1, rest | fresh)

    def _choices(self, needs, alive):
        """Yield sets that serve all needs: a storage or the copy for one's own backward."""
        sets = [frozenset()]
        for group in needs:
            sets = [chosen | {s} for chosen in sets for s in group if s in alive]
        return set(sets)

    def _fitting(self, alive, needed, makes, room):
        """Yield the largest parts of what is alive, what is needed among it, that fit."""
        room -= sum(self.nbytes[s] for s in needed | makes)
        if room < 0:
            return
        others = sorted(alive - needed - makes, key=str)
        found = []
        for size in range(len(others), -1, -1):
            for chosen in combinations(others, size):
                part = frozenset(chosen)
                fits = sum(self.nbytes[s] for s in part) <= room
                if fits and not any(part <= larger for larger in found):
                    found.append(part)
                    yield part | needed
            if size == len(others) and found:
                return


def least_cost(problem, budget, *, ordered=False):
    return Schedules(problem, ordered=ordered).least_cost(budget)


def least_peak(problem, low, high):
    """Return the least budget in (low, high] with a schedule, ``high`` having one."""
    schedules = Schedules(problem)
    while high - low > 1:
        middle = (low + high) // 2
        if schedules.least_cost(middle) is None:
            low = middle
        else:
            high = middle
    return high
