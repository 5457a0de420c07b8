"""A device `sim` without hardware, and a recorder of a step on this device, in program order: operators and their
costs, collectives, messages, waits, memory.
"""

import contextlib
import importlib
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distbench.observe.module_attribution import CollectiveTracker, Communication, IssueContext
from distbench.ranks.dtypes import dtype_name
from distbench.simulate.recording import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MATMUL,
    MEMORY,
    ON_HOST,
    TO_DEVICE,
    TO_HOST,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    HostWaited,
    Operator,
    StepBegun,
    Touched,
    ranks_of,
)
from distbench.torch_private import (
    GROUPED_MM,
    NAMESPACES,
    Block,
    CollectiveCall,
    EndedWork,
    LiveStorages,
    arguments_of,
    call_of,
    each_operator,
    global_metadata,
    has_values,
    is_async,
    is_attention,
    is_pinned,
    messages_of_stages,
    pinned,
    reducers_on_host,
    replaced,
    simulated_device,
    streams_of_accelerator,
    tensors_in,
    waited_for_when_used,
    with_values_again,
    written_by,
)

DEVICE_TYPE = "sim"
# Operators that make a tensor without writing to it, or only report a property.
LAUNCHES_NOTHING = (
    *("empty", "new_empty", "lift_fresh", "is_pinned", "is_same_size", "sym_", "record_stream"),
    *("set_", "resize_"),
)
# In-place operators that do not read the previous content.
OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")
# FlashAttention-2's backward temporarily holds dQ in fp32 and one number per row of the softmax.
WORKSPACE_BYTES = 4
WRAPS = "_wrap_tensor_autograd"  # a collective's result under another tensor, without waiting for it
# DTensor's all-to-all returns after the data has arrived, so its caller does not wait.
WAITS_ITSELF = "shard_dim_alltoall"
CPU = torch.device("cpu")
# Copies from pinned memory to the device may continue while the host continues. Without a device, any memory counts as
# pinned.
PINNED = "pin_memory"


class Streams:
    """The streams of a process.

    Args:
        on_event: called with each recorded or awaited event; initially without effect.
        stream_numbers, event_numbers: numbers of the next stream and event.
        entered: streams whose contexts are open, from the default stream to the current stream.
    """

    def __init__(self) -> None:
        self.on_event: Callable[[Event], None] = lambda _: None
        self.stream_numbers, self.event_numbers = itertools.count(), itertools.count()
        self.entered = [SimStream(of=self)]

    @property
    def default(self) -> "SimStream":
        """The default stream."""
        return self.entered[0]

    @property
    def current(self) -> "SimStream":
        """The innermost active stream."""
        return self.entered[-1]

    @current.setter
    def current(self, stream: "SimStream") -> None:
        self.entered[-1] = stream


class SimStream:
    """A stream with the interface of torch's device modules; `number` is its name in recordings, 0 the default."""

    def __init__(self, device: Any = None, priority: int = 0, of: Streams | None = None) -> None:
        self._of = of if of is not None else STREAMS
        self.number = next(self._of.stream_numbers)
        self.priority = priority
        # torch's id of a stream, which FSDP2 passes on since 2.15. 20 is PrivateUse1.
        self.stream_id, self.device_index, self.device_type = self.number, 0, 20

    def record_event(self, event: "SimEvent | None" = None) -> "SimEvent":
        """Return an event that happens when all work issued to this stream has ended."""
        event = event or SimEvent()
        event.record(self)
        return event

    def wait_event(self, event: "SimEvent | None") -> None:
        """Delay later work on this stream until the event; without effect for an unrecorded event."""
        if event is not None and event.number is not None:
            self._of.on_event(EventWaited(self.number, event.number))

    def wait_stream(self, other: "SimStream") -> None:
        """Wait for all work issued to another stream."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait for all work issued to this stream."""
        self._of.on_event(HostWaited(self.number))

    def is_capturing(self) -> bool:
        """Return False, because no graph is captured. Optimizers of torch 2.15 call this in each step."""
        return False

    def __enter__(self) -> "SimStream":
        self._of.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._of.entered.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class SimEvent:
    """An event with the interface of torch's device modules; `number` is None until it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number: int | None = None

    def record(self, stream: SimStream | None = None) -> None:
        """Record the event on a stream (default: the current stream); it happens when all issued work has ended."""
        self.number = next(STREAMS.event_numbers)
        STREAMS.on_event(EventRecorded((stream or STREAMS.current).number, self.number))

    def wait(self, stream: SimStream | None = None) -> None:
        """Make a stream (default: the current stream) wait for the event."""
        (stream or STREAMS.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event, recorded as a wait for the current stream."""
        STREAMS.current.synchronize()

    def query(self) -> bool:
        """Return True, because no time passes while a step is recorded."""
        return True


