"""Over which links a mesh dim's groups communicate: how many ranks of a group each host has.

A shape is written as those numbers: `4` are four ranks of one host, `1+1` one of each of two hosts, `2+2` two of each,
`2|1+1` a mesh dim of which some groups stay within a host and others cross. Ranks are numbered host by host, and all
groups of a mesh dim communicate at once, so on the same hosts a shape also says how many groups share a host's link.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from distbench.spec.printable import count_text

SHAPE = re.compile(r"[1-9]\d{0,8}(?:[+|][1-9]\d{0,8})*", re.ASCII)
WITHIN, RAIL, ACROSS, PARTLY = "within a host", "across hosts, same local rank", "across hosts", "partly across hosts"


def group_shape(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """The shape of one group; `hosts` has each rank's host, in rank order."""
    return "+".join(map(str, sorted(Counter(hosts[rank] for rank in ranks).values(), reverse=True)))


def dim_shape(groups: Iterable[Iterable[int]], hosts: Sequence[str]) -> str:
    """The shapes of all groups of a mesh dim, each once."""
    return "|".join(
        sorted({group_shape(group, hosts) for group in groups}, key=lambda shape: (shape.count("+"), shape))
    )


def mesh_shapes(mesh: Mapping[str, int], hosts: Sequence[str]) -> dict[str, str]:
    """Mesh dim, and all of them joined by "x", to its shape; of a mesh over all ranks in order, outermost first."""
    found, inner = {}, len(hosts)
    for name, size in mesh.items():
        inner //= size
        found[name] = dim_shape(groups_of(size, inner, len(hosts)), hosts)
    return found | {"x".join(mesh): group_shape(range(len(hosts)), hosts)}


def groups_of(size: int, stride: int, num_ranks: int) -> list[range]:
    """The groups of a mesh dim of this size whose neighbours are `stride` ranks apart."""
    starts = (block + at for block, at in product(range(0, num_ranks, size * stride), range(stride)))
    return [range(start, start + size * stride, stride) for start in starts]


def is_shape(told: object) -> bool:
    """Whether it is a shape, or "" for an unknown one."""
    return isinstance(told, str) and (not told or SHAPE.fullmatch(told) is not None)


def sizes_of(shape: str) -> set[int]:
    """How many ranks the groups of a shape have: one number, where it is of groups of a mesh dim."""
    return {sum(map(int, one.split("+"))) for one in shape.split("|")}


def fits(measured: str, shape: str) -> bool:
    """Whether a line measured over groups of one shape is that of another: all of its patterns are among them."""
    return not measured or set(shape.split("|")) <= set(measured.split("|"))


def slowest(shape: str) -> str:
    """Of a mesh dim whose groups lie differently, the shape of those that span most hosts."""
    return max(shape.split("|"), key=lambda one: one.count("+"))


def level_of(shape: str) -> str:
    """In words; empty for an unknown shape."""
    if not shape:
        return ""
    crosses = ["+" in one for one in shape.split("|")]
    if not any(crosses):
        return WITHIN
    if not all(crosses):
        return PARTLY
    return RAIL if set(shape) <= set("1+|") else ACROSS


def ranks_per_host(hosts: Sequence[str]) -> set[int]:
    """How many ranks share a host."""
    return set(Counter(hosts).values())


def more_like(hosts: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """Hosts for another number of ranks, as many on each; none where these differ in that."""
    if len(hosts) == num_ranks:
        return tuple(hosts)
    counts = ranks_per_host(hosts)
    return tuple(f"host {rank // min(counts)}" for rank in range(num_ranks)) if len(counts) == 1 else ()


def layout_text(hosts: Sequence[str]) -> str:
    """`8 ranks on 2 hosts (4+4)`."""
    counts = list(Counter(hosts).values())
    if len(counts) == 1:
        return f"{count_text(len(hosts), 'rank')} on one host"
    each = f"{counts[0]} each" if len(set(counts)) == 1 else "+".join(map(str, counts))
    return f"{count_text(len(hosts), 'rank')} on {count_text(len(counts), 'host')} ({each})"


def flattened(mesh: Mapping[str, int], hosts: Sequence[str]) -> list[tuple[str, int, int]]:
    """(shape, size, stride) of groups that no mesh dim has: what other meshes over these ranks consist of.

    Mesh dims are split into primes, and neighbouring ones joined. Of those that cross hosts only such as span all hosts
    are there: with many hosts there would be too many. The first of each shape.
    """
    num_hosts, primes = len(set(hosts)), [prime for size in mesh.values() for prime in primes_of(size)]
    own = {shape for name, shape in mesh_shapes(mesh, hosts).items() if name in mesh}
    found: dict[str, tuple[int, int]] = {}
    for end in range(len(primes), 0, -1):
        stride = math.prod(primes[end:])
        for start in range(end):
            size = math.prod(primes[start:end])
            shape = dim_shape(groups_of(size, stride, len(hosts)), hosts)
            spans = {len(one.split("+")) for one in shape.split("|")}
            if shape not in own and spans in ({1}, {num_hosts}):
                found.setdefault(shape, (size, stride))
    return [(shape, *sizes) for shape, sizes in found.items()]


def primes_of(number: int) -> list[int]:
    """Its prime factors, ascending."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found
