"""Device meshes as ordered {mesh dim name: size}; torch sees them only in the worker."""

import math
from collections.abc import Mapping

from distbench.spec.errors import UserError
from distbench.spec.printable import count_text, cut

MAX_RANKS = 1 << 16  # torch's fake process groups of more take minutes, or all memory
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")

Mesh = dict[str, int]


def parse_mesh(text: str) -> Mesh:
    """`"dp_shard=2,tp=2"` to `{"dp_shard": 2, "tp": 2}`; `UserError` where a part is no known NAME=SIZE, or comes
    twice."""
    mesh: Mesh = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not (size.isascii() and size.removeprefix("-").isdigit()):
            raise UserError(f"mesh part {cut(part)!r} is not NAME=SIZE; write for example --mesh dp_shard=2,tp=2")
        if name in mesh:
            raise UserError(f"mesh dim {name!r} is given twice in {cut(text)!r}; give each mesh dim once")
        mesh[name] = mesh_dim_size(size, part)
    check_mesh_dims(mesh)
    check_num_ranks(mesh)
    return mesh


def mesh_dim_size(digits: str, part: str) -> int:
    """The size that a part of a mesh gives; UserError where no mesh dim has such a size."""
    if len(digits) > len(str(MAX_RANKS)) or not 1 <= int(digits) <= MAX_RANKS:
        wrong = f"mesh part {cut(part)!r} has a size that no mesh dim has"
        raise UserError(f"{wrong}; give a whole number from 1 to {MAX_RANKS}")
    return int(digits)


def check_num_ranks(mesh: Mapping[str, int]) -> None:
    """Refuse a mesh of more ranks than MAX_RANKS."""
    if mesh_size(mesh) > MAX_RANKS:
        wrong = f"mesh {format_mesh(mesh)} has {count_text(mesh_size(mesh), 'rank')}"
        raise UserError(f"{wrong}; give a mesh of at most {MAX_RANKS:,}")


def check_mesh_dims(mesh: Mapping[str, int], where: str = "") -> None:
    """Refuse names that are not in MESH_DIMS: no plan knows them. `where` begins the sentence."""
    for name in mesh:
        if name not in MESH_DIMS:
            raise UserError(f"{where}mesh dim {name!r} is unknown; use {', '.join(MESH_DIMS)}")


def format_mesh(mesh: Mapping[str, int]) -> str:
    """`{"dp_shard": 2, "tp": 2}` to `"dp_shard=2,tp=2"`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def fit_mesh(declared: Mapping[str, int], world_size: int) -> Mesh:
    """The declared mesh adapted to another number of ranks (all are used), mesh dims and their order kept.

    The last mesh dims are the fastest links, so they keep as much of their declared size as divides what is left;
    the first mesh dim takes the rest: `{"dp_shard": 2, "tp": 2}` on 8 ranks is 4x2, on 2 ranks 1x2, on 1 rank 1x1.
    """
    left = world_size
    fitted: Mesh = {}
    first, *rest = declared
    for name in reversed(rest):
        fitted[name] = math.gcd(declared[name], left)
        left //= fitted[name]
    fitted[first] = left
    return {name: fitted[name] for name in declared}


def mesh_size(mesh: Mapping[str, int]) -> int:
    """Number of ranks the mesh needs."""
    return math.prod(mesh.values())
