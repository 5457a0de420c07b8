"""Writes down what a step does on the simulated device, in program order: operators and their costs, collectives,
messages, memory."""

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from distbench.observe.module_attribution import CollectiveTracker, IssueContext
from distbench.plans.parallelize import shards_sequence
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext, dtype_name
from distbench.simulate.recording import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MATMUL,
    MEMORY,
    Allocated,
    Collective,
    Event,
    Freed,
    Operator,
    StepBegun,
    Touched,
)
from distbench.simulate.sim_device import DEVICE_TYPE, STREAMS, SimEvent, SimStream
from distbench.spec.plan import ULYSSES
from distbench.torch_private import (
    NAMESPACES,
    Block,
    CollectiveCall,
    EndedWork,
    LiveStorages,
    NeedsValues,
    arguments_of,
    call_of,
    each_operator,
    global_metadata,
    has_values,
    is_async,
    is_attention,
    is_strided_shard,
    messages_of_stages,
    reducers_on_host,
    replaced,
    tensors_in,
    waited_for_when_used,
    with_values_again,
    written_by,
)

# What an operator's time depends on: its floating point operations, and the bytes it reads and writes.

# Makes a tensor and writes nothing into it, or only tells of one.
MAKES_OR_TELLS = ("empty", "new_empty", "lift_fresh", "is_same_size", "sym_", "record_stream", "set_", "resize_")
# In place, and what was there before is not read.
OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")
# FlashAttention-2's backward holds, while it runs, dQ in fp32 and a number a row of the softmax.
WORKSPACE_BYTES = 4


def _flop_formulas() -> Mapping[Any, Any]:
    """Those of torch's FlopCounterMode.

    It and what else of torch a recording needs import triton, where there is one: no simulated device has its kernels,
    and it takes 80 MB.
    """
    modules: dict[str, Any] = sys.modules
    hides_triton = "triton" not in modules
    if hides_triton:
        modules["triton"] = None
    try:
        importlib.import_module("torch.distributed.tensor.debug")
        formulas: Mapping[Any, Any] = importlib.import_module("torch.utils.flop_counter").flop_registry
    finally:
        if hides_triton:
            del modules["triton"]
    return formulas


FLOP_FORMULAS = _flop_formulas()


