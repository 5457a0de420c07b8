"""Detection of slow ranks, hosts and links: each item is compared with the median of comparable items, pass by pass."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, stdtr, stdtrit

from distbench.records.run_file import Run
from distbench.spec import UserError
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import Floats
from distbench.statistics.significance import PRIOR_FREEDOM, holm, moderated_variance

LATENCY, BANDWIDTH, GROUPS, COMPUTE = "latency", "bandwidth", "all_reduce", "compute"
SMALL_BYTES = 4096  # the time of messages up to this size is latency
MIN_LIKE = 4  # an outlier needs at least this many comparable items
# Retransmitted segments, as a share and as a number, above which packets are lost. A lost packet of a host with
# segmentation offload counts as up to 45 segments, and a busy CPU may lose one or two.
MAX_LOSS, LEAST_AGAIN = 0.001, 100
# No cable can lose packets of this interface. Its segments are retransmitted if a busy CPU acknowledges them late.
LOOPBACK = "lo"
Ranks = tuple[int, ...]
Segments = tuple[int, int]  # sent, retransmitted


@dataclass(frozen=True)
class ComparisonGroup:
    """Ranks, pairs or groups that take equally long on a healthy machine.

    Args:
        quantity: LATENCY, BANDWIDTH, GROUPS or COMPUTE.
        level: the location of a pair's two ranks, such as the same host, or the mesh dim of a group.
        members: the ranks of each member (rank, pair or group).
        times_s: times in seconds, shape (passes, members).
        size_bytes: message size; 0 for COMPUTE.
    """

    quantity: str
    level: str
    members: tuple[Ranks, ...]
    times_s: Floats
    size_bytes: int = 0

    @property
    def logs(self) -> Floats:
        """Logarithms of the times."""
        return np.log(np.maximum(self.times_s, 1e-9))


@dataclass(frozen=True)
class LinkRun:
    """A run's measured links.

    Args:
        hosts: each rank's host, in rank order.
        groups: the measured times, by quantity, level and size.
        devices: type and number of each rank's accelerator; empty for CPUs and if not recorded.
        is_relative: whether times are divided by the times of an earlier run.
        segments: (pair of the round or (), rank, interface) to the numbers of TCP segments that the rank sent and
            retransmitted in the first pass.
    """

    hosts: tuple[str, ...]
    groups: tuple[ComparisonGroup, ...]
    devices: tuple[str, ...] = ()
    is_relative: bool = False
    segments: Mapping[tuple[Ranks, int, str], tuple[int, int]] = field(default_factory=dict)


def link_run_of(run: Run) -> LinkRun | None:
    """Return the links that a run measured; None without links to compare."""
    cases = [case for case in run.cases if case["case"].get("kind") == "links" and case["status"] == "ok"]
    timed_cases = [(case["case"].get("params") or {}, _by_pass(case)) for case in cases]
    complete_cases = [
        (params, times)
        for params, times in timed_cases
        if times is not None and len(params.get("hosts") or ()) == times.shape[1]
    ]
    if not complete_cases:
        return None
    hosts = tuple(complete_cases[0][0]["hosts"])
    complete_cases = [(params, times) for params, times in complete_cases if tuple(params["hosts"]) == hosts]
    num_passes = min(len(times) for _, times in complete_cases)
    by_key: dict[tuple[str, str, int], list[tuple[Ranks, Floats]]] = {}
    for params, times in complete_cases:
        for key, members, column in _columns(params, times[:num_passes], hosts):
            by_key.setdefault(key, []).append((members, column))
    groups = []
    for (quantity, level, size_bytes), columns in by_key.items():
        columns.sort(key=lambda column: column[0])
        times_s = np.column_stack([column for _, column in columns])
        groups.append(ComparisonGroup(quantity, level, tuple(members for members, _ in columns), times_s, size_bytes))
    devices = next((params["devices"] for params, _ in complete_cases if isinstance(params.get("devices"), list)), ())
    devices = tuple(map(str, devices)) if len(devices) == len(hosts) else ()
    return LinkRun(hosts, tuple(groups), devices, segments=_segments_of(cases, hosts)) if groups else None


def _segments_of(cases: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> dict[tuple[Ranks, int, str], Segments]:
    """The TCP segments by pair, rank and interface other than LOOPBACK, summed over the cases."""
    totals: dict[tuple[Ranks, int, str], Segments] = {}
    for case in cases:
        by_rank = (case.get("counters") or {}).get("tcp_segments") or []
        pairs = (case["case"].get("params") or {}).get("pairs") if by_rank else None
        pair_of = {rank: tuple(pair) for pair in pairs or () for rank in pair}
        for rank, interfaces in enumerate(by_rank[: len(hosts)]):
            for interface, segments in interfaces.items():
                if interface != LOOPBACK:
                    key = pair_of.get(rank, ()), rank, interface
                    totals[key] = _sum((totals.get(key, (0, 0)), segments))
    return totals


def _sum(parts: Iterable[Segments]) -> Segments:
    sent, again = 0, 0
    for part_sent, part_again in parts:
        sent, again = sent + part_sent, again + part_again
    return sent, again


def is_lossy(segments: Segments) -> bool:
    """Return whether the share of retransmitted segments shows lost packets."""
    sent, again = segments
    return again >= LEAST_AGAIN and again > MAX_LOSS * sent


def relative_to(links: LinkRun, earlier: LinkRun) -> LinkRun:
    """Divide times by the times of an earlier run; the ratios are comparable even between links of different speed.

    Items that are in only one of the runs are omitted.

    Raises:
        UserError: the runs have different ranks per host, or no common item.
    """
    places = [[hosts.index(host) for host in hosts] for hosts in (links.hosts, earlier.hosts)]
    if places[0] != places[1]:
        here = f"{count_text(len(links.hosts), 'rank')} on {count_text(len(set(links.hosts)), 'host')}"
        there = f"{len(earlier.hosts)} on {len(set(earlier.hosts))}"
        raise UserError(
            f"this run has {here}, but the earlier run has {there}; give a run with the same ranks on each host"
        )
    earlier_groups = {(group.quantity, group.level, group.size_bytes, group.members): group for group in earlier.groups}
    groups = []
    for group in links.groups:
        if before := earlier_groups.get((group.quantity, group.level, group.size_bytes, group.members)):
            groups.append(replace(group, times_s=group.times_s / np.exp(before.logs.mean(axis=0))))
    if not groups:
        raise UserError("the earlier run has no case of this run; give a run with the same sizes")
    return replace(links, groups=(*_few_together(groups),), is_relative=True)


def _few_together(groups: Sequence[ComparisonGroup]) -> Iterator[ComparisonGroup]:
    """Join the pairs of all levels with too few pairs, because relative times are comparable across levels."""
    few: dict[tuple[str, int], list[ComparisonGroup]] = {}
    for group in groups:
        if group.quantity in (LATENCY, BANDWIDTH) and len(group.members) < MIN_LIKE:
            few.setdefault((group.quantity, group.size_bytes), []).append(group)
        else:
            yield group
    for (quantity, size_bytes), parts in few.items():
        members = tuple(chain.from_iterable(group.members for group in parts))
        yield ComparisonGroup(quantity, "", members, np.column_stack([group.times_s for group in parts]), size_bytes)


def _by_pass(case: Mapping[str, Any]) -> Floats | None:
    """Each rank's median per pass in seconds, shape (passes, ranks); for a burst of matrix products, per product."""
    rows = case.get("ranks_by_pass") or [case.get("rank_median_s") or []]
    if any(not row or len(row) != len(rows[0]) for row in rows):
        return None
    repeats = (case.get("counters") or {}).get("repeats")
    return np.array(rows, dtype=np.float64) / (repeats if isinstance(repeats, int) and repeats > 0 else 1)


