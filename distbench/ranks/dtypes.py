"""Dtypes by their names in case ids and results."""

import contextlib
from collections.abc import Iterator

import torch

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.int64: "i64", torch.int32: "i32"}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` to `"f32"`."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


@contextlib.contextmanager
def default_dtype_kept() -> Iterator[None]:
    """Restore torch's default dtype afterwards, in case the user's code changes it."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
