"""How often the timing gate cries wolf and how often it finds a slowdown, beside other tools on the same series.

    python -m benchmarks.gate_quality quiet=runs/quiet loaded=runs/loaded     (recorded launches of unchanged code)
    python -m benchmarks.gate_quality --synthetic                             (checks the arithmetic, not the claim)

Windows of consecutive launches are cut out of a series, neighbours become pairs, and a coin says which of a pair is the
candidate: as if baseline and candidate had taken turns. A slowdown is put into one case of the candidate's samples.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.gate_peers import PEERS
from benchmarks.gate_series import NOISES, Floats, Series, recorded, synthetic
from distbench.gate.comparable import facts_of
from distbench.gate.gate import gate
from distbench.gate.launches import Launch, Value, value_of
from distbench.gate.options import Options

OURS = "distbench gate"
TAIL_SHARE, TAIL_FACTOR = 0.1, 3.0
CHANGES: dict[str, float | None] = {"none": 1.0, "+10 %": 1.1, "+20 %": 1.2, "+50 %": 1.5, "tail": None}


@dataclass
class Rates:
    """What one rule did in many comparisons with one change.

    Args:
        num_comparisons: comparisons made.
        false_jobs: comparisons in which any unchanged case was called slower.
        found: comparisons in which the changed case was called slower.
        passed: comparisons in which the changed case was called a pass (ours only).
    """

    num_comparisons: int = 0
    false_jobs: int = 0
    found: int = 0
    passed: int = 0


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
class Trial:
    """A series with what is computed of it once.

    Args:
        series: the series.
        values: [case][launch] to what the gate keeps of its samples.
    """

    series: Series
    values: list[list[Value]] = field(init=False)

    def __post_init__(self) -> None:
        self.values = [[_value(samples) for samples in launches] for launches in self.series.samples_s]

    def window(self, num_pairs: int, factor: float | None, draw: np.random.Generator) -> Window:
        """A window of neighbours, anywhere in the series."""
        start = int(draw.integers(self.series.num_launches - 2 * num_pairs + 1))
        coin = draw.integers(2, size=num_pairs)
        first = start + 2 * np.arange(num_pairs)
        changed = int(draw.integers(len(self.series.case_ids)))
        return Window(
            (first + coin).tolist(), (first + 1 - coin).tolist(), changed, factor, int(draw.integers(1 << 30))
        )

    def launches(self, window: Window, candidate: bool) -> list[Launch]:
        """One side of a window as the gate takes it."""
        return [
            self._launch(window, index, candidate) for index in (window.candidate if candidate else window.baseline)
        ]

    def _launch(self, window: Window, index: int, candidate: bool) -> Launch:
        cases = {case_id: self.values[row][index] for row, case_id in enumerate(self.series.case_ids)}
        if candidate:
            changed = window.slowed(window.changed, index, np.asarray(self.series.samples_s[window.changed][index]))
            cases[self.series.case_ids[window.changed]] = _value(changed)
        return Launch(f"launch-{index}", "", self.series.name, 1.0 + index, "", facts_of({}, {}), None, True, cases)

    def pooled(self, window: Window, candidate: bool) -> Floats:
        """One side's samples of each case, launches forgotten: [cases, samples], equally many of each launch."""
        indexes = window.candidate if candidate else window.baseline
        everything = [
            self.series.samples_s[row][index] for row in range(len(self.series.case_ids)) for index in indexes
        ]
        fewest = min(len(samples) for samples in everything)
        return np.array(
            [
                np.concatenate(
                    [
                        (window.slowed(row, index, samples[:fewest]) if candidate else samples[:fewest])
                        for index, samples in ((index, np.asarray(launches[index])) for index in indexes)
                    ]
                )
                for row, launches in enumerate(self.series.samples_s)
            ]
        )


def _value(samples_s: Floats) -> Value:
    return value_of({"status": "ok", "samples_s": samples_s.tolist()})