def _columns(
    params: Mapping[str, Any], times: Floats, hosts: Sequence[str]
) -> Iterator[tuple[tuple[str, str, int], Ranks, Floats]]:
    """Yield for each pair, group or rank of a case: (quantity, level, size), its ranks, and its seconds per pass."""
    size_bytes, op = int(params.get("size_bytes") or 0), params.get("op")
    name = {"matmul": "ranks", "send_recv": "pairs"}.get(str(op), "groups")
    sets = [params.get(name) or ()] if op == "matmul" else params.get(name) or ()
    for members in (tuple(ranks) for ranks in sets if ranks and max(ranks) < len(hosts)):
        if op == "matmul":
            yield from (((COMPUTE, "", 0), (rank,), times[:, rank]) for rank in members)
        elif op != "send_recv":
            key = GROUPS, str(params.get("mesh_dim") or ""), size_bytes
            yield key, members, times[:, list(members)].max(axis=1)
        elif len(members) == 2:
            # A round of several levels has no common level.
            where = "within a host" if hosts[members[0]] == hosts[members[1]] else "across hosts"
            quantity = LATENCY if size_bytes <= SMALL_BYTES else BANDWIDTH
            key = quantity, str(params.get("level") or where), size_bytes
            yield key, members, times[:, list(members)].max(axis=1)


