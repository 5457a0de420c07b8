"""Launches over time: a series per case, split at change points; as a table and as plots."""

import datetime
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distbench.judge.gate_text import collect_text, number_text
from distbench.records.launches import SECONDS, Launch, Unit, units_of
from distbench.records.run_file import MUST_AGREE
from distbench.show.blocks import Block, Heading, Lines, Notes, Table
from distbench.show.plots import BLUE, GREY, RED, label_axis, new_figure, time_tick
from distbench.show.terminal import text_of
from distbench.show.units import times_text
from distbench.spec.discovery import argument_of
from distbench.spec.printable_text import count_text
from distbench.statistics.change_points import (
    BLOCK,
    LEVEL,
    MIN_BLOCKS,
    MIN_CASES,
    MIN_LAUNCHES,
    ChangePoints,
    change_points,
    row_medians,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_LATENCIES = "latencies of a forward pass (10th percentile); changes of the tail (p90, p99) are not detected"


@dataclass(frozen=True)
class Point:
    """One launch of a case.

    Args:
        started_at: seconds since the epoch.
        dirty: whether files differed from the commit.
        seconds: the 10th percentile of the samples, which varies less between launches than the mean.
        label: label of the run, or "".
    """

    started_at: float
    commit: str | None
    dirty: bool
    seconds: float
    label: str = ""


@dataclass(frozen=True)
class Level:
    """The launches between two changes, as the range of indexes `start:stop` of the points, and their median in
    seconds.
    """

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True)
class Series:
    """The launches of one case on one machine.

    Args:
        points: oldest first.
        levels: the launches between changes, in order.
        is_tested: whether the number of launches suffices to detect a change.
        unit: of the points and levels; where a higher number is better, these are reciprocals.
        more: advice on more launches, or "" where `distbench ab` does that.
    """

    scenario: str
    case_id: str
    points: tuple[Point, ...]
    levels: tuple[Level, ...]
    is_tested: bool = True
    unit: Unit = SECONDS
    more: str = ""

    @property
    def changes(self) -> list[tuple[Point, float]]:
        """The first point after each change, and the relative change (positive: slower)."""
        return [
            (self.points[after.start], after.seconds / before.seconds - 1) for before, after in pairwise(self.levels)
        ]


def series_of(launches: Iterable[Launch], pattern: str) -> tuple[list[Series], list[str]]:
    """Return a series for each case whose id or scenario matches the glob.

    Only launches that are comparable with the scenario's newest launch are used.

    Returns:
        The series, largest change first, and sentences on omitted launches.
    """
    ordered = sorted(launches, key=lambda launch: launch.started_at)
    units = units_of(ordered)
    newest = {launch.scenario: launch for launch in ordered}
    kept = [
        launch
        for launch in ordered
        if all(launch.facts.get(name) == newest[launch.scenario].facts.get(name) for name in MUST_AGREE)
    ]
    left_out = f"{len(ordered) - len(kept)} of {count_text(len(ordered), 'launch', 'launches')} left out"
    notes = [f"{left_out}: not the newest launch's machine, mesh or device"] if len(kept) < len(ordered) else []
    all_series: list[Series] = []
    for scenario in dict.fromkeys(launch.scenario for launch in kept):
        of_scenario = [launch for launch in kept if launch.scenario == scenario]
        series, sentences = _of_scenario(scenario, of_scenario, pattern, units)
        all_series, notes = [*all_series, *series], [*notes, *sentences]
    scenarios = {series.scenario for series in all_series}
    of_latencies = [
        name for name in newest if name in scenarios and any(case.is_latency for case in newest[name].cases.values())
    ]
    if of_latencies:
        notes.append(f"{', '.join(of_latencies)}: {OF_LATENCIES}")
    by_change = sorted(all_series, key=lambda each: -max((abs(change) for _, change in each.changes), default=0.0))
    return by_change, notes


def _matches(scenario: str, case_id: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (case_id, scenario))


ALL_CASES = -1  # row of the median over all cases


