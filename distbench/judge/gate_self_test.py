"""The gate's rates of false alarms and of detected slowdowns, on launches of unchanged code.

Each comparison uses a window of consecutive launches, from every possible start. As in `distbench ab`, the order of
each pair is random. One case gets an artificial slowdown. The comparisons therefore contain the machine's drift and the
effect of each launch on the next launch. Overlapping windows are not independent, so the number of launches limits the
precision of a rate.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distbench.judge.gate import Gated, gate
from distbench.records.baselines import read_side
from distbench.records.foreign_numbers import NumberColumns
from distbench.records.launches import Launch, Value, launch_of, value_of
from distbench.records.results_folder import run_files_in
from distbench.records.run_file import Header, Run, read_run
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import Floats
from distbench.statistics.verdicts import IMPROVEMENT, PASS, REGRESSION, Options

MIN_LAUNCHES = 10
ORIGIN = ("machine", "num_cpus", "torch", "scheduler", "git_commit")

TAIL_SHARE, TAIL_FACTOR = 0.1, 3.0
SPOILED_FACTOR = 3.0


class Change(NamedTuple):
    """An artificial change of the launches in a window.

    Args:
        factor: factor for one case's candidate samples; None slows only a random share of the samples (a tail).
        spoils: whether one launch of one side is SPOILED_FACTOR times slower in all cases.
    """

    factor: float | None = 1.0
    spoils: bool = False


WITH_SPOILED = ", one launch 3x slower"
CHANGES = {
    "none": Change(),
    "+10 %": Change(1.1),
    "+20 %": Change(1.2),
    "+50 %": Change(1.5),
    "tail": Change(None),
    f"none{WITH_SPOILED}": Change(spoils=True),
    f"+20 %{WITH_SPOILED}": Change(1.2, spoils=True),
}


class TrialVerdicts(NamedTuple):
    """The outcome of one comparison: verdict of each case, number of pairs used, and whether the headline is PASS."""

    verdicts: NDArray[np.str_]
    num_pairs: int
    is_pass: bool = False


@dataclass
class Rates:
    """The outcomes of one rule in many comparisons with one change, as numbers of comparisons.

    Args:
        false_jobs: comparisons with the verdict "slower" on an unchanged case.
        false_verdicts: comparisons with the verdict "slower" or "faster" on an unchanged case.
        detected: comparisons with the verdict "slower" on the changed case.
        passed: comparisons with the verdict "pass" on the changed case.
        headed_pass: comparisons with the headline PASS.
        num_pairs: pairs of launches that the rule used, summed over comparisons.
    """

    num_comparisons: int = 0
    false_jobs: int = 0
    false_verdicts: int = 0
    detected: int = 0
    passed: int = 0
    headed_pass: int = 0
    num_pairs: int = 0

    def add(self, window: "Window", trial: TrialVerdicts) -> None:
        """Count the outcome of one comparison."""
        verdicts = trial.verdicts
        slower = verdicts == REGRESSION
        is_unchanged = (np.arange(len(slower)) != window.changed) | (window.factor == 1.0)
        self.num_comparisons += 1
        self.false_jobs += bool((slower & is_unchanged).any())
        self.false_verdicts += bool(((slower | (verdicts == IMPROVEMENT)) & is_unchanged).any())
        self.detected += bool(slower[window.changed])
        self.passed += bool(verdicts[window.changed] == PASS)
        self.headed_pass += trial.is_pass
        self.num_pairs += trial.num_pairs


@dataclass(frozen=True)
class Window:
    """One comparison: the launches of both sides, and the change.

    Args:
        baseline, candidate: indexes of launches, in time order. Launches of a pair are adjacent in time.
        changed: row of the changed case.
        factor: factor for the candidate samples of the changed case; None for a tail.
        seed: seed for the choice of the samples in a tail.
        spoiled: the launch that is SPOILED_FACTOR times slower in all cases, or None.
    """

    baseline: Sequence[int]
    candidate: Sequence[int]
    changed: int
    factor: float | None
    seed: int
    spoiled: int | None = None

    def slowed(self, row: int, launch: int, samples_s: Floats) -> Floats:
        """Return a candidate launch's samples of one case; samples of the changed case are slowed."""
        if row != self.changed or self.factor == 1.0:
            return samples_s
        if self.factor is not None:
            return samples_s * self.factor
        draw = np.random.default_rng((self.seed, launch))
        return np.where(draw.random(samples_s.shape) < TAIL_SHARE, TAIL_FACTOR, 1.0) * samples_s