STREAMS = Streams()


def _returning(value: Any) -> Callable[..., Any]:
    return lambda self, *_: value


class SimModule:
    """The module returned by `torch.get_device_module("sim")`: one device, its streams, no kernels."""

    Stream = SimStream
    Event = SimEvent
    is_initialized = is_available = _returning(True)
    device_count = _returning(1)
    current_device = _returning(0)
    set_device = _returning(None)
    _is_in_bad_fork = _returning(False)
    get_amp_supported_dtype = _returning([torch.bfloat16, torch.float16, torch.float32])
    manual_seed_all = set_rng_state = _returning(None)
    memory_allocated = _returning(0)  # memory is counted when a recording is replayed

    def current_stream(self, device: Any = None) -> SimStream:
        """Return the current stream; all methods follow torch's device modules."""
        return STREAMS.current

    def default_stream(self, device: Any = None) -> SimStream:
        """Return the default stream."""
        return STREAMS.default

    def stream(self, stream: SimStream | None) -> contextlib.AbstractContextManager[Any]:
        """Make a stream current while the context is open."""
        return stream if stream is not None else contextlib.nullcontext()

    def set_stream(self, stream: SimStream) -> None:
        """Make a stream current."""
        STREAMS.current = stream

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of an unused generator; checkpointing saves it."""
        return torch.zeros(16, dtype=torch.uint8)

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for the device."""
        STREAMS.default.synchronize()


SIM = SimModule()


def simulate_device() -> torch.device:
    """Register the device in torch; Unsupported if this version of torch cannot."""
    simulated_device(DEVICE_TYPE, SIM)
    return torch.device(DEVICE_TYPE, 0)


def _flop_formulas() -> Mapping[Any, Any]:
    """Return the formulas of torch's FlopCounterMode.

    The counter and other parts of torch import triton if installed, which takes 80 MB. Simulated devices do not need
    triton's kernels.
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


def _is_sized_by_values(func: Any, args: Any) -> bool:
    """Return whether the host must wait for an operator to get the size of its result."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    is_index = func.overloadpacket.__name__ == "index"
    return not is_index or any(index is not None and index.dtype == torch.bool for index in args[1])


def _costs_nothing(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], writes: bool) -> bool:
    """Return whether an operator launches nothing: it allocates, reports a property, or returns a view of a tensor."""
    if func.is_view or func.overloadpacket.__name__.startswith(LAUNCHES_NOTHING):
        return True
    return not writes and bool(outputs) and {*map(_key, outputs)} <= {*map(_key, inputs)}


def _costs(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, str, list[int], int]:
    """Return an operator's floating point operations, as in torch's FlopCounterMode; its kind; for attention queries,
    keys, and 1 if causal; and bytes that attention's backward allocates temporarily.

    Attention has 4 b h s_q s_k d operations in forward, and 2.5 times as many in backward (FlashAttention computes the
    scores again; Dao 2023). Causal attention counts half.
    """
    forward, backward = is_attention(func)
    if forward or backward:
        arguments = arguments_of(func, args, kwargs)
        batch, heads, queries, head_dim = arguments["query"].shape
        keys, is_causal = arguments["key"].shape[-2], int(arguments.get("is_causal", False))
        flops = 4 * batch * heads * queries * keys * head_dim // (2 if is_causal else 1)
        if forward:
            return flops, ATTENTION, [queries, keys, is_causal], 0
        workspace_bytes = batch * heads * queries * (head_dim + 1) * WORKSPACE_BYTES
        return flops * 5 // 2, ATTENTION_BACKWARD, [queries, keys, is_causal], workspace_bytes
    if func is GROUPED_MM:
        return _grouped_flops(args[0].shape, args[1].shape), MATMUL, [], 0
    if func.overloadpacket in FLOP_FORMULAS:
        return int(FLOP_FORMULAS[func.overloadpacket](*args, **kwargs, out_val=out)), MATMUL, [], 0
    return 0, MEMORY, [], 0


