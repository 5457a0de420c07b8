"""The peak of a call's memory as torch's own tracker adds it up from the tensors alive: no allocator, no noise."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from distbench.worker.torch_internals.labels import autograd_position
from distbench.worker.torch_internals.probe import require

_NO_HANDLE = RemovableHandle(OrderedDict())


def tracked_peak_bytes(call: Callable[[], object], model: nn.Module, *others: Any) -> int | None:
    """Bytes of all tensors alive at the peak of one call, those of the model and of others (optimizers, tensors)
    included.

    It counts tensors, so it is the same every time, and less than what an allocator holds. None where torch's
    tracker fails: `call` must have run without the tracker, so that what it raises now is the tracker's.
    """
    require("predicted peak memory")
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> Any:
            # torch asks every parameter for a gradient hook, which a frozen one refuses unless it seems to have one.
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    self._param_to_grad_hook_handles[parameter] = (_NO_HANDLE, _NO_HANDLE)
            return super()._track_module_params_and_buffers(module, install_grad_hooks)

        def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
            # A microbatch after the first is a second step to torch, whose statistics a module we do not read.
            if module is model and autograd_position() is None:
                self.reset_mod_stats()
            super()._pre_fw_hook(module, inputs)

    tracker = Tracker()
    tracker.track_external(model, *others)
    try:
        with tracker:
            call()
    except RuntimeError:
        return None
    snapshot: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    return sum(int(by_kind["Total"]) for by_kind in snapshot.values())
