"""What an operator's time depends on: its floating point operations, and the bytes it reads and writes."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distbench.simulate.recording import ATTENTION, ATTENTION_BACKWARD, MATMUL, MEMORY
from distbench.worker.torch_internals import arguments_of, is_attention, written_by

# Makes a tensor and writes nothing into it, or only tells of one.
MAKES_OR_TELLS = ("empty", "new_empty", "lift_fresh", "is_same_size", "sym_", "record_stream", "set_", "resize_")
# In place, and what was there before is not read.
OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")
# FlashAttention-2's backward holds, while it runs, dQ in fp32 and a number a row of the softmax.
WORKSPACE_BYTES = 4


def _flop_formulas() -> Mapping[Any, Any]:
    """Those of torch's FlopCounterMode.

    It and what else of torch a recording needs import triton, where there is one: no simulated device has its kernels,
    and it takes 80 MB.
    """
    modules: dict[str, Any] = sys.modules
    hides_triton = "triton" not in modules
    if hides_triton:
        modules["triton"] = None
    try:
        importlib.import_module("torch.distributed.tensor.debug")
        formulas: Mapping[Any, Any] = importlib.import_module("torch.utils.flop_counter").flop_registry
    finally:
        if hides_triton:
            del modules["triton"]
    return formulas


FLOP_FORMULAS = _flop_formulas()


def costs_nothing(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], writes: bool) -> bool:
    """Whether an operator launches nothing: it makes room, tells of a tensor, or gives another view of one."""
    name = func.overloadpacket.__name__
    if func.is_view or any(name.startswith(prefix) for prefix in MAKES_OR_TELLS):
        return True
    if writes or not outputs:
        return False
    given = {id(tensor.untyped_storage()) for tensor in inputs}
    return all(id(tensor.untyped_storage()) in given for tensor in outputs)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, str]:
    """Floating point operations as torch's FlopCounterMode counts them, and the operator's kind.

    Attention is counted by its formula: 4 b h s_q s_k d forward, 2.5 times that backward (FlashAttention computes the
    scores again; Dao 2023), and half where it is causal.
    """
    forward, backward = is_attention(func)
    if forward or backward:
        given = arguments_of(func, args, kwargs)
        batch, heads, queries, head_dim = given["query"].shape
        keys = given["key"].shape[-2]
        flops = 4 * batch * heads * queries * keys * head_dim
        if given.get("is_causal", False):
            flops //= 2
        return (flops * 5 // 2, ATTENTION_BACKWARD) if backward else (flops, ATTENTION)
    if func.overloadpacket in FLOP_FORMULAS:
        return int(FLOP_FORMULAS[func.overloadpacket](*args, **kwargs, out_val=out)), MATMUL
    return 0, MEMORY


def shape_of_attention(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Queries, keys, and 1 where it is causal; nothing of other operators."""
    if not any(is_attention(func)):
        return []
    given = arguments_of(func, args, kwargs)
    return [given["query"].shape[-2], given["key"].shape[-2], int(given.get("is_causal", False))]


def workspace_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """What attention's backward allocates for itself while it runs; 0 for other operators."""
    if not is_attention(func)[1]:
        return 0
    batch, heads, queries, head_dim = arguments_of(func, args, kwargs)["query"].shape
    return int(batch * heads * queries * (head_dim + 1) * WORKSPACE_BYTES)


def bytes_touched(
    func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    """Bytes that an operator reads and writes: each tensor once, one that it changes in place twice.

    Operators that touch only a part of what they are given are counted by that part.
    """
    name = f"{func.namespace}::{func.overloadpacket.__name__}"
    made = sum(map(num_bytes, outputs))
    if name == "fsdp::all_gather_copy_in":
        # Its outputs are the whole gathered buffer, and this rank's part of it, which is what is copied.
        return 2 * (made - max(map(num_bytes, outputs)))
    if name in {"aten::embedding", "aten::index"}:
        return 2 * made
    if name == "aten::nll_loss_backward":
        return made
    if name == "aten::nll_loss_forward":
        return sum(map(num_bytes, inputs[1:])) * 2
    seen, touched = set(), 0
    for tensor in (*inputs, *outputs):
        key = (id(tensor.untyped_storage()), tensor.storage_offset(), tuple(tensor.shape))
        if key not in seen:
            seen.add(key)
            touched += num_bytes(tensor)
    if name not in OVERWRITES:
        touched += sum(map(num_bytes, written_by(func, args, kwargs)))
    return touched


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in parts for tensor in tensors_in(one)]


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; what is expanded counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