@dataclass(frozen=True)
class JudgedCases:
    """The cases of one scenario on one machine, and the changes of each case.

    Args:
        launches: by time, but all launches of a commit together.
        logs: logarithms of the 10th percentiles, [cases, launches]; nan if a launch lacks the case.
        units: unit of each case id that is not in seconds.
        is_regrouped: whether commits alternated.
    """

    scenario: str
    launches: Sequence[Launch]
    case_ids: Sequence[str]
    logs: NDArray[np.float64]
    points: ChangePoints
    units: Mapping[str, Unit]
    is_regrouped: bool

    @property
    def is_tested(self) -> bool:
        """Whether the number of launches suffices to detect a change."""
        return not math.isnan(self.points.own_share)

    @property
    def changed_rows(self) -> list[int]:
        """Rows with a change. ALL_CASES is first if the median of all cases changed and the cases have one unit."""
        rows = [row for row, cuts in enumerate(self.points.own) if cuts]
        return [ALL_CASES, *rows] if self.points.shared and len(self._common_units) == 1 else rows

    @property
    def _common_units(self) -> set[Unit]:
        return {self.units.get(case_id, SECONDS) for case_id in self.case_ids}

    def series(self, row: int) -> Series:
        """Return the series of a case, or of ALL_CASES."""
        if row == ALL_CASES:
            middle = row_medians(self.logs)
            logs = row_medians((self.logs - middle[:, None]).T) + middle.mean()
            name, cuts = f"all {len(self.case_ids)} cases, the median", self.points.shared
            unit = self._common_units.pop()
        else:
            name, logs, cuts = self.case_ids[row], self.logs[row], self.points.own[row]
            unit = self.units.get(name, SECONDS)
        return _series(self.scenario, name, logs, cuts, self.launches, self.is_tested, unit)

    def notes(self) -> list[str]:
        """Return sentences on the limits for a change, and on the order of launches."""
        sentences = _rule(self.points, len(self.case_ids), len(self.launches))
        if self.is_regrouped:
            sentences.append("launches of one commit are shown together, although commits alternated")
        return [f"{self.scenario}: {sentence}" for sentence in sentences]


def judge_cases(
    scenario: str,
    launches: Sequence[Launch],
    case_ids: Sequence[str],
    p10_s: NDArray[np.float64],
    units: Mapping[str, Unit],
) -> JudgedCases:
    """Detect the changes of a scenario's cases.

    Args:
        launches: oldest first, comparable with each other. Their cases are not used.
        p10_s: 10th percentiles, [cases, launches]; nan if a launch lacks the case.
    """
    order = [index for index in _by_commit(launches) if np.isfinite(p10_s[:, index]).any()]
    logs = p10_s[:, order]
    np.log(logs, out=logs)
    by_commit = [launches[index] for index in order]
    return JudgedCases(scenario, by_commit, case_ids, logs, change_points(logs), units, order != sorted(order))


def _by_commit(launches: Sequence[Launch]) -> list[int]:
    """Return indexes by time, but all launches of a commit together, because `ab` alternates between commits."""
    together: dict[tuple[Any, ...], list[int]] = {}
    for index, launch in enumerate(launches):
        commit = launch.facts.get("git_commit")
        key = (commit, bool(launch.facts.get("git_dirty"))) if commit else (index,)
        together.setdefault(key, []).append(index)
    return list(chain.from_iterable(together.values()))


def _of_scenario(
    scenario: str, launches: Sequence[Launch], pattern: str, units: Mapping[str, Unit]
) -> tuple[list[Series], list[str]]:
    """Return the series of a scenario's matching cases, and sentences on the penalty for a change."""
    ids = list(dict.fromkeys(name for launch in launches for name, case in launch.cases.items() if case.status == "ok"))
    if not any(_matches(scenario, case_id, pattern) for case_id in ids):
        return [], []
    values = [[launch.cases.get(case_id) for launch in launches] for case_id in ids]
    p10_s = [[value.p10_s if value and value.status == "ok" else math.nan for value in row] for row in values]
    judged = judge_cases(scenario, launches, ids, np.array(p10_s), units)
    rows = [row for row, case_id in enumerate(ids) if _matches(scenario, case_id, pattern)]
    shared = [row for row in judged.changed_rows if row == ALL_CASES]
    return [judged.series(row) for row in (*shared, *rows)], judged.notes()