@dataclass
class RecordedSeries:
    """Launches of unchanged code, in time order.

    Args:
        case_ids: the cases that every launch measured.
        samples_s: samples of each case and launch, `[case][launch]`, in seconds; empty for a stored baseline.
        origin: machine, CPUs, torch, scheduler and commit, as JSON.
        values: statistics of each case and launch, `[case][launch]`; by default those of `samples_s`.
    """

    name: str
    case_ids: tuple[str, ...]
    samples_s: Sequence[Sequence[Floats]]
    origin: str
    values: Sequence[Sequence[Value]] = ()

    def __post_init__(self) -> None:
        self.values = self.values or [[_value(samples) for samples in launches] for launches in self.samples_s]

    @property
    def changes(self) -> list[str]:
        """The changes of CHANGES that these launches allow: a tail needs samples."""
        return [name for name, change in CHANGES.items() if change.factor is not None or self.samples_s]

    @property
    def num_launches(self) -> int:
        """The number of launches."""
        return len(self.values[0])

    def num_starts(self, num_pairs: int) -> int:
        """The number of possible first launches of a window of `num_pairs` pairs."""
        return max(self.num_launches - 2 * num_pairs + 1, 0)

    def window(self, number: int, num_pairs: int, change: Change, draw: np.random.Generator) -> Window:
        """Return the window with this number (modulo the number of starts), with random orders and a random changed
        case."""
        first = number % self.num_starts(num_pairs) + 2 * np.arange(num_pairs)
        is_second = draw.integers(2, size=num_pairs)  # the launch of the candidate
        changed = int(draw.integers(len(self.case_ids)))
        seed = int(draw.integers(1 << 30))
        sides = (first + 1 - is_second).tolist(), (first + is_second).tolist()
        spoiled = int(first[0]) + seed % (2 * num_pairs) if change.spoils else None
        return Window(*sides, changed, change.factor, seed, spoiled)

    def sides(self, window: Window) -> tuple[list[Launch], list[Launch]]:
        """Return baseline and candidate of a window, as input of the gate."""
        baseline = [self._launch(window, index, False) for index in window.baseline]
        return baseline, [self._launch(window, index, True) for index in window.candidate]

    def _launch(self, window: Window, index: int, candidate: bool) -> Launch:
        cases = {case_id: self.values[row][index] for row, case_id in enumerate(self.case_ids)}
        if candidate and window.factor != 1.0:
            changed_id = self.case_ids[window.changed]
            if window.factor is None:
                samples_s = np.asarray(self.samples_s[window.changed][index])
                cases[changed_id] = _value(window.slowed(window.changed, index, samples_s))
            else:
                cases[changed_id] = _times(cases[changed_id], window.factor)
        if index == window.spoiled:
            cases = {case_id: _times(value, SPOILED_FACTOR) for case_id, value in cases.items()}
        return Launch(f"launch-{index}", "", self.name, 1.0 + index, 1.5 + index, "", Header().facts, None, True, cases)

    def judged(self, gated: Gated) -> TrialVerdicts:
        """Return a comparison's verdicts, in the order of the series' cases, and its number of pairs."""
        verdicts = {case.case_id: case.verdict for case in gated.cases}
        in_order = np.array([verdicts[case_id] for case_id in self.case_ids])
        return TrialVerdicts(in_order, gated.num_baseline, gated.exit_code() == 0 and not gated.is_open)


def recorded(folder: Path, columns: NumberColumns | None = None) -> RecordedSeries:
    """Return the finished launches below a folder, in time order, with the cases that all launches measured.

    The run files of one `distbench run` count as one launch.

    Args:
        folder: of run files, or a file or folder of another tool.
        columns: the columns of the numbers in another tool's files.

    Raises:
        UserError: fewer than MIN_LAUNCHES launches, or no case that all launches measured.
    """
    if columns is not None and (columns != NumberColumns() or not (folder.is_dir() and run_files_in(folder))):
        return series_of(folder.name, read_side([folder], "self-test", [], columns))
    invocations: dict[str, list[tuple[Launch, Run]]] = {}
    for run in map(read_run, run_files_in(folder)):
        invocations.setdefault(run.about.invocation_id or str(run.path), []).append((launch_of(run), run))
    finished = [runs for runs in invocations.values() if all(launch.complete for launch, _ in runs)]
    finished.sort(key=lambda runs: min(launch.started_at for launch, _ in runs))
    _require_launches(str(folder), len(finished), len(invocations) - len(finished))
    measured = [
        {
            (launch.scenario, record["case"]["id"]): np.array(record["samples_s"])
            for launch, run in runs
            for record in run.cases
            if record["status"] == "ok"
        }
        for runs in finished
    ]
    keys = [key for key in measured[0] if all(key in launch for launch in measured)]
    if not keys:
        raise UserError(f"no case was measured by every launch below {folder}; record launches of the same scenarios")
    several = len({scenario for scenario, _ in keys}) > 1
    ids = tuple(f"{scenario}: {case_id}" if several else case_id for scenario, case_id in keys)
    origin = json.dumps({name: finished[0][0][0].facts[name] for name in ORIGIN})
    return RecordedSeries(folder.name, ids, [[launch[key] for launch in measured] for key in keys], origin)