# Hosts, ranks, pairs and groups are compared with the median of comparable items in each pass.

MIN_RANKS_OF_HOST, MIN_PAIRS_OF_HOST = 2, 3
THRESHOLD = 0.2  # smaller slowdowns are not reported
SLOW_SPREADS = 3  # a pass is slow if it exceeds the threshold by this many standard deviations of comparable items
# This share of the ranks and pairs of a slow host, or of the pairs between two slow hosts, may have normal speed.
MAX_LIKE_OTHERS = 0.1
TO_DEVIATION = 1.4826  # median absolute deviation to standard deviation, of normal values
# Parameters of the fit by least absolute deviations: the number of iterations, the residual that is treated as 0, the
# ridge, and the change of a weight that ends the iteration.
ROUNDS_OF_FIT, LEAST_RESIDUAL, RIDGE, CONVERGED = 20, 0.02, 1e-9, 0.1
RANK, HOST, HOSTS, LINK, GROUP = "rank", "host", "hosts", "link", "group"


class Effects(NamedTuple):
    """Effects on items of one kind and quantity: logarithms of the time relative to the median of comparable items.

    `num_slow` is the number of passes in which the item was slow, `p_slow` the probability of as many by chance.
    """

    kind: str
    quantity: str
    level: str
    members: tuple[Ranks, ...]
    center: Floats
    error: Floats
    freedom: float
    num_slow: Floats
    p_slow: Floats


def _of_hosts(links: LinkRun) -> Iterator[Effects]:
    """Compare each host's computing, over nearly all its ranks, with the median host (of two hosts: the faster
    host)."""
    names = list(dict.fromkeys(links.hosts))
    for group in (group for group in links.groups if group.quantity == COMPUTE and len(names) > 1):
        places = [[at for at, (rank, *_) in enumerate(group.members) if links.hosts[rank] == name] for name in names]
        if min(map(len, places)) < MIN_RANKS_OF_HOST:
            continue
        logs = group.logs
        by_host = np.column_stack([logs[:, of_host].mean(axis=1) for of_host in places])
        middle = np.median(by_host, axis=1) if len(names) > 2 else by_host[:, int(by_host.mean(axis=0).argmin())]
        members = tuple(tuple(group.members[at][0] for at in of_host) for of_host in places)
        effects = _effects_of(HOST, COMPUTE, "", members, by_host - middle[:, None])
        # The scatter of ranks within a host limits the difference between equally fast hosts.
        within = [logs[:, of_host].mean(axis=0).var(ddof=1) / len(of_host) for of_host in places]
        host_offsets = [(logs[:, of_host] - middle[:, None]).mean(axis=0) for of_host in places]
        error = np.sqrt(effects.error**2 + float(np.median(within)))
        yield effects._replace(center=np.minimum(effects.center, _of_nearly_all(host_offsets)), error=error)


