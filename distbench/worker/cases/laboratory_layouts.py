"""How the laboratory's tensors lie on the mesh: placements, shard orders, strided shards. Plain data, no torch.

Notation, one placement a mesh dim: `R`, `S(0)`, `P(sum)`; `S(0)[1]` where a mesh dim cuts out of its turn; `_S(0,2)`
for a strided shard: tensor dim 0 is cut into 2 pieces, and of each piece this mesh dim takes its share.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distbench.planning import State, parse_state

STRIDED = re.compile(r"_S\((\d+),(\d+)\)")


@dataclass(frozen=True)
class Layout:
    """One side of a redistribution.

    Args:
        placements: one a mesh dim, in the notation above.
        state: the same as cuts in an order; None for strided shards that no order of cuts gives.
    """

    placements: tuple[str, ...]
    state: State | None

    def __str__(self) -> str:
        return "".join(self.placements)

    @property
    def has_partial(self) -> bool:
        """Whether a mesh dim still waits for its reduction."""
        return any(text.startswith("P") for text in self.placements)

    @property
    def is_strided(self) -> bool:
        """Whether a mesh dim has a strided shard."""
        return any(map(STRIDED.match, self.placements))

    @property
    def has_own_order(self) -> bool:
        """Whether some tensor dim is not cut from left to right."""
        return self.state is not None and any(tuple(sorted(order)) != order for order in self.state.orders)


def plain(placements: Sequence[str], tensor_ndim: int) -> Layout:
    """Placements whose cuts are made from left to right."""
    return Layout(tuple(placements), parse_state("".join(placements), tensor_ndim))


def plain_layouts(mesh_ndim: int, tensor_ndim: int, partial_op: str | None = None) -> Iterator[Layout]:
    """Every layout of R and S(d), and of Partial with one reduce op where one is given."""
    choices = ["R", *(f"S({dim})" for dim in range(tensor_ndim))]
    if partial_op:
        choices.append(f"P({partial_op})")
    for placements in itertools.product(choices, repeat=mesh_ndim):
        yield plain(placements, tensor_ndim)


def ordered_layouts(mesh_ndim: int, tensor_ndim: int) -> Iterator[Layout]:
    """Every layout of R and S(d) in every order of its cuts."""
    for layout in plain_layouts(mesh_ndim, tensor_ndim):
        assert layout.state is not None
        for orders in itertools.product(*(itertools.permutations(order) for order in layout.state.orders)):
            state = State(mesh_ndim, tuple(orders))
            yield Layout(state.placements(), state)


def strided(layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """The same layout with strided shards in the place of shard orders, as FSDP2 over TP writes it.

    A mesh dim's split factor is the product of the mesh dims to its right that cut the same tensor dim before it.
    """
    assert layout.state is not None
    placements = list(layout.placements)
    for tensor_dim, order in enumerate(layout.state.orders):
        for turn, mesh_dim in enumerate(order):
            factor = math.prod(mesh_shape[earlier] for earlier in order[:turn] if earlier > mesh_dim)
            placements[mesh_dim] = f"S({tensor_dim})" if factor == 1 else f"_S({tensor_dim},{factor})"
    return Layout(tuple(placements), layout.state)


def undecodable_layouts(mesh_shape: Sequence[int], tensor_ndim: int, factor: int = 2) -> Iterator[Layout]:
    """Every layout of R, S(d) and strided shards of one split factor that no order of cuts gives."""
    mesh_ndim = len(mesh_shape)
    known = {strided(layout, mesh_shape).placements for layout in ordered_layouts(mesh_ndim, tensor_ndim)}
    dims = range(tensor_ndim)
    choices = ["R", *(f"S({dim})" for dim in dims), *(f"_S({dim},{factor})" for dim in dims)]
    for placements in itertools.product(choices, repeat=mesh_ndim):
        if any(map(STRIDED.match, placements)) and placements not in known:
            yield Layout(placements, None)
