"""The links of one run: what each rank, pair and group took, pass by pass."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distbench.compare.intervals import Floats
from distbench.runs.run_file import Run
from distbench.spec import UserError
from distbench.spec.printable import count_text

LATENCY, BANDWIDTH, GROUPS, COMPUTE = "latency", "bandwidth", "all_reduce", "compute"
# Messages up to this size, in bytes, tell latency.
SMALL_BYTES = 4096
# Of fewer things nobody can say which is unlike the others.
MIN_LIKE = 4
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Alike:
    """Things that ought to take equally long.

    Args:
        quantity: LATENCY, BANDWIDTH, GROUPS or COMPUTE.
        level: of pairs: where their ranks are; of groups: their mesh dim.
        members: the ranks of each: two of a pair, one that computes.
        times_s: seconds, shape (passes, members).
        size_bytes: of a message; 0 for what sends none.
    """

    quantity: str
    level: str
    members: tuple[Ranks, ...]
    times_s: Floats
    size_bytes: int = 0


@dataclass(frozen=True)
class LinkRun:
    """A run's measured links.

    Args:
        hosts: each rank's host, in rank order.
        alike: what was measured.
        devices: each rank's accelerator, its type and number; empty for CPUs, and for runs that do not say.
        is_relative: whether times are over those of an earlier run.
        segments: host to the TCP segments that it sent in the first pass, and to those of them that it sent again.
    """

    hosts: tuple[str, ...]
    alike: tuple[Alike, ...]
    devices: tuple[str, ...] = ()
    is_relative: bool = False
    segments: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def link_run_of(run: Run) -> LinkRun | None:
    """The links that a run measured; None where it measured none, or too little of them is there to compare."""
    cases = [case for case in run.cases if case["case"].get("kind") == "links" and case["status"] == "ok"]
    known = [(case["case"].get("params"), _by_pass(case)) for case in cases]
    whole = [(params, times) for params, times in known if times is not None and _has_hosts(params, times.shape[1])]
    if not whole:
        return None
    hosts = tuple(map(str, whole[0][0]["hosts"]))
    whole = [(params, times) for params, times in whole if tuple(map(str, params["hosts"])) == hosts]
    num_passes = min(len(times) for _, times in whole)
    taken: dict[tuple[str, str, int], list[tuple[Ranks, Floats]]] = {}
    for params, times in whole:
        for key, members, column in _columns(params, times[:num_passes], hosts):
            taken.setdefault(key, []).append((members, column))
    alike = []
    for (quantity, level, size_bytes), columns in taken.items():
        columns.sort(key=lambda column: column[0])
        times_s = np.column_stack([column for _, column in columns])
        alike.append(Alike(quantity, level, tuple(members for members, _ in columns), times_s, size_bytes))
    told = [params["devices"] for params, _ in whole if isinstance(params.get("devices"), list)]
    devices = tuple(map(str, told[0])) if told and len(told[0]) == len(hosts) else ()
    return LinkRun(hosts, tuple(alike), devices, segments=_segments_of(cases, hosts)) if alike else None


def _segments_of(cases: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return each host's segments. Ranks of a host have the same counts, unless each has a network of its own."""
    counters = [case.get("counters") or {} for case in cases]
    known = [(one.get("tcp_segments"), one.get("tcp_segments_again")) for one in counters]
    whole = [np.array(both) for both in known if all(isinstance(one, list) and len(one) == len(hosts) for one in both)]
    if not whole:
        return {}
    sent, again = (part.tolist() for part in np.sum(whole, axis=0))
    worst = {host: max((again[at], sent[at]) for at, name in enumerate(hosts) if name == host) for host in hosts}
    return {host: (of_host[1], of_host[0]) for host, of_host in worst.items()}


