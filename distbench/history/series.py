"""Run files to one series a case, a point a launch, split at its change points."""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distbench.runs.header import MUST_AGREE
from distbench.runs.launches import Launch
from distbench.spec.printable import count_text

# A level is of at least so many launches: fewer are outliers, not a change.
MIN_LAUNCHES = 3
# Times variance x log(launches): with 4, two of 300 series of noise alone, 40 launches each, were split.
PENALTY = 4.0
OF_LATENCIES = (
    "latencies of a forward pass by their fast end (p10); a change of their tail (p90, p99) is not looked for"
)
OUTLIER = 4.0  # standard deviations
MAD_TO_SD = 1 / 0.6745


@dataclass(frozen=True)
class Point:
    """One launch of a case.

    Args:
        started_at: seconds since the epoch.
        dirty: whether files differed from that commit.
        seconds: the 10th percentile of its samples, which strays less between launches than their mean.
        label: of its run, or "".
    """

    started_at: float
    commit: str | None
    dirty: bool
    seconds: float
    label: str = ""


@dataclass(frozen=True)
class Level:
    """Launches between two changes: first and one past the last of the series' points, and their median seconds."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True)
class Series:
    """One case on one machine: points oldest first, and the levels that they fall into, in order."""

    scenario: str
    case_id: str
    points: tuple[Point, ...]
    levels: tuple[Level, ...]

    @property
    def changes(self) -> list[tuple[Point, float]]:
        """The first point of each new level, and by what share it is slower (or faster, below 0)."""
        return [
            (self.points[after.start], after.seconds / before.seconds - 1) for before, after in pairwise(self.levels)
        ]


def series_of(launches: Iterable[Launch], pattern: str) -> tuple[list[Series], list[str]]:
    """A series for each case whose id or scenario matches the glob.

    A scenario's launches are those that may be compared with its newest one.

    Returns:
        The series, those with the largest change first, and sentences on what was left out.
    """
    ordered = sorted(launches, key=lambda launch: launch.started_at)
    newest = {launch.scenario: launch for launch in ordered}
    kept = [launch for launch in ordered if _alike(launch, newest[launch.scenario])]
    left_out = f"{len(ordered) - len(kept)} of {count_text(len(ordered), 'launch', 'launches')} were left out"
    notes = [f"{left_out}: made on another machine, mesh or device than the newest"] if len(kept) < len(ordered) else []
    points: dict[tuple[str, str], list[Point]] = {}
    of_latencies: dict[str, None] = {}
    for launch in kept:
        for case_id, value in launch.cases.items():
            if value.status == "ok" and any(fnmatch.fnmatchcase(name, pattern) for name in (case_id, launch.scenario)):
                points.setdefault((launch.scenario, case_id), []).append(_point(launch, value.p10_s))
                of_latencies |= {launch.scenario: None} if value.is_latency else {}
    if of_latencies:
        notes.append(f"{', '.join(of_latencies)}: {OF_LATENCIES}")
    found = [Series(*key, tuple(some), levels_of([point.seconds for point in some])) for key, some in points.items()]
    return sorted(found, key=lambda one: -max((abs(change) for _, change in one.changes), default=0.0)), notes


def _alike(launch: Launch, other: Launch) -> bool:
    return all(launch.facts.get(name) == other.facts.get(name) for name in MUST_AGREE)


def _point(launch: Launch, seconds: float) -> Point:
    commit = launch.facts.get("git_commit")
    is_dirty = bool(launch.facts.get("git_dirty"))
    return Point(launch.started_at, str(commit) if commit else None, is_dirty, seconds, launch.label)


def levels_of(seconds: Sequence[float]) -> tuple[Level, ...]:
    """Times, oldest first, split at change points: PELT on logarithms (Killick et al. 2012), as `ruptures` has it."""
    logs = np.log(np.asarray(seconds, dtype=float))
    bounds = [0, *_change_points(logs), len(logs)]
    return tuple(Level(*ends, math.exp(float(np.median(logs[slice(*ends)])))) for ends in pairwise(bounds))


def _change_points(logs: NDArray[np.float64]) -> list[int]:
    if len(logs) < 2 * MIN_LAUNCHES:
        return []
    import ruptures

    # Neighbours' differences: a change of level is in one of them only, so it does not widen the noise.
    spread = float(np.median(np.abs(np.diff(logs)))) * MAD_TO_SD / math.sqrt(2)
    penalty = max(PENALTY * math.log(len(logs)) * spread**2, 1e-12)
    signal = _without_outliers(logs, spread).reshape(-1, 1)
    found = ruptures.Pelt(model="l2", min_size=MIN_LAUNCHES, jump=1).fit(signal).predict(pen=penalty)
    return [int(index) for index in found[:-1]]


def _without_outliers(logs: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """A launch far from all its neighbours moved to their median (Hampel's filter): one is no new level."""
    from scipy.ndimage import median_filter

    around = median_filter(logs, size=2 * MIN_LAUNCHES - 1, mode="nearest")
    kept: NDArray[np.float64] = np.where(np.abs(logs - around) > OUTLIER * spread, around, logs)
    return kept
