"""The peak of a call's memory as torch's own tracker adds it up from the tensors alive: no allocator, no noise."""

from collections.abc import Callable
from typing import Any

from torch import nn

from distbench.worker.torch_internals.probe import require


def tracked_peak_bytes(call: Callable[[], object], model: nn.Module, *others: Any) -> int | None:
    """Bytes of all tensors alive at the worst moment of one call, the model's and others' included.

    It counts tensors, so it is the same every time, and less than what an allocator holds. None where torch's tracker
    fails: it supports neither frozen parameters nor a second forward in one call.

    Args:
        call: what to run, once; it must have run without the tracker, so that what it raises now is the tracker's.
        model: a module whose parameters live through it.
        others: optimizers and tensors that do as well.

    Raises:
        Unsupported: torch has no such tracker.
    """
    require("predicted peak memory")
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, *others)
    try:
        with tracker:
            call()
    except RuntimeError:
        return None
    snapshot: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    return sum(int(by_kind["Total"]) for by_kind in snapshot.values())
