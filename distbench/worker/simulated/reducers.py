"""The host's side of DDP's reducers, which are C++, while a step is recorded.

Gradients, buckets and copies between them have no values, like all tensors of a recorded step. What a reducer counts on
the host (how many parameters there are, of which shapes, which of them make a bucket, which were used) it reads from
memory: those tensors are real ones. Ranks are taken to count what this one does, so what it sends is what it receives.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from distbench.worker.simulated.operator_costs import tensors_in
from distbench.worker.simulated.sim_device import DEVICE_TYPE, STREAMS
from distbench.worker.torch_internals import EndedWork, is_async, reducers_on_host, with_values_again

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
        counted = [tensor for tensor in tensors if id(tensor.untyped_storage()) in self._on_host]
        if self._is_counted(counted, tensors, kwargs):
            return self._with_values(func, args, kwargs)
        for tensor in tensors:
            if (work := self._running.get(id(tensor.untyped_storage()))) is not None:
                work.wait()
        is_copied_back = name == COPIES and counted and counted[0] is args[0]
        if self._sent is not None and (is_copied_back or (name == ASKS and self._count)):
            STREAMS.current.synchronize()
            return self._with_values(func, (*args[:1], self._sent) if is_copied_back else (self._sent,), {})
        if counted:
            # On the device it has no values; torch would keep those of a small tensor.
            self._sent = sent = counted[0]
            args = [torch.empty(sent.shape, dtype=sent.dtype) if one is sent else one for one in args]
        out = record(func, args, kwargs)
        if self._count and not tensors:
            self.on_device.update(tensors_in(out))
        return out

    def _is_counted(self, counted: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], kwargs: Any) -> bool:
        """Whether an operator works on nothing but what is counted, or makes what is.

        Which parameters were used goes to the device from pinned memory, which is made in the middle of backward.
        """
        if (kwargs.get("device") or CPU).type != CPU.type or len(counted) != len(tensors):
            return False
        return bool(counted) or self._count or bool(kwargs.get(PINNED) and kwargs.get("dtype") is torch.int32)

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
        made = [tensor for tensor in tensors_in(out) if tensor.device.type == DEVICE_TYPE]
        if not made or not is_async(func, args, kwargs):
            return out
        keys = [id(tensor.untyped_storage()) for tensor in made]

        def wait() -> None:
            self._use(made)
            for key in keys:
                self._running.pop(key, None)

        work = EndedWork(out[0], wait)
        self._works.append(work)
        self._running.update(dict.fromkeys(keys, work))
        return (*out[:-1], work.boxed())
