"""Ranks, hosts and links that are slower than their like, by how much, and how sure that is.

A thing is held against the median of its like within each pass, so that what slows all of them down does not count.
What it takes longer than that median, as a logarithm, is an estimate with two errors: its own over the passes, and how
far its like scatter (median absolute deviation). It is named where Student's t puts it above the threshold at a
family-wise level of 5 % (Holm; hosts, ranks, and links with groups have a third of it each).
Variances are moderated by those of its like, as in G. K. Smyth, "Linear models and empirical Bayes methods for
assessing differential expression in microarray experiments" (2004), with a fixed prior.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

from distbench.links.effects import (
    HOST,
    HOSTS,
    THRESHOLD,
    Effects,
    of_host_links,
    of_hosts,
    of_links,
    of_ranks,
)
from distbench.links.link_measurements import BANDWIDTH, COMPUTE, GROUPS, LATENCY, MIN_LIKE, LinkRun, Ranks

LEVEL, NUM_FAMILIES, MIN_PASSES = 0.05, 3, 4


@dataclass(frozen=True)
class Outlier:
    """What is slower than its like.

    Args:
        kind: RANK, HOST, HOSTS (the links between two), LINK or GROUP.
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
        too_few: links that were left out, being too few of their kind: how many, and where.
    """

    outliers: tuple[Outlier, ...]
    num_compared: int
    num_passes: int
    detectable: dict[str, float]
    why_not: str = ""
    too_few: tuple[str, ...] = ()


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
    hosts, ranks = [*of_hosts(links), *of_host_links(links)], list(of_ranks(links))
    slow_hosts = _named(hosts, threshold, links)
    computing = {one.ranks for one in slow_hosts if one.quantity == COMPUTE}
    slow_hosts = [one for one in slow_hosts if one.quantity == COMPUTE or one.ranks not in computing]
    of_slow = {(rank, one.quantity) for one in slow_hosts if one.kind == HOST for rank in one.ranks}
    slow_ranks = [
        one
        for one in _named(ranks, threshold, links)
        if one.quantity != COMPUTE or (one.ranks[0], one.quantity) not in of_slow
    ]
    known = {(rank, quantity) for one in slow_ranks for rank in one.ranks for quantity in _explained(one.quantity)}
    explained = {(pair, one.quantity) for one in slow_hosts for pair in _pairs_of(one, links)}
    others = [effects for alike in links.alike for effects in of_links(alike, known, explained)]
    found = [*slow_hosts, *slow_ranks, *_named(others, threshold, links)]
    found.sort(key=lambda one: -one.slowdown)
    counted = sum(len(effects.members) for effects in (*hosts, *ranks, *others))
    too_few = _too_few_alike(links)
    return LinkVerdict(tuple(found), counted, num_passes, _detectable([*ranks, *others], threshold), "", too_few)


def _too_few_alike(links: LinkRun) -> tuple[str, ...]:
    """Links of which there are too few of a kind to hold one against the others."""
    few = [one for one in links.alike if one.quantity in (LATENCY, BANDWIDTH) and len(one.members) < MIN_LIKE]
    return tuple(dict.fromkeys(f"{len(one.members)} {one.level or 'of all'}" for one in few))


def _pairs_of(slow: Outlier, links: LinkRun) -> list[Ranks]:
    """The pairs within a slow host, or between two hosts whose links are."""
    wanted = {links.hosts[rank] for rank in slow.ranks}
    if slow.quantity == COMPUTE or len(wanted) != (2 if slow.kind == HOSTS else 1):
        return []
    pairs = [pair for one in links.alike if one.quantity == slow.quantity for pair in one.members]
    return [pair for pair in pairs if {links.hosts[rank] for rank in pair} == wanted]


def _too_few(number: int, one: str, several: str) -> str:
    return f"{number} {one} is too few" if number == 1 else f"{number} {several} are too few"


def _explained(quantity: str) -> tuple[str, ...]:
    """In which quantities a rank's links and groups are slow because the rank is."""
    return (LATENCY, BANDWIDTH, GROUPS) if quantity in (COMPUTE, BANDWIDTH) else (quantity,)


def _named(family: Sequence[Effects], threshold: float, links: LinkRun) -> list[Outlier]:
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


def _outlier(effects: Effects, at: int, links: LinkRun) -> Outlier:
    reach = float(stdtrit(effects.freedom, 0.975)) * effects.error[at]
    center = effects.center[at]
    ranks = effects.members[at]
    hosts = " and ".join(dict.fromkeys(links.hosts[rank] for rank in ranks))
    slowdown, low, high = (float(np.exp(value)) for value in (center, center - reach, center + reach))
    return Outlier(effects.kind, ranks, hosts, effects.quantity, slowdown, low, high, effects.level)


def _detectable(family: Sequence[Effects], threshold: float) -> dict[str, float]:
    """By quantity, the slow-down that a thing of median error would have been named with four times in five."""
    num_tests = sum(len(effects.members) for effects in family)
    found: dict[str, float] = {}
    for effects in family:
        needed = stdtrit(effects.freedom, 1 - LEVEL / NUM_FAMILIES / num_tests) + stdtrit(effects.freedom, 0.8)
        reach = float(np.exp(np.log1p(threshold) + needed * np.median(effects.error)))
        found[effects.quantity] = max(found.get(effects.quantity, 0.0), reach)
    return found
