"""The gate on made-up launches of known spread: a steady case among noisy ones, and a disturbance that comes and goes.

python -m benchmarks.gate_made_up [TRIALS]

Verdicts are those of `distbench gate`, launches in the order that `distbench ab` tosses. A launch's mean and 10th
percentile have half of their variance in common.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distbench.judge.ab import Side, order_of
from distbench.judge.gate import Gated, gate
from distbench.records.launches import Launch, Value
from distbench.records.run_file import Header
from distbench.statistics.verdicts import IMPROVEMENT, REGRESSION, Options

NUM_CASES = 30
SPREAD, STEADY_SPREAD = 0.2, 0.01  # standard deviations of a launch's logarithm
SLOWDOWN, DISTURBANCE = 1.2, 1.1
SEED = 20260101
SIDES = [Side(name, ".", Path()) for name in "ab"]
Floats = NDArray[np.float64]


def compared(logs: Floats, orders: Sequence[Sequence[Side]], options: Options | None = None) -> Gated:
    """The gate's verdict on launches one after another.

    Args:
        logs: of seconds, [launches, cases, 2]: the two metrics.
        orders: of each pair of launches, the side that ran first and the other.
    """
    sides: dict[str, list[Launch]] = {"a": [], "b": []}
    for index, name in enumerate(side.name for order in orders for side in order):
        values = [Value("ok", 20, mean_s, p10_s) for mean_s, p10_s in np.exp(logs[index]).tolist()]
        cases = {f"case-{number}": value for number, value in enumerate(values)}
        start = 1.0 + 60 * index
        sides[name].append(Launch(f"{index}", "", "made up", start, start + 50, "", Header().facts, None, True, cases))
    return gate(sides["a"], sides["b"], options or Options())


def noise(draw: np.random.Generator, num_launches: int, spread: Floats) -> Floats:
    """Launches of unchanged cases, [launches, cases, 2]; `spread` has one value a case."""
    shape = (num_launches, len(spread))
    both = draw.standard_normal((*shape, 1)) + draw.standard_normal((*shape, 2))
    return np.asarray(spread[:, None] * both / np.sqrt(2))


def steady_among_noisy(num_trials: int, num_pairs: int = 5) -> float:
    """The share of comparisons that find the one steady case, which is slower; the others are noisy and unchanged."""
    draw, result = np.random.default_rng(SEED), 0
    spread = np.array([STEADY_SPREAD, *[SPREAD] * (NUM_CASES - 1)])
    for trial in range(num_trials):
        orders = [order_of(pair, SIDES, trial) for pair in range(num_pairs)]
        logs = noise(draw, 2 * num_pairs, spread)
        logs[[side.name == "b" for order in orders for side in order], 0] += np.log(SLOWDOWN)
        verdicts = {case.case_id: case.verdict for case in compared(logs, orders).cases}
        result += verdicts["case-0"] == REGRESSION
    return result / num_trials


def disturbed(num_trials: int, is_tossed: bool, num_pairs: int = 10) -> float:
    """The share of comparisons that call any unchanged case slower or faster where two launches of four are disturbed.

    Args:
        is_tossed: whether a coin gives each pair its order; else they are run A B, B A, A B ...
    """
    draw, alarms = np.random.default_rng(SEED), 0
    for trial in range(num_trials):
        fixed = [SIDES, SIDES[::-1]]
        orders = [order_of(pair, SIDES, trial) if is_tossed else fixed[pair % 2] for pair in range(num_pairs)]
        logs = noise(draw, 2 * num_pairs, np.full(NUM_CASES, STEADY_SPREAD))
        # The second launch of one pair and the first of the next: side b, where the order is fixed.
        logs[[index % 4 in (1, 2) for index in range(2 * num_pairs)]] += np.log(DISTURBANCE)
        counts = compared(logs, orders).counts
        alarms += bool(counts.get(REGRESSION) or counts.get(IMPROVEMENT))
    return alarms / num_trials


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"{count} comparisons each, {NUM_CASES} cases")
    print(f"one case of 1 % spread, +20 %, among 29 of 20 % spread, 5 pairs: found {steady_among_noisy(count):.3f}")
    for label, tossed in (("a coin for each pair", True), ("A B, B A, ...", False)):
        said = f"+10 % on two launches of four, no change, 10 pairs, {label}"
        print(f"{said}: any false verdict {disturbed(count, tossed):.3f}")
