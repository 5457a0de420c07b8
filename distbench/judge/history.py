"""Run files over time: a series a case, divided into levels at change points; as a table and as plots."""

import datetime
import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distbench.records.launch_values import Launch
from distbench.records.run_file import MUST_AGREE
from distbench.show.blocks import Block, Heading, Lines, Table
from distbench.show.plots import BLUE, GREY, RED, label_axis, new_figure, save, styled, time_tick
from distbench.show.terminal import text_of
from distbench.show.units import time_text
from distbench.spec.printable_text import count_text
from distbench.statistics.change_points import (
    BLOCK,
    LEVEL,
    MIN_BLOCKS,
    MIN_CASES,
    MIN_LAUNCHES,
    ChangePoints,
    change_points,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Run files to one series per case, a point per launch, divided into levels at its change points.

OF_LATENCIES = (
    "latencies of a forward pass by their fast end (p10); a change of their tail (p90, p99) is not looked for"
)


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
    kept = [
        launch
        for launch in ordered
        if all(launch.facts.get(name) == newest[launch.scenario].facts.get(name) for name in MUST_AGREE)
    ]
    left_out = f"{len(ordered) - len(kept)} of {count_text(len(ordered), 'launch', 'launches')} were left out"
    notes = [f"{left_out}: made on another machine, mesh or device than the newest"] if len(kept) < len(ordered) else []
    all_series: list[Series] = []
    for scenario in dict.fromkeys(launch.scenario for launch in kept):
        series, sentences = _of_scenario(scenario, [one for one in kept if one.scenario == scenario], pattern)
        all_series, notes = [*all_series, *series], [*notes, *sentences]
    scenarios = {one.scenario for one in all_series}
    of_latencies = [
        name for name in newest if name in scenarios and any(one.is_latency for one in newest[name].cases.values())
    ]
    if of_latencies:
        notes.append(f"{', '.join(of_latencies)}: {OF_LATENCIES}")
    return sorted(all_series, key=lambda one: -max((abs(change) for _, change in one.changes), default=0.0)), notes


def _point(launch: Launch, seconds: float) -> Point:
    commit = launch.facts.get("git_commit")
    is_dirty = bool(launch.facts.get("git_dirty"))
    return Point(launch.started_at, str(commit) if commit else None, is_dirty, seconds, launch.label)


def _matches(scenario: str, case_id: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (case_id, scenario))


def _by_commit(launches: Sequence[Launch]) -> list[Launch]:
    """Launches oldest first, those of a commit together, where it was first launched: `ab` has commits take turns."""
    together: dict[tuple[Any, ...], list[Launch]] = {}
    for index, launch in enumerate(launches):
        commit = launch.facts.get("git_commit")
        key = (commit, bool(launch.facts.get("git_dirty"))) if commit else (index,)
        together.setdefault(key, []).append(launch)
    return list(chain.from_iterable(together.values()))


def _of_scenario(scenario: str, launches: Sequence[Launch], pattern: str) -> tuple[list[Series], list[str]]:
    """The series of a scenario's cases that match, and what must be exceeded for a change."""
    ids = list(dict.fromkeys(one for launch in launches for one, value in launch.cases.items() if value.status == "ok"))
    if not any(_matches(scenario, one, pattern) for one in ids):
        return [], []
    by_commit = _by_commit(launches)
    logs = np.full((len(ids), len(by_commit)), np.nan)
    for column, launch in enumerate(by_commit):
        for row, case_id in enumerate(ids):
            if (value := launch.cases.get(case_id)) and value.status == "ok":
                logs[row, column] = math.log(value.p10_s)
    is_measured = np.isfinite(logs).any(axis=0)
    logs, by_commit = logs[:, is_measured], list(compress(by_commit, is_measured))
    points = change_points(logs)
    shown_rows = [
        (ids[row], logs[row], points.own[row]) for row in range(len(ids)) if _matches(scenario, ids[row], pattern)
    ]
    if points.shared:
        middle = np.nanmedian(logs, axis=1, keepdims=True)
        typical = np.nanmedian(logs - middle, axis=0) + middle.mean()
        shown_rows.insert(0, (f"all {len(ids)} cases, the median", typical, points.shared))
    notes = [f"{scenario}: {sentence}" for sentence in _rule(points, len(ids), len(by_commit))]
    if by_commit != [one for one in launches if one in by_commit]:
        notes.append(f"{scenario}: launches of a commit are shown together, though commits took turns")
    return [_series(scenario, case_id, row, cuts, by_commit) for case_id, row, cuts in shown_rows], notes


def _rule(points: ChangePoints, num_cases: int, num_launches: int) -> list[str]:
    """What a split had to explain to be a change, as sentences."""
    alone, shared = num_cases < MIN_CASES, points.shared_share
    few = f"{num_launches} launches are too few to tell {{}} from the machine's drift, {MIN_BLOCKS * BLOCK} are needed"
    if math.isnan(points.own_share):
        least = f"{num_launches} launches are too few for a change, {2 * MIN_LAUNCHES} are needed"
        return [few.format("a change") if alone and num_launches >= 2 * MIN_LAUNCHES else least]
    of_all = "" if math.isnan(shared) else f", or over {100 * shared:.0f} % of that of the median of all cases"
    rule = f"penalty: a split is a change if it explains over {100 * points.own_share:.0f} % of a case's sum of squares"
    chance = f"{100 * LEVEL:g} % of permutations of the launches exceed that, over all cases together"
    drift = [few.format("a change of all cases together")] if not alone and math.isnan(shared) else []
    return [f"{rule}{of_all}; {chance}", *drift]


def _series(
    scenario: str, case_id: str, logs: NDArray[np.float64], cuts: Sequence[int], launches: Sequence[Launch]
) -> Series:
    """One case's points and levels.

    Args:
        cuts: columns of `logs` at which a level begins, but for the first.
    """
    is_known = np.isfinite(logs)
    points = tuple(_point(launches[column], math.exp(logs[column])) for column in np.flatnonzero(is_known).tolist())
    # Columns to points: how many are known before each.
    bounds = [0, *(int(is_known[:cut].sum()) for cut in cuts), len(points)]
    seconds = [point.seconds for point in points]
    levels = (Level(*ends, float(np.exp(np.median(np.log(seconds[slice(*ends)]))))) for ends in pairwise(bounds))
    return Series(scenario, case_id, points, tuple(levels))


# Those that changed, each with a table of its own; and those that did not.
MAX_CASES, MAX_STEADY = 40, 60
SHORT_HASH = 8
COLUMNS = ("<from", "<commit", "launches", "median of p10", "change")
STEADY_COLUMNS = ("<scenario", "<case", "launches", "median of p10", "<from", "<commit")


def text(series: Sequence[Series], notes: Sequence[str]) -> str:
    """The cases that changed their level, the largest change first; then those that did not, a line each."""
    changed = [case_series for case_series in series if case_series.changes]
    first_line = f"{count_text(len(series), 'case')}, {len(changed)} of them changed their level"
    blocks: list[Block] = [Heading("history", 1), Lines((first_line, *notes))]
    blocks += map(_changed, changed[:MAX_CASES])
    steady = [case_series for case_series in series if not case_series.changes]
    left_out = max(len(changed) - MAX_CASES, 0) + max(len(steady) - MAX_STEADY, 0)
    if steady:
        rows = [_steady_row(case_series) for case_series in steady[:MAX_STEADY]]
        blocks.append(Table("no change of their own:", STEADY_COLUMNS, rows, optional=("commit", "from", "scenario")))
    if left_out:
        blocks.append(Lines((f"... {left_out} more cases: narrow the pattern, e.g. distbench history SCENARIO",)))
    if changed:
        blocks.append(Lines((_next_step(changed[0]),)))
    return text_of(blocks)


def _next_step(series: Series) -> str:
    """How to find out whether the code made the largest change."""
    change = max(zip(pairwise(series.levels), series.changes, strict=True), key=lambda item: abs(item[1][1]))
    before, after = (series.points[index] for index in (change[0][0].stop - 1, change[0][1].start))
    if before.commit and after.commit and before.commit != after.commit:
        why = "launches both in turn and decides whether the commit or the machine changed"
        return (
            f"next: distbench ab {before.commit[:SHORT_HASH]} {after.commit[:SHORT_HASH]} -- {series.scenario}   {why}"
        )
    why = "the commit is the same before and after the change" if before.commit else "no commit is recorded"
    return f"next: distbench ab A B -- {series.scenario}   with the revisions to compare; here {why}"


def _changed(series: Series) -> Table:
    changes = dict(zip((level.start for level in series.levels[1:]), series.changes, strict=True))
    rows = []
    for level in series.levels:
        change = f"{100 * changes[level.start][1]:+.0f} %" if level.start in changes else ""
        first = series.points[level.start]
        rows.append((_date(first), _named(first), str(level.stop - level.start), time_text(level.seconds), change))
    return Table(f"{series.scenario}: {series.case_id}", COLUMNS, rows)


def _steady_row(series: Series) -> tuple[str, ...]:
    (level,), first = series.levels, series.points[0]
    count = str(level.stop - level.start)
    return series.scenario, series.case_id, count, time_text(level.seconds), _date(first), _named(first)


def _named(point: Point) -> str:
    return " ".join([commit_text(point), *([f'"{point.label}"'] if point.label else [])])


def _date(point: Point) -> str:
    if point.started_at <= 0:
        return "-"
    return datetime.datetime.fromtimestamp(point.started_at, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def commit_text(point: Point) -> str:
    """`1a2b3c4d`, with a `+` where files differed from it; `-` where it is not known."""
    return "-" if point.commit is None else point.commit[:SHORT_HASH] + ("+" if point.dirty else "")


def draw(series: Sequence[Series], folder: Path) -> list[Path]:
    """One figure a case; the paths. An OSError where the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        path_lists = [
            save(figure_of(case_series), folder, f"history-{n:02}") for n, case_series in enumerate(series[:MAX_CASES])
        ]
    return list(chain.from_iterable(path_lists))


def figure_of(series: Series) -> "Figure":
    """A case's series: a point a launch, a line a level."""
    figure, [axes] = new_figure(1, 9, 3.6)
    axes.plot(range(len(series.points)), [point.seconds for point in series.points], "o", color=GREY, markersize=4)
    for level in series.levels:
        axes.hlines(level.seconds, level.start - 0.4, level.stop - 0.6, color=BLUE, linewidth=2)
    for level, (point, change) in zip(series.levels[1:], series.changes, strict=True):
        colour = RED if change > 0 else BLUE
        axes.axvline(level.start - 0.5, color=colour, linewidth=1, linestyle=":")
        text = f"{100 * change:+.0f} %\n{commit_text(point)}"
        axes.annotate(text, (level.start - 0.4, 1), xycoords=("data", "axes fraction"), va="top", color=colour)
    title = f"{series.case_id}: the 10th percentile of each launch's samples"
    top = 1.25 * max(point.seconds for point in series.points)
    axes.set(title=title, xlabel="launch, oldest first", ylabel="time", ylim=(0, top))
    axes.grid(axis="y")
    label_axis(axes.yaxis, time_tick)
    return figure