def _of_host_links(links: LinkRun) -> Iterator[Effects]:
    """Compare hosts by nearly all links within a host; relative to an earlier run, also pairs of hosts by their links.

    "Nearly all", because a single slow rank is part of half the links.
    """
    by_size = sorted(links.groups, key=lambda group: (group.quantity, group.size_bytes))
    for (quantity, _), groups in groupby(by_size, key=lambda group: (group.quantity, group.size_bytes)):
        logs_by_pair: dict[Ranks, Floats] = {}
        for group in groups if quantity in (LATENCY, BANDWIDTH) else ():
            logs_by_pair.update(zip(group.members, group.logs.T, strict=True))
        of: dict[frozenset[str], list[Ranks]] = {}
        for pair in logs_by_pair:
            of.setdefault(frozenset(links.hosts[rank] for rank in pair), []).append(pair)
        if not links.is_relative:
            of = {hosts: pairs for hosts, pairs in of.items() if len(hosts) == 1}
            of = of if all(len(pairs) >= MIN_PAIRS_OF_HOST for pairs in of.values()) else {}
        # The scatter within sets of pairs needs more pairs than sets.
        if len(of) > 1 and sum(map(len, of.values())) > len(of):
            yield from _of_host_pairs(quantity, of, logs_by_pair)


def _of_host_pairs(
    quantity: str, of: Mapping[frozenset[str], list[Ranks]], logs_by_pair: Mapping[Ranks, Floats]
) -> Iterator[Effects]:
    medians = np.column_stack([np.median([logs_by_pair[pair] for pair in pairs], axis=0) for pairs in of.values()])
    middle = medians[:, int(medians.mean(axis=0).argmin())] if len(of) == 2 else np.median(medians, axis=1)
    offsets = [np.array([(logs_by_pair[pair] - middle).mean() for pair in pairs]) for pairs in of.values()]
    apart = sum(float(((centers - np.median(centers)) ** 2).sum()) for centers in offsets)
    variance = apart / (sum(map(len, offsets)) - len(offsets))
    ranks = [tuple(sorted({rank for pair in pairs for rank in pair})) for pairs in of.values()]
    for kind, level, size in ((HOST, "within it", 1), (HOSTS, "between them", 2)):
        kept = [at for at, hosts in enumerate(of) if len(hosts) == size]
        if kept:
            members = tuple(ranks[at] for at in kept)
            effects = _effects_of(kind, quantity, level, members, (medians - middle[:, None])[:, kept])
            error = np.sqrt(effects.error**2 + variance / np.array([len(offsets[at]) for at in kept]))
            yield effects._replace(center=np.minimum(effects.center, _of_nearly_all(offsets)[kept]), error=error)


def _of_nearly_all(parts: Sequence[Floats]) -> Floats:
    """The slowdown that nearly all parts of an item share; a few slow parts do not make an item slow."""
    return np.array([np.quantile(centers, MAX_LIKE_OTHERS, method="lower") for centers in parts])


def _of_ranks(links: LinkRun) -> Iterator[Effects]:
    """Each rank's computing speed, and the rank's effect on its pairs."""
    for group in links.groups:
        if group.quantity == COMPUTE and len(group.members) >= MIN_LIKE:
            yield _effects_of(RANK, COMPUTE, "", group.members, _from_median(group.logs))
    for quantity in (LATENCY, BANDWIDTH):
        groups = [group for group in links.groups if group.quantity == quantity and len(group.members) >= MIN_LIKE]
        pairs = [pair for group in groups for pair in group.members]
        counts = Counter(chain.from_iterable(pairs))
        if len(counts) >= MIN_LIKE and min(counts.values()) >= MIN_LIKE - 1:
            logs = np.column_stack([group.logs for group in groups])
            levels = [at for at, group in enumerate(groups) for _ in group.members]
            ranks = sorted(counts)
            members = tuple((rank,) for rank in ranks)
            yield _effects_of(RANK, quantity, "", members, _from_median(rank_effects(logs, pairs, levels, ranks)))


def rank_effects(logs: Floats, pairs: Sequence[Ranks], levels: Sequence[int], ranks: Sequence[int]) -> Floats:
    """Return each rank's effect on its pairs' logarithms in each pass, shape (passes, ranks), up to a constant.

    A pair's logarithm is the sum of its level's effect and the effects of both ranks. The median of a level is not a
    valid reference if about half of its pairs contain a slow rank, as with one slow rank on each of two hosts. The fit
    minimises absolute deviations by iterated least squares, with weights from the mean over the passes. Therefore a
    slow link, and a pair of two slow ranks (as slow as a pair with one slow rank), have little weight.

    Args:
        logs: shape (passes, pairs).
        pairs, levels: ranks and number of the level of each column.
        ranks: all ranks.
    """
    # Three unknowns per pair: the effects of its two ranks and of its level.
    unknowns = np.column_stack([np.searchsorted(ranks, pairs), len(ranks) + np.asarray(levels)])
    weights, means = np.ones(len(pairs)), logs.mean(axis=0)
    for _ in range(ROUNDS_OF_FIT):
        fitted = _fitted(means[None], unknowns, weights)[0]
        last, weights = weights, 1 / np.maximum(np.abs(means - fitted[unknowns].sum(axis=1)), LEAST_RESIDUAL)
        if np.abs(weights / last - 1).max() < CONVERGED:
            break
    return _fitted(logs, unknowns, weights)[:, : len(ranks)]


