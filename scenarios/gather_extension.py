"""An example of FSDP2's all-gather extension: parameters gathered as bf16, or as int8 with a scale per row.

A parameter is wrapped in a tensor subclass with two hooks for FSDP2. The first converts this rank's shard to the
gathered format, the second converts the gathered tensors to a parameter. Optimizer and gradients use the fp32 shard.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class GatheredAs(torch.Tensor):
    """A tensor that behaves like the wrapped tensor, and keeps its class when FSDP2 splits, pads or moves it."""

    KEEPS_CLASS: ClassVar[set[Any]] = {
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.view.default,
        aten.as_strided.default,
        aten.clone.default,
        aten.detach.default,
        aten._to_copy.default,
        aten.copy_.default,
    }

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "GatheredAs":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Any], _: Any, size: Any, stride: Any) -> "GatheredAs":
        return cls(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(GatheredAs, lambda tensor: tensor.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if func in cls.KEEPS_CLASS else result


class Bf16Gathered(GatheredAs):
    """Gathered as bf16: half the bytes, 8 bits of mantissa."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.inner.bfloat16(),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        return unpacked(lambda: gathered[0].to(dtype), out)


class Int8Gathered(GatheredAs):
    """Gathered as int8 and one fp32 scale per row: a quarter of the bytes, error at most 1/254 of the row's maximum."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        rows = self.inner.flatten(1)
        scales = rows.abs().amax(dim=1).clamp(min=1e-12) / 127
        return ((rows / scales[:, None]).round().to(torch.int8), scales), None

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        values, scales = gathered
        return unpacked(lambda: values.to(dtype) * scales.to(dtype)[:, None], out)


def unpacked(compute: Callable[[], torch.Tensor], out: torch.Tensor | None) -> Any:
    """The gathered parameter: first a new tensor, with the buffers that FSDP2 may free; later written in place."""
    if out is None:
        value = compute()
        return value, (value,)
    # Through .data: backward saved this parameter, and a second gather must not count as a modification.
    out.data.copy_(compute())
    return None


EXTENSIONS = {"bf16": Bf16Gathered, "int8": Int8Gathered}


def gathered_as(form: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The value of `FsdpPlan.gather_extension` for "bf16" or "int8"."""
    return partial(_wrap, EXTENSIONS[form])


def _wrap(kind: type[GatheredAs], tensor: torch.Tensor) -> torch.Tensor:
    return kind(tensor)
