"""How often `distbench ab --bisect` names the right commit of made-up histories, and its launches.

A history has 32 commits. A launch of a commit is a recorded launch of unchanged code, the next one of its series in
time, with one case slower from the changed commit on. The decisions are those of the command (`judge.bisect.search`).

Run it with `python -m benchmarks bisect`; it needs no ranks.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.claims import Claim, Row
from benchmarks.gate_history import QUIET
from benchmarks.gate_series import quiet_here, recorded_here, shrunk
from distbench.judge.ab import Pair, Terms, looks_of
from distbench.judge.bisect import Commit, Search, search
from distbench.judge.gate_self_test import RecordedSeries
from distbench.records.launches import Launch
from distbench.records.run_file import Header
from distbench.statistics.verdicts import Options

NUM_COMMITS, MAX_PAIRS, LAUNCH_S, BUDGET_S = 32, 20, 12.0, 1800.0
# Time relative to the good commit, by the number of commits after the first changed one.
KINDS = {"+20 %": [(0, 1.2)], "no change": [], "+5 %": [(0, 1.05)], "+20 % twice": [(0, 1.2), (8, 1.44)]}
NUM_HISTORIES = 200
ENDINGS = ("right", "range", "wrong", "none named")
LEAST_RIGHT, MAX_WRONG = 0.9, 0.05
IS_LONG = True

CLAIMS = (
    Claim(
        "`distbench ab --bisect`, 32 commits, one of them 20 % slower: right commit named (200 histories of launches "
        "recorded on a quiet machine); mean number of launches",
        "{:.1%}, {:.0f} launches",
        "at least 90 %",
        ("quiet, +20 %, right", "quiet, +20 %, launches, mean"),
    ),
    Claim(
        "the same, wrong commit or range named (largest share of four spreads)",
        "{most:.1%}",
        "at most 5 %",
        ("*, +20 %, wrong",),
    ),
    Claim(
        "`distbench ab --bisect` over 32 equal commits names a commit (largest share of four spreads)",
        "{most:.1%}",
        "at most 5 %",
        ("*, no change, wrong",),
    ),
)


@dataclass
class History:
    """Recorded launches as those of a history's commits.

    Args:
        factors: the changed case's time relative to commit 0, by the number of the commit from which it is so.
        broken: commits that cannot be launched.
    """

    series: RecordedSeries
    row: int
    first: int
    factors: Mapping[int, float]
    draw: np.random.Generator
    num_launches: int = 0

    def launch(self, number: int, pair: int) -> Pair:
        """Launch commit 0 and a commit in random order."""
        result = Pair(seconds=dict.fromkeys(("good", "commit"), LAUNCH_S))
        sides = [(0, result.baseline), (number, result.candidate)]
        for index in self.draw.permutation(2).tolist():
            commit, launches = sides[index]
            launches.append(self._launch_of(commit))
        return result

    def _launch_of(self, commit: int) -> Launch:
        at = (self.first + self.num_launches) % self.series.num_launches
        cases = {case_id: values[at] for case_id, values in zip(self.series.case_ids, self.series.values, strict=True)}
        factor = next((self.factors[start] for start in sorted(self.factors, reverse=True) if start <= commit), 1.0)
        case_id = self.series.case_ids[self.row]
        value = cases[case_id]
        cases[case_id] = value._replace(mean_s=value.mean_s * factor, p10_s=value.p10_s * factor)
        name, start = f"launch-{self.num_launches}", 1.0 + self.num_launches
        self.num_launches += 1
        return Launch(name, "", "made up", start, start + 0.5, "", Header().facts, None, True, cases)


def searched(series: RecordedSeries, factors: Mapping[int, float], seed: int, tolerance: float = 0.05) -> Search:
    """Search one history of a series."""
    draw = np.random.default_rng(seed)
    row, first = (int(draw.integers(count)) for count in (len(series.case_ids), series.num_launches))
    history = History(series, row, first, factors, draw)
    options = Options(tolerances=dict.fromkeys(("mean", "p10"), tolerance))
    terms = Terms(MAX_PAIRS, BUDGET_S, looks_of(MAX_PAIRS, options), seed, NUM_COMMITS)
    commits = [Commit(f"{number:08}", "") for number in range(NUM_COMMITS + 1)]
    return search(commits, history.launch, options, terms, lambda line: None)


def main() -> list[Row]:
    """Rows (name, measured, allowed): numbers of histories; launches."""
    rows: list[Row] = []
    for name, series in serieses().items():
        for kind in KINDS:
            endings, launches = endings_of(series, kind, NUM_HISTORIES)
            allowed = {"right": -LEAST_RIGHT} if (name, kind) == ("quiet", "+20 %") else {}
            allowed |= {"wrong": MAX_WRONG} if kind != "+5 %" else {}
            count = len(endings)
            rows += [
                (f"{name}, {kind}, {ending}", endings.count(ending) / count, allowed.get(ending, math.inf))
                for ending in ENDINGS
            ]
            rows.append((f"{name}, {kind}, launches, mean", statistics.fmean(launches), math.inf))
            rows.append((f"{name}, {kind}, launches, most", max(launches), math.inf))
    return rows


def serieses() -> dict[str, RecordedSeries]:
    """Launches of `collectives --quick --passes 8`: as recorded on a quiet machine; on a busy one; and these with
    deviations as on a quiet machine, and three times as large."""
    busy = recorded_here()
    return {
        "quiet": quiet_here(),
        "quieter": shrunk(busy, QUIET),
        "medium": shrunk(busy, 3 * QUIET),
        "busy": busy,
    }


def endings_of(series: RecordedSeries, kind: str, num_histories: int) -> tuple[list[str], list[int]]:
    """How each search ended (ENDINGS), and its launches."""
    endings, launches = [], []
    for seed in range(num_histories):
        changed = 1 + int(np.random.default_rng((seed, NUM_COMMITS)).integers(NUM_COMMITS))
        factors = {changed + after: factor for after, factor in KINDS[kind] if changed + after <= NUM_COMMITS}
        state = searched(series, factors, seed)
        launches.append(2 * len(state.pairs))
        if state.step is None or state.is_refuted:
            endings.append("none named")
            continue
        first, last, _ = state.answer
        is_right = first <= changed <= last and bool(factors)
        endings.append(("right" if first == last else "range") if is_right else "wrong")
    return endings, launches


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:.3g} (allowed {allowed:g})")
