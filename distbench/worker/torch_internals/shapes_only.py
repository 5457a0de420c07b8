"""Tensors without values: a model of any size runs on them in seconds, and shows what does not fit together."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.worker.torch_internals.probe import Unsupported, require


class NeedsValues(Unsupported):
    """What was run asks for a value where only shapes are."""


class ShapesOnly:
    """torch's fake tensors: what is created while `on()` is open has a shape, dtype and device, but no memory."""

    def __init__(self) -> None:
        require("tensors without values")
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Run what is inside on shapes alone; tensors from outside lose their values inside.

        `NeedsValues` where it asks for a value, or for an operator that knows none but real tensors.
        """
        from torch._subclasses import fake_tensor

        needs_values = (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.UnsupportedFakeTensorException,
            fake_tensor.UnsupportedOperatorException,
        )
        try:
            with self._mode, _MaskedWrites():
                yield
        except needs_values as error:
            raise NeedsValues(f"asks for values ({getattr(error, 'func', None) or type(error).__name__})") from error


class _MaskedWrites(TorchDispatchMode):
    """`x[mask] = number` without asking how many elements the mask has; vocabulary parallel embeddings do that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default and len(args) == 3:
            given, (mask, *others), value = args
            if not others and mask is not None and mask.dtype == torch.bool and value.numel() == 1:
                shape = (*mask.shape, *(1 for _ in range(given.ndim - mask.ndim)))
                return given.masked_fill_(mask.reshape(shape), value.reshape(()))
        return func(*args, **(kwargs or {}))
