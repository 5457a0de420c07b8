"""Device meshes as ordered {mesh dim: size}, without torch; the numbers of ranks per host of each group.

A shape is a text of these numbers: `4` is 4 ranks on one host, `1+1` is 1 rank on each of two hosts, `2+2` is 2 ranks
on each; `2|1+1` is a mesh dim with some groups within a host and other groups across hosts. Ranks are numbered host by
host, and all groups of a mesh dim communicate at once, so a shape also implies how many groups share a host's link.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text, cut

RANKS_PER_CPU = 4  # more ranks would mainly measure contention for CPUs
MAX_RANKS = 1 << 16  # larger fake process groups of torch take minutes or exhaust memory
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
BATCH_DIMS = ("dp_replicate", "dp_shard", "ep")  # mesh dims along which ranks have different parts of the batch

Mesh = dict[str, int]


def parse_mesh(text: str) -> Mesh:
    """Parse `"dp_shard=2,tp=2"` to `{"dp_shard": 2, "tp": 2}`; raise UserError for an invalid or duplicate
    NAME=SIZE."""
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
    """Parse the size in a part of a mesh. Raise UserError for a size that is not valid."""
    if len(digits) > len(str(MAX_RANKS)) or not 1 <= int(digits) <= MAX_RANKS:
        problem = f"mesh part {cut(part)!r} has an invalid size"
        raise UserError(f"{problem}; give a whole number from 1 to {MAX_RANKS}")
    return int(digits)


def check_num_ranks(mesh: Mapping[str, int]) -> None:
    """Raise UserError for a mesh of more than MAX_RANKS ranks."""
    if mesh_size(mesh) > MAX_RANKS:
        problem = f"mesh {format_mesh(mesh)} has {count_text(mesh_size(mesh), 'rank')}"
        raise UserError(f"{problem}; give a mesh of at most {MAX_RANKS:,}")


def check_mesh_dims(mesh: Mapping[str, int], where: str = "") -> None:
    """Raise UserError for names that are not in MESH_DIMS, because no plan uses these. `where` begins the message."""
    for name in mesh:
        if name not in MESH_DIMS:
            raise UserError(f"{where}mesh dim {name!r} is unknown; use {', '.join(MESH_DIMS)}")


def format_mesh(mesh: Mapping[str, int]) -> str:
    """Return `"dp_shard=2,tp=2"` for `{"dp_shard": 2, "tp": 2}`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def fit_mesh(declared: Mapping[str, int], world_size: int) -> Mesh:
    """Return the declared mesh adapted to another number of ranks, with the same mesh dims in the same order.

    The last mesh dims have the fastest links, so each (last first) gets the largest size that divides its declared size
    and the remaining ranks. The first mesh dim gets the rest: `{"dp_shard": 2, "tp": 2}` is 4x2 on 8 ranks, 1x2 on 2
    ranks, 1x1 on 1 rank.
    """
    fitted, first = dict(declared), next(iter(declared))
    for name in reversed([name for name in declared if name != first]):
        fitted[name] = math.gcd(declared[name], world_size)
        world_size //= fitted[name]
    return {**fitted, first: world_size}


def mesh_size(mesh: Mapping[str, int]) -> int:
    """Return the number of ranks of a mesh."""
    return math.prod(mesh.values())


SHAPE = re.compile(r"[1-9]\d{0,8}(?:[+|][1-9]\d{0,8})*", re.ASCII)
MAX_LISTED_HOSTS = 4
WITHIN, RAIL, ACROSS, PARTLY = "within a host", "across hosts, same local rank", "across hosts", "partly across hosts"