def _fitted(logs: Floats, unknowns: NDArray[np.int64], weights: Floats) -> Floats:
    """Return the unknowns of each row by weighted least squares; if underdetermined, the minimum-norm solution."""
    size = int(unknowns.max()) + 1
    normal, right = np.zeros((size, size)), np.zeros((size, len(logs)))
    for column in unknowns.T:
        np.add.at(right, column, (weights * logs).T)
        for other_column in unknowns.T:
            np.add.at(normal, (column, other_column), weights)
    normal += RIDGE * np.trace(normal) * np.eye(size)
    return np.asarray(np.linalg.solve(normal, right).T)


def _of_links(
    group: ComparisonGroup, explained_ranks: set[tuple[int, str]], explained: set[tuple[Ranks, str]]
) -> Iterator[Effects]:
    """Pairs and groups that are not slow because of slow ranks (`explained_ranks`) or hosts (`explained`)."""
    kept = [
        at
        for at, members in enumerate(group.members)
        if (members, group.quantity) not in explained
        and not any((rank, group.quantity) in explained_ranks for rank in members)
    ]
    if group.quantity != COMPUTE and len(kept) >= MIN_LIKE:
        kind = GROUP if group.quantity == GROUPS else LINK
        members = tuple(group.members[at] for at in kept)
        yield _effects_of(kind, group.quantity, group.level, members, _from_median(group.logs[:, kept]))


def _from_median(logs: Floats) -> Floats:
    """Logarithms minus the median of the pass; shape (passes, items)."""
    return np.asarray(logs - np.median(logs, axis=1)[:, None])


def _effects_of(kind: str, quantity: str, level: str, members: tuple[Ranks, ...], against: Floats) -> Effects:
    """Return means over the passes, with standard errors, of logarithms relative to comparable items, shape (passes,
    members)."""
    num_passes = len(against)
    center = against.mean(axis=0)
    spread = TO_DEVIATION * float(np.median(np.abs(center - np.median(center))))
    # The variance of few passes is uncertain, so the variance of comparable items is used as additional passes.
    variances, freedom = against.var(axis=0, ddof=1), num_passes - 1
    moderated = moderated_variance(freedom * variances, float(np.median(variances)), freedom)
    # The errors already contain the scatter due to noise. The scatter of few items contains no information.
    scatter = max(spread**2 - float(np.median(variances)) / num_passes, 0.0) if len(members) >= MIN_LIKE else 0.0
    error = np.sqrt(moderated / num_passes + scatter)
    num_slow, p_slow = _slow_passes(against, spread)
    if quantity == LATENCY:
        # A busy CPU delays the small messages of a rank in several passes.
        p_slow = np.ones_like(p_slow)
    return Effects(kind, quantity, level, members, center, error, freedom + PRIOR_FREEDOM, num_slow, p_slow)


def _slow_passes(against: Floats, spread: float) -> tuple[Floats, Floats]:
    """Return each item's number of slow passes, and the probability of as many by chance, from the number of slow
    passes of the other items. A link that is slow at times has a mean with a large error.

    Args:
        against: logarithms relative to comparable items, shape (passes, items).
        spread: standard deviation of the items' means.
    """
    num_passes, num_items = against.shape
    if num_items < MIN_LIKE:
        return np.zeros(num_items), np.ones(num_items)
    counts = (against > np.log1p(THRESHOLD) + SLOW_SPREADS * spread).sum(axis=0).astype(np.float64)
    by_chance = (counts.sum() - counts + 1) / (num_passes * (num_items - 1) + 1)
    return counts, np.where(counts > 0, bdtrc(counts - 1, num_passes, by_chance), 1.0)