def _rule(points: ChangePoints, num_cases: int, num_launches: int) -> list[str]:
    """Return sentences on the penalty: the share of the variation that a split must explain to count as a change."""
    alone, shared = num_cases < MIN_CASES, points.shared_share
    few = f"{num_launches} launches cannot separate {{}} from the machine's drift; {MIN_BLOCKS * BLOCK} are needed"
    if math.isnan(points.own_share):
        least = f"{num_launches} launches are too few to detect a change; {launches_needed(num_cases)} are needed"
        return [few.format("a change") if alone and num_launches >= 2 * MIN_LAUNCHES else least]
    of_all = "" if math.isnan(shared) else f" ({100 * shared:.0f} % for the median of all cases)"
    share = f"{100 * points.own_share:.0f} % of a case's sum of squares"
    rule = f"penalty: a split is reported as a change if it explains more than {share}"
    chance = f"{100 * LEVEL:g} % of permutations of the launches exceed this limit in at least one case"
    drift = [few.format("a change of all cases together")] if not alone and math.isnan(shared) else []
    return [f"{rule}{of_all}; {chance}", *drift]


def _series(
    scenario: str,
    case_id: str,
    logs: NDArray[np.float64],
    cuts: Sequence[int],
    launches: Sequence[Launch],
    is_tested: bool,
    unit: Unit,
) -> Series:
    """Return one case's points and levels. `cuts` are the columns of `logs` at which a level begins."""
    is_known = np.isfinite(logs)
    points = tuple(
        Point(
            launch.started_at,
            str(commit) if (commit := launch.facts.get("git_commit")) else None,
            bool(launch.facts.get("git_dirty")),
            math.exp(log),
            launch.label,
        )
        for launch, log in zip(launches, logs.tolist(), strict=True)
        if math.isfinite(log)
    )
    # Convert columns to points: count the measured values before each column.
    bounds = [0, *(int(is_known[:cut].sum()) for cut in cuts), len(points)]
    seconds = [point.seconds for point in points]
    levels = (Level(*ends, float(np.exp(np.median(np.log(seconds[slice(*ends)]))))) for ends in pairwise(bounds))
    return Series(scenario, case_id, points, tuple(levels), is_tested, unit, launches[0].more if launches else "")


MAX_CASES, MAX_STEADY = 40, 60
PAIRS_ADVISED = 10
SHORT_HASH = 8
COLUMNS = ("<from", "<commit", "launches", "median of p10", "change")
STEADY_COLUMNS = ("<scenario", "<case", "launches", "median of p10", "<from", "<commit")


def text(series: Sequence[Series], notes: Sequence[str]) -> str:
    """The history as text: cases with a change (the largest first), one line per other case, and the answer."""
    changed = [case_series for case_series in series if case_series.changes]
    steady = [case_series for case_series in series if not case_series.changes]
    blocks: list[Block] = [Heading(f"history: {count_text(len(series), 'case')}", 1)]
    blocks += map(_changed, changed[:MAX_CASES])
    left_out = max(len(changed) - MAX_CASES, 0) + max(len(steady) - MAX_STEADY, 0)
    if steady:
        rows = [_steady_row(case_series) for case_series in steady[:MAX_STEADY]]
        blocks.append(Table("no change:", STEADY_COLUMNS, rows, optional=("commit", "from", "scenario")))
    if left_out:
        blocks.append(Lines((f"... {left_out} more cases: narrow the pattern, e.g. distbench history SCENARIO",)))
    return text_of([*blocks, Notes(tuple(notes)), Lines(answer(series))])


def answer(series: Sequence[Series]) -> tuple[str, str]:
    """The finding, with its severity first, and the next command."""
    slower = [change for each in series for _, change in each.changes if change > 0]
    changed = [each for each in series if each.changes]
    cases = count_text(len(series), "case")
    if changed:
        point, change = max(changed[0].changes, key=lambda item: abs(item[1]))
        since = f"{times_text(1 + change, 'before', words=changed[0].unit.words)} since {' '.join(origin(point))}"
        finding = f"{len(changed)} of {cases} changed. Largest change: {changed[0].case_id}: {since}"
        return f"{'FAIL' if slower else 'PASS'}: {finding}", next_step(changed[0])
    launches = count_text(max(len(each.points) for each in series), "launch", "launches")
    launch_both = f"Next: distbench ab REF_A REF_B -- {argument_of(series[0].scenario)}   "
    compares, detects = f"{launch_both}(compares revisions)", f"{launch_both}(detects smaller changes)"
    if more := series[0].more:
        compares, detects = more_launches(len(series)), f"Next: {collect_text(more, PAIRS_ADVISED)}"
    if not any(each.is_tested for each in series):
        return f"UNKNOWN: too few launches to detect a change: {launches} of {cases}", compares
    return f"PASS: no performance change in {cases} ({launches})", detects