def rates(trial: Trial, num_pairs: int, change: str, num_comparisons: int, seed: int, peers: bool) -> dict[str, Rates]:
    """Rule to its rates.

    Args:
        trial: the series.
        num_pairs: pairs of launches in each comparison.
        change: one of CHANGES.
        num_comparisons: comparisons to make.
        seed: of the windows.
        peers: whether to ask the other tools' rules as well.
    """
    draw = np.random.default_rng(seed)
    found = {name: Rates() for name in (OURS, *(PEERS if peers else ()))}
    for _ in range(num_comparisons):
        window = trial.window(num_pairs, CHANGES[change], draw)
        gated = gate(trial.launches(window, False), trial.launches(window, True), Options())
        verdicts = {case.case_id: case.verdict for case in gated.cases}
        ours = np.array([verdicts[case_id] == "regression" for case_id in trial.series.case_ids])
        _count(found[OURS], ours, window)
        found[OURS].passed += verdicts[trial.series.case_ids[window.changed]] == "pass"
        if peers:
            left, right = trial.pooled(window, False), trial.pooled(window, True)
            for name, rule in PEERS.items():
                _count(found[name], rule(left, right), window)
    return found


def _count(counted: Rates, slower: np.ndarray, window: Window) -> None:
    unchanged = slower.copy()
    if window.factor != 1.0:
        unchanged[window.changed] = False
    counted.num_comparisons += 1
    counted.false_jobs += bool(unchanged.any())
    counted.found += bool(slower[window.changed])


def table(trial: Trial, num_pairs: int, num_comparisons: int, seed: int) -> str:
    """Markdown: a row a rule, a column a change, in percent of comparisons."""
    by_change = {change: rates(trial, num_pairs, change, num_comparisons, seed, peers=True) for change in CHANGES}
    found = [change for change in CHANGES if change != "none"]
    lines = [
        f"{trial.series.name}: {num_pairs} pairs, {len(trial.series.case_ids)} cases, {num_comparisons} comparisons "
        f"out of {trial.series.num_launches} launches ({trial.series.origin})",
        "",
        "| rule | any false alarm | " + " | ".join(f"{change} found" for change in found) + " | +20 % called a pass |",
        "|:---|---:|" + "---:|" * (len(found) + 1),
    ]
    for name in (OURS, *PEERS):
        of = {change: by_change[change][name] for change in CHANGES}
        cells = [_percent(of["none"].false_jobs, of["none"]), *(_percent(of[one].found, of[one]) for one in found)]
        passed = _percent(of["+20 %"].passed, of["+20 %"]) if name == OURS else "-"
        lines.append(f"| {name} | {' | '.join(cells)} | {passed} |")
    return "\n".join(lines)


def _percent(count: int, of: Rates) -> str:
    return f"{100 * count / of.num_comparisons:.1f}"


def main(arguments: Sequence[str]) -> int:
    """Print a table for each series and number of pairs; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", nargs="*", metavar="NAME=FOLDER", help="recorded launches of unchanged code")
    parser.add_argument("--synthetic", action="store_true", help="synthetic series instead")
    parser.add_argument("--pairs", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--comparisons", type=int, default=400)
    parser.add_argument("--seed", type=int, default=20260101)
    given = parser.parse_args(arguments)
    if not given.series and not given.synthetic:
        parser.error("give recorded series as NAME=FOLDER, or --synthetic")
    series = [synthetic(name) for name in NOISES] if given.synthetic else [_named(text) for text in given.series]
    for one in series:
        trial = Trial(one)
        for num_pairs in given.pairs:
            print(table(trial, num_pairs, given.comparisons, given.seed) + "\n", flush=True)
    return 0


def _named(text: str) -> Series:
    name, _, folder = text.rpartition("=")
    series = recorded(Path(folder))
    return Series(name or series.name, series.case_ids, series.samples_s, series.origin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
