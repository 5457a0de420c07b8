"""Every collective that a piece of code issues, seen where torch dispatches it; works without real ranks too."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.worker.torch_internals.probe import require

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "recv_": "recv",
}
# Bookkeeping in the same namespaces: nothing travels.
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "barrier")
INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as it was issued on this rank.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"; any other op by its own name.
        op: as torch dispatches it, e.g. "c10d._allgather_base_".
        ranks: global ranks of its group.
        dtype: of what travels.
        payload_numel: elements of nccl-tests' size S: the full gathered or scattered buffer, else the input.
    """

    kind: str
    op: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    payload_numel: int


@contextlib.contextmanager
def each_collective(tell: Callable[[CollectiveCall], None]) -> Iterator[None]:
    """Call `tell` just before each collective of this thread (and of the backward that it runs) is issued.

    Raises:
        Unsupported: this torch dispatches collectives elsewhere.
    """
    require("collectives seen at dispatch")
    with _Mode(tell):
        yield


class _Mode(TorchDispatchMode):
    def __init__(self, tell: Callable[[CollectiveCall], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor's own dispatch first, then what it issues comes back here with plain tensors.
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        if func.namespace in NAMESPACES:
            call = _call_of(func, args, kwargs or {})
            if call is not None:
                self._tell(call)
        return func(*args, **(kwargs or {}))


def _call_of(func: Any, args: Any, kwargs: Any) -> CollectiveCall | None:
    name = func._schema.name.split("::")[1]
    if name in SILENT:
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    tensors = flat_tensors(next(given[name] for name in INPUTS if name in given))
    ranks, kind = _ranks_of(given), KINDS.get(name, name)
    numel = sum(tensor.numel() for tensor in tensors) * (len(ranks) if kind == "all_gather" else 1)
    return CollectiveCall(kind, f"{func.namespace}.{name}", ranks, tensors[0].dtype, numel)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in flat_tensors(one)]


def _ranks_of(given: dict[str, Any]) -> tuple[int, ...]:
    group: Any = given.get("group_name", given.get("process_group"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))