def costs_nothing(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], writes: bool) -> bool:
    """Whether an operator launches nothing: it makes room, tells of a tensor, or gives another view of one."""
    name = func.overloadpacket.__name__
    if func.is_view or any(name.startswith(prefix) for prefix in MAKES_OR_TELLS):
        return True
    if writes or not outputs:
        return False
    storages = {id(tensor.untyped_storage()) for tensor in inputs}
    return all(id(tensor.untyped_storage()) in storages for tensor in outputs)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, str]:
    """Floating point operations as torch's FlopCounterMode counts them, and the operator's kind.

    Attention is counted by its formula: 4 b h s_q s_k d forward, 2.5 times that backward (FlashAttention computes the
    scores again; Dao 2023), and half where it is causal.
    """
    forward, backward = is_attention(func)
    if forward or backward:
        arguments = arguments_of(func, args, kwargs)
        batch, heads, queries, head_dim = arguments["query"].shape
        keys = arguments["key"].shape[-2]
        flops = 4 * batch * heads * queries * keys * head_dim
        if arguments.get("is_causal", False):
            flops //= 2
        return (flops * 5 // 2, ATTENTION_BACKWARD) if backward else (flops, ATTENTION)
    if func.overloadpacket in FLOP_FORMULAS:
        return int(FLOP_FORMULAS[func.overloadpacket](*args, **kwargs, out_val=out)), MATMUL
    return 0, MEMORY


def shape_of_attention(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Queries, keys, and 1 where it is causal; nothing of other operators."""
    if not any(is_attention(func)):
        return []
    arguments = arguments_of(func, args, kwargs)
    return [arguments["query"].shape[-2], arguments["key"].shape[-2], int(arguments.get("is_causal", False))]


def workspace_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """What attention's backward allocates for itself while it runs; 0 for other operators."""
    if not is_attention(func)[1]:
        return 0
    batch, heads, queries, head_dim = arguments_of(func, args, kwargs)["query"].shape
    return int(batch * heads * queries * (head_dim + 1) * WORKSPACE_BYTES)


def bytes_touched(
    func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    """Bytes that an operator reads and writes: each tensor once, one that it changes in place twice.

    Operators that touch only a part of what they are given are counted by that part.
    """
    name = f"{func.namespace}::{func.overloadpacket.__name__}"
    output_bytes = sum(map(num_bytes, outputs))
    if name == "fsdp::all_gather_copy_in":
        # Its outputs are the whole gathered buffer, and this rank's part of it, which is what is copied.
        return 2 * (output_bytes - max(map(num_bytes, outputs)))
    if name in {"aten::embedding", "aten::index"}:
        return 2 * output_bytes
    if name == "aten::nll_loss_backward":
        return output_bytes
    if name == "aten::nll_loss_forward":
        return sum(map(num_bytes, inputs[1:])) * 2
    seen_keys, touched = set(), 0
    for tensor in (*inputs, *outputs):
        key = (id(tensor.untyped_storage()), tensor.storage_offset(), tuple(tensor.shape))
        if key not in seen_keys:
            seen_keys.add(key)
            touched += num_bytes(tensor)
    if name not in OVERWRITES:
        touched += sum(map(num_bytes, written_by(func, args, kwargs)))
    return touched


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; what is expanded counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


# Which ranks may run another step than rank 0: with smaller shards, none, or another part of the sequence.

Cut = tuple[tuple[int, ...], int]  # ranks along a mesh dim, and the length of what they share out


def differing_ranks(step: TrainingStep, inputs: torch.Tensor, context: RankContext) -> tuple[int, ...]:
    """Of each mesh dim along which ranks differ from rank 0, the last rank: it has least, or of causal work most.

    Args:
        inputs: of the global batch, (batch, sequence, ...).
    """
    lengths: dict[tuple[int, ...], set[int]] = {}
    for ranks, length in (*_cuts_of_parameters(step), *_cuts_of_sequence(step, inputs, context)):
        lengths.setdefault(ranks, set()).add(length)
    last_ranks = {rank for ranks, of_ranks in lengths.items() for rank in differing_along(ranks, of_ranks)[-1:]}
    return tuple(sorted({*last_ranks, *busier_ranks(step, context)}))


def busier_ranks(step: TrainingStep, context: RankContext) -> tuple[int, ...]:
    """Ranks that have more to do than rank 0, which has no smaller shard than any other."""
    plan = step.plan.cp
    if plan is None or plan.rotate == ULYSSES or not shards_sequence(plan, context) or plan.balances:
        return ()
    # Causal attention: the first rank sees one block of keys, the last one all of them.
    return (_ranks_along(context.mesh.mesh, context.mesh_dims.index(plan.mesh_dim))[-1],)


def differing_along(ranks: tuple[int, ...], lengths: Iterable[int]) -> list[int]:
    """The first of the ranks for each other set of shard sizes than the first rank's, as torch.chunk gives them.

    >>> differing_along((0, 1, 2, 3), {10})
    [3]
    """
    first_ranks: dict[tuple[int, ...], int] = {}
    for place, rank in enumerate(ranks):
        chunks = ((length, -(-length // len(ranks))) for length in sorted(lengths))
        first_ranks.setdefault(tuple(min(max(length - place * chunk, 0), chunk) for length, chunk in chunks), rank)
    return [rank for rank in first_ranks.values() if rank != ranks[0]]


def _cuts_of_parameters(step: TrainingStep) -> Iterator[Cut]:
    for parameter in step.model.parameters():
        placements, mesh = getattr(parameter, "placements", ()), getattr(parameter, "device_mesh", None)
        # In the order in which they share a tensor dim out: TP's shards are cut by FSDP2, whose mesh dim is the outer.
        order = sorted(range(len(placements)), key=lambda mesh_dim: is_strided_shard(placements[mesh_dim]))
        local_shape = list(parameter.shape)
        for mesh_dim in order:
            tensor_dim = getattr(placements[mesh_dim], "dim", None)
            if mesh is not None and tensor_dim is not None:
                yield _ranks_along(mesh.mesh, mesh_dim), local_shape[tensor_dim]
                local_shape[tensor_dim] = -(-local_shape[tensor_dim] // mesh.size(mesh_dim))


def _cuts_of_sequence(step: TrainingStep, inputs: torch.Tensor, context: RankContext) -> Iterator[Cut]:
    """Sequence parallel modules share the sequence out over the ranks of TP."""
    dims = [name for name in step.plan.tp_dims if context.size(name) > 1]
    if step.plan.tp and inputs.ndim > 1 and len(dims) == 1:
        yield _ranks_along(context.mesh.mesh, context.mesh_dims.index(dims[0])), inputs.shape[1]


def _ranks_along(mesh: torch.Tensor, mesh_dim: int) -> tuple[int, ...]:
    """The global ranks along one mesh dim, the others' first."""
    return tuple(mesh.movedim(mesh_dim, -1).reshape(-1, mesh.shape[mesh_dim])[0].tolist())


def nested_ranks(ranks: Sequence[int]) -> Touched:
    """Ranks, counted from the lowest, as loops (count, stride), outermost first; [(1, rank), ...] where they are none.

    Groups along a mesh dim are alike on all ranks but for where they begin.
    """
    lowest = min(ranks)
    ordered = [rank - lowest for rank in sorted(ranks)]
    loops: list[tuple[int, int]] = []
    ranks_left = ordered
    while len(ranks_left) > 1:
        stride = ranks_left[1] - ranks_left[0]
        count = next(
            (at for at in range(1, len(ranks_left)) if ranks_left[at] != ranks_left[0] + at * stride), len(ranks_left)
        )
        if len(ranks_left) % count:
            return [(1, rank) for rank in ordered]
        loops.insert(0, (count, stride))
        ranks_left = ranks_left[::count]
    again = [0]
    for count, stride in loops:
        again = [base + at * stride for base in again for at in range(count)]
    return loops if again == ordered else [(1, rank) for rank in ordered]


# The host's side of DDP's reducers, which are C++, while a step is recorded.
#
# Gradients, buckets and copies between them have no values, like all tensors of a recorded step. What a reducer
# counts on
# the host (how many parameters there are, of which shapes, which of them make a bucket, which were used) it reads from
# memory: those tensors are real ones. Ranks are taken to count what this one does, so what it sends is what it
# receives.

Operation = Callable[[Any, Any, Any], Any]
CPU = torch.device("cpu")
# What is copied to the host has arrived before the host goes on.
COPIES, ASKS = "copy_", "_local_scalar_dense"
# Memory that a copy to the device may be read from while the host goes on: of a host alone, any.
PINNED, IS_PINNED = "pin_memory", "is_pinned"


class ReducersOnHost:
    """Between DDP's reducers and who records the step.

    Args:
        use: is told of tensors that are used now, so that the current stream waits for their collective.

    Attributes:
        on_device: what reducers made there: their buckets, and which parameters were used.
    """

    def __init__(self, use: Callable[[Sequence[torch.Tensor]], None]) -> None:
        self.on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._use = use
        self._are_there = self._count = False
        self._on_host: dict[int, torch.UntypedStorage] = {}
        self._sent: torch.Tensor | None = None
        # Of a tensor's storage, its collective that nobody has waited for; C++ keeps half of a work, so all are kept.
        self._running: dict[int, EndedWork] = {}
        self._works: list[EndedWork] = []

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Notice reducers that are made or count inside."""
        with reducers_on_host(self._counting):
            yield

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        before, self._count, self._are_there = self._count, True, True
        try:
            yield
        finally:
            self._count = before

    def run(self, func: Any, args: Any, kwargs: Any, record: Operation) -> Any:
        """An operator: on what is counted here it runs with values, all others are `record`ed."""
        if not self._are_there:
            return record(func, args, kwargs)
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs, record)
        tensors, name = tensors_in([args, kwargs]), func.overloadpacket.__name__
        host_tensors = [tensor for tensor in tensors if id(tensor.untyped_storage()) in self._on_host]
        if self._is_counted(host_tensors, tensors, kwargs):
            return self._with_values(func, args, kwargs)
        for tensor in tensors:
            if (work := self._running.get(id(tensor.untyped_storage()))) is not None:
                work.wait()
        is_copied_back = name == COPIES and host_tensors and host_tensors[0] is args[0]
        if self._sent is not None and (is_copied_back or (name == ASKS and self._count)):
            STREAMS.current.synchronize()
            return self._with_values(func, (*args[:1], self._sent) if is_copied_back else (self._sent,), {})
        if host_tensors:
            # On the device it has no values; torch would keep those of a small tensor.
            self._sent = sent = host_tensors[0]
            args = [torch.empty(sent.shape, dtype=sent.dtype) if argument is sent else argument for argument in args]
        out = record(func, args, kwargs)
        if self._count and not tensors:
            self.on_device.update(tensors_in(out))
        return out

    def _is_counted(self, host_tensors: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], kwargs: Any) -> bool:
        """Whether an operator works on nothing but what is counted, or makes what is.

        Which parameters were used goes to the device from pinned memory, which is made in the middle of backward.
        """
        if (kwargs.get("device") or CPU).type != CPU.type or len(host_tensors) != len(tensors):
            return False
        return bool(host_tensors) or self._count or bool(kwargs.get(PINNED) and kwargs.get("dtype") is torch.int32)

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket.__name__ == IS_PINNED:
            return True
        with with_values_again():
            out = func(*args, **{name: value for name, value in kwargs.items() if name != PINNED})
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            self._on_host[id(storage)] = storage
        return out

    def _communicate(self, func: Any, args: Any, kwargs: Any, record: Operation) -> Any:
        """A collective; one that runs beside has a work that is waited for when C++ asks, or, of the future that it
        asks for instead, where it looks into the result."""
        out = record(func, args, kwargs)
        outputs = [tensor for tensor in tensors_in(out) if tensor.device.type == DEVICE_TYPE]
        if not outputs or not is_async(func, args, kwargs):
            return out
        keys = [id(tensor.untyped_storage()) for tensor in outputs]

        def wait() -> None:
            self._use(outputs)
            for key in keys:
                self._running.pop(key, None)

        work = EndedWork(out[0], wait)
        self._works.append(work)
        self._running.update(dict.fromkeys(keys, work))
        return (*out[:-1], work.boxed())


# Writes down what a step does on the simulated device, in program order: operators, collectives, waits, memory.
#
# Memory is that of storages: one is allocated when an operator first returns it, and freed when nothing holds it any
# more. FSDP2 frees and fills storages that it keeps by resizing them, which no operator tells of.

# A collective's result under another tensor, which is not waited for yet.
WRAPS = "_wrap_tensor_autograd"
# DTensor's all-to-all returns what has arrived: its caller waits for nothing.
WAITS_ITSELF = "shard_dim_alltoall"
# What Adam asks for: how many steps it has taken, which no time depends on.
STEPS_TAKEN = 2.0


class Recorder:
    """Everything that is issued while `on()` is open, as events.

    Args:
        at_once: as what is compiled does, wait for a functional collective as soon as it is issued: its wait stands
            right behind it in the graph. Otherwise it is waited for where its result is first used.
        events: in the order of the program; those of operators only while `tracker` is set.
        tracker: who runs now, and to whom a collective belongs.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.events: list[Event] = []
        self._at_once = at_once
        self.tracker: CollectiveTracker | None = None
        self._storages = LiveStorages(self._allocate, self._free)
        self._issued_in: dict[int, tuple[int, IssueContext | None]] = {}
        self._num_blocks = self._num_steps = 0
        # Of storages that are filled again: nobody but FSDP2 does that.
        self._filled: set[int] = set()
        self._is_metadata = False
        self._of_groups: dict[tuple[int, ...], SimStream] = {}
        self._pending: dict[int, SimEvent] = {}
        self._owners: dict[int, str] = {}
        self.reducers = ReducersOnHost(self.use)

    def begin_step(self) -> None:
        """What follows is another step."""
        self._num_steps += 1
        self.events.append(StepBegun(self._num_steps))

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Record what is inside. Tensors without values must be on around it."""
        with (
            replaced(STREAMS, "tell", self.events.append),
            self._storages.resizing(),
            global_metadata(self._unseen),
            waited_for_when_used(self._at_once) as unwaited,
            self.reducers.on(),
            each_operator(partial(self.reducers.run, record=self._handle), unwaited),
        ):
            yield

    def annotate(self, held: Mapping[int, str]) -> None:
        """Say of every block what lies in it, once all modules have run.

        Args:
            held: block to its kind, of those that a step holds between two runs, and of gradients.
        """
        for number, (place, issued_in) in self._issued_in.items():
            block = self.events[place]
            assert isinstance(block, Allocated)
            kind = held.get(number) or ("fsdp" if number in self._filled else _held(issued_in))
            self.events[place] = block._replace(held=kind, owner=self._owner(issued_in))

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are read or written now, by nothing that torch dispatches."""
        for tensor in tensors:
            self._see(tensor)
        self._await(tensors)

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The block that a tensor's memory is now; None where it has none on the device."""
        return self._storages.number_of(tensor.untyped_storage())

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        before, self._is_metadata = self._is_metadata, True
        try:
            yield
        finally:
            self._is_metadata = before

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_metadata or func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func.namespace in NAMESPACES:
            return self._communicate(func, args, kwargs)
        if func.overloadpacket.__name__ == "_local_scalar_dense" and not has_values(args[0]):
            return self._value_of(args[0])
        out = func(*args, **kwargs)
        outputs = [tensor for tensor in tensors_in(out) if tensor.device.type == DEVICE_TYPE]
        inputs = [tensor for tensor in tensors_in([args, kwargs]) if tensor.device.type == DEVICE_TYPE]
        if not outputs and not inputs:
            return out
        writes = bool(written_by(func, args, kwargs))
        if self.tracker is None or costs_nothing(func, inputs, outputs, writes):
            for tensor in outputs:
                self._see(tensor)
            return out
        self._await(inputs)
        self._operate(func, args, kwargs, inputs, outputs, out)
        return out

    def _await(self, tensors: Sequence[torch.Tensor]) -> None:
        """Whoever uses what a functional collective makes waits for it, if nobody has."""
        for tensor in tensors:
            if event := self._pending.pop(id(tensor.untyped_storage()), None):
                STREAMS.current.wait_event(event)

    def _value_of(self, tensor: torch.Tensor) -> float | int | bool:
        """A number that the optimizer asks for on the host; nobody else may: its time would depend on it."""
        phase = self.tracker.issue_context().phase if self.tracker else ""
        is_first = self.tracker is None and self._num_steps > 0
        if tensor.device.type != "cpu" or not (is_first or phase == "optimizer"):
            raise NeedsValues("asks for a tensor's value, which a simulated step does not have")
        return STEPS_TAKEN if tensor.is_floating_point() else int(STEPS_TAKEN)

    def _operate(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        reads, writes = self._touched(inputs), self._touched(outputs)
        flops, kind = flops_of(func, args, kwargs, out)
        stream = STREAMS.current.number
        assert self.tracker is not None
        issued_in = self.tracker.issue_context()
        if workspace := workspace_bytes(func, args, kwargs):
            self.events.append(Freed(self._allocate(workspace)))
        self.events.append(
            Operator(
                stream=stream,
                name=str(func),
                kind=kind,
                flops=flops,
                dtype=dtype_name((inputs or outputs)[0].dtype),
                num_bytes=bytes_touched(func, args, kwargs, inputs, outputs),
                reads=reads,
                writes=writes,
                phase=issued_in.phase,
                owner=self._owner(issued_in),
                attention=shape_of_attention(func, args, kwargs),
            )
        )

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [tensor for tensor in tensors_in([args, kwargs]) if tensor.device.type == DEVICE_TYPE]
        if func.overloadpacket.__name__ in ("wait_tensor", WRAPS):
            out = func(*args, **kwargs)
            self._see(out)
            event = self._pending.pop(id(args[0].untyped_storage()), None)
            if event and func.overloadpacket.__name__ == WRAPS:
                self._pending[id(out.untyped_storage())] = event
            elif event:
                STREAMS.current.wait_event(event)
            return out
        call = call_of(func, args, kwargs)
        # Asked before it runs: what it makes has no owner yet.
        communication = (
            self.tracker.communication(call, self.tracker.issue_context()) if self.tracker and call else None
        )
        self.use(tensors)
        out = func(*args, **kwargs)
        outputs = [tensor for tensor in tensors_in(out) if tensor.device.type == DEVICE_TYPE]
        for tensor in outputs:
            self._see(tensor)
        if call is None or communication is None or not tensors:
            return out
        fields = {name: getattr(communication, name) for name in Collective._fields if hasattr(communication, name)}
        issued = Collective(stream=STREAMS.current.number, ranks=nested_ranks(call.ranks), **fields)
        if func.namespace == "c10d" and not is_async(func, args, kwargs):
            self.events.append(issued)  # FSDP2 issues its own on streams that it made for them
        else:
            self._issue_aside(issued, call.ranks, outputs)
            if func.overloadpacket.__name__ == WAITS_ITSELF:
                self._await(outputs)
        return out

    def _issue_aside(self, issued: Collective, ranks: tuple[int, ...], outputs: Sequence[torch.Tensor]) -> None:
        """As NCCL does: on a stream of the communicator's, after what was issued before; who waits, waits for it."""
        stream = self._of_groups.setdefault(ranks, SimStream())
        stream.wait_stream(STREAMS.current)
        self.events.append(issued._replace(stream=stream.number))
        event = stream.record_event()
        for tensor in outputs:
            self._pending[id(tensor.untyped_storage())] = event

    def _touched(self, tensors: Sequence[torch.Tensor]) -> Touched:
        return [(self._see(tensor), num_bytes(tensor)) for tensor in tensors]

    def _see(self, tensor: torch.Tensor) -> int:
        """The block of a tensor's storage, allocated now if it was not before."""
        return self._storages.see(tensor.untyped_storage())

    def _allocate(self, size: int, is_resized: bool = False) -> int:
        number = self._num_blocks
        self._num_blocks += 1
        if is_resized:
            self._filled.add(number)
        if size:
            self._issued_in[number] = (len(self.events), self.tracker.issue_context() if self.tracker else None)
            self.events.append(Allocated(number, size, STREAMS.current.number, "other", ""))
        return number

    def _free(self, block: Block) -> None:
        if block.num_bytes:
            self.events.append(Freed(block.number))

    def _owner(self, issued_in: IssueContext | None) -> str:
        """The module's name; a node of backward belongs to one, found among all that have run once."""
        if issued_in is None or self.tracker is None:
            return ""
        if issued_in.position is None or issued_in.fsdp_owner is not None or issued_in.finished is not None:
            return self.tracker.owner_of(issued_in) or ""
        if issued_in.position not in self._owners:
            self._owners[issued_in.position] = self.tracker.owner_of(issued_in) or ""
        return self._owners[issued_in.position]


def _held(issued_in: IssueContext | None) -> str:
    """What lies in a block that is not held between two steps: told by who asked for it."""
    if issued_in is None or issued_in.phase == "optimizer":
        return "other" if issued_in is None else "optimizer"
    if issued_in.label is not None and issued_in.label.source == "fsdp":
        return "fsdp"
    return "activations" if issued_in.phase == "forward" else "backward"


class Sent:
    """Messages that were asked for together.

    Args:
        event: happens when all of them have ended; None of a step that is not written down.
        tensors: what NCCL's work keeps until somebody waits for it.
    """

    def __init__(self, event: SimEvent | None, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self.tensors = event, tensors

    def wait(self) -> None:
        """Have the current stream wait for them."""
        STREAMS.current.wait_event(self._event)
        self.tensors = ()


class StageMessages:
    """What one rank's stages send and receive, among the events of a recorder.

    torch asks for sends alone, or receives alone, one by one: NCCL runs them on a communicator of the two ranks, whose
    stream takes one after another. Both together run at once, on the communicator of the whole group.
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._streams: dict[tuple[int, ...], SimStream] = {}
        self._last: dict[tuple[int, ...], Sent] = {}
        self._num_batches = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Write down what is inside; the recorder must be on around it."""
        with messages_of_stages(self._issue):
            yield

    def _issue(self, tensors: Sequence[torch.Tensor], messages: Sequence[CollectiveCall]) -> list[Sent]:
        if len({message.kind for message in messages}) > 1:
            return [self._at_once((*messages[0].ranks, -1), tensors, messages)]
        return [
            self._at_once(tuple(sorted((self._rank, message.peer or 0))), [tensor], [message])
            for tensor, message in zip(tensors, messages, strict=True)
        ]

    def _at_once(
        self, communicator: tuple[int, ...], tensors: Sequence[torch.Tensor], messages: Sequence[CollectiveCall]
    ) -> Sent:
        recorder = self._recorder
        recorder.use(tensors)
        if (tracker := recorder.tracker) is None:
            return Sent(None, ())
        self._num_batches += 1
        stream = self._streams.setdefault(communicator, SimStream())
        stream.wait_stream(STREAMS.current)
        for message in messages:
            assert message.peer is not None
            communication = tracker.communication(message, tracker.issue_context(message))
            fields = {name: getattr(communication, name) for name in Collective._fields if hasattr(communication, name)}
            ends = nested_ranks((self._rank, message.peer))
            issued = Collective(stream=stream.number, ranks=ends, **fields)
            recorder.events.append(issued._replace(peer=message.peer, batch=self._num_batches))
        # NCCL's watchdog drops what an earlier work keeps once it has ended, which nobody may have waited for.
        if (last := self._last.get(communicator)) is not None:
            last.tensors = ()
        self._last[communicator] = Sent(stream.record_event(), tensors)
        return self._last[communicator]
