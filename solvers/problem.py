"""The graph problem: what a solver sees of one training step.

A problem is plain data. It is made by ``autockpt.lower`` from a capture and its profile,
and it is all that crosses from torch to the solvers.

One step is a sequence of ops, run in program order and differentiated in reverse program
order. An op reads and defines *values* (tensors as program variables). Values that are views
of each other share a *storage* (one allocation); bytes belong to storages. Gradients belong
to values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One allocation.

    Attributes
    ----------
    nbytes : int
        Allocated bytes.
    producer : int or None
        Index of the op that allocates it. ``None`` for what is there before the step starts
        (parameters, buffers, the batch): its bytes are part of the fixed bytes.
    """

    nbytes: int
    producer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor as a program variable.

    Attributes
    ----------
    storage : int
        Index of the storage it lives in.
    gradient_bytes : int
        Bytes of its gradient when that has a storage of its own; 0 if none ever flows to it.
    leaf : bool
        True for a parameter or an input that requires grad: its gradient, once complete, is
        added into ``.grad``.
    parameter : bool
        True for parameters and buffers: read from the live module wherever they are used, so
        they are never an input of a region.
    """

    storage: int
    gradient_bytes: int = 0
    leaf: bool = False
    parameter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What an op's backward hands to one of its inputs.

    Attributes
    ----------
    value : int
        The input value that receives it.
    source : int
        Where its bytes are: ``k >= 0`` is the k-th entry of the op's ``gradient_bytes`` (a
        fresh storage), ``~k`` (negative) is the storage of the gradient of ``outputs[k]``,
        handed on as it is or as a view of it.
    dense : bool
        Whether autograd may accumulate into it in place (it does when it also holds the only
        reference).
    view : bool
        Whether it is a view: autograd never adds into one, as its base is alive.
    """

    value: int
    source: int
    dense: bool = True
    view: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call of the captured graph, with what running it and its backward does to memory.

    Attributes
    ----------
    name : str
        Name of the variable that holds the result in the emitted code.
    target : str
        Qualified name of the function that is called.
    module, source : str
        Dotted path of the module it ran in, and ``file.py:line`` of the user's call.
    inputs, outputs : tuple of int
        Values read and values defined.
    saved : tuple of int
        Storages that autograd keeps for its backward, parameters and buffers aside.
    copied : tuple of int
        Storages from before the step that it writes and saves, running statistics: a replay
        makes copies of them and holds these for the op's backward.
    packs : bool
        Whether autograd saves anything at all, parameters included: this is what wakes up the
        recomputation of a region, and the last op of a region that packs is where it stops.
    forward_workspace_bytes : int
        Most bytes alive at once while it runs, above its inputs and all storages it produces.
    dropped_workspace_bytes : int or None
        The same where autograd saves nothing, as in the forward of a region: negative where an
        op of several steps need not keep what it hides. None: as ``forward_workspace_bytes``.
    backward_workspace_bytes : int
        The same as ``forward_workspace_bytes`` for its backward, above its saved storages, the
        gradients of its outputs and all of ``gradient_bytes``. Negative where an op of several
        steps frees what it hid before the last of its gradients is made.
    backward_workspace_alone_bytes : int or None
        The same where nobody else has the gradients of its outputs, of an op that lets go of
        them before it makes its own. None: as ``backward_workspace_bytes``.
    early_backward_bytes : int
        What its backward has made, less the gradients of outputs that it has let go of, when it
        first asks for something saved: a replay that this brings about finds it alive.
    early_backward_alone_bytes : int or None
        The same where nobody else has the gradients of its outputs, as above.
    stop_peak_bytes : int
        Most bytes alive at once above its inputs when it runs only until the last of its saved
        tensors is packed, where a recomputation stops. 0 where that was not measured: it is
        then taken to need what a whole run needs.
    gradient_bytes : tuple of int
        The fresh storages that its backward allocates for gradients.
    gradients : tuple of Gradient
        What its backward hands to which input.
    cost, backward_cost : int
        Cost of running it again, and of its backward, in the units of the chosen cost (ns).
    stop_cost : int
        Cost of running it only until the last of its saved tensors is packed: 0 when it saves
        its inputs only, as a recomputation that stops there does not run it at all.
    flops, stop_flops, backward_flops : int
        The same in floating point operations.
    random : bool
        Whether it draws from a default generator.
    pinned : bool
        Whether it has to stay outside all regions (effects, guards, explicit generators).
    """

    name: str
    target: str = ""
    module: str = ""
    source: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    packs: bool = False
    forward_workspace_bytes: int = 0
    dropped_workspace_bytes: int | None = None
    backward_workspace_bytes: int = 0
    backward_workspace_alone_bytes: int | None = None
    early_backward_bytes: int = 0
    early_backward_alone_bytes: int | None = None
    stop_peak_bytes: int = 0
    gradient_bytes: tuple[int, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    cost: int = 0
    stop_cost: int = 0
    backward_cost: int = 0
    flops: int = 0
    stop_flops: int = 0
    backward_flops: int = 0
    random: bool = False
    pinned: bool = False

    @property
    def workspace_in_region_bytes(self) -> int:
        """Workspace of its forward where autograd saves nothing."""
        if self.dropped_workspace_bytes is None:
            return self.forward_workspace_bytes
        return self.dropped_workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One call of a module: the ops ``start <= i < stop`` ran inside it.

    Attributes
    ----------
    name : str
        Dotted path of the module; ``"layers.3:1"`` for its second call in the step.
    start, stop : int
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One training step as a graph of ops, values and storages.

    Attributes
    ----------
    ops : tuple of Op
        In program order.
    values : tuple of Value
    storages : tuple of Storage
    outputs : tuple of int
        Values that the caller holds to the end of the step.
    loss : int
        The value whose backward is taken.
    parameter_bytes, buffer_bytes, batch_bytes, gradient_bytes : int
        What is there at the start of a step whose gradients are resident.
    boundaries : tuple of bool
        ``boundaries[i]`` tells whether a region may start or stop before op ``i``;
        ``len(ops) + 1`` entries. False inside a stretch that writes a storage in place.
    number_bytes : int
        Python numbers that autograd has saved beside tensors. Hooks do not see them, so no
        region lets go of them: they are counted as if they were there all along.
    forward_bytes : int
        What is held beside all else from the beginning of forward to its end: copies of what
        it writes before it is known whether the recorded branch is the one to take.
    forward_held : tuple of int
        Storages that live to the end of forward whoever reads them: autocast's copies of
        weights. A replay that makes them again holds them to its own end.
    random_state_bytes : int
        What a region with a random op keeps on the device for its generator state.
    region_cost : int
        What a region costs each time it is replayed beside its ops: the call under
        ``checkpoint``, and starting the replay.
    signature : str
        Digest of the stream of calls, shapes aside: a plan carries over between problems of
        one signature.
    spans : tuple of Span or None
        Where the model's own Python runs, regions are calls of modules: these are the only
        ones allowed, outer ones before those inside them; they nest and never cross. None:
        any run of ops.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...]
    loss: int
    boundaries: tuple[bool, ...]
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    batch_bytes: int = 0
    gradient_bytes: int = 0
    number_bytes: int = 0
    forward_bytes: int = 0
    forward_held: tuple[int, ...] = ()
    random_state_bytes: int = 0
    region_cost: int = 0
    signature: str = ""
    spans: tuple[Span, ...] | None = None

    @property
    def fixed_bytes(self) -> int:
        """Bytes there at the start of a step with gradients resident."""
        return self.parameter_bytes + self.buffer_bytes + self.batch_bytes + self.gradient_bytes

    @property
    def forward_cost(self) -> int:
        """Cost of one plain forward."""
        return sum(op.cost for op in self.ops)

    @property
    def step_flops(self) -> int:
        """FLOPs of one plain forward and backward."""
        return sum(op.flops + op.backward_flops for op in self.ops)