# Ranks, hosts and links that are slower than comparable items, with the slowdown and its significance.
#
# A rank, host or link is compared with the median of comparable items within each pass, so a common slowdown cancels.
# The logarithm of the ratio is an estimate with two errors: the standard error over the passes, and the scatter of
# comparable items (median absolute deviation). A slowdown is reported if Student's t test finds it above the threshold
# at a family-wise level of 5 % (Holm; a third of the level each for hosts, for ranks, and for links with groups).

LEVEL, NUM_FAMILIES, MIN_PASSES = 0.05, 3, 4
# Of thousands of links, a few have several disturbed samples by chance. This share of the links must be known.
KNOWN_SHARE = 0.999


@dataclass(frozen=True)
class Outlier:
    """A rank, host, link or group that is slower than comparable items.

    Args:
        kind: RANK, HOST, HOSTS (the links between two hosts), LINK or GROUP.
        ranks: the ranks of the outlier.
        host: the ranks' host or hosts.
        quantity: the slow quantity.
        slowdown, low, high: time over the time of comparable items, and its 95 % interval.
        level: the level of the outlier's comparison group.
        num_slow: number of passes in which the outlier was slow.
    """

    kind: str
    ranks: Ranks
    host: str
    quantity: str
    slowdown: float
    low: float
    high: float
    level: str = ""
    num_slow: int = 0


@dataclass(frozen=True)
class Loss:
    """A rank, host or link that loses packets, which TCP retransmits.

    Args:
        kind: RANK, HOST or LINK.
        interfaces: interfaces that retransmitted the packets.
        segments: TCP segments to and from the ranks, sent and retransmitted.
    """

    kind: str
    ranks: Ranks
    host: str
    interfaces: tuple[str, ...]
    segments: Segments


@dataclass(frozen=True)
class LinkVerdict:
    """The slow ranks, hosts and links of a run.

    Args:
        outliers: slowest first.
        losses: most lossy first.
        num_compared: number of compared ranks, links and groups.
        num_passes: number of passes of the run.
        at_most: by quantity, the largest upper end of a slowdown (95 %, one-sided) of the items that are not named.
        why_not: the reason why nothing was compared, or "".
        too_few: number and location of links that were omitted, because fewer than MIN_LIKE have this location.
    """

    outliers: tuple[Outlier, ...]
    num_compared: int
    num_passes: int
    at_most: dict[str, float]
    why_not: str = ""
    too_few: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()


def losses_of(links: LinkRun) -> tuple[Loss, ...]:
    """Return the ranks, links and hosts that explain the lost packets; nothing if more than half of the ranks lose
    packets, as in a congested network.

    The most lossy rank is removed with its pairs until the other pairs lose no packets, because a lossy rank makes the
    pairs of its partners lossy. A link is lossy instead if the rank's other pairs lose no packets.
    """
    pairs: dict[Ranks, list[Segments]] = {}
    for (pair, _, _), segments in links.segments.items():
        if len(pair) == 2:
            pairs.setdefault(pair, []).append(segments)
    if sum(again for parts in pairs.values() for _, again in parts) < LEAST_AGAIN:
        return ()
    rest, lossy = {pair: _sum(parts) for pair, parts in pairs.items()}, []
    while True:
        of_rank: dict[int, list[Ranks]] = {}
        for pair in rest:
            for rank in pair:
                of_rank.setdefault(rank, []).append(pair)
        totals = {rank: _sum(rest[pair] for pair in of_rank[rank]) for rank in of_rank}
        lossy_ranks = [rank for rank in totals if is_lossy(totals[rank])]
        if not lossy_ranks:
            break
        worst = max(lossy_ranks, key=lambda rank: totals[rank][1] / totals[rank][0])
        link = max(of_rank[worst], key=lambda pair: rest[pair][1])
        others = [pair for pair in of_rank[worst] if pair != link]
        is_link = bool(others) and not is_lossy(_sum(rest[pair] for pair in others))
        lossy.append(link if is_link else (worst,))
        for pair in [link] if is_link else of_rank[worst]:
            del rest[pair]
    if len({rank for ranks in lossy for rank in ranks}) > len(links.hosts) / 2:
        return ()
    losses = []
    for host in dict.fromkeys(links.hosts):
        of_host = tuple(rank for rank, name in enumerate(links.hosts) if name == host)
        num_lossy = sum((rank,) in lossy for rank in of_host)
        # All but one rank are in all pairs within a host.
        if num_lossy > 1 and num_lossy >= len(of_host) - (len(of_host) >= MIN_LIKE):
            losses.append(_loss(HOST, of_host, links))
            lossy = [ranks for ranks in lossy if ranks[0] not in of_host or len(ranks) > 1]
    return (*losses, *(_loss(RANK if len(ranks) == 1 else LINK, ranks, links) for ranks in lossy))


