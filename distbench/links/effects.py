"""What is compared among links: hosts, ranks, pairs and groups, each against the median of its like in each pass."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.compare.intervals import Floats
from distbench.links.link_measurements import BANDWIDTH, COMPUTE, GROUPS, LATENCY, MIN_LIKE, Alike, LinkRun, Ranks

MIN_RANKS_OF_HOST, MIN_PAIRS_OF_HOST = 2, 3
THRESHOLD = 0.2  # slower by less is not worth a name
# Of a host's ranks and pairs, or pairs between two hosts, this share may be like others where the rest are not.
MAX_LIKE_OTHERS = 0.1
# What turns a median absolute deviation into a standard deviation, of normal values.
TO_DEVIATION = 1.4826
PRIOR_FREEDOM = 8
# Of a fit by least absolute deviations: how often it is weighted again, and the residual that counts as none.
ROUNDS_OF_FIT, LEAST_RESIDUAL, RIDGE = 20, 0.02, 1e-9
RANK, HOST, HOSTS, LINK, GROUP = "rank", "host", "hosts", "link", "group"


class Effects(NamedTuple):
    """Things of one kind and quantity: logarithms of times over the median of their like."""

    kind: str
    quantity: str
    level: str
    members: tuple[Ranks, ...]
    center: Floats
    error: Floats
    freedom: int


def of_hosts(links: LinkRun) -> Iterator[Effects]:
    """Each host by what its ranks compute: held against the middle one, of two against the faster.

    It is slow only where nearly all of its ranks are.
    """
    names = list(dict.fromkeys(links.hosts))
    for alike in links.alike:
        places = [[at for at, (rank, *_) in enumerate(alike.members) if links.hosts[rank] == name] for name in names]
        if alike.quantity != COMPUTE or len(names) < 2 or min(map(len, places)) < MIN_RANKS_OF_HOST:
            continue
        logs = np.log(np.maximum(alike.times_s, 1e-9))
        by_host = np.column_stack([logs[:, of_host].mean(axis=1) for of_host in places])
        middle = np.median(by_host, axis=1) if len(names) > 2 else by_host[:, [int(by_host.mean(axis=0).argmin())]].T[0]
        members = tuple(tuple(alike.members[at][0] for at in of_host) for of_host in places)
        found = effects_of(HOST, COMPUTE, "", members, by_host - middle[:, None])
        # How ranks of one host scatter says how far hosts that are alike may be apart.
        within = [logs[:, of_host].mean(axis=0).var(ddof=1) / len(of_host) for of_host in places]
        own = [(logs[:, of_host] - middle[:, None]).mean(axis=0) for of_host in places]
        error = np.sqrt(found.error**2 + float(np.median(within)))
        yield found._replace(center=np.minimum(found.center, _of_nearly_all(own)), error=error)


def of_host_links(links: LinkRun) -> Iterator[Effects]:
    """Each host by the links within it; against an earlier run also each two hosts by the links between them, since a
    link that is held against itself is like any other.

    They are slow only where nearly all of their pairs are: a slow rank is in half of them.
    """
    for (quantity, _), same in groupby(sorted(links.alike, key=_size_of), key=_size_of):
        taken: dict[Ranks, Floats] = {}
        for alike in same if quantity in (LATENCY, BANDWIDTH) else ():
            taken.update(zip(alike.members, np.log(np.maximum(alike.times_s, 1e-9)).T, strict=True))
        of: dict[frozenset[str], list[Ranks]] = {}
        for pair in taken:
            of.setdefault(frozenset(links.hosts[rank] for rank in pair), []).append(pair)
        if not links.is_relative:
            of = {hosts: pairs for hosts, pairs in of.items() if len(hosts) == 1}
            of = of if all(len(pairs) >= MIN_PAIRS_OF_HOST for pairs in of.values()) else {}
        # How pairs that belong together scatter says how far those that are alike may be apart.
        if len(of) > 1 and sum(map(len, of.values())) > len(of):
            yield from _of_host_pairs(quantity, of, taken)


def _of_host_pairs(
    quantity: str, of: Mapping[frozenset[str], list[Ranks]], taken: Mapping[Ranks, Floats]
) -> Iterator[Effects]:
    medians = np.column_stack([np.median([taken[pair] for pair in pairs], axis=0) for pairs in of.values()])
    middle = medians[:, int(medians.mean(axis=0).argmin())] if len(of) == 2 else np.median(medians, axis=1)
    own = [np.array([(taken[pair] - middle).mean() for pair in pairs]) for pairs in of.values()]
    apart = sum(float(((centers - np.median(centers)) ** 2).sum()) for centers in own)
    variance = apart / (sum(map(len, own)) - len(own))
    ranks = [tuple(sorted({rank for pair in pairs for rank in pair})) for pairs in of.values()]
    for kind, level, size in ((HOST, "within it", 1), (HOSTS, "between them", 2)):
        kept = [at for at, hosts in enumerate(of) if len(hosts) == size]
        if kept:
            found = effects_of(
                kind, quantity, level, tuple(ranks[at] for at in kept), (medians - middle[:, None])[:, kept]
            )
            error = np.sqrt(found.error**2 + variance / np.array([len(own[at]) for at in kept]))
            yield found._replace(center=np.minimum(found.center, _of_nearly_all(own)[kept]), error=error)


def _of_nearly_all(parts: Sequence[Floats]) -> Floats:
    """How slow nearly all parts of each thing are: what a few of them do is not the thing's."""
    return np.array([np.quantile(centers, MAX_LIKE_OTHERS, method="lower") for centers in parts])


