"""What a sentence about a plan says at its end: which sizes would do, and a mesh that has one."""

from collections.abc import Sequence

from distbench.spec.mesh import format_mesh
from distbench.worker.rank.rank_context import RankContext

# Of the sizes that a sentence names.
LARGEST_SIZE = 64


def mesh_that_works(number: int, mesh_dims: Sequence[str], context: RankContext) -> str:
    """The mesh with each of these mesh dims no larger than it is, so that together they shard `number` evenly."""
    left, chosen = number, dict(zip(context.mesh_dims, context.mesh_shape, strict=True))
    for name in mesh_dims:
        chosen[name] = max(size for size in range(1, chosen[name] + 1) if left % size == 0)
        left //= chosen[name]
    return f"--mesh {format_mesh(chosen)} works"


def undivided(what: str, number: int, mesh_dims: Sequence[str], context: RankContext) -> str:
    """That the mesh dims do not shard a tensor dim (or batch) of `number` evenly, as a sentence that begins `what`."""
    _, size = context.index(tuple(mesh_dims))
    where = f"mesh dim {'x'.join(mesh_dims)!r} of size {size}"
    sizes = ", ".join(str(size) for size in range(1, min(number, LARGEST_SIZE) + 1) if number % size == 0)
    return (
        f"{what} over {where}: {number} is not a multiple of {size}; sizes that work: {sizes}; "
        f"{mesh_that_works(number, mesh_dims, context)}"
    )
