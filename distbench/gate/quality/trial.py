"""Comparisons cut out of a series of unchanged launches, a slowdown put into one case: what the gate makes of them.

Windows of consecutive launches are taken as `distbench ab` would have launched them (A B, B A, A B ...), from every
start and with either side as the candidate. So what drifts, and what a launch leaves behind for the next one, is in
them as it was. Overlapping windows are not independent: a rate is known no better than the launches allow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from distbench.compare.log_differences import Floats
from distbench.compare.options import Options
from distbench.gate.compare_sides import gate
from distbench.gate.quality.recorded_launches import RecordedSeries
from distbench.gate.verdict import Gated
from distbench.runs.header import Header
from distbench.runs.launches import Launch, Value, value_of

OURS = "distbench gate"
TAIL_SHARE, TAIL_FACTOR = 0.1, 3.0
CHANGES: dict[str, float | None] = {"none": 1.0, "+10 %": 1.1, "+20 %": 1.2, "+50 %": 1.5, "tail": None}
Rule = Callable[[Floats, Floats], "np.ndarray"]
Judge = Callable[[Sequence[Launch], Sequence[Launch]], Gated]


@dataclass
class Rates:
    """What one rule did in many comparisons with one change.

    Args:
        num_comparisons: comparisons made.
        false_jobs: comparisons in which any unchanged case was called slower.
        found: comparisons in which the changed case was called slower.
        passed: comparisons in which the changed case was called a pass (ours only).
        num_pairs: pairs of launches that were judged in the end, summed (ours only).
    """

    num_comparisons: int = 0
    false_jobs: int = 0
    found: int = 0
    passed: int = 0
    num_pairs: int = 0


@dataclass(frozen=True)
class Window:
    """One comparison: which launches are the baseline's and which the candidate's, and what was changed.

    Args:
        baseline: indexes of launches, in time order.
        candidate: likewise; each beside its partner in time.
        changed: row of the changed case.
        factor: what its candidate samples are multiplied by; None for a tail.
        seed: which samples a tail hits.
    """

    baseline: Sequence[int]
    candidate: Sequence[int]
    changed: int
    factor: float | None
    seed: int

    def slowed(self, row: int, launch: int, samples_s: Floats) -> Floats:
        """A candidate launch's samples of one case, with the change put in where it belongs."""
        if row != self.changed or self.factor == 1.0:
            return samples_s
        if self.factor is not None:
            return samples_s * self.factor
        draw = np.random.default_rng((self.seed, launch))
        return np.where(draw.random(samples_s.shape) < TAIL_SHARE, TAIL_FACTOR, 1.0) * samples_s


@dataclass
class QualityTrial:
    """A series with what is computed of it once.

    Args:
        series: the series.
        values: [case][launch] to what the gate keeps of its samples.
    """

    series: RecordedSeries
    values: list[list[Value]] = field(init=False)

    def __post_init__(self) -> None:
        self.values = [[_value(samples) for samples in launches] for launches in self.series.samples_s]

    def num_windows(self, num_pairs: int) -> int:
        """Different windows of so many pairs: every start, either side the candidate."""
        return 2 * max(self.series.num_launches - 2 * num_pairs + 1, 0)

    def window(self, number: int, num_pairs: int, factor: float | None, draw: np.random.Generator) -> Window:
        """The window of a number, modulo how many there are; the changed case is drawn."""
        start, swapped = divmod(number % self.num_windows(num_pairs), 2)
        pairs = np.arange(num_pairs)
        first = start + 2 * pairs
        # A B, B A, A B: the candidate is second in every other pair.
        is_second = (pairs + swapped) % 2
        changed = int(draw.integers(len(self.series.case_ids)))
        seed = int(draw.integers(1 << 30))
        return Window((first + 1 - is_second).tolist(), (first + is_second).tolist(), changed, factor, seed)

    def launches(self, window: Window, candidate: bool) -> list[Launch]:
        """One side of a window as the gate takes it."""
        return [
            self._launch(window, index, candidate) for index in (window.candidate if candidate else window.baseline)
        ]

    def _launch(self, window: Window, index: int, candidate: bool) -> Launch:
        cases = {case_id: self.values[row][index] for row, case_id in enumerate(self.series.case_ids)}
        if candidate and window.factor != 1.0:
            changed = window.slowed(window.changed, index, np.asarray(self.series.samples_s[window.changed][index]))
            cases[self.series.case_ids[window.changed]] = _value(changed)
        return Launch(f"launch-{index}", "", self.series.name, 1.0 + index, "", Header().facts, None, True, cases)

    def pooled(self, window: Window, candidate: bool) -> Floats:
        """One side's samples of each case, launches forgotten: [cases, samples], equally many of each launch."""
        indexes = window.candidate if candidate else window.baseline
        rows = range(len(self.series.case_ids))
        fewest = min(len(self.series.samples_s[row][index]) for row in rows for index in indexes)

        def side_of(row: int, index: int) -> Floats:
            samples = np.asarray(self.series.samples_s[row][index])[:fewest]
            return window.slowed(row, index, samples) if candidate else samples

        return np.array([np.concatenate([side_of(row, index) for index in indexes]) for row in rows])


def _value(samples_s: Floats) -> Value:
    return value_of({"status": "ok", "samples_s": samples_s.tolist()})


def judged_once(baseline: Sequence[Launch], candidate: Sequence[Launch], options: Options | None = None) -> Gated:
    """All pairs at once, as `distbench gate` does; usual terms unless given others."""
    return gate(baseline, candidate, options or Options())


def rates(
    trial: QualityTrial,
    num_pairs: int,
    change: str,
    num_comparisons: int,
    seed: int,
    peers: "dict[str, Rule] | None" = None,
    judge: Judge = judged_once,
) -> dict[str, Rates]:
    """Rule to its rates.

    Args:
        trial: the series.
        num_pairs: pairs of launches in each comparison.
        change: one of CHANGES.
        num_comparisons: comparisons to make; more than there are windows change another case in the same launches.
        seed: of which case is changed.
        peers: other rules to ask on the same samples, by name.
        judge: baseline and candidate to verdicts; it may leave out the last pairs.
    """
    draw = np.random.default_rng(seed)
    found = {name: Rates() for name in (OURS, *(peers or {}))}
    step = _coprime_step(trial.num_windows(num_pairs))
    for number in range(num_comparisons):
        window = trial.window(number * step, num_pairs, CHANGES[change], draw)
        gated = judge(trial.launches(window, False), trial.launches(window, True))
        verdicts = {case.case_id: case.verdict for case in gated.cases}
        ours = np.array([verdicts[case_id] == "regression" for case_id in trial.series.case_ids])
        _count(found[OURS], ours, window)
        found[OURS].num_pairs += gated.num_baseline
        found[OURS].passed += verdicts[trial.series.case_ids[window.changed]] == "pass"
        if peers:
            left, right = trial.pooled(window, False), trial.pooled(window, True)
            for name, rule in peers.items():
                _count(found[name], rule(left, right), window)
    return found


def _coprime_step(count: int) -> int:
    """A stride that visits all of `count` windows, far apart from one to the next."""
    return next(step for step in range(max(int(0.618 * count), 1), 0, -1) if np.gcd(step, count) == 1)


def _count(counted: Rates, slower: "np.ndarray", window: Window) -> None:
    unchanged = slower.copy()
    if window.factor != 1.0:
        unchanged[window.changed] = False
    counted.num_comparisons += 1
    counted.false_jobs += bool(unchanged.any())
    counted.found += bool(slower[window.changed])
