"""The verdict on ranks that arrive last in their group more often than by chance: binomial tests of all ranks as one
family (Holm). The sentences are the same for a watched loop (`loop_watch.py`) and for files of other tools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.records.late_rank_files import CollectiveTimes
from distbench.show.units import brief_time_text, decimals_for, time_scale
from distbench.spec.printable_text import count_text, listed, ranks_text
from distbench.statistics.intervals import Floats, median, median_ci

ALPHA = 0.05
MIN_PAIRED = 3  # samples for a correlation of neighbours
MAX_NAMED = 4
# For files: the number of samples, and the smallest reported lateness. The lateness is a share of the median collective
# (durations), or of the time between collectives (arrivals).
PARTS, LEAST_SHARE = 20, 0.1
PASS, LATE, UNKNOWN = 0, 1, 3  # exit codes, as of preflight


@dataclass(frozen=True)
class GroupArrivals:
    """Arrivals of the ranks of one group.

    Args:
        name: name in messages, such as `tp 4-7`.
        ranks: names of its ranks in messages, such as `rank 5`.
        hosts: host of each rank, "" if unknown.
        arrivals_s: seconds with any zero per sample, [samples, ranks].
        least_s: a smaller lateness is not reported.
        per: what a sample's seconds are per: "step" or "collective".
        why_not: the reason why the group is not judged, or "".
    """

    name: str
    ranks: tuple[str, ...]
    hosts: tuple[str, ...]
    arrivals_s: Floats
    least_s: float
    per: str = "step"
    why_not: str = ""


@dataclass(frozen=True)
class LateRank:
    """A rank that arrives last in a group more often than by chance.

    Attributes:
        rank, host, group: as in messages; host is "" if unknown.
        num_last, num_samples: samples (steps) in which the rank is last, and all samples.
        late_s, low_s, high_s: median of seconds after the median of the group's other ranks in the samples in which the
            rank is last, with its 95 % confidence interval.
        p: probability of `num_last` by chance, adjusted over all ranks and groups (Holm).
        per: what the seconds are per: "step" or "collective".
    """

    rank: str
    host: str
    group: str
    num_last: int
    num_samples: int
    late_s: float
    low_s: float
    high_s: float
    p: float
    per: str = "step"

    def text(self, samples: str) -> str:
        """Return `rank 5 (host b) arrives last in group tp 4-7 in 9 of 10 sampled steps, 41 ms (95 % CI ...`."""
        where = f" (host {self.host})" if self.host else ""
        scale, unit = time_scale(self.late_s)
        decimals = decimals_for(self.late_s / scale)
        center, low, high = (f"{seconds / scale:.{decimals}f}" for seconds in (self.late_s, self.low_s, self.high_s))
        late = f"{center} {unit} (95 % CI {low}-{high} {unit}) per {self.per} after the median of the other ranks"
        often = f"in {self.num_last} of {self.num_samples} {samples}"
        return f"{self.rank}{where} arrives last in group {self.group} {often}, {late}"


@dataclass(frozen=True)
class LatenessVerdict:
    """The late ranks of all groups, the latest first, and lines for people: first the headline, then the next command.

    Attributes:
        late: late ranks.
        lines: sentences.
        exit_code: 0 without a late rank, 1 with a late rank, 3 if unknown.
    """

    late: tuple[LateRank, ...]
    lines: tuple[str, ...]
    exit_code: int

    def to_record(self) -> Mapping[str, Any]:
        """Return the verdict as a JSON value."""
        severity = {PASS: "PASS", LATE: "FAIL", UNKNOWN: "UNKNOWN"}[self.exit_code]
        return {"verdict": severity, "late": [asdict(each) for each in self.late], "lines": list(self.lines)}


def judge_arrivals(groups: Sequence[GroupArrivals], samples: str, more: str, alpha: float = ALPHA) -> LatenessVerdict:
    """Return the verdict on ranks that arrive last more often than by chance, at an error rate of `alpha` over all
    groups.

    Args:
        groups: all groups of two or more ranks.
        samples: plural noun of the samples, such as "sampled steps".
        more: how to get more samples, for verdict UNKNOWN.
    """
    judged = [group for group in groups if not group.why_not]
    num_tests = sum(len(group.ranks) for group in judged)
    short = [group for group in judged if len(group.arrivals_s) < fewest_samples(len(group.ranks), num_tests, alpha)]
    late = [
        LateRank(
            group.ranks[lateness.member],
            group.hosts[lateness.member],
            group.name,
            lateness.num_last,
            len(group.arrivals_s),
            *(lateness.late_s, lateness.low_s, lateness.high_s),
            p=lateness.p,
            per=group.per,
        )
        for lateness in latenesses([group.arrivals_s for group in judged])
        for group in [judged[lateness.group]]
        if lateness.p <= alpha and lateness.low_s >= group.least_s
    ]
    late.sort(key=lambda each: -each.late_s * each.num_last / each.num_samples)
    not_judged = _not_judged(groups)
    if late:
        sentences = listed([each.text(samples) for each in late], MAX_NAMED, "; ")
        return LatenessVerdict(tuple(late), (*not_judged, f"FAIL: {sentences}.", _next(late)), LATE)
    if short:
        return LatenessVerdict((), (*not_judged, _too_few(short, num_tests, samples, more, alpha)), UNKNOWN)
    if not judged:
        return LatenessVerdict((), not_judged or (f"UNKNOWN: no group of ranks has {samples}. {more}",), UNKNOWN)
    checked = f"{count_text(len(judged), 'group')}, {_range_of([len(group.arrivals_s) for group in judged])} {samples}"
    headline = f"PASS: no rank is late beyond chance ({checked}). {_detectable(judged, num_tests, samples, alpha)}"
    return LatenessVerdict((), (headline, *not_judged), UNKNOWN if not_judged else PASS)


def arrivals_of_files(groups: Sequence[CollectiveTimes], ranks_per_host: int | None) -> list[GroupArrivals]:
    """Return the arrivals of groups of files, whose samples are PARTS parts of consecutive collectives.

    Files do not mark steps, and collectives of a step depend on each other. Clocks of hosts are not aligned, so
    durations are compared. All ranks leave a collective together, so the rank that arrives last has the shortest
    duration. Times of the host's call are compared only within a host.

    Args:
        ranks_per_host: number of ranks per host, for files without hosts; None if unknown.
    """
    return [_arrivals_of(group, ranks_per_host) for group in groups]


def _arrivals_of(group: CollectiveTimes, ranks_per_host: int | None) -> GroupArrivals:
    waited_s, arrived_s = group.table(group.waited_s), group.table(group.arrived_s)
    why, values_s, scale_s = "", arrived_s, 0.0
    if len(group.members) < group.num_ranks:
        why = f"only {len(group.members)} of its {group.num_ranks} ranks have a file"
    elif len(waited_s):
        values_s, scale_s = -waited_s, float(np.median(waited_s))
    elif not len(arrived_s):
        why = "no collective is in the files of all its ranks"
    elif group.is_device:
        why = "the files have no durations on the device; set TORCH_NCCL_ENABLE_TIMING=1"
    elif ranks_per_host is None:
        why = "the files have no hosts, whose clocks differ; give --ranks-per-host N"
    elif len({rank // ranks_per_host for rank in group.members}) > 1:
        why = "its ranks are on several hosts, whose clocks are not aligned, and the files have no durations"
    else:
        scale_s = float(np.ptp(arrived_s.min(axis=1))) / len(arrived_s)
    parts = np.array_split(values_s, min(PARTS, len(values_s))) if not why else []
    means = np.array([part.mean(axis=0) for part in parts]).reshape(len(parts), len(group.members))
    ranks, hosts = ([names.get(key, "") for key in group.members] for names in (group.ranks, group.hosts))
    least_s = LEAST_SHARE * scale_s
    # Processes are named by host; groups of ranks of one mesh dim share a name.
    has_numbers = all(isinstance(key, int) for key in group.members)
    name = f"{group.name} {ranks_text(group.members)}" if has_numbers else group.name
    return GroupArrivals(name, tuple(ranks), tuple(hosts), means, least_s, "collective", why)


def _not_judged(groups: Sequence[GroupArrivals]) -> tuple[str, ...]:
    by_reason: dict[str, list[str]] = {}
    for group in groups:
        if group.why_not:
            by_reason.setdefault(group.why_not, []).append(group.name)
    reasons = [
        f"{'groups' if len(names) > 1 else 'group'} {listed(names, MAX_NAMED)}: {why}"
        for why, names in by_reason.items()
    ]
    return (f"UNKNOWN: {'; '.join(reasons)}.",) if reasons else ()


def _next(late: Sequence[LateRank]) -> str:
    hosts = list(dict.fromkeys(each.host or each.rank for each in late))
    where = (
        f"host{'s' if len(hosts) > 1 else ''} {listed(hosts, MAX_NAMED)}" if late[0].host else f"the host of {hosts[0]}"
    )
    return f"Next: check {where} (distbench preflight; other processes, clocks, input data of these ranks)"


def _too_few(short: Sequence[GroupArrivals], num_tests: int, samples: str, more: str, alpha: float) -> str:
    group = max(short, key=lambda each: fewest_samples(len(each.ranks), num_tests, alpha))
    needed = fewest_samples(len(group.ranks), num_tests, alpha)
    return f"UNKNOWN: {len(group.arrivals_s)} {samples} of group {group.name} are too few; {needed} are needed. {more}"


def _range_of(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"


def _detectable(judged: Sequence[GroupArrivals], num_tests: int, samples: str, alpha: float) -> str:
    """A sentence on the group in which a rank must be last most often."""
    needed = [(fewest_last(len(group.arrivals_s), len(group.ranks), num_tests, alpha) or 0, group) for group in judged]
    count, group = max(needed, key=lambda pair: pair[0] / len(pair[1].arrivals_s))
    least = brief_time_text(float(np.max([each.least_s for each in judged])))
    return (
        f"Detectable: a rank that is last in {count} of {len(group.arrivals_s)} {samples}, by {least} per {group.per} "
        f"or more."
    )


class Lateness(NamedTuple):
    """How often and by how much one rank of one group arrives last.

    Args:
        group, member: index of the group, and of the rank in the group.
        num_last: samples in which the rank is last.
        late_s, low_s, high_s: median of seconds after the median of the group's other ranks, over these samples, with
            its 95 % interval.
        p: probability of so many samples by chance, adjusted over all ranks and groups.
    """

    group: int
    member: int
    num_last: int
    late_s: float
    low_s: float
    high_s: float
    p: float


def latenesses(groups: Sequence[Floats]) -> list[Lateness]:
    """Test each rank of each group that is last in a sample.

    If all ranks are alike, each rank of n is last with probability 1/n. Therefore the number of samples in which a rank
    is last is binomial. A sample is a step, because the collectives of a step depend on each other. Samples also depend
    on each other if a disturbance lasts for several samples. `_independent_share` reduces their number for this reason.

    Args:
        groups: arrivals in seconds (any zero per sample) in order of time, each [samples, ranks of the group]; two or
            more ranks.
    """
    from scipy.special import betainc

    from distbench.statistics.significance import holm

    rows: list[Lateness] = []
    chances: list[float] = []
    for group, arrivals in enumerate(groups):
        num_samples, num_ranks = arrivals.shape
        last = arrivals.argmax(axis=1) if num_samples else np.empty(0, dtype=np.int64)
        share = _independent_share(last, num_ranks)
        for member in range(num_ranks):
            of_member = arrivals[last == member]
            after = of_member[:, member] - np.median(np.delete(of_member, member, axis=1), axis=1)
            late_s = [float(value) for value in after]
            count = len(late_s)
            # The binomial tail, also for numbers that are not whole.
            others = share * (num_samples - count)
            chances.append(float(betainc(share * count, others + 1, 1 / num_ranks)) if count else 1.0)
            rows.append(Lateness(group, member, count, median(late_s), *median_ci(late_s), p=1.0))
    adjusted = holm(np.array(chances))
    return [row._replace(p=p) for row, p in zip(rows, adjusted.tolist(), strict=True) if row.num_last]


def _independent_share(last: NDArray[np.int64], num_ranks: int) -> float:
    """Return the share of samples that are independent, from repeats of the last rank in neighbouring samples.

    The correlation r is the excess of repeats over those of independent samples with the same frequencies, as in
    Cohen's kappa; the share of an autoregressive series is (1 - r) / (1 + r) (Bartlett, J. Roy. Stat. Soc. 98, 1935).
    """
    if len(last) < MIN_PAIRED:
        return 1.0
    frequencies = np.bincount(last, minlength=num_ranks) / len(last)
    expected = float((frequencies**2).sum())
    repeated = float((last[1:] == last[:-1]).mean())
    excess = (repeated - expected) / (1 - expected) if expected < 1 else 0.0
    return (1 - max(excess, 0.0)) / (1 + max(excess, 0.0))


def fewest_last(num_samples: int, num_ranks: int, num_tests: int, alpha: float = ALPHA) -> int | None:
    """Return the smallest number of samples in which a rank must be last for significance; None if no number is large
    enough.

    Args:
        num_tests: number of ranks over all groups. Bonferroni's correction is used, which needs at most one sample more
            than Holm's.
    """
    from scipy.special import bdtrc

    counts = np.arange(1, num_samples + 1)
    enough = np.flatnonzero(bdtrc(counts - 1, num_samples, 1 / num_ranks) * num_tests <= alpha)
    return int(counts[enough[0]]) if len(enough) else None


def fewest_samples(num_ranks: int, num_tests: int, alpha: float = ALPHA) -> int:
    """Return the number of samples below which even a rank that is always last is not significant."""
    return int(np.ceil(np.log(num_tests / alpha) / np.log(num_ranks) - 1e-9))
