"""How a tensor lies on a mesh, as data: which mesh dims cut which tensor dim, in which order, and what is partial."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
_TOKEN = re.compile(r"R|S\((\d+)\)(?:\[(\d+)\])?|P\((\w+)\)")


class NotHandled(Exception):
    """A placement or shape unknown to this planner; callers fall back to torch's own. The message says which."""


@dataclass(frozen=True)
class State:
    """One layout of a tensor on a mesh; mesh dims named nowhere hold replicas.

    Args:
        mesh_ndim: number of mesh dims.
        orders: for each tensor dim, the mesh dims that cut it, outermost cut first.
        partials: (mesh dim, reduce op) of each mesh dim that still waits for its reduction, ascending.
    """

    mesh_ndim: int
    orders: tuple[tuple[int, ...], ...]
    partials: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        return "".join(self.placements())

    @property
    def tensor_ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.orders)

    def placements(self) -> tuple[str, ...]:
        """`("S(0)", "R", "P(sum)")`, one a mesh dim; `S(0)[1]` where a mesh dim does not cut in its default turn."""
        texts = ["R"] * self.mesh_ndim
        for mesh_dim, reduce_op in self.partials:
            texts[mesh_dim] = f"P({reduce_op})"
        for tensor_dim, order in enumerate(self.orders):
            default = tuple(sorted(order)) == order
            for turn, mesh_dim in enumerate(order):
                texts[mesh_dim] = f"S({tensor_dim})" + ("" if default else f"[{turn}]")
        return tuple(texts)


def parse_state(text: str, tensor_ndim: int) -> State:
    """`"S(0)R"`, `"S(0)[1]S(0)[0]"` or `"P(sum)S(1)"` to a state; `[turn]` is a mesh dim's place in the shard order.

    Args:
        text: one placement a mesh dim, outermost mesh dim first.
        tensor_ndim: number of tensor dims.

    Raises:
        ValueError: the text is no list of placements, or its turns are not 0, 1, 2, ... on a tensor dim.
        NotHandled: a reduce op that is unknown here.
    """
    matches = list(_TOKEN.finditer(text))
    if "".join(match.group(0) for match in matches) != text or not matches:
        raise ValueError(f"placements {text!r} are unknown; write R, S(tensor dim), S(tensor dim)[turn] or P(sum)")
    turns: list[list[tuple[int, int]]] = [[] for _ in range(tensor_ndim)]
    partials = []
    for mesh_dim, match in enumerate(matches):
        tensor_dim, turn, reduce_op = match.groups()
        if reduce_op is not None:
            partials.append((mesh_dim, known_reduce_op(reduce_op)))
        elif tensor_dim is not None:
            if int(tensor_dim) >= tensor_ndim:
                raise ValueError(f"placement {match.group(0)} cuts a tensor dim that a {tensor_ndim}-D tensor lacks")
            cuts = turns[int(tensor_dim)]
            cuts.append((len(cuts) if turn is None else int(turn), mesh_dim))
    for cuts in turns:
        if sorted(turn for turn, _ in cuts) != list(range(len(cuts))):
            raise ValueError(f"placements {text!r} do not number the cuts of each tensor dim 0, 1, 2, ... once each")
    orders = tuple(tuple(mesh_dim for _, mesh_dim in sorted(cuts)) for cuts in turns)
    return State(len(matches), orders, tuple(partials))


def known_reduce_op(reduce_op: str) -> str:
    """The reduce op itself.

    Raises:
        NotHandled: it is none of torch's plain ones.
    """
    if reduce_op not in REDUCE_OPS:
        raise NotHandled(f"reduce op {reduce_op!r}")
    return reduce_op


def local_shape(state: State, shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The largest local shape of any rank, elements; every cut is into ceil-sized chunks of what is left.

    Nested ceilings are one ceiling of the product, so the shard order does not matter here.
    """
    counts = [math.prod(mesh_shape[mesh_dim] for mesh_dim in order) for order in state.orders]
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


Box = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def box_of(state: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    """What one rank holds: for each tensor dim the interval (start, stop) of the full tensor, stop exclusive.

    Args:
        state: the layout; partial mesh dims hold the whole of what is left.
        shape: of the full tensor.
        mesh_shape: ranks along each mesh dim.
        coordinate: the rank's index along each mesh dim.
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
