"""Ranks, hosts and links that are slower than their like, by how much, and how sure that is.

A thing is held against the median of its like within each pass, so that what slows all of them down does not count.
What it takes longer than that median, as a logarithm, is an estimate with two errors: its own over the passes, and how
far its like scatter (median absolute deviation). It is named where Student's t puts it above the threshold at a
family-wise level of 5 % (Holm; hosts, ranks, and links with groups have a third of it each).
Variances are moderated by those of its like, as in G. K. Smyth, "Linear models and empirical Bayes methods for
assessing differential expression in microarray experiments" (2004), with a fixed prior.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from distbench.compare.intervals import Floats
from distbench.links.link_measurements import BANDWIDTH, COMPUTE, GROUPS, LATENCY, Alike, LinkRun, Ranks

LEVEL, NUM_FAMILIES = 0.05, 3
THRESHOLD = 0.2  # slower by less is not worth a name
MIN_LIKE, MIN_PASSES, MIN_RANKS_OF_HOST = 4, 4, 2
# What turns a median absolute deviation into a standard deviation, of normal values.
TO_DEVIATION = 1.4826
PRIOR_FREEDOM = 8
RANK, HOST, LINK, GROUP = "rank", "host", "link", "group"


@dataclass(frozen=True)
class Outlier:
    """What is slower than its like.

    Args:
        kind: RANK, HOST, LINK or GROUP.
        ranks: whose it is.
        host: their host, or hosts.
        quantity: in which it is slow.
        slowdown, low, high: times as long as its like, with the bounds of its 95 % interval.
        level: where its pairs' ranks are.
    """

    kind: str
    ranks: Ranks
    host: str
    quantity: str
    slowdown: float
    low: float
    high: float
    level: str = ""


@dataclass(frozen=True)
class LinkVerdict:
    """What was found.

    Args:
        outliers: slowest first.
        num_compared: ranks, links and groups that were held against their like.
        num_passes: of the run.
        detectable: what takes so many times as long as its like would have been named four times in five; nan for
            quantities that could not be compared.
        why_not: why nothing could be compared; "" where it could.
    """

    outliers: tuple[Outlier, ...]
    num_compared: int
    num_passes: int
    detectable: dict[str, float]
    why_not: str = ""


class _Effects(NamedTuple):
    """Things of one kind and quantity: logarithms of times over the median of their like."""

    kind: str
    quantity: str
    level: str
    members: tuple[Ranks, ...]
    center: Floats
    error: Floats
    freedom: int


def verdict_of(links: LinkRun, threshold: float = THRESHOLD) -> LinkVerdict:
    """Who is slower than their like by more than `threshold` (0.2: takes 1.2 times as long)."""
    num_passes = min(len(alike.times_s) for alike in links.alike)
    if num_passes < MIN_PASSES:
        why = f"{_too_few(num_passes, 'pass', 'passes')} to name anything; measure with --passes {MIN_PASSES} or more"
        return LinkVerdict((), 0, num_passes, {}, why)
    if len(links.hosts) < MIN_LIKE:
        few = _too_few(len(links.hosts), "rank", "ranks")
        why = f"{few} to tell which is slower than the others; {MIN_LIKE} are needed"
        return LinkVerdict((), 0, num_passes, {}, why)
    hosts, ranks = list(_of_hosts(links)), list(_of_ranks(links))
    slow_hosts = _named(hosts, threshold, links)
    of_hosts = {rank for one in slow_hosts for rank in one.ranks}
    slow_ranks = [
        one for one in _named(ranks, threshold, links) if one.quantity != COMPUTE or not of_hosts.issuperset(one.ranks)
    ]
    known = {(rank, quantity) for one in slow_ranks for rank in one.ranks for quantity in _explained(one.quantity)}
    others = [effects for alike in links.alike for effects in _of_links(alike, known)]
    found = [*slow_hosts, *slow_ranks, *_named(others, threshold, links)]
    found.sort(key=lambda one: -one.slowdown)
    counted = sum(len(effects.members) for effects in (*hosts, *ranks, *others))
    return LinkVerdict(tuple(found), counted, num_passes, _detectable([*ranks, *others], threshold))


def _too_few(number: int, one: str, several: str) -> str:
    return f"{number} {one} is too few" if number == 1 else f"{number} {several} are too few"


def _explained(quantity: str) -> tuple[str, ...]:
    """In which quantities a rank's links and groups are slow because the rank is."""
    return (LATENCY, BANDWIDTH, GROUPS) if quantity in (COMPUTE, BANDWIDTH) else (quantity,)


