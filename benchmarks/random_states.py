"""Random layouts for whatever is checked on many of them: here and in the tests."""

import random
from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

from distbench.planning.placement_states import State


def random_state(rng: random.Random, mesh_ndim: int, tensor_ndim: int, reduce_ops: Sequence[str] = ()) -> State:
    """Any placement on each mesh dim, the shard order shuffled.

    Args:
        rng: draws.
        mesh_ndim: mesh dims.
        tensor_ndim: tensor dims.
        reduce_ops: of its Partials, each drawn from these; none, and there is no Partial.
    """
    orders: list[list[int]] = [[] for _ in range(tensor_ndim)]
    partials = []
    for mesh_dim in rng.sample(range(mesh_ndim), mesh_ndim):
        choice = rng.randrange(tensor_ndim + (2 if reduce_ops else 1))
        if choice < tensor_ndim:
            orders[choice].append(mesh_dim)
        elif choice > tensor_ndim:
            partials.append((mesh_dim, rng.choice(reduce_ops)))
    return State(mesh_ndim, tuple(map(tuple, orders)), tuple(sorted(partials)))


def spmd_shardings(names: Sequence[str]) -> list[Any]:
    """Every `TensorSharding` of a 2-D tensor: each axis over none or one of its dims, in every order."""
    import spmd_types as spmd

    result = []
    for dims in product((None, 0, 1), repeat=len(names)):
        sharded = [[name for name, dim in zip(names, dims, strict=True) if dim == number] for number in (0, 1)]
        result += [spmd.TensorSharding(*orders) for orders in product(*(list(permutations(axes)) for axes in sharded))]
    return result