def _loss(kind: str, ranks: Ranks, links: LinkRun) -> Loss:
    """A loss with the segments of all pairs of these ranks; of a link, of its pair."""
    parts = {
        key: segments
        for key, segments in links.segments.items()
        if len(key[0]) == 2 and (key[0] == ranks if kind == LINK else {*key[0]} & {*ranks})
    }
    interfaces = sorted({interface for (_, _, interface), (_, again) in parts.items() if again})
    host = " and ".join(dict.fromkeys(links.hosts[rank] for rank in ranks))
    return Loss(kind, ranks, host, tuple(interfaces), _sum(parts.values()))


def verdict_of(links: LinkRun) -> LinkVerdict:
    """Return items that are slower than comparable items by more than THRESHOLD (0.2: 1.2x slower)."""
    num_passes, why = min(len(group.times_s) for group in links.groups), ""
    if num_passes < MIN_PASSES:
        few = f"{count_text(num_passes, 'pass', 'passes')} {'is' if num_passes == 1 else 'are'} too few"
        why = f"{few}; measure with --passes {MIN_PASSES} or more"
    elif (num_ranks := len(links.hosts)) < MIN_LIKE:
        few = f"{count_text(num_ranks, 'rank')} {'is' if num_ranks == 1 else 'are'} too few"
        why = f"{few} to compare; {MIN_LIKE} are needed"
    if why:
        return LinkVerdict((), 0, num_passes, {}, why)
    hosts, ranks = [*_of_hosts(links), *_of_host_links(links)], list(_of_ranks(links))
    slow_hosts = _named(hosts, links)
    computing = {outlier.ranks for outlier in slow_hosts if outlier.quantity == COMPUTE}
    slow_hosts = [outlier for outlier in slow_hosts if outlier.quantity == COMPUTE or outlier.ranks not in computing]
    of_slow = set(chain.from_iterable(computing))
    slow_ranks = [
        outlier for outlier in _named(ranks, links) if outlier.quantity != COMPUTE or outlier.ranks[0] not in of_slow
    ]
    explained_ranks = {
        (outlier.ranks[0], quantity)
        for outlier in slow_ranks
        # A rank with slow computing or sending makes all its links and groups slow.
        for quantity in (
            (LATENCY, BANDWIDTH, GROUPS) if outlier.quantity in (COMPUTE, BANDWIDTH) else (outlier.quantity,)
        )
    }
    explained = {(pair, outlier.quantity) for outlier in slow_hosts for pair in _pairs_of(outlier, links)}
    link_effects = [effects for group in links.groups for effects in _of_links(group, explained_ranks, explained)]
    outliers = [*_by_host(slow_hosts, slow_ranks, links), *_named(link_effects, links)]
    outliers.sort(key=lambda outlier: -outlier.slowdown)
    losses = () if links.is_relative else losses_of(links)
    return LinkVerdict(
        tuple(outliers),
        sum(len(effects.members) for effects in (*hosts, *ranks, *link_effects)),
        num_passes,
        _at_most([*hosts, *ranks, *link_effects], [*outliers, *losses]),
        too_few=tuple(
            dict.fromkeys(
                f"{len(group.members)} {group.level or 'of all'}"
                for group in links.groups
                if group.quantity in (LATENCY, BANDWIDTH) and len(group.members) < MIN_LIKE
            )
        ),
        losses=losses,
    )


