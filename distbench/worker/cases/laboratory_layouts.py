"""The layouts that the laboratory's suites are made of. Plain data, no torch."""

import itertools
import math
from collections.abc import Iterator, Sequence

from distbench.planning import State
from distbench.spec.layouts import Placement
from distbench.worker.redistribute.tensor_layout import Layout


def plain_layouts(mesh_ndim: int, tensor_ndim: int, partial_op: str | None = None) -> Iterator[Layout]:
    """Every layout of R and S(d), and of Partial with one reduce op where one is given."""
    choices = ["R", *(f"S({dim})" for dim in range(tensor_ndim))]
    if partial_op:
        choices.append(f"P({partial_op})")
    for placements in itertools.product(choices, repeat=mesh_ndim):
        yield Layout.of("".join(placements), tensor_ndim)


def ordered_layouts(mesh_ndim: int, tensor_ndim: int) -> Iterator[Layout]:
    """Every layout of R and S(d) in every shard order."""
    for layout in plain_layouts(mesh_ndim, tensor_ndim):
        assert layout.state is not None
        for orders in itertools.product(*(itertools.permutations(order) for order in layout.state.orders)):
            state = State(mesh_ndim, tuple(orders))
            yield Layout(state.placements(), state)


def strided(layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """The same layout with strided shards in the place of shard orders, as FSDP2 over TP writes it.

    A mesh dim's split factor is the product of the mesh dims to its right that shard the same tensor dim before it.
    """
    assert layout.state is not None
    placements = list(layout.placements)
    for tensor_dim, order in enumerate(layout.state.orders):
        for turn, mesh_dim in enumerate(order):
            factor = math.prod(mesh_shape[earlier] for earlier in order[:turn] if earlier > mesh_dim)
            placements[mesh_dim] = Placement(tensor_dim, split_factor=None if factor == 1 else factor)
    return Layout(tuple(placements), layout.state)


def undecodable_layouts(mesh_shape: Sequence[int], tensor_ndim: int, factor: int = 2) -> Iterator[Layout]:
    """Every layout of R, S(d) and strided shards of one split factor that no shard order gives."""
    mesh_ndim = len(mesh_shape)
    known = {strided(layout, mesh_shape).placements for layout in ordered_layouts(mesh_ndim, tensor_ndim)}
    shards = [Placement(dim, split_factor=pieces) for pieces in (None, factor) for dim in range(tensor_ndim)]
    for placements in itertools.product([Placement(), *shards], repeat=mesh_ndim):
        layout = Layout(placements, None)
        if layout.is_strided and placements not in known:
            yield layout