def _grouped_flops(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the operations of one multiplication per group; for matrices of two dims, groups share a size.

    >>> _grouped_flops((100, 8), (4, 8, 16)), _grouped_flops((8, 100), (100, 16)), _grouped_flops((4, 2, 8), (4, 8, 16))
    (25600, 25600, 2048)
    """
    num_groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * num_groups * first[-2] * first[-1] * second[-1]


def _bytes_touched(
    func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    """Return the bytes that an operator reads and writes: each tensor once, tensors that it changes in place twice.

    Operators that use only a part of their inputs count only this part.
    """
    name = f"{func.namespace}::{func.overloadpacket.__name__}"
    output_bytes = sum(map(_num_bytes, outputs))
    if name == "fsdp::all_gather_copy_in":
        # The outputs are the whole gathered buffer and this rank's part, and only this part is copied.
        return 2 * (output_bytes - max(map(_num_bytes, outputs)))
    if name in {"aten::embedding", "aten::index"}:
        return 2 * output_bytes
    if name == "aten::nll_loss_backward":
        return output_bytes
    if name == "aten::nll_loss_forward":
        return sum(map(_num_bytes, inputs[1:])) * 2
    tensors: dict[tuple[Any, ...], torch.Tensor] = {}
    for tensor in (*inputs, *outputs):
        tensors.setdefault((_key(tensor), tensor.storage_offset(), tuple(tensor.shape)), tensor)
    written = () if name in OVERWRITES else written_by(func, args, kwargs)
    return sum(map(_num_bytes, (*tensors.values(), *written)))


class _HostCopy(NamedTuple):
    """A copy between host and device. `blocks` is whether the host waits until the copy has arrived."""

    kind: str
    num_bytes: int
    blocks: bool


def _copied_over_host_link(func: Any, args: Any, kwargs: Any, out: Any) -> _HostCopy | None:
    """Return the copy if an operator copies between host and device, else None. The host waits for the copy, unless the
    copy is non_blocking and the host's memory is pinned. torch's results on the host are pinned.
    """
    name = f"{func.namespace}::{func.overloadpacket.__name__}"
    if name not in ("aten::_to_copy", "aten::copy_"):
        return None
    source = args[name == "aten::copy_"]
    if source.device.type == out.device.type or not out.numel():
        return None
    to_device = out.device.type == DEVICE_TYPE
    non_blocking = arguments_of(func, args, kwargs).get("non_blocking", False)
    blocks = not non_blocking or (to_device and not is_pinned(source))
    return _HostCopy(TO_DEVICE if to_device else TO_HOST, _num_bytes(out), blocks)


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; expanded elements count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


def _key(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())


def _on_device(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.device.type == DEVICE_TYPE]


def nested_ranks(ranks: Sequence[int]) -> Touched:
    """Return ranks, relative to the lowest, as loops (count, stride), outermost first; else [(1, rank), ...].

    Groups along a mesh dim then differ between ranks only in their first rank.
    """
    ordered = [rank - min(ranks) for rank in sorted(ranks)]
    loops: list[tuple[int, int]] = []
    left = ordered
    while len(left) > 1:
        stride = left[1] - left[0]
        count = next((at for at, rank in enumerate(left) if rank != left[0] + at * stride), len(left))
        loops.insert(0, (count, stride))
        left = left[::count]
    return loops if ranks_of(loops) == ordered else [(1, rank) for rank in ordered]


class ReducersOnHost:
    """Handler of operators of DDP's C++ reducers for the recorder of the step.

    Gradients, buckets and copies between them have no values, like all tensors of a recorded step. A reducer reads
    counts on the host from memory (the number of parameters, their shapes, buckets and use), so count tensors are real.
    All ranks are assumed to have the same counts, so received counts equal sent counts.

    Args:
        use: called with tensors before their use, so that the current stream waits for their collective.

    Attributes:
        on_device: reducers' tensors on the device: buckets, and flags of used parameters.
    """

    def __init__(self, use: Callable[[Sequence[torch.Tensor]], None]) -> None:
        self.on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._use = use
        self._are_there = self._count = False
        self._on_host: dict[int, torch.UntypedStorage] = {}
        self._sent: torch.Tensor | None = None
        # A tensor's storage to its collective without a wait so far; C++ keeps only half of a work, so all works are
        # kept.
        self._running: dict[int, EndedWork] = {}
        self._works: list[EndedWork] = []

    def on(self) -> contextlib.AbstractContextManager[None]:
        """Detect reducers that are created or that count in the block."""
        return reducers_on_host(self._counting)

    def _counting(self) -> contextlib.AbstractContextManager[None]:
        self._are_there = True
        return replaced(self, "_count", True)

    def run(self, func: Any, args: Any, kwargs: Any, record: Callable[[Any, Any, Any], Any]) -> Any:
        """Run an operator on count tensors with values. `record` any other operator."""
        if not self._are_there:
            return record(func, args, kwargs)
        if func.namespace == "c10d":
            return self._in_background(func, args, kwargs, record(func, args, kwargs))
        tensors, name = tensors_in([args, kwargs]), func.overloadpacket.__name__
        host_tensors = [tensor for tensor in tensors if _key(tensor) in self._on_host]
        if self._is_counted(host_tensors, tensors, kwargs):
            return self._with_values(func, args, kwargs)
        for tensor in tensors:
            if (work := self._running.get(_key(tensor))) is not None:
                work.wait()
        is_copied_back = name == "copy_" and host_tensors and host_tensors[0] is args[0]
        if self._sent is not None and (is_copied_back or (name == "_local_scalar_dense" and self._count)):
            # A copy to the host has arrived before the host continues.
            STREAMS.current.synchronize()
            return self._with_values(func, (*args[:1], self._sent) if is_copied_back else (self._sent,), {})
        if host_tensors:
            # A tensor on the device has no values; torch would keep the values of a small tensor.
            self._sent = sent = host_tensors[0]
            flags = pinned(torch.empty(sent.shape, dtype=sent.dtype))
            args = [flags if argument is sent else argument for argument in args]
        out = record(func, args, kwargs)
        if self._count and not tensors:
            self.on_device.update(tensors_in(out))
        return out

    def _is_counted(self, host_tensors: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], kwargs: Any) -> bool:
        """Return whether an operator works only on count tensors, or makes them.

        Flags of used parameters go to the device from pinned memory, which is allocated during backward.
        """
        if (kwargs.get("device") or CPU).type != CPU.type or len(host_tensors) != len(tensors):
            return False
        return bool(host_tensors) or self._count or bool(kwargs.get(PINNED) and kwargs.get("dtype") is torch.int32)

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket.__name__ == "is_pinned":
            return True
        with with_values_again():
            out = func(*args, **{name: value for name, value in kwargs.items() if name != PINNED})
        for tensor in tensors_in(out):
            self._on_host[_key(tensor)] = tensor.untyped_storage()
        return out

    def _in_background(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return the result of a collective.

        The wait for a concurrent collective happens when C++ requests a wait or reads the result of the future.
        """
        outputs = _on_device(out)
        if not outputs or not is_async(func, args, kwargs):
            return out
        keys = [*map(_key, outputs)]

        def wait() -> None:
            self._use(outputs)
            for key in keys:
                self._running.pop(key, None)

        work = EndedWork(out[0], wait)
        self._works.append(work)
        self._running.update(dict.fromkeys(keys, work))
        return (*out[:-1], work.boxed())


class Recorder:
    """Recorder of all work issued while `on()` is open, as events.

    Memory is counted per storage: a storage is allocated when an operator first returns it, and freed after the last
    reference. FSDP2 frees and fills storages by resizing, which no operator reports.

    Args:
        at_once: wait for a functional collective directly after its issue, as in a compiled graph. Otherwise the wait
            is at the first use of the result.
        events: events in program order; operators are included only while `tracker` is set.
        tracker: tracker of the running module and of a collective's owner.
        watcher: tracker of the first steps, whose operators are not recorded.
        modules_of_blocks: modules of blocks, by the allocating code or an operator's inputs; None if not wanted.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.events: list[Event] = []
        self._at_once = at_once
        self.tracker: CollectiveTracker | None = None
        self._storages = LiveStorages(self._allocate, self._free)
        self._issued_in: dict[int, tuple[int, IssueContext | None]] = {}
        self._num_blocks = self._num_steps = 0
        # Blocks of storages that are filled again, as only FSDP2 does.
        self._filled: set[int] = set()
        self._is_metadata = False
        self._of_groups: dict[tuple[int, ...], SimStream] = {}
        self._groups: dict[tuple[int, ...], list[str]] = {}  # ranks to the names of their groups, in order of use
        self._pending: dict[int | None, SimEvent] = {}  # of blocks
        self._owners: dict[int, str] = {}
        self.watcher: CollectiveTracker | None = None
        self.modules_of_blocks: dict[int, str] | None = None
        self.reducers = ReducersOnHost(self.use)

    def begin_step(self) -> None:
        """Begin another step."""
        self._num_steps += 1
        self.events.append(StepBegun(self._num_steps))

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Record the block; `ShapesOnly.on()` must enclose the block."""
        with (
            replaced(STREAMS, "on_event", self.events.append),
            streams_of_accelerator(SIM.current_stream),
            self._storages.resizing(),
            global_metadata(lambda: replaced(self, "_is_metadata", True)),
            waited_for_when_used(self._at_once) as unwaited,
            self.reducers.on(),
            each_operator(partial(self.reducers.run, record=self._handle), unwaited),
        ):
            yield

    def annotate(self, held: Mapping[int, str]) -> None:
        """Label every block since the last call with its content, after all modules have run.

        Args:
            held: kinds of blocks, for gradients and blocks that a step holds between two runs.
        """
        for number, (place, issued_in) in self._issued_in.items():
            block = self.events[place]
            assert isinstance(block, Allocated)
            kind = held.get(number) or ("fsdp" if number in self._filled else _held(issued_in))
            self.events[place] = block._replace(held=kind, owner=self._owner(issued_in))
        self._issued_in.clear()
        self._owners.clear()

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record a use of tensors without a dispatched operator."""
        for tensor in tensors:
            self._see(tensor)
        self._await(tensors)

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Return the block of a tensor's memory; None without memory on the device."""
        return self._storages.number_of(tensor.untyped_storage())

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_metadata or func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func.namespace in NAMESPACES:
            return self._communicate(func, args, kwargs)
        inputs = _on_device([args, kwargs])
        if func.overloadpacket.__name__ == "_local_scalar_dense" and inputs:
            self._await(inputs)
            STREAMS.current.synchronize()
        out = func(*args, **kwargs)
        outputs = _on_device(out)
        if not outputs and not inputs:
            self._run_on_host(func, args, kwargs, out)
            return out
        if self.tracker is None or _costs_nothing(func, inputs, outputs, bool(written_by(func, args, kwargs))):
            for tensor in outputs:
                self._see(tensor)
            self._attribute(inputs, outputs)
            return out
        self._await(inputs)
        reads, writes = self._touched(inputs), self._touched(outputs)
        self._attribute(inputs, outputs)
        issued_in = self.tracker.issue_context()
        flops, kind, attention, workspace_bytes = _costs(func, args, kwargs, out)
        num_bytes = _bytes_touched(func, args, kwargs, inputs, outputs)
        if copied := _copied_over_host_link(func, args, kwargs, out):
            kind, num_bytes = copied.kind, copied.num_bytes
        if workspace_bytes:
            self.events.append(Freed(self._allocate(workspace_bytes)))
        self.events.append(
            Operator(
                stream=STREAMS.current.number,
                name=str(func),
                kind=kind,
                flops=flops,
                dtype=dtype_name((inputs or outputs)[0].dtype),
                num_bytes=num_bytes,
                reads=reads,
                writes=writes,
                phase=issued_in.phase,
                owner=self._owner(issued_in),
                attention=attention,
            )
        )
        if _is_sized_by_values(func, args) or (copied and copied.blocks):
            STREAMS.current.synchronize()
        return out

    def _run_on_host(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operator on tensors without values in the host's memory; constants and counters have values."""
        inputs, outputs = tensors_in([args, kwargs]), tensors_in(out)
        if self.tracker is None or not any(tensor.device == CPU and not has_values(tensor) for tensor in inputs):
            return
        if _costs_nothing(func, inputs, outputs, bool(written_by(func, args, kwargs))):
            return
        issued_in = self.tracker.issue_context()
        self.events.append(
            Operator(
                stream=STREAMS.current.number,
                name=str(func),
                kind=ON_HOST,
                flops=0,
                dtype=dtype_name(inputs[0].dtype),
                num_bytes=_bytes_touched(func, args, kwargs, inputs, outputs),
                reads=[],
                writes=[],
                phase=issued_in.phase,
                owner=self._owner(issued_in),
            )
        )

    def _await(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait for the pending functional collectives of used tensors."""
        for tensor in tensors:
            STREAMS.current.wait_event(self._pending.pop(self.block_of(tensor), None))

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, tensors = func.overloadpacket.__name__, _on_device([args, kwargs])
        if name in ("wait_tensor", WRAPS):
            out = func(*args, **kwargs)
            self._see(out)
            event = self._pending.pop(self.block_of(args[0]), None)
            if event and name == WRAPS:
                self._pending[self.block_of(out)] = event
            else:
                STREAMS.current.wait_event(event)
            return out
        call = call_of(func, args, kwargs)
        # This is evaluated before the run, while the outputs have no owner.
        tracker = self.tracker
        communication = tracker.communication(call, tracker.issue_context()) if tracker and call else None
        self.use(tensors)
        out = func(*args, **kwargs)
        outputs = _on_device(out)
        for tensor in outputs:
            self._see(tensor)
        if call is None or communication is None or not tensors:
            return out
        groups = self._groups.setdefault(call.ranks, [])
        groups += [] if call.group in groups else [call.group]
        communicator = groups.index(call.group)
        issued = _collective(communication, STREAMS.current, call.ranks)._replace(communicator=communicator)
        if func.namespace == "c10d" and not is_async(func, args, kwargs):
            self.events.append(issued)  # FSDP2 issues its collectives on its own streams
        else:
            # As in NCCL, the collective runs on a stream of the communicator, after earlier collectives; users of the
            # result wait.
            stream = self._of_groups.setdefault((*call.ranks, -1 - communicator), SimStream())
            stream.wait_stream(STREAMS.current)
            self.events.append(issued._replace(stream=stream.number))
            self._pending.update(dict.fromkeys(map(self.block_of, outputs), stream.record_event()))
            if name == WAITS_ITSELF:
                self._await(outputs)
        return out

    def _touched(self, tensors: Sequence[torch.Tensor]) -> Touched:
        return [(self._see(tensor), _num_bytes(tensor)) for tensor in tensors]

    def _see(self, tensor: torch.Tensor) -> int:
        """Return the block of a tensor's storage; allocate a new storage."""
        return self._storages.see(tensor.untyped_storage())

    def _allocate(self, size: int, before_resize: int | None = None) -> int:
        number = self._num_blocks
        self._num_blocks += 1
        if before_resize is not None:
            self._filled.update((number, before_resize))
        if self.modules_of_blocks is not None and (watcher := self.tracker or self.watcher):
            self.modules_of_blocks[number] = _module(watcher.owner_of(watcher.issue_context()))
        if size:
            self._issued_in[number] = (len(self.events), self.tracker.issue_context() if self.tracker else None)
            self.events.append(Allocated(number, size, STREAMS.current.number, "other", ""))
        return number

    def _attribute(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Attribute results outside of all modules to the modules of the inputs, which are in the same order."""
        if self.modules_of_blocks is None:
            return
        for result, source in zip(outputs, inputs, strict=False):
            block, of_source = self.block_of(result), self.block_of(source)
            if block is not None and of_source is not None and not self.modules_of_blocks.get(block):
                self.modules_of_blocks[block] = self.modules_of_blocks.get(of_source, "")

    def _free(self, block: Block) -> None:
        if block.num_bytes:
            self.events.append(Freed(block.number))

    def _owner(self, issued_in: IssueContext | None) -> str:
        """Return the module's name; the module of a backward node is one that has already run."""
        if issued_in is None or self.tracker is None:
            return ""
        position = issued_in.position
        if position is None or issued_in.fsdp_owner is not None or issued_in.finished is not None:
            return self.tracker.owner_of(issued_in) or ""
        if position not in self._owners:
            self._owners[position] = self.tracker.owner_of(issued_in) or ""
        return self._owners[position]


def _module(owner: str | None) -> str:
    """Return the name of an owner that is a module, else ""."""
    return owner if owner and not owner.startswith("(") else ""


def _collective(communication: Communication, stream: SimStream, ranks: Sequence[int]) -> Collective:
    fields = {name: getattr(communication, name) for name in Collective._fields if hasattr(communication, name)}
    return Collective(stream=stream.number, ranks=nested_ranks(ranks), **fields)


def _held(issued_in: IssueContext | None) -> str:
    """Return the kind of content of a block that is not held between two steps, by the code that allocated it."""
    if issued_in is None or issued_in.phase == "optimizer":
        return "other" if issued_in is None else "optimizer"
    if issued_in.label is not None and issued_in.label.source == "fsdp":
        return "fsdp"
    return "activations" if issued_in.phase == "forward" else "backward"


class Sent:
    """Messages of one request.

    Args:
        event: event at the end of all messages; None in an unrecorded step.
        tensors: the messages' tensors, which NCCL's work keeps until the wait.
    """

    def __init__(self, event: SimEvent | None, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self.tensors = event, tensors

    def wait(self) -> None:
        """Let the current stream wait for the messages."""
        STREAMS.current.wait_event(self._event)
        self.tensors = ()


class StageMessages:
    """Messages of one rank's stages, among the events of a recorder.

    torch requests only sends, or only receives, one by one: NCCL runs these in order on the stream of a communicator of
    the two ranks. Sends together with receives run at once, on the communicator of the whole group. With
    `pipeline_per_edge_p2p` (torch 2.15), each direction between two ranks has its own communicator.
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._streams: dict[tuple[int, ...], SimStream] = {}
        self._last: dict[tuple[int, ...], Sent] = {}
        self._num_batches = 0

    def on(self) -> contextlib.AbstractContextManager[None]:
        """Record messages of the block; the recorder's `on()` must enclose the block."""
        return messages_of_stages(self._issue)

    def _issue(self, tensors: Sequence[torch.Tensor], messages: Sequence[CollectiveCall]) -> list[Sent]:
        # The module is imported where the option is set; torch 2.11 may lack both.
        is_per_edge = getattr(getattr(dist, "config", None), "pipeline_per_edge_p2p", False)
        if len({message.kind for message in messages}) > 1 and not is_per_edge:
            return [self._at_once((*messages[0].ranks, -1), tensors, messages)]
        edges = [(self._rank, message.peer or 0)[:: 1 if message.kind == "send" else -1] for message in messages]
        return [
            self._at_once(edge if is_per_edge else tuple(sorted(edge)), [tensor], [message])
            for edge, tensor, message in zip(edges, tensors, messages, strict=True)
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
            issued = _collective(communication, stream, (self._rank, message.peer))
            recorder.events.append(issued._replace(peer=message.peer, batch=self._num_batches))
        # NCCL's watchdog releases the tensors of an ended work, even without a wait.
        if (last := self._last.get(communicator)) is not None:
            last.tensors = ()
        self._last[communicator] = Sent(stream.record_event(), tensors)
        return self._last[communicator]
