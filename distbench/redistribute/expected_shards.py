"""The part of a full tensor that a rank holds, computed independently of torch, to check results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distbench.planning.placement_states import State, state_of
from distbench.ranks.context import RankContext
from distbench.spec import UserError
from distbench.spec.placements import Placement, format_placements, parse_placements
from distbench.torch_private import is_strided_shard, strided_shard


@dataclass(frozen=True)
class Layout:
    """One side of a redistribution; without a state if no shard order corresponds to its strided shards."""

    placements: tuple[Placement, ...]
    state: State | None

    @classmethod
    def of(cls, text: str, tensor_ndim: int) -> "Layout":
        """Parse a layout such as "S(0)R"; strided shards have no state."""
        layout = cls(parse_placements(text), None)
        return layout if layout.is_strided else cls(layout.placements, state_of(layout.placements, tensor_ndim))

    def __str__(self) -> str:
        return format_placements(self.placements)

    @property
    def has_partial(self) -> bool:
        """Return whether a mesh dim has a pending reduction."""
        return any(placement.reduce_op for placement in self.placements)

    @property
    def is_strided(self) -> bool:
        """Return whether a mesh dim has a strided shard."""
        return any(placement.split_factor for placement in self.placements)

    @property
    def has_own_order(self) -> bool:
        """Return whether some tensor dim is not sharded from left to right."""
        return self.state is not None and any(tuple(sorted(order)) != order for order in self.state.orders)


@dataclass(frozen=True)
class Pair:
    """A redistribution of one tensor; `shape` is the full tensor's."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]

    @classmethod
    def of(cls, source: str, target: str, shape: tuple[int, ...]) -> "Pair":
        """Parse two layouts."""
        return cls(Layout.of(source, len(shape)), Layout.of(target, len(shape)), shape)

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


REDUCE_OPS = ("sum", "avg", "max", "min")
# Values of tagged tensors lie between 0 and this.
PERIOD = 61
# Consecutive parts differ by at least this many values, so that a part at the wrong offset is detected.
MIN_PART_PERIOD = 7


def parse_placement(text: str) -> Any:
    """Convert `"R"`, `"S(1)"`, `"P(sum)"` or `"_S(0,2)"` (a strided shard) to torch's placement."""
    try:
        (placement,) = parse_placements(text)
    except ValueError:
        placement = None
    if placement is None or placement.turn is not None or placement.reduce_op not in (None, *REDUCE_OPS):
        raise UserError(f"placement {text!r} is unknown; write R, S(tensor dim) or P(sum)")
    return torch_placement(placement)


