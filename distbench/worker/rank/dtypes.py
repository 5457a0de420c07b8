"""The dtype names of case ids, as torch has them."""

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
    """torch's default dtype is afterwards what it was, whatever code of the user's own sets."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def shape_text(shape: tuple[int, ...] | torch.Size) -> str:
    """`(4, 8)` to `"[4,8]"`."""
    return "[" + ",".join(str(int(size)) for size in shape) + "]"
