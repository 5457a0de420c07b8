"""What DDP's reducer, which is C++, reads on the host while a step is recorded, and when it waits for a bucket.

Its gradients, buckets and copies are tensors without values on the simulated device, like all others. What it counts
on the host (how many parameters there are, of which shapes, which of them are in which bucket, which were used) it
reads from memory of its own: those tensors are real ones.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from distbench.worker.simulated.operator_costs import tensors_in
from distbench.worker.simulated.recorder import Recorder
from distbench.worker.simulated.sim_device import DEVICE_TYPE, STREAMS
from distbench.worker.torch_internals import (
    arguments_of,
    each_operator,
    has_values,
    reducers_on_host,
    with_values_again,
    work_of,
)

CPU = torch.device("cpu")


class ReducerOnHost:
    """The host's side of DDP's reducers: real tensors for what they count, and waits for what they communicate.

    Ranks are taken to tell what this one does: what it sends is what it receives.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._counts = False
        self._on_host: dict[int, torch.UntypedStorage] = {}
        self._reduced: dict[int, torch.UntypedStorage] = {}
        self._works: list[Any] = []
        self._sent: torch.Tensor | None = None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Stand in between a reducer and the recorder, which must be on around it."""
        with reducers_on_host(self._counting), each_operator(self._handle):
            yield

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        before, self._counts = self._counts, True
        try:
            yield
        finally:
            self._counts = before

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in([args, kwargs])
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs, tensors)
        real = [tensor for tensor in tensors if id(tensor.untyped_storage()) in self._on_host]
        device, name = kwargs.get("device") or CPU, func.overloadpacket.__name__
        if name == "is_pinned" and real:
            return True
        # The copy of which parameters were used that it sends: there is no pinned memory without a device.
        is_pinned = self._on_host and kwargs.get("pin_memory")
        if device.type == "cpu" and len(real) == len(tensors) and (real or self._counts or is_pinned):
            kwargs = {**kwargs, "pin_memory": False} if is_pinned else kwargs
            with with_values_again():
                return self._kept(func(*args, **kwargs))
        if name == "copy_" and real and real[0] is args[0]:
            self._host_waits(args[1])
            with with_values_again():
                return args[0].copy_(self._sent)
        if name == "_local_scalar_dense" and self._counts and self._sent is not None:
            self._host_waits(args[0])
            with with_values_again():
                return self._sent.flatten()[0].item()
        if real:
            # torch would keep what values it has on the device, which has none.
            self._sent, args = real[0], [_blank(one) if one is real[0] else one for one in args]
        self._reduced_is_used(tensors)
        return func(*args, **kwargs)

    def _kept(self, out: Any) -> Any:
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            self._on_host[id(storage)] = storage
        return out

    def _host_waits(self, tensor: torch.Tensor) -> None:
        self._recorder.use([tensor])
        STREAMS.current.synchronize()

    def _communicate(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        out = func(*args, **kwargs)
        device = [tensor for tensor in tensors if tensor.device.type == DEVICE_TYPE]
        if not device or not arguments_of(func, args, kwargs).get("async_op", True):
            return out
        *made, _ = out
        for tensor in device:
            self._reduced[id(tensor.untyped_storage())] = tensor.untyped_storage()
        work = work_of(made[0], lambda: self._recorder.use(device))
        self._works.append(work)
        return (*made, work.boxed())

    def _reduced_is_used(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._reduced.pop(id(tensor.untyped_storage()), None) is not None:
                self._recorder.use([tensor])


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
