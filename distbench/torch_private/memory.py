"""How much memory a call takes: the peak that torch's tracker predicts, and what CPU's allocator hands out meanwhile.

The tracker adds up the tensors that operators return; under its dispatch mode compiled modules run uncompiled. The
allocator's own record has every block, those inside operators and of compiled code too, and changes nothing that runs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from distbench.torch_private.fsdp import autograd_position
from distbench.torch_private.probe import replaced, require

_NO_HANDLE = RemovableHandle(OrderedDict())


def tracked_peak_bytes(call: Callable[[], object], model: nn.Module, *others: Any) -> int | None:
    """Bytes of all tensors alive at the peak of one call, those of the model and of others (optimizers, tensors)
    included.

    It counts tensors, so it is the same every time, and less than what an allocator holds. None where torch's
    tracker fails: `call` must have run without the tracker, so that what it raises now is the tracker's.
    """
    require("predicted peak memory")
    from torch.distributed._tools import mem_tracker

    of_none = WeakIdKeyDictionary()
    roots = list(getattr(model, "stages", [model]))  # of a pipeline each stage is run by itself

    class Tracker(mem_tracker.MemTracker):
        def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> Any:
            # torch asks every parameter for a gradient hook, which a frozen one refuses unless it seems to have one.
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    self._param_to_grad_hook_handles[parameter] = (_NO_HANDLE, _NO_HANDLE)
            return super()._track_module_params_and_buffers(module, install_grad_hooks)

        def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
            # A microbatch after the first is a second step to torch, whose statistics a module we do not read.
            if any(module is root for root in roots) and autograd_position() is None:
                self.reset_mod_stats()
            super()._pre_fw_hook(module, inputs)

        def _update_peak_stats(self, peak_state: Any) -> None:
            # Asked after each operator, and most of the time goes to statistics of modules, again.
            of_modules, self.memory_tracking = self.memory_tracking, of_none
            super()._update_peak_stats(peak_state)
            self.memory_tracking = of_modules

    tracker = Tracker()
    tracker.track_external(model, *others)
    try:
        with replaced(mem_tracker, "tree_map_only", _each_of), tracker:
            call()
    except RuntimeError:
        return None
    snapshot: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    return sum(int(by_kind["Total"]) for by_kind in snapshot.values())


def _each_of(kind: type, function: Callable[[Any], object], found: Any) -> None:
    """What the tracker asks of `tree_map_only` after each operator, without a new tree: that took half of its time."""
    if isinstance(found, kind):
        function(found)
    elif isinstance(found, list | tuple):
        for one in found:
            _each_of(kind, function, one)
    elif found is not None and not isinstance(found, int | float):
        tree_map_only(kind, function, found)


class Allocation(NamedTuple):
    """A block that CPU's allocator handed out, or took back.

    Args:
        pointer: where it begins.
        num_bytes: its size as it was asked for; negative where it was taken back.
        inside: what was open around it on its thread, outermost first: names of `record_function` blocks, and the
            sequence numbers of nodes of backward.
    """

    pointer: int
    num_bytes: int
    inside: tuple[str | int, ...] = ()


def cpu_allocations(call: Callable[[], object]) -> list[Allocation]:
    """Every block that CPU's allocator handed out or took back during a call, in order, on all threads that it had
    work done on.

    Blocks that were handed out before are not known, so neither is that they were taken back. Runs nothing else than
    the call does by itself.
    """
    require("memory of a step")
    from torch._C import _autograd
    from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

    activities = {ProfilerActivity.CPU}
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _autograd._prepare_profiler(config, activities)
    # Not every operator, which torch.profiler would record too: that takes longer than the step.
    enable: Any = _autograd._enable_profiler
    enable(config, activities, {RecordScope.USER_SCOPE, RecordScope.BACKWARD_FUNCTION})
    try:
        call()
    finally:
        result = _autograd._disable_profiler()
    tree = result.experimental_event_tree()
    return [allocation for _, allocation in sorted(_allocations(tree), key=lambda timed: timed[0])]


def _allocations(tree: Iterable[Any]) -> Iterator[tuple[int, Allocation]]:
    from torch._C._profiler import RecordScope, _EventType

    found: list[tuple[Any, tuple[str | int, ...]]] = [(event, ()) for event in tree]
    while found:
        event, inside = found.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, Allocation(fields.ptr, fields.alloc_size, inside)
            continue
        if event.tag == _EventType.TorchOp:
            fields = event.extra_fields
            if fields.scope == RecordScope.USER_SCOPE:
                inside = (*inside, event.name)
            elif fields.scope == RecordScope.BACKWARD_FUNCTION and fields.sequence_number >= 0:
                inside = (*inside, fields.sequence_number)
        found += [(child, inside) for child in event.children]


def storages_of(found: object) -> dict[int, int]:
    """Where the memory of each tensor in nested containers begins, to its bytes: this rank's part of a DTensor, what a
    subclass wraps."""
    require("memory of a step")
    from torch.distributed._tools.common_utils import get_untyped_storages
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    storages = [storage for tensor in tensors for storage in get_untyped_storages(tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
