"""How a tensor lies on a mesh: which mesh dims shard which tensor dim, in which order, and what is partial."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from distbench.spec.placements import Placement, format_placements, parse_placements, shard_orders

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


class NotHandled(Exception):
    """A placement or shape unknown to this planner; callers fall back to torch's own. The message says which."""


@dataclass(frozen=True)
class State:
    """One layout of a tensor on a mesh; mesh dims named nowhere hold replicas."""

    mesh_ndim: int
    orders: tuple[tuple[int, ...], ...]  # for each tensor dim, the mesh dims that shard it, the first one first
    partials: tuple[tuple[int, str], ...] = ()  # (mesh dim, reduce op) where a reduction is waited for, ascending

    def __str__(self) -> str:
        return format_placements(self.placements())

    @property
    def tensor_ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.orders)

    def placements(self) -> tuple[Placement, ...]:
        """One a mesh dim; a shard names its turn where its tensor dim is not sharded from left to right."""
        placements = [Placement()] * self.mesh_ndim
        for mesh_dim, reduce_op in self.partials:
            placements[mesh_dim] = Placement(reduce_op=reduce_op)
        for tensor_dim, order in enumerate(self.orders):
            is_default = tuple(sorted(order)) == order
            for turn, mesh_dim in enumerate(order):
                placements[mesh_dim] = Placement(tensor_dim, None if is_default else turn)
        return tuple(placements)


def parse_state(text: str, tensor_ndim: int) -> State:
    """`"S(0)R"`, `"S(0)[1]S(0)[0]"` or `"P(sum)S(1)"` (the notation of `spec.layouts`) to a state; see `state_of`."""
    return state_of(parse_placements(text), tensor_ndim)


def state_of(placements: Sequence[Placement], tensor_ndim: int) -> State:
    """The state of placements.

    Raises:
        ValueError: turns that are not 0, 1, 2, ... on a tensor dim, or a strided shard.
        NotHandled: a reduce op that is unknown here.
    """
    if any(placement.split_factor is not None for placement in placements):
        text = format_placements(placements)
        raise ValueError(f"placements {text!r} have a strided shard; write S(tensor dim)[turn] for each of its shards")
    partials = [
        (mesh_dim, known_reduce_op(placement.reduce_op))
        for mesh_dim, placement in enumerate(placements)
        if placement.reduce_op is not None
    ]
    return State(len(placements), shard_orders(placements, tensor_ndim), tuple(partials))


def known_reduce_op(reduce_op: str) -> str:
    """The reduce op itself; NotHandled where it is none of torch's plain ones."""
    if reduce_op not in REDUCE_OPS:
        raise NotHandled(f"reduce op {reduce_op!r}")
    return reduce_op


def local_shape(state: State, shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The largest local shape of any rank, elements; every shard is a ceil-sized chunk of what is left.

    Nested ceilings are one ceiling of the product, so the shard order does not matter here.
    """
    counts = [math.prod(mesh_shape[mesh_dim] for mesh_dim in order) for order in state.orders]
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


Box = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def box_of(state: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    """What one rank holds: for each tensor dim the interval (start, stop) of the full tensor, stop exclusive.

    The coordinate is the rank's index along each mesh dim; partial mesh dims hold the whole of what is left.
    """
    box = []
    for size, order in zip(shape, state.orders, strict=True):
        start, stop = 0, size
        for mesh_dim in order:
            chunk = -(-(stop - start) // mesh_shape[mesh_dim])
            first = min(start + coordinate[mesh_dim] * chunk, stop)
            start, stop = first, min(first + chunk, stop)
        box.append((start, stop))
    return tuple(box)