def _size_of(alike: Alike) -> tuple[str, int]:
    return alike.quantity, alike.size_bytes


def of_ranks(links: LinkRun) -> Iterator[Effects]:
    """Each rank's own speed, and what it adds to its pairs."""
    for alike in links.alike:
        if alike.quantity == COMPUTE and len(alike.members) >= MIN_LIKE:
            yield effects_of(RANK, COMPUTE, "", alike.members, against_like(alike.times_s))
    for quantity in (LATENCY, BANDWIDTH):
        of_quantity = [one for one in links.alike if one.quantity == quantity and len(one.members) >= MIN_LIKE]
        pairs = [pair for one in of_quantity for pair in one.members]
        counts = Counter(rank for pair in pairs for rank in pair)
        if len(counts) >= MIN_LIKE and min(counts.values()) >= MIN_LIKE - 1:
            logs = np.column_stack([np.log(np.maximum(one.times_s, 1e-9)) for one in of_quantity])
            levels = [at for at, one in enumerate(of_quantity) for _ in one.members]
            ranks = sorted(counts)
            effects = rank_effects(logs, pairs, levels, ranks)
            effects -= np.median(effects, axis=1)[:, None]
            yield effects_of(RANK, quantity, "", tuple((rank,) for rank in ranks), effects)


def rank_effects(logs: Floats, pairs: Sequence[Ranks], levels: Sequence[int], ranks: Sequence[int]) -> Floats:
    """Return what each rank adds to its pairs' logarithms in each pass, shape (passes, ranks), up to a constant.

    A pair's logarithm is fitted to its level and to the effects of both ranks. The median of a level is no reference
    where about half of its pairs have a slow rank, as with one slow rank on each of two hosts. A link that is slow
    itself, and a pair of two slow ranks, which is as slow as one of them, are left out by their weights: those of
    least absolute deviations, by iterated least squares, from the mean over the passes.

    Args:
        logs: shape (passes, pairs).
        pairs, levels: of each column, its ranks and the number of its level.
        ranks: all of them.
    """
    # Three unknowns of each pair: of its two ranks, and of its level.
    unknowns = np.column_stack([np.searchsorted(ranks, pairs), len(ranks) + np.asarray(levels)])
    weights = np.ones(len(pairs))
    for _ in range(ROUNDS_OF_FIT):
        fitted = _fitted(logs.mean(axis=0, keepdims=True), unknowns, weights)[0]
        weights = 1 / np.maximum(np.abs(logs.mean(axis=0) - fitted[unknowns].sum(axis=1)), LEAST_RESIDUAL)
    return _fitted(logs, unknowns, weights)[:, : len(ranks)]


def _fitted(logs: Floats, unknowns: NDArray[np.int64], weights: Floats) -> Floats:
    """Return the unknowns of each row by weighted least squares; of those that are not determined, the least ones."""
    size = int(unknowns.max()) + 1
    normal, right = np.zeros((size, size)), np.zeros((size, len(logs)))
    for one in unknowns.T:
        np.add.at(right, one, (weights * logs).T)
        for other in unknowns.T:
            np.add.at(normal, (one, other), weights)
    normal += RIDGE * np.trace(normal) * np.eye(size)
    return np.asarray(np.linalg.solve(normal, right).T)


def of_links(alike: Alike, known: set[tuple[int, str]], explained: set[tuple[Ranks, str]]) -> Iterator[Effects]:
    """Pairs and groups without those of ranks that are named already, and pairs that are: `explained`."""
    if alike.quantity == COMPUTE:
        return
    kept = [
        at
        for at, members in enumerate(alike.members)
        if (members, alike.quantity) not in explained and not any((rank, alike.quantity) in known for rank in members)
    ]
    if len(kept) >= MIN_LIKE:
        kind = GROUP if alike.quantity == GROUPS else LINK
        members, against = tuple(alike.members[at] for at in kept), against_like(alike.times_s[:, kept])
        yield effects_of(kind, alike.quantity, alike.level, members, against)


def against_like(times_s: Floats) -> Floats:
    """Logarithms of times over the median of their pass; shape (passes, things)."""
    logs = np.log(np.maximum(times_s, 1e-9))
    return np.asarray(logs - np.median(logs, axis=1)[:, None])


def effects_of(kind: str, quantity: str, level: str, members: tuple[Ranks, ...], against: Floats) -> Effects:
    """Of few things how they scatter says nothing."""
    num_passes = len(against)
    center = against.mean(axis=0)
    spread = TO_DEVIATION * float(np.median(np.abs(center - np.median(center))))
    # A variance of few passes is itself uncertain: that of its like counts as so many more of them.
    own, freedom = against.var(axis=0, ddof=1), num_passes - 1
    moderated = (freedom * own + PRIOR_FREEDOM * np.median(own)) / (freedom + PRIOR_FREEDOM)
    # What noise alone makes its like scatter is in their errors already.
    scatter = max(spread**2 - float(np.median(own)) / num_passes, 0.0) if len(members) >= MIN_LIKE else 0.0
    error = np.sqrt(moderated / num_passes + scatter)
    return Effects(kind, quantity, level, members, center, error, freedom + PRIOR_FREEDOM)
