"""Writing the functions: one for the forward, one for each region."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from autockpt.capture.ambient import Ambient
from autockpt.rewrite.contexts import around_region, contexts
from autockpt.rewrite.expressions import Renderer, in_parentheses
from autockpt.rewrite.layout import laid_out
from autockpt.rewrite.lookups import Lookups
from autockpt.rewrite.scopes import Scope, deaths, is_live_read, written_statistics

INDENT = "    "


class Emitter:
    """Writes the code of scopes.

    Parameters
    ----------
    ops : sequence of fx.Node
        In program order.
    renderer : Renderer
    regions, prologues : mapping from (start, stop) to str
        Names of the functions of regions, and of what runs before them on recomputation.
    random : collection of int
        Indices of the ops that draw random numbers.
    used : collection of fx.Node
        Values that an emitted op reads, or the caller gets.
    ambient : Ambient
        Around the call.
    saving : collection of int
        Indices of the ops that autograd saves something for.
    apart : bool
        Whether what was taken apart stays so where nobody needs the parts.
    """

    def __init__(
        self,
        *,
        ops: Sequence[fx.Node],
        renderer: Renderer,
        regions: Mapping[tuple[int, int], str],
        prologues: Mapping[tuple[int, int], str],
        random: Collection[int],
        used: Collection[fx.Node],
        ambient: Ambient,
        saving: Collection[int],
        apart: bool,
    ) -> None:
        self._ops = ops
        self._renderer = renderer
        self._regions = regions
        self._prologues = prologues
        self._random = random
        self._used = used
        self._ambient = ambient
        self._saving = saving
        self._apart = apart
        self._in_region = False
        self._lines: list[str] = []
        self._source = ""

    def region(self, scope: Scope) -> str:
        """Write the function of a region, after that of its prologue."""
        key = scope.start, scope.stop
        function = self._function(self._regions[key], scope)
        if scope.prologue is None:
            return function
        return f"{self._function(self._prologues[key], scope.prologue)}\n\n{function}"

    def _function(self, name: str, scope: Scope) -> str:
        arguments = ["self", *(self._renderer.names[node] for node in scope.reads)]
        arguments[1:1] = _own_arguments(scope)
        self._begin(f"def {name}({', '.join(arguments)}):", in_region=True)
        if scope.prologue is not None:
            made = ", ".join(self._renderer.names[node] for node in scope.prologue.returns)
            read = ["self", *(self._renderer.names[node] for node in scope.prologue.reads)]
            self._write(1, f"{made} = taken({', '.join(['again', *read])})")
        if any(self._is_left_out(scope, i) for i in _ints(scope.items)):
            self._write(1, "replay = replays(keep)")
        self._body(scope)
        returned = [self._renderer.names[node] for node in scope.returns]
        if returned:
            self._write(1, f"return {', '.join(returned)}")
        return self._text()

    def forward(self, scope: Scope, placeholders: Iterable[fx.Node], outputs: Any) -> str:
        """Write the forward, which returns the tuple of the model's output tensors."""
        arguments = ["self", *(self._renderer.names[node] for node in placeholders)]
        self._begin(f"def forward({', '.join(arguments)}):", in_region=False)
        self._body(scope)
        self._write(1, f"return {self._renderer.value(tuple(outputs), self._paths(outputs))}")
        return self._text()

    def _begin(self, line: str, *, in_region: bool) -> None:
        self._lines, self._source, self._in_region = [line], "", in_region

    def _text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _write(self, depth: int, line: str, source: str = "") -> None:
        comment = ""
        if source and source != self._source:
            comment, self._source = f"  # {source.rpartition('/')[2]}", source
        self._lines += laid_out(line, INDENT * depth, comment)

    def _body(self, scope: Scope) -> None:
        dying = deaths(scope, self._ops)
        self._lookups = Lookups(self._renderer, [self._ops[i] for i in _ints(scope.items)])
        opened = ""
        position = 0
        while position < len(scope.items):
            item = scope.items[position]
            needed = self._contexts(item)
            if needed and needed != opened:
                self._write(1, f"with {needed}:")
            opened = needed
            depth = 2 if opened else 1
            if isinstance(item, Scope):
                idle = item.start in scope.idle
                self._region_call(item, dying[position], depth, idle=idle)
                position += 1
                continue
            joined = self._joined(scope, position, dying)
            count = self._op(scope, position, joined, depth)
            # What lies inside one statement never had a name: parts of a call that is written
            # whole, and a tuple that is taken apart at once.
            inner = joined - 1 if count == joined else joined
            unnamed = [self._ops[i] for i in _ints(scope.items[position : position + inner])]
            dead = [node for group in dying[position : position + count] for node in group]
            self._delete([node for node in dead if node not in unnamed], depth)
            position += count

    def _region_call(
        self, scope: Scope, dead: Sequence[fx.Node], depth: int, *, idle: bool
    ) -> None:
        """Write the call of a region; what it can make again nobody else may hold for it."""
        made = () if scope.prologue is None else scope.prologue.returns
        if made:
            names = [self._renderer.names[node] for node in made]
            prologue = self._prologues[scope.start, scope.stop]
            self._write(depth, f"again = remade({', '.join([prologue, *names])})")
            self._delete([node for node in made if node in dead], depth)
        self._write(depth, self._call(scope, idle=idle))
        self._delete([node for node in dead if node not in made], depth)

    def _contexts(self, item: int | Scope) -> str:
        """Contexts around an item: those that it needs and that do not hold yet."""
        if isinstance(item, Scope):
            inside = {self._ops[i].meta["ambient"] for i in range(item.start, item.stop)}
            return around_region(inside, self._ambient, in_region=self._in_region)
        ambient = self._ops[item].meta["ambient"]
        return contexts(ambient, self._ambient, in_region=self._in_region)

    def _delete(self, dead: Sequence[fx.Node], depth: int) -> None:
        names = [self._renderer.names[node] for node in dead]
        if names:
            self._write(depth, f"del {', '.join(names)}")

    def _joined(self, scope: Scope, position: int, dying: Sequence[Sequence[fx.Node]]) -> int:
        """Count the ops from here on that are one call, as nobody needs what lies between them.

        In a region they stay apart, as the memory model sees them.
        """
        item = scope.items[position]
        assert isinstance(item, int)
        whole = self._ops[item].meta.get("whole")
        if whole is None or not whole.alike or self._apart or self._in_region:
            return 1
        end = position + len(whole.parts)
        if [self._ops[i] for i in _ints(scope.items[position:end])] != [*whole.parts]:
            return 1
        inside = {node for dead in dying[position:end] for node in dead}
        return len(whole.parts) if inside.issuperset(whole.parts[:-1]) else 1

    def _op(self, scope: Scope, position: int, joined: int, depth: int) -> int:
        """Write an op, with the ``getitem`` ops after it that take its results apart.

        With ``joined`` above one, write the call that so many ops come to.
        """
        position += joined - 1
        index = scope.items[position]
        assert isinstance(index, int)
        node = self._ops[index]
        source = str(node.meta.get("source", ""))
        if joined == 1:
            text = self._renderer.call(node, self._overrides(node, depth))
        else:
            whole = node.meta["whole"]
            text = self._renderer.call_of(whole.target, whole.args, whole.kwargs, {})
        left_out = self._is_left_out(scope, index)
        if not left_out and (index in scope.idle or index in scope.kept):
            tensors = (n for n in node.all_input_nodes if not is_live_read(n))
            given = [self._renderer.names[tensor] for tensor in tensors]
            once = "skipped" if index in scope.idle else "kept"
            text = f"{once}({', '.join(['keep', str(index), _later(text, given), *given])})"
        parts = self._parts(scope, position)
        names = [self._renderer.names[part] for part in parts]
        nothing = "None"
        if len(parts) == 1:
            text = f"{in_parentheses(text)}[{parts[0].args[1]}]"
        elif parts:
            nothing = f"({', '.join(['None'] * len(parts))})"
        elif node in self._used:
            names = [self._renderer.names[node]]
        made = f"{', '.join(names)} = " if names else ""
        self._write(depth, f"{made}{f'{nothing} if replay else ' * left_out}{text}", source)
        return joined + len(parts)

    def _is_left_out(self, scope: Scope, index: int) -> bool:
        """Tell whether a replay just leaves an op out: nobody needs of it what it made or saved."""
        return index in scope.idle and index not in self._saving

    def _parts(self, scope: Scope, position: int) -> list[fx.Node]:
        """Give the ``getitem`` ops after a call when one statement can hold all of them."""
        index = scope.items[position]
        assert isinstance(index, int)
        node = self._ops[index]
        parts: list[fx.Node] = []
        for item in scope.items[position + 1 :]:
            following = None if isinstance(item, Scope) else self._ops[item]
            if following is None or not _takes_from(following, node):
                break
            parts.append(following)
        if set(parts) != node.users.keys() or any(part not in self._used for part in parts):
            return []
        indices = [part.args[1] for part in parts]
        whole = indices == list(range(len(node.meta.get("tensors", ()))))
        return parts if whole or len(parts) == 1 else []

    def _overrides(self, node: fx.Node, depth: int) -> dict[fx.Node, str]:
        """Say which arguments of an op are not rendered as usual, and look up what they need."""
        for line in self._lookups.before(node):
            self._write(depth, line)
        found = self._paths(node.all_input_nodes) | self._lookups.texts(node)
        for buffer in written_statistics(node) if self._in_region else ():
            found[buffer] = f"statistic({found.get(buffer) or self._renderer.reference(buffer)})"
        return found

    def _paths(self, nodes: Iterable[Any]) -> dict[fx.Node, str]:
        """Tensors in plain attributes: arguments of regions, looked up in the forward."""
        if self._in_region:
            return {}
        return {
            node: self._renderer.path(str(node.target))
            for node in nodes
            if isinstance(node, fx.Node) and node.op == "get_attr"
        }

    def _call(self, scope: Scope, *, idle: bool) -> str:
        """Render the call of a region."""
        name = self._regions[scope.start, scope.stop]
        paths = self._paths(scope.reads)
        reads = (self._renderer.value(node, paths) for node in scope.reads)
        own = ["keeper()" if name == "keep" else name for name in _own_arguments(scope)]
        arguments = [name, "self", *own, *reads]
        arguments.append(f"draws={self._draws(scope)}")
        call = f"checkpointed({', '.join(arguments)})"
        if idle:
            given = [self._renderer.names[node] for node in scope.reads]
            call = _later(call, given)
            if len(scope.returns) > 1:
                given.append(f"results={len(scope.returns)}")
            call = f"skipped({', '.join(['keep', str(scope.start), call, *given])})"
        if not scope.returns:
            return call
        return f"{', '.join(self._renderer.names[node] for node in scope.returns)} = {call}"

    def _draws(self, scope: Scope) -> str:
        """Say whether a recomputation draws: where kept ops run all the same, more do."""
        draws = [i for i in range(scope.start, scope.stop) if i in self._random]
        if any(i not in scope.kept for i in draws):
            return "True"
        return '"kept"' if draws else "False"


def _later(text: str, variables: Sequence[str]) -> str:
    """Write a function that evaluates an expression.

    Variables are defaults of parameters, not free: one that a function closes over and that is
    deleted afterwards is beyond Dynamo.
    """
    names = dict.fromkeys(variables)
    parameters = " " + ", ".join(f"{name}={name}" for name in names) if names else ""
    return f"lambda{parameters}: {text}"


def _own_arguments(scope: Scope) -> list[str]:
    """Name the arguments of a region that are no tensors."""
    own = ["again"] if scope.prologue is not None else []
    return [*own, "keep"] if scope.kept or scope.idle else own


def _ints(items: Iterable[int | Scope]) -> list[int]:
    return [item for item in items if isinstance(item, int)]


def _takes_from(node: fx.Node, source: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and node.args[0] is source
        and isinstance(node.args[1], int)
    )
