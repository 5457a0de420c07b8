"""Placement notation, one placement per mesh dim, as text and as data; the names of the redistribution planners.

`R` replicates and `S(0)` shards tensor dim 0. If several mesh dims shard one tensor dim, the order is from left to
right, unless `S(0)[1]` gives the position. `_S(0,2)` is a strided shard: each rank of the mesh dim has a chunk of each
of 2 pieces. `P(sum)` is a partial sum, to be reduced. Run files also contain strided shards as torch writes them:
`_S(0, 2)`, `SS(0, 2)`, `_StridedShard(dim=0, sf=2)`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_TOKEN = re.compile(
    r"R"
    r"|P\((?P<reduce_op>\w+)\)"
    r"|(?:S\((?:dim=)?(?P<plain>\d+)\)"
    r"|_?S(?:S|tridedShard)?\((?:dim=)?(?P<strided>\d+), *(?:sf=|split_factor=)?(?P<factor>\d+)\))"
    r"(?:\[(?P<turn>\d+)\])?"
)


@dataclass(frozen=True)
class Placement:
    """The effect of one mesh dim on a tensor: shards of a tensor dim, partial values, or replicas."""

    tensor_dim: int | None = None
    turn: int | None = None  # number of mesh dims that shard the tensor dim before this mesh dim; None if not given
    split_factor: int | None = None  # number of pieces of a strided shard; None for a plain shard
    reduce_op: str | None = None  # the pending reduction of partial values

    def __str__(self) -> str:
        if self.reduce_op is not None:
            return f"P({self.reduce_op})"
        if self.tensor_dim is None:
            return "R"
        strided = f"_S({self.tensor_dim},{self.split_factor})"
        shard = f"S({self.tensor_dim})" if self.split_factor is None else strided
        return shard if self.turn is None else f"{shard}[{self.turn}]"


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Parse texts such as `"S(0)[1]RP(sum)"`: one placement per mesh dim, outermost first. Raise ValueError for any
    other text."""
    matches = list(_TOKEN.finditer(text))
    if "".join(match.group() for match in matches) != text or not matches:
        raise ValueError(f"placements {text!r} are unknown; write R, S(tensor dim), S(tensor dim)[position] or P(sum)")
    placements = []
    for match in matches:
        reduce_op, plain, strided, *others = match.groups()
        tensor_dim, factor, turn = (None if number is None else int(number) for number in (plain or strided, *others))
        placements.append(Placement(tensor_dim, turn, factor, reduce_op))
    return tuple(placements)


def format_placements(placements: Iterable[Placement]) -> str:
    """Return the text that `parse_placements` parses."""
    return "".join(map(str, placements))


def shard_orders(placements: Sequence[Placement], tensor_ndim: int) -> tuple[tuple[int, ...], ...]:
    """Return for each tensor dim the mesh dims that shard it, in order.

    Raises:
        ValueError: the tensor lacks a tensor dim, or the positions on a tensor dim are not 0, 1, 2, ...
    """
    turns: list[list[tuple[int, int]]] = [[] for _ in range(tensor_ndim)]
    for mesh_dim, placement in enumerate(placements):
        if placement.tensor_dim is None:
            continue
        if placement.tensor_dim >= tensor_ndim:
            raise ValueError(f"placement {placement} shards a tensor dim that a {tensor_ndim}-D tensor lacks")
        shards = turns[placement.tensor_dim]
        shards.append((len(shards) if placement.turn is None else placement.turn, mesh_dim))
    if any(sorted(turn for turn, _ in shards) != list(range(len(shards))) for shards in turns):
        text = format_placements(placements)
        raise ValueError(f"placements {text!r} do not number the shards of each tensor dim 0, 1, 2, ... once each")
    return tuple(tuple(mesh_dim for _, mesh_dim in sorted(shards)) for shards in turns)


TORCH_PLANNERS = ("greedy", "min_cost")
# calibrated: the cheapest path under a profile. direct: one exchange without a path.
CALIBRATED = "calibrated"
OUR_PLANNERS = (CALIBRATED, "direct")
# The order resolves ties: planners with the fewest requirements on the user are first.
PLANNERS = (*TORCH_PLANNERS, *OUR_PLANNERS)
# DTensor's default: the baseline of comparisons.
BASELINE = "greedy"
# Suffix of a planner's name if its all-to-alls on CPU did not run as all-gathers; direct uses no all-to-all.
NATIVE = "+native"
VARIANTS = tuple(name + how for name in PLANNERS for how in ("", NATIVE) if name + how != f"direct{NATIVE}")
OUR_VARIANTS = tuple(name for name in VARIANTS if name.removesuffix(NATIVE) in OUR_PLANNERS)
