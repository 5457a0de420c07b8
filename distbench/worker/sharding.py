"""Which part of a full tensor a rank holds, worked out here and not by DTensor: what results are checked against."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from distbench.spec import UserError
from distbench.worker.torch_internals import is_strided_shard

NOISE_PERIOD = 7


def parse_placement(text: str) -> Any:
    """`"R"`, `"S(1)"` or `"P(sum)"` to torch's placement.

    Raises:
        UserError: any other text.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if text == "R":
        return Replicate()
    if match := re.fullmatch(r"S\((\d+)\)", text):
        return Shard(int(match.group(1)))
    if match := re.fullmatch(r"P\((sum|avg|max|min)\)", text):
        return Partial(match.group(1))
    raise UserError(f"placement {text!r} is unknown; write R, S(tensor dim) or P(sum)")


def cut(full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Any:
    """The shard of `full` at a mesh coordinate; Replicate and Partial cut nothing.

    Mesh dims cut from left to right, each into ceil-sized chunks of what is left, except that the strided shards of
    FSDP2 over TP cut after all plain ones (the parameter was sharded by TP before FSDP saw it).

    Args:
        full: the global tensor.
        placements: one a mesh dim.
        mesh_shape: ranks along each mesh dim.
        coordinate: this rank's index along each mesh dim.
    """
    order = sorted(range(len(placements)), key=lambda mesh_dim: is_strided_shard(placements[mesh_dim]))
    local = full
    for mesh_dim in order:
        tensor_dim = getattr(placements[mesh_dim], "dim", None)
        if tensor_dim is not None:
            local = chunk_of(local, tensor_dim, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return local


def chunk_of(tensor: torch.Tensor, tensor_dim: int, num_chunks: int, index: int) -> torch.Tensor:
    """Chunk `index` of `num_chunks` ceil-sized ones along a tensor dim; the last ones may be short or empty."""
    length = tensor.shape[tensor_dim]
    size = -(-length // num_chunks)
    start = min(index * size, length)
    return tensor.narrow(tensor_dim, start, min(size, length - start))


def tagged(shape: Sequence[int], dtype: torch.dtype, period: int = 61, shift: int = 0) -> torch.Tensor:
    """Small integers, exact in every dtype, that tell neighbouring offsets apart: (offset + shift) mod period."""
    numel = 1
    for size in shape:
        numel *= size
    pattern = ((torch.arange(period) + shift) % period).to(dtype)
    return pattern.repeat(numel // period + 1)[:numel].reshape(tuple(shape))


def source_shard(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """This rank's local tensor of a DTensor whose value is `full`; Partial(sum) ranks hold parts that add up to it."""
    local = full
    partial_dims = [mesh_dim for mesh_dim, placement in enumerate(placements) if placement.is_partial()]
    if partial_dims:
        local = _partial(full, [mesh_shape[dim] for dim in partial_dims], [coordinate[dim] for dim in partial_dims])
    return cut(local, placements, mesh_shape, coordinate).contiguous()


def _partial(full: torch.Tensor, sizes: list[int], index: list[int]) -> torch.Tensor:
    num_parts, part = 1, 0
    for size, position in zip(sizes, index, strict=True):
        num_parts, part = num_parts * size, part * size + position
    noise = [tagged(full.shape, full.dtype, NOISE_PERIOD, shift) for shift in range(1, num_parts)]
    if part:
        return noise[part - 1]
    local = full.clone()
    for other in noise:
        local -= other
    return local
