"""Memory of a call: the peak of its tensors, traced at dispatch, and the allocations of the CPU's allocator.
Allocations inside operators and compiled code are included.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from distbench.torch_private.collectives import each_operator, tensors_in
from distbench.torch_private.fake_tensors import has_values
from distbench.torch_private.probe import replaced, require


class Block(NamedTuple):
    """Memory of a storage, with its number from `allocate` and its bytes."""

    number: int
    num_bytes: int


class LiveStorages:
    """The storages of tensors, each from its first use until its last reference.

    FSDP2 frees and fills storages by resizing, which no operator shows. A resized storage is freed and allocated again.

    Args:
        allocate: called with a storage's bytes and, after a resize, its last number; returns the storage's number.
        free: called with the freed block.
    """

    def __init__(self, allocate: Callable[[int, int | None], int], free: Callable[[Block], object]) -> None:
        self._allocate, self._free = allocate, free
        self._blocks: dict[int, Block] = {}

    def see(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage; allocate a new storage."""
        number = self.number_of(storage)
        return self._keep(storage, storage.nbytes(), None) if number is None else number

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, None if it is unknown."""
        block = self._blocks.get(id(storage))
        return block.number if block is not None else None

    @contextlib.contextmanager
    def resizing(self) -> Iterator[None]:
        """Track storages that are resized inside the block."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            done = plain(storage, size)
            block = self._blocks.get(id(storage))
            if block is not None and block.num_bytes != size:
                self._free(block)
                self._keep(storage, size, block.number)
            return done

        with replaced(torch.UntypedStorage, "resize_", resize):
            yield

    def _keep(self, storage: torch.UntypedStorage, size: int, before: int | None) -> int:
        block = Block(self._allocate(size, before), size)
        self._blocks[id(storage)] = block
        weakref.finalize(storage, self._gone, id(storage), block.number).atexit = False
        return block.number

    def _gone(self, key: int, number: int) -> None:
        block = self._blocks.get(key)
        if block is not None and block.number == number:
            del self._blocks[key]
            self._free(block)


def peak_of_live_tensors(call: Callable[[], object], model: nn.Module, *others: Any) -> int:
    """Return the bytes of all tensors alive at the peak of one call, including the model's and `others` (nested
    containers).

    The count of tensors is reproducible, and lower than an allocator's memory. Compiled modules run
    uncompiled, because no operator shows the allocations of fused kernels.
    """
    live = peak = num_blocks = 0

    def allocate(num_bytes: int, _: int | None) -> int:
        nonlocal live, num_blocks
        live, num_blocks = live + num_bytes, num_blocks + 1
        return num_blocks

    def free(block: Block) -> None:
        nonlocal live
        live -= block.num_bytes

    storages = LiveStorages(allocate, free)

    def see(tree: object) -> None:
        for storage in _storages_in(tree):
            storages.see(storage)

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal peak
        out = func(*args, **kwargs)
        see(out)
        peak = max(peak, live)
        return out

    def enter(module: nn.Module, *_: object) -> None:
        see([*module.parameters(), *module.buffers()])

    see([*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters()), *others])
    was_collecting = gc.isenabled()
    gc.collect()
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            # The hook runs before FSDP2's own hook, because operators show the memory that FSDP2 gathers for a module.
            hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
        # Without this module nothing has been compiled, and its import would take seconds.
        if "torch._dynamo" in sys.modules:
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        hooks.enter_context(storages.resizing())
        hooks.enter_context(each_operator(handle))
        # Garbage collection frees tensors in reference cycles at any time, so peaks would not be reproducible.
        gc.disable()
        if was_collecting:
            hooks.callback(gc.enable)
        peak = live
        call()
    return peak


def _storages_in(tree: object) -> Iterator[torch.UntypedStorage]:
    """Return the storages of the tensors in nested containers: this rank's part of a DTensor, the inner tensors of a
    subclass.

    Tensors without values have no storage; DTensor runs operators on them for the result's shape.
    """
    for tensor in tensors_in(tree):
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _storages_in([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        elif tensor.device.type != "meta" and has_values(tensor):
            yield tensor.untyped_storage()


class Allocation(NamedTuple):
    """Allocation or release of a block by CPU's allocator."""

    pointer: int
    num_bytes: int  # as requested; negative for a release
    # Enclosing scopes on its thread, outermost first: names of `record_function`, sequence numbers of backward's nodes.
    inside: tuple[str | int, ...] = ()


def cpu_allocations(call: Callable[[], object]) -> list[Allocation]:
    """Return every allocation and release by CPU's allocator during a call, in order, on all threads of the call.

    Releases of blocks from before the call are left out.
    """
    require("memory of a step")
    from torch._C._profiler import RecordScope
    from torch.autograd import profiler

    enable: Any = profiler._enable_profiler
    scopes = {RecordScope.USER_SCOPE, RecordScope.BACKWARD_FUNCTION}
    # Turn off the default recording of operators, which takes longer than the step.
    with replaced(profiler, "_enable_profiler", lambda config, activities: enable(config, activities, scopes)):
        recording: Any = profiler.profile(profile_memory=True)
        with recording:
            call()
    tree = recording.kineto_results.experimental_event_tree()
    return [allocation for _, allocation in sorted(_allocations(tree), key=lambda timed: timed[0])]


def _allocations(tree: Iterable[Any]) -> Iterator[tuple[int, Allocation]]:
    from torch._C._profiler import RecordScope

    pending: list[tuple[Any, tuple[str | int, ...]]] = [(event, ()) for event in tree]
    while pending:
        event, inside = pending.pop()
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            yield event.start_time_ns, Allocation(fields.ptr, fields.alloc_size, inside)
            continue
        scope = getattr(fields, "scope", None)
        if scope == RecordScope.USER_SCOPE:
            inside = (*inside, event.name)
        elif scope == RecordScope.BACKWARD_FUNCTION and fields.sequence_number >= 0:
            inside = (*inside, fields.sequence_number)
        pending += [(child, inside) for child in event.children]


def storages_of(tree: object) -> dict[int, int]:
    """Map the start of each tensor's memory in nested containers to its bytes; DTensors count by this rank's part,
    other subclasses by their inner tensors.
    """
    return {storage.data_ptr(): storage.nbytes() for storage in _storages_in(tree) if storage.nbytes()}