def relative_to(links: LinkRun, earlier: LinkRun) -> LinkRun:
    """What each took over what the same took in an earlier run: these ought to be alike even where links are not.

    What only one of the runs has is left out.

    Raises:
        UserError: the runs have other ranks on their hosts, or nothing in common.
    """
    places = [[hosts.index(host) for host in hosts] for hosts in (links.hosts, earlier.hosts)]
    if places[0] != places[1]:
        what = (
            f"{count_text(len(links.hosts), 'rank')} on {count_text(len(set(links.hosts)), 'host')}, "
            f"the earlier run {len(earlier.hosts)} on"
        )
        raise UserError(f"this run has {what} {len(set(earlier.hosts))}; give a run with the same ranks on each host")
    known = {(one.quantity, one.level, one.size_bytes, one.members): one for one in earlier.alike}
    alike = []
    for one in links.alike:
        if before := known.get((one.quantity, one.level, one.size_bytes, one.members)):
            center_s = np.exp(np.log(np.maximum(before.times_s, 1e-9)).mean(axis=0))
            alike.append(replace(one, times_s=one.times_s / center_s))
    if not alike:
        raise UserError("the earlier run measured nothing that this one did; give one with the same sizes")
    return LinkRun(links.hosts, (*_few_together(alike),), links.devices, True, links.segments)


def _few_together(alike: Sequence[Alike]) -> Iterator[Alike]:
    """Pairs of different levels as one kind where each has too few: held against themselves they are all alike."""
    few: dict[tuple[str, int], list[Alike]] = {}
    for one in alike:
        if one.quantity in (LATENCY, BANDWIDTH) and len(one.members) < MIN_LIKE:
            few.setdefault((one.quantity, one.size_bytes), []).append(one)
        else:
            yield one
    for (quantity, size_bytes), parts in few.items():
        members = tuple(itertools.chain.from_iterable(one.members for one in parts))
        yield Alike(quantity, "", members, np.column_stack([one.times_s for one in parts]), size_bytes)


def _by_pass(case: Mapping[str, Any]) -> Floats | None:
    """Each rank's median of each pass, seconds, shape (passes, ranks); of a burst of products, for each of them."""
    rows = case.get("ranks_by_pass") or [case.get("rank_median_s") or []]
    if any(not isinstance(row, list) or not row or len(row) != len(rows[0]) for row in rows):
        return None
    repeats = (case.get("counters") or {}).get("repeats")
    return np.array(rows, dtype=np.float64) / (repeats if isinstance(repeats, int) and repeats > 0 else 1)


def _has_hosts(params: Any, num_ranks: int) -> bool:
    """Whether a case's parameters name each rank's host."""
    hosts = params.get("hosts") if isinstance(params, dict) else None
    return isinstance(hosts, list) and len(hosts) == num_ranks


def _sets_of(told: Any, num_ranks: int) -> list[Ranks]:
    """The pairs or groups of a case, as far as they are ones of its ranks."""
    sets = told if isinstance(told, list) else []
    known = range(num_ranks)
    return [
        tuple(one) for one in sets if isinstance(one, list) and one and all(type(r) is int and r in known for r in one)
    ]


def _columns(
    params: Mapping[str, Any], times: Floats, hosts: Sequence[str]
) -> list[tuple[tuple[str, str, int], Ranks, Floats]]:
    """What of a case is compared with what: its place, the ranks, and their seconds by pass."""
    told_bytes, num_ranks = params.get("size_bytes"), times.shape[1]
    size_bytes = told_bytes if type(told_bytes) is int and told_bytes > 0 else 0
    if params.get("op") == "matmul":
        ranks = _sets_of([params.get("ranks")], num_ranks)
        return [((COMPUTE, "", 0), (rank,), times[:, rank]) for rank in itertools.chain(*ranks)]
    together: list[Ranks]
    if params.get("op") == "send_recv":
        quantity = LATENCY if size_bytes <= SMALL_BYTES else BANDWIDTH
        together = [pair for pair in _sets_of(params.get("pairs"), num_ranks) if len(pair) == 2]
        levels = [str(params.get("level") or level_of(pair, hosts)) for pair in together]
    else:
        quantity = GROUPS
        together = _sets_of(params.get("groups"), num_ranks)
        levels = [str(params.get("mesh_dim") or "")] * len(together)
    return [
        ((quantity, level, size_bytes), members, times[:, list(members)].max(axis=1))
        for members, level in zip(together, levels, strict=True)
    ]


def level_of(pair: Sequence[int], hosts: Sequence[str]) -> str:
    """Where a pair's ranks are, for rounds of several levels."""
    return "within a host" if hosts[pair[0]] == hosts[pair[1]] else "across hosts"