def group_shape(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Return the shape of one group; `hosts` contains each rank's host, in rank order."""
    return "+".join(map(str, sorted(Counter(hosts[rank] for rank in ranks).values(), reverse=True)))


def dim_shape(groups: Iterable[Iterable[int]], hosts: Sequence[str]) -> str:
    """Return the shape of a mesh dim: the distinct shapes of its groups."""
    shapes = {group_shape(group, hosts) for group in groups}
    return "|".join(sorted(shapes, key=lambda shape: (shape.count("+"), shape)))


def mesh_shapes(mesh: Mapping[str, int], hosts: Sequence[str]) -> dict[str, str]:
    """Return the shapes of the mesh dims of a mesh over all ranks, and of all mesh dims together (names joined by
    "x")."""
    shapes, inner = {}, len(hosts)
    for name, size in mesh.items():
        inner //= size
        shapes[name] = dim_shape(groups_of(size, inner, len(hosts)), hosts)
    return shapes | {"x".join(mesh): group_shape(range(len(hosts)), hosts)}


def groups_of(size: int, stride: int, num_ranks: int) -> list[range]:
    """Return the groups of a mesh dim with this size; neighbours in a group are `stride` ranks apart."""
    starts = (block + at for block, at in product(range(0, num_ranks, size * stride), range(stride)))
    return [range(start, start + size * stride, stride) for start in starts]


def sizes_of(shape: str) -> set[int]:
    """Return the set of group sizes in a shape: one size for a mesh dim."""
    return {sum(map(int, group.split("+"))) for group in shape.split("|")}


def fits(measured: str, shape: str) -> bool:
    """Return whether a line measured for one shape is valid for another: the measured shape contains all its groups'
    shapes."""
    return not measured or set(shape.split("|")) <= set(measured.split("|"))


def slowest(shape: str) -> str:
    """Return the shape of the groups that span the most hosts, out of a mesh dim's shape."""
    return max(shape.split("|"), key=lambda group: group.count("+"))


def brief_shape(shape: str) -> str:
    """Format a shape for tables: `64x8` for 8 ranks on each of 64 hosts, which would be too long."""
    counts = shape.split("+")
    return f"{len(counts)}x{counts[0]}" if len(counts) > MAX_LISTED_HOSTS and len(set(counts)) == 1 else shape


def level_of(shape: str) -> str:
    """Describe a shape in words; "" for an unknown shape."""
    if not shape:
        return ""
    crosses = ["+" in group for group in shape.split("|")]
    if not any(crosses):
        return WITHIN
    if not all(crosses):
        return PARTLY
    return RAIL if set(shape) <= set("1+|") else ACROSS


def ranks_per_host(hosts: Sequence[str]) -> set[int]:
    """Return the numbers of ranks per host."""
    return set(Counter(hosts).values())


def more_like(hosts: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """Return hosts for another number of ranks, with the same number of ranks per host; () if this number differs
    between the given hosts."""
    if len(hosts) == num_ranks:
        return tuple(hosts)
    counts = ranks_per_host(hosts)
    return tuple(f"host {rank // min(counts)}" for rank in range(num_ranks)) if len(counts) == 1 else ()


def layout_text(hosts: Sequence[str]) -> str:
    """Return `8 ranks on 2 hosts (4+4)`."""
    counts = list(Counter(hosts).values())
    if len(counts) == 1:
        return f"{count_text(len(hosts), 'rank')} on one host"
    per_host = f"{counts[0]} each" if len(set(counts)) == 1 else "+".join(map(str, counts))
    return f"{count_text(len(hosts), 'rank')} on {count_text(len(counts), 'host')} ({per_host})"


def flattened(mesh: Mapping[str, int], hosts: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (shape, size, stride) of groups that occur in other meshes over these ranks, but not in this mesh.

    Mesh dims are split into prime factors, and neighbouring factors are joined. Groups across hosts must span all
    hosts, which limits their number. Each shape occurs once.
    """
    num_hosts, primes = len(set(hosts)), [prime for size in mesh.values() for prime in primes_of(size)]
    dim_shapes = {shape for name, shape in mesh_shapes(mesh, hosts).items() if name in mesh}
    by_shape: dict[str, tuple[int, int]] = {}
    for end in range(len(primes), 0, -1):
        stride = math.prod(primes[end:])
        for start in range(end):
            size = math.prod(primes[start:end])
            shape = dim_shape(groups_of(size, stride, len(hosts)), hosts)
            spans = {len(group.split("+")) for group in shape.split("|")}
            if shape not in dim_shapes and spans in ({1}, {num_hosts}):
                by_shape.setdefault(shape, (size, stride))
    return [(shape, *sizes) for shape, sizes in by_shape.items()]


def primes_of(number: int) -> list[int]:
    """Return the prime factors of a number, ascending."""
    primes, factor = [], 2
    while number > 1:
        while number % factor == 0:
            primes.append(factor)
            number //= factor
        factor += 1
    return primes