def _by_host(slow_hosts: Sequence[Outlier], slow_ranks: Sequence[Outlier], links: LinkRun) -> Iterator[Outlier]:
    """Yield slow hosts and ranks; a host with slow messages on nearly all its ranks replaces these ranks."""
    yield from slow_hosts
    of: dict[tuple[str, str], list[Outlier]] = {}
    for outlier in slow_ranks:
        of.setdefault((outlier.host, outlier.quantity), []).append(outlier)
    for (host, quantity), parts in of.items():
        ranks = tuple(rank for rank, name in enumerate(links.hosts) if name == host)
        if quantity == COMPUTE or len(ranks) < MIN_RANKS_OF_HOST or len(parts) < (1 - MAX_LIKE_OTHERS) * len(ranks):
            yield from parts
        elif not any(outlier.ranks == ranks and outlier.quantity == quantity for outlier in slow_hosts):
            middle = sorted(parts, key=lambda outlier: outlier.slowdown)[len(parts) // 2]
            yield replace(middle, kind=HOST, ranks=ranks)


def _pairs_of(slow: Outlier, links: LinkRun) -> list[Ranks]:
    """The pairs within a slow host, or between two hosts with slow links."""
    slow_hosts = {links.hosts[rank] for rank in slow.ranks}
    if slow.quantity == COMPUTE or len(slow_hosts) != (2 if slow.kind == HOSTS else 1):
        return []
    pairs = [pair for group in links.groups if group.quantity == slow.quantity for pair in group.members]
    return [pair for pair in pairs if {links.hosts[rank] for rank in pair} == slow_hosts]


def _named(family: Sequence[Effects], links: LinkRun) -> list[Outlier]:
    """Return items with a slowdown significantly above the threshold, with Holm's correction: in the mean of all
    passes, or in more passes than by chance."""
    tests = [(effects, at) for effects in family for at in range(len(effects.members))]
    p = [
        stdtr(effects.freedom, (np.log1p(THRESHOLD) - effects.center) / np.maximum(effects.error, 1e-12))
        for effects in family
    ]
    # A part that is slow in some passes is slower on average, too.
    p_at_times = [np.where(of.center > np.log1p(THRESHOLD) / 2, of.p_slow, 1.0) for of in family]
    smaller_p = [np.minimum(2 * np.minimum(*both), 1) for both in zip(p, p_at_times, strict=True)]
    adjusted = holm(np.concatenate([*smaller_p, np.empty(0)]))
    return [_outlier(*tests[test], links) for test in np.flatnonzero(adjusted <= LEVEL / NUM_FAMILIES).tolist()]


def _outlier(effects: Effects, at: int, links: LinkRun) -> Outlier:
    reach = float(stdtrit(effects.freedom, 0.975)) * effects.error[at]
    center, ranks = effects.center[at], effects.members[at]
    hosts = " and ".join(dict.fromkeys(links.hosts[rank] for rank in ranks))
    slowdown, low, high = np.exp([center, center - reach, center + reach]).tolist()
    num_slow = int(effects.num_slow[at])
    return Outlier(effects.kind, ranks, hosts, effects.quantity, slowdown, low, high, effects.level, num_slow)


def _at_most(family: Sequence[Effects], parts: Sequence[Outlier | Loss]) -> dict[str, float]:
    """Return per quantity the largest upper end of a slowdown, without items that the named parts make slow. Of more
    than 1,000 links of a level, one in 1,000 may exceed it.

    Each item is tested at LEVEL, without a correction for their number: "all items are faster than a limit" is wrong
    with at most that probability (intersection-union test; R. L. Berger, Technometrics 24, 1982).
    """
    links = {part.ranks for part in parts if part.kind in (LINK, GROUP)}
    of_parts = {rank for part in parts if part.ranks not in links for rank in part.ranks}
    slowdowns: dict[str, float] = {}
    for effects in family:
        upper = np.exp(effects.center + stdtrit(effects.freedom, 1 - LEVEL) * effects.error)
        of_members = zip(effects.members, upper.tolist(), strict=True)
        kept = [at_most for members, at_most in of_members if members not in links and not of_parts & {*members}]
        if kept:
            largest = float(np.quantile(kept, KNOWN_SHARE, method="higher"))
            slowdowns[effects.quantity] = max(slowdowns.get(effects.quantity, 0.0), largest)
    return slowdowns
