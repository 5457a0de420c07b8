"""Which part of a full tensor a rank holds, worked out here and not by DTensor: what results are checked against."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from distbench.spec import UserError
from distbench.worker.torch_internals import is_strided_shard, strided_shard

NOISE_PERIOD = 7


def parse_placement(text: str) -> Any:
    """`"R"`, `"S(1)"`, `"P(sum)"` or `"_S(0,2)"` (a strided shard) to torch's placement.

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
    if match := re.fullmatch(r"_S\((\d+),(\d+)\)", text):
        return strided_shard(int(match.group(1)), int(match.group(2)))
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


def cut_in_order(
    full: torch.Tensor, orders: Sequence[Sequence[int]], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """The shard of `full` at a mesh coordinate where the mesh dims cut in a given order.

    Args:
        full: the global tensor.
        orders: for each tensor dim, the mesh dims that cut it, outermost cut first.
        mesh_shape: ranks along each mesh dim.
        coordinate: this rank's index along each mesh dim.
    """
    for tensor_dim, order in enumerate(orders):
        for mesh_dim in order:
            full = chunk_of(full, tensor_dim, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return full


def cut_strided(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """The shard of `full` where each mesh dim cuts in its turn, and a strided one takes its chunk of several pieces.

    This is what torch says a `_StridedShard` means, whether or not an order of plain cuts gives the same.

    Args:
        full: the global tensor; each piece must be divisible.
        placements: one a mesh dim.
        mesh_shape: ranks along each mesh dim.
        coordinate: this rank's index along each mesh dim.
    """
    for mesh_dim, placement in enumerate(placements):
        tensor_dim = getattr(placement, "dim", None)
        if tensor_dim is not None:
            factor = placement.split_factor if is_strided_shard(placement) else 1
            pieces = [chunk_of(full, tensor_dim, factor, index) for index in range(factor)]
            own = [chunk_of(piece, tensor_dim, mesh_shape[mesh_dim], coordinate[mesh_dim]) for piece in pieces]
            full = torch.cat(own, dim=tensor_dim)
    return full


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
    """This rank's local tensor of a DTensor whose value is `full`; Partial ranks hold parts that reduce to it."""
    return cut(part_of(full, placements, mesh_shape, coordinate), placements, mesh_shape, coordinate).contiguous()


def part_of(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """The uncut part of `full` that a rank contributes to the reduction; `full` itself without Partial.

    No two ranks contribute the same, so that a rank left out of the reduction shows. Sums of parts are exact; averages
    are where the number of parts is a power of two.
    """
    mesh_dims = [mesh_dim for mesh_dim, placement in enumerate(placements) if placement.is_partial()]
    if not mesh_dims:
        return full
    num_parts, part = 1, 0
    for mesh_dim in mesh_dims:
        num_parts, part = num_parts * mesh_shape[mesh_dim], part * mesh_shape[mesh_dim] + coordinate[mesh_dim]
    reduce_op = placements[mesh_dims[0]].reduce_op
    if reduce_op in ("max", "min"):
        # At each offset one part holds the value and all others miss it, each by its own distance.
        distance = tagged(full.shape, full.dtype, num_parts, part)
        return full - distance if reduce_op == "max" else full + distance
    noise = [tagged(full.shape, full.dtype, NOISE_PERIOD, shift) for shift in range(1, num_parts)]
    if part:
        return noise[part - 1]
    local = full * num_parts if reduce_op == "avg" else full.clone()
    for other in noise:
        local -= other
    return local
