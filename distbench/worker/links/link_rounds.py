"""Who talks to whom while links are measured (every pair of ranks once, all ranks at a time), and who computes when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

WITHIN, SAME_PLACE, ACROSS = "within a host", "across hosts, same local rank", "across hosts"
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LinkRound:
    """Pairs of ranks that send to each other at the same time.

    Args:
        level: out of WITHIN, SAME_PLACE and ACROSS; "" for pairs of several levels.
        pairs: no rank is in two of them.
    """

    level: str
    pairs: Pairs


def link_rounds(hosts: Sequence[str]) -> list[LinkRound]:
    """Rounds that have every pair of ranks once.

    Where all hosts have the same even number of ranks, and there is one host or an even number, a round has pairs of
    one level, all ranks take part, and N ranks need N - 1 rounds. Pairs that cross from one host to another then share
    its links with as many others in each round. Otherwise levels may mix, and an odd number of ranks takes N rounds in
    which one waits.

    Args:
        hosts: each rank's host, in rank order.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    members, sizes = list(ranks_of.values()), {len(ranks) for ranks in ranks_of.values()}
    size, num_hosts = max(sizes, default=0), len(members)
    if len(sizes) > 1 or size % 2 * (size > 1) or num_hosts % 2 * (num_hosts > 1):
        return [LinkRound("", pairs) for pairs in tournament(len(hosts))]
    found = []
    for places in tournament(size):
        pairs = tuple((ranks[a], ranks[b]) for ranks in members for a, b in places)
        found.append(LinkRound(WITHIN, pairs))
    for meetings in tournament(num_hosts):
        for shift in range(size):
            pairs = tuple((members[a][i], members[b][(i + shift) % size]) for a, b in meetings for i in range(size))
            found.append(LinkRound(ACROSS if shift else SAME_PLACE, pairs))
    return found


def compute_turns(hosts: Sequence[str], at_once: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The ranks that compute at the same time, turn by turn, each rank once: all hosts at a time, and of a host as many
    ranks in each turn, so that one finds what the others do.

    Args:
        hosts: each rank's host, in rank order.
        at_once: how many ranks each host has room for.
    """
    queues = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        room = min(max(at_once[host], 1), len(ranks))
        size = max(size for size in range(1, room + 1) if len(ranks) % size == 0)
        queues.append([ranks[at : at + size] for at in range(0, len(ranks), size)])
    turns = zip_longest(*queues, fillvalue=[])
    return [tuple(sorted(chain.from_iterable(together))) for together in turns]


def tournament(num_players: int) -> list[Pairs]:
    """Each player against each other once: the circle method, n - 1 rounds for an even number, n for an odd one.

    Source: E. Lucas, "Recreations mathematiques" (1883), volume 2; the schedule of a round-robin tournament.
    """
    if num_players < 2:
        return []
    count, found = num_players + num_players % 2, []
    for number in range(count - 1):
        last = count - 1
        pairs = [(number, last)]
        pairs += [((number + step) % last, (number - step) % last) for step in range(1, count // 2)]
        found.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < num_players)))
    return found