def launches_needed(num_cases: int) -> int:
    """Return the smallest number of launches in which a change can be detected."""
    return MIN_BLOCKS * BLOCK if num_cases < MIN_CASES else 2 * MIN_LAUNCHES


def more_launches(num_cases: int) -> str:
    """Return the next step if another tool's launches are too few."""
    return f"Next: add launches of the same program; {launches_needed(num_cases)} of each case are needed"


def next_step(series: Series) -> str:
    """The command that shows whether the code caused the largest change."""
    if series.more:
        return f"Next: {collect_text(series.more, PAIRS_ADVISED)}"
    levels = zip(pairwise(series.levels), series.changes, strict=True)
    (before_level, after_level), _ = max(levels, key=lambda item: abs(item[1][1]))
    before, after = series.points[before_level.stop - 1], series.points[after_level.start]
    if before.commit and after.commit and before.commit != after.commit:
        revisions = f"{before.commit[:SHORT_HASH]} {after.commit[:SHORT_HASH]}"
        return f"Next: distbench ab {revisions} -- {argument_of(series.scenario)}   (commit or machine changed?)"
    why = "the commit is the same before and after" if before.commit else "no commit is recorded"
    return f"Next: distbench ab REF_A REF_B -- {argument_of(series.scenario)}   ({why})"


def _changed(series: Series) -> Table:
    changes = ["", *(f"{100 * series.unit.change(change):+.0f} %" for _, change in series.changes)]
    rows = [
        (
            *origin(series.points[level.start]),
            str(level.stop - level.start),
            number_text(level.seconds, series.unit),
            change,
        )
        for level, change in zip(series.levels, changes, strict=True)
    ]
    return Table(f"{series.scenario}: {series.case_id}", COLUMNS, rows)


def _steady_row(series: Series) -> tuple[str, ...]:
    count, number = str(len(series.points)), number_text(series.levels[0].seconds, series.unit)
    return series.scenario, series.case_id, count, number, *origin(series.points[0])


def origin(point: Point) -> tuple[str, str]:
    """The date of a launch, and its commit and label."""
    date = datetime.datetime.fromtimestamp(point.started_at, datetime.UTC).strftime("%Y-%m-%d %H:%M")
    label = f' "{point.label}"' if point.label else ""
    return date if point.started_at > 0 else "-", commit_text(point) + label


def commit_text(point: Point) -> str:
    """`1a2b3c4d`, followed by `+` if files differed from the commit; `-` for an unknown commit."""
    return "-" if point.commit is None else point.commit[:SHORT_HASH] + ("+" if point.dirty else "")


def figures_of(series: Sequence[Series]) -> "Iterator[tuple[str, Figure]]":
    """Yield (name, figure), one per case."""
    for number, of_case in enumerate(series[:MAX_CASES]):
        yield f"history-{number:02}", figure_of(of_case)


def figure_of(series: Series) -> "Figure":
    """Draw a case's series: one point per launch, one line per level."""
    unit = series.unit
    numbers = [unit.given(point.seconds) for point in series.points]
    figure, [axes] = new_figure(1, 9, 3.6)
    axes.plot(range(len(series.points)), numbers, "o", color=GREY, markersize=4)
    for level in series.levels:
        axes.hlines(unit.given(level.seconds), level.start - 0.4, level.stop - 0.6, color=BLUE, linewidth=2)
    for level, (point, change) in zip(series.levels[1:], series.changes, strict=True):
        colour = RED if change > 0 else BLUE
        axes.axvline(level.start - 0.5, color=colour, linewidth=1, linestyle=":")
        words = f"{100 * unit.change(change):+.0f} %\n{commit_text(point)}"
        axes.annotate(words, (level.start - 0.4, 1), xycoords=("data", "axes fraction"), va="top", color=colour)
    title = f"{series.case_id}: the 10th percentile of each launch's samples"
    label = "time" if unit.name == SECONDS.name else unit.name
    axes.set(title=title, xlabel="launch, oldest first", ylabel=label, ylim=(0, 1.25 * max(numbers)))
    axes.grid(axis="y")
    if unit.name == SECONDS.name:
        label_axis(axes.yaxis, time_tick)
    return figure