def torch_placement(placement: Placement) -> Any:
    """Return torch's placement, without shard order."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if placement.reduce_op is not None:
        return Partial(placement.reduce_op)
    if placement.tensor_dim is None:
        return Replicate()
    if placement.split_factor is not None:
        return strided_shard(placement.tensor_dim, placement.split_factor)
    return Shard(placement.tensor_dim)


def shard_of(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return the shard of `full` at a mesh coordinate; Replicate and Partial do not divide the tensor.

    Mesh dims shard from left to right, each into ceil-sized chunks of the remainder, except that the strided shards of
    FSDP2 over TP come after all plain shards (TP sharded the parameter before FSDP2). The coordinate is the rank's
    index along each mesh dim.
    """
    for mesh_dim in sorted(range(len(placements)), key=lambda mesh_dim: is_strided_shard(placements[mesh_dim])):
        tensor_dim = getattr(placements[mesh_dim], "dim", None)
        if tensor_dim is not None:
            full = chunk_of(full, tensor_dim, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return full


def own_shard(full: torch.Tensor, placements: Sequence[Any], mesh: Any) -> torch.Tensor:
    """Return this rank's shard on a device mesh; for a packed parameter (gate and up in one) a chunk of each piece."""
    shape = tuple(mesh.shape)
    of = strided_shard_of if _is_packed(placements, shape) else shard_of
    return of(full, placements, shape, tuple(mesh.get_coordinate() or ()))


def _is_packed(placements: Sequence[Any], mesh_shape: Sequence[int]) -> bool:
    """Return whether a strided shard is the author's, not one of FSDP2 over a tensor dim that is sharded already."""
    for mesh_dim, placement in enumerate(placements):
        if is_strided_shard(placement):
            inner = zip(placements[mesh_dim + 1 :], mesh_shape[mesh_dim + 1 :], strict=True)
            sizes = [size for other, size in inner if getattr(other, "dim", None) == placement.dim]
            if placement.split_factor != math.prod(sizes):
                return True
    return False


def chunk_of(tensor: torch.Tensor, tensor_dim: int, num_chunks: int, index: int) -> torch.Tensor:
    """Return chunk `index` of `num_chunks` ceil-sized chunks along a tensor dim; the last may be short or empty."""
    length = tensor.shape[tensor_dim]
    size = -(-length // num_chunks)
    start = min(index * size, length)
    return tensor.narrow(tensor_dim, start, min(size, length - start))


def shard_in_order(
    full: torch.Tensor, orders: Sequence[Sequence[int]], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return the shard like `shard_of`, but for the mesh dims of each tensor dim in shard order (`State.orders`)."""
    for tensor_dim, order in enumerate(orders):
        for mesh_dim in order:
            full = chunk_of(full, tensor_dim, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return full


def strided_shard_of(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return the shard like `shard_of`, but always from left to right; a strided shard is a chunk of each piece, as in
    torch's `_StridedShard`.
    """
    for mesh_dim, placement in enumerate(placements):
        tensor_dim = getattr(placement, "dim", None)
        if tensor_dim is not None:
            factor = placement.split_factor if is_strided_shard(placement) else 1
            pieces = [chunk_of(full, tensor_dim, factor, index) for index in range(factor)]
            chunks = [chunk_of(piece, tensor_dim, mesh_shape[mesh_dim], coordinate[mesh_dim]) for piece in pieces]
            full = torch.cat(chunks, dim=tensor_dim)
    return full


def tagged(shape: Sequence[int], dtype: torch.dtype, period: int = PERIOD, shift: int = 0) -> torch.Tensor:
    """Return small integers, exact in every dtype, different from their neighbours: (offset + shift) mod period."""
    numel = math.prod(shape)
    pattern = ((torch.arange(period) + shift) % period).to(dtype)
    return pattern.repeat(numel // period + 1)[:numel].reshape(tuple(shape))


def part_of(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return the part of `full` that a rank contributes to the reduction, unsharded; `full` itself without Partial.

    Each rank contributes a different part, so that a missing rank is detected. `rounding_of` is the error of a correct
    reduction.
    """
    mesh_dims = _partial_dims(placements)
    if not mesh_dims:
        return full
    num_parts, part = 1, 0
    for mesh_dim in mesh_dims:
        num_parts, part = num_parts * mesh_shape[mesh_dim], part * mesh_shape[mesh_dim] + coordinate[mesh_dim]
    reduce_op = placements[mesh_dims[0]].reduce_op
    if reduce_op in ("max", "min"):
        # At each offset one part holds the value and all others differ from it, each by its own distance.
        distance = tagged(full.shape, full.dtype, num_parts, part)
        return full - distance if reduce_op == "max" else full + distance
    averaged = [mesh_shape[mesh_dim] for mesh_dim in mesh_dims if placements[mesh_dim].reduce_op == "avg"]
    return _summand(full, num_parts, part) * math.prod(averaged)


def _summand(full: torch.Tensor, num_parts: int, part: int) -> torch.Tensor:
    """Return a summand: parts 1 and 2, 3 and 4, ... cancel, so that partial sums remain small; part 0 is the rest."""
    num_pairs = num_parts // 2
    pair = (part + 1) // 2 if part else num_pairs
    noise = 1 + tagged(full.shape, full.dtype, max(num_pairs, MIN_PART_PERIOD), pair)
    if part:
        return noise if part % 2 else -noise
    # If the number of parts is even, the last one has no counterpart.
    return full.clone() if num_parts % 2 else full - noise


def torch_placements(layout: Layout) -> Any:
    """Return torch's placements, one per mesh dim, without shard orders."""
    return [torch_placement(placement) for placement in layout.placements]


def shard_under(full: torch.Tensor, layout: Layout, context: RankContext) -> torch.Tensor:
    """Return this rank's shard of `full` under a layout."""
    at = context.mesh_shape, context.coordinate
    if layout.is_strided or layout.state is None:
        return strided_shard_of(full, torch_placements(layout), *at).contiguous()
    return shard_in_order(full, layout.state.orders, *at).contiguous()


def dtensor_under(full: torch.Tensor, layout: Layout, context: RankContext) -> Any:
    """Return the DTensor whose value is `full`, with expected shards; under Partial each rank has its part."""
    placements = torch_placements(layout)
    part = part_of(full, placements, context.mesh_shape, context.coordinate)
    local = shard_under(part, layout, context).to(context.device)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, context.mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def rounding_of(source: Sequence[Any], target: Sequence[Any], mesh_shape: Sequence[int], dtype: torch.dtype) -> float:
    """Return the largest error of a correct redistribution of `part_of`'s parts, compared with the full tensor.

    The error is 0 if all sums are integers that the dtype represents, and all divisors (of averages, and of a replica
    that becomes parts) are powers of two.
    """
    before, after = _partial_dims(source), _partial_dims(target)
    num_parts = math.prod(mesh_shape[mesh_dim] for mesh_dim in before)
    num_pairs = num_parts // 2
    period = max(num_pairs, MIN_PART_PERIOD)
    largest_sum = PERIOD + sum(range(period - num_pairs + 1, period + 1))
    divided = [*after, *(mesh_dim for mesh_dim in before if source[mesh_dim].reduce_op == "avg")]
    eps = torch.finfo(dtype).eps
    if largest_sum <= 2 / eps and all(mesh_shape[mesh_dim].bit_count() == 1 for mesh_dim in divided):
        return 0.0
    return eps * num_parts * math.prod(mesh_shape[mesh_dim] for mesh_dim in after) * largest_sum


def _partial_dims(placements: Sequence[Any]) -> list[int]:
    return [mesh_dim for mesh_dim, placement in enumerate(placements) if placement.is_partial()]