def _of_hosts(links: LinkRun) -> Iterator[_Effects]:
    """Each host by what its ranks compute: held against the middle one, of two against the faster."""
    names = list(dict.fromkeys(links.hosts))
    for alike in links.alike:
        places = [[at for at, (rank, *_) in enumerate(alike.members) if links.hosts[rank] == name] for name in names]
        if alike.quantity != COMPUTE or len(names) < 2 or min(map(len, places)) < MIN_RANKS_OF_HOST:
            continue
        logs = np.log(np.maximum(alike.times_s, 1e-9))
        by_host = np.column_stack([logs[:, of_host].mean(axis=1) for of_host in places])
        middle = np.median(by_host, axis=1) if len(names) > 2 else by_host[:, [int(by_host.mean(axis=0).argmin())]].T[0]
        members = tuple(tuple(alike.members[at][0] for at in of_host) for of_host in places)
        found = _effects(HOST, COMPUTE, "", members, by_host - middle[:, None])
        # How ranks of one host scatter says how far hosts that are alike may be apart.
        within = [logs[:, of_host].mean(axis=0).var(ddof=1) / len(of_host) for of_host in places]
        yield found._replace(error=np.sqrt(found.error**2 + float(np.median(within))))


def _of_ranks(links: LinkRun) -> Iterator[_Effects]:
    """Each rank's own speed, and the median over its pairs, each of which is held against those of its level."""
    for alike in links.alike:
        if alike.quantity == COMPUTE and len(alike.members) >= MIN_LIKE:
            yield _effects(RANK, COMPUTE, "", alike.members, _against_like(alike.times_s))
    for quantity in (LATENCY, BANDWIDTH):
        of_quantity = [one for one in links.alike if one.quantity == quantity and len(one.members) >= MIN_LIKE]
        pairs = [pair for one in of_quantity for pair in one.members]
        ranks = sorted({rank for pair in pairs for rank in pair})
        of_rank = {rank: [at for at, pair in enumerate(pairs) if rank in pair] for rank in ranks}
        if len(ranks) >= MIN_LIKE and min(map(len, of_rank.values())) >= MIN_LIKE - 1:
            against = np.column_stack([_against_like(one.times_s) for one in of_quantity])
            medians = np.column_stack([np.median(against[:, of_rank[rank]], axis=1) for rank in ranks])
            medians -= np.median(medians, axis=1)[:, None]
            yield _effects(RANK, quantity, "", tuple((rank,) for rank in ranks), medians)


def _of_links(alike: Alike, known: set[tuple[int, str]]) -> Iterator[_Effects]:
    """Pairs and groups without those of ranks that are named already."""
    if alike.quantity == COMPUTE:
        return
    kept = [
        at for at, members in enumerate(alike.members) if not any((rank, alike.quantity) in known for rank in members)
    ]
    if len(kept) >= MIN_LIKE:
        kind = GROUP if alike.quantity == GROUPS else LINK
        members, against = tuple(alike.members[at] for at in kept), _against_like(alike.times_s[:, kept])
        yield _effects(kind, alike.quantity, alike.level, members, against)


def _against_like(times_s: Floats) -> Floats:
    logs = np.log(np.maximum(times_s, 1e-9))
    return np.asarray(logs - np.median(logs, axis=1)[:, None])


def _effects(kind: str, quantity: str, level: str, members: tuple[Ranks, ...], against: Floats) -> _Effects:
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
    return _Effects(kind, quantity, level, members, center, error, freedom + PRIOR_FREEDOM)


def _named(family: Sequence[_Effects], threshold: float, links: LinkRun) -> list[Outlier]:
    """Holm's step-down over all things of these kinds: those that are surely above the threshold."""
    tests = []
    for effects in family:
        excess = (effects.center - np.log1p(threshold)) / np.maximum(effects.error, 1e-12)
        p_values = stdtr(effects.freedom, -excess)
        tests += [(float(p), effects, at) for at, p in enumerate(p_values)]
    tests.sort(key=lambda test: test[0])
    found = []
    for place, (p, effects, at) in enumerate(tests):
        if p * (len(tests) - place) > LEVEL / NUM_FAMILIES:
            break
        found.append(_outlier(effects, at, links))
    return found


def _outlier(effects: _Effects, at: int, links: LinkRun) -> Outlier:
    reach = float(stdtrit(effects.freedom, 0.975)) * effects.error[at]
    center = effects.center[at]
    ranks = effects.members[at]
    hosts = " and ".join(dict.fromkeys(links.hosts[rank] for rank in ranks))
    slowdown, low, high = (float(np.exp(value)) for value in (center, center - reach, center + reach))
    return Outlier(effects.kind, ranks, hosts, effects.quantity, slowdown, low, high, effects.level)


def _detectable(family: Sequence[_Effects], threshold: float) -> dict[str, float]:
    """By quantity, the slow-down that a thing of median error would have been named with four times in five."""
    num_tests = sum(len(effects.members) for effects in family)
    found: dict[str, float] = {}
    for effects in family:
        needed = stdtrit(effects.freedom, 1 - LEVEL / NUM_FAMILIES / num_tests) + stdtrit(effects.freedom, 0.8)
        reach = float(np.exp(np.log1p(threshold) + needed * np.median(effects.error)))
        found[effects.quantity] = max(found.get(effects.quantity, 0.0), reach)
    return found