def series_of(name: str, launches: Sequence[Launch]) -> RecordedSeries:
    """Launches without samples, oldest first, with the cases that all of them measured. Raises as `recorded`."""
    _require_launches(name, len(launches))
    ids = [
        case_id
        for case_id in launches[0].cases
        if all((value := launch.cases.get(case_id)) and value.status == "ok" for launch in launches)
    ]
    if not ids:
        raise UserError(f"no case was measured by every launch of {name}; give launches of the same cases")
    origin = json.dumps({name: launches[0].facts[name] for name in ORIGIN})
    return RecordedSeries(name, tuple(ids), (), origin, [[launch.cases[case] for launch in launches] for case in ids])


def _require_launches(name: str, count: int, num_failed: int = 0) -> None:
    if count < MIN_LAUNCHES:
        failed = f" that finished, and {num_failed} that did not finish" if num_failed else ""
        launches = count_text(count, "launch", "launches")
        raise UserError(f"{name} has {launches}{failed}; record at least {MIN_LAUNCHES}, preferably 60")


Rule = Callable[[RecordedSeries, Window], TrialVerdicts]


def _value(samples_s: Floats) -> Value:
    return value_of({"status": "ok", "samples_s": samples_s.tolist()})


def _times(value: Value, factor: float) -> Value:
    return value._replace(mean_s=value.mean_s * factor, p10_s=value.p10_s * factor)


def gate_rule(series: RecordedSeries, window: Window, options: Options | None = None) -> TrialVerdicts:
    """Judge all pairs at the same time, as `distbench gate` does."""
    return series.judged(gate(*series.sides(window), options or Options()))


def rates(
    series: RecordedSeries, num_pairs: int, change: str, num_comparisons: int, seed: int, rule: Rule = gate_rule
) -> Rates:
    """Count a rule's outcomes in many comparisons.

    Args:
        num_pairs: pairs of launches in each comparison.
        change: one of CHANGES.
        num_comparisons: number of comparisons. If it exceeds the number of starts, launches are used again in another
            order.
        seed: seed for orders and the changed case, so that all rules get the same comparisons.
        rule: the rule to test, which may ignore the last pairs.
    """
    draw, totals, num_starts = np.random.default_rng(seed), Rates(), series.num_starts(num_pairs)
    # A stride that visits all starts, far apart from one to the next.
    step = next(step for step in range(max(int(0.618 * num_starts), 1), 0, -1) if np.gcd(step, num_starts) == 1)
    for number in range(num_comparisons):
        window = series.window(number * step, num_pairs, CHANGES[change], draw)
        totals.add(window, rule(series, window))
    return totals


OURS = "distbench gate"


def table(series: RecordedSeries, num_pairs: int, num_comparisons: int, seed: int, rules: Mapping[str, Rule]) -> str:
    """Return a table with one row per rule and one column per change, in percent of comparisons; parameters as for
    `rates`.

    Args:
        rules: name to rule; the gate's name is OURS, and only the gate has the verdict "pass".
    """
    changes = [name for name in series.changes if CHANGES[name].factor != 1.0]
    lines = [
        f"{series.name}: {num_pairs} pairs, {len(series.case_ids)} cases, {series.num_launches} "
        f"launches: {num_comparisons} comparisons per column, in windows from {series.num_starts(num_pairs)} starts",
        "",
        "| rule | any false alarm | "
        + " | ".join(f"{change} detected" for change in changes)
        + " | +20 % with verdict pass | +20 % with headline PASS |",
        "|:---|---:|" + "---:|" * (len(changes) + 2),
    ]
    for name, rule in rules.items():
        of = {change: rates(series, num_pairs, change, num_comparisons, seed, rule) for change in ("none", *changes)}
        none = of["none"]
        cells = [percent(none.false_jobs, none), *(percent(of[change].detected, of[change]) for change in changes)]
        slower = of["+20 %"]
        cells += [percent(count, slower) if name == OURS else "-" for count in (slower.passed, slower.headed_pass)]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def percent(count: int, of: Rates) -> str:
    """Format a count in percent of all comparisons, as `12.5`; "-" without comparisons."""
    return f"{100 * count / of.num_comparisons:.1f}" if of.num_comparisons else "-"
