"""Writes down what a step does on the simulated device, in program order: operators, collectives, waits, memory.

Memory is that of storages: one is allocated when an operator first returns it, and freed when nothing holds it any
more. FSDP2 frees and fills storages that it keeps by resizing them, which no operator tells of.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from distbench.simulate.recording import Allocated, Collective, Event, Freed, Operator, StepBegun, Touched
from distbench.worker.rank.dtypes import dtype_name
from distbench.worker.simulated import operator_costs as costs
from distbench.worker.simulated.differing_ranks import nested_ranks
from distbench.worker.simulated.reducers import ReducersOnHost
from distbench.worker.simulated.sim_device import DEVICE_TYPE, STREAMS, SimEvent, SimStream
from distbench.worker.torch_internals import (
    NAMESPACES,
    NeedsValues,
    call_of,
    each_operator,
    global_metadata,
    has_values,
    is_async,
    replaced,
    waited_for_when_used,
    written_by,
)
from distbench.worker.tracing.attribution import CollectiveTracker, IssueContext

# A collective's result under another tensor, which is not waited for yet.
WRAPS = "_wrap_tensor_autograd"
# DTensor's all-to-all returns what has arrived: its caller waits for nothing.
WAITS_ITSELF = "shard_dim_alltoall"
# What Adam asks for: how many steps it has taken, which no time depends on.
STEPS_TAKEN = 2.0


class _Memory(NamedTuple):
    """Memory of a storage: its number in the recording, and its bytes."""

    number: int
    num_bytes: int


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
        self._blocks: dict[int, _Memory] = {}
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
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            done = plain(storage, size)
            self._resized(storage, size)
            return done

        with (
            replaced(STREAMS, "tell", self.events.append),
            replaced(torch.UntypedStorage, "resize_", resize),
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
        block = self._blocks.get(id(tensor.untyped_storage()))
        return block.number if block else None

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
        outputs = [tensor for tensor in costs.tensors_in(out) if tensor.device.type == DEVICE_TYPE]
        inputs = [tensor for tensor in costs.tensors_in([args, kwargs]) if tensor.device.type == DEVICE_TYPE]
        if not outputs and not inputs:
            return out
        writes = bool(written_by(func, args, kwargs))
        if self.tracker is None or costs.costs_nothing(func, inputs, outputs, writes):
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
        flops, kind = costs.flops_of(func, args, kwargs, out)
        stream = STREAMS.current.number
        assert self.tracker is not None
        issued_in = self.tracker.issue_context()
        if workspace := costs.workspace_bytes(func, args, kwargs):
            self.events.append(Freed(self._allocate(workspace)))
        self.events.append(
            Operator(
                stream=stream,
                name=str(func),
                kind=kind,
                flops=flops,
                dtype=dtype_name((inputs or outputs)[0].dtype),
                num_bytes=costs.bytes_touched(func, args, kwargs, inputs, outputs),
                reads=reads,
                writes=writes,
                phase=issued_in.phase,
                owner=self._owner(issued_in),
                attention=costs.shape_of_attention(func, args, kwargs),
            )
        )

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [tensor for tensor in costs.tensors_in([args, kwargs]) if tensor.device.type == DEVICE_TYPE]
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
        found = self.tracker.communication(call, self.tracker.issue_context()) if self.tracker and call else None
        self.use(tensors)
        out = func(*args, **kwargs)
        made = [tensor for tensor in costs.tensors_in(out) if tensor.device.type == DEVICE_TYPE]
        for tensor in made:
            self._see(tensor)
        if call is None or found is None or not tensors:
            return out
        fields = {name: getattr(found, name) for name in Collective._fields if hasattr(found, name)}
        issued = Collective(stream=STREAMS.current.number, ranks=nested_ranks(call.ranks), **fields)
        if func.namespace == "c10d" and not is_async(func, args, kwargs):
            self.events.append(issued)  # FSDP2 issues its own on streams that it made for them
        else:
            self._issue_aside(issued, call.ranks, made)
            if func.overloadpacket.__name__ == WAITS_ITSELF:
                self._await(made)
        return out

    def _issue_aside(self, issued: Collective, ranks: tuple[int, ...], made: Sequence[torch.Tensor]) -> None:
        """As NCCL does: on a stream of the communicator's, after what was issued before; who waits, waits for it."""
        stream = self._of_groups.setdefault(ranks, SimStream())
        stream.wait_stream(STREAMS.current)
        self.events.append(issued._replace(stream=stream.number))
        event = stream.record_event()
        for tensor in made:
            self._pending[id(tensor.untyped_storage())] = event

    def _touched(self, tensors: Sequence[torch.Tensor]) -> Touched:
        return [(self._see(tensor), costs.num_bytes(tensor)) for tensor in tensors]

    def _see(self, tensor: torch.Tensor) -> int:
        """The block of a tensor's storage, allocated now if it was not before."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if (block := self._blocks.get(key)) is not None:
            return block.number
        number = self._allocate(storage.nbytes())
        self._keep(storage, _Memory(number, storage.nbytes()))
        return number

    def _keep(self, storage: torch.UntypedStorage, block: _Memory) -> None:
        self._blocks[id(storage)] = block
        weakref.finalize(storage, self._gone, id(storage), block.number).atexit = False

    def _gone(self, key: int, number: int) -> None:
        block = self._blocks.get(key)
        if block is not None and block.number == number:
            del self._blocks[key]
            self._free(block)

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        block = self._blocks.get(id(storage))
        if block is None or block.num_bytes == size:
            return
        self._free(block)
        number = self._allocate(size)
        self._filled.add(number)
        self._keep(storage, _Memory(number, size))

    def _allocate(self, size: int) -> int:
        number = self._num_blocks
        self._num_blocks += 1
        if size:
            self._issued_in[number] = (len(self.events), self.tracker.issue_context() if self.tracker else None)
            self.events.append(Allocated(number, size, STREAMS.current.number, "other", ""))
        return number

    def _free(self, block: _Memory) -> None:
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
