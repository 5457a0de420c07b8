"""How often `distbench history` reports a change of launches of unchanged code, and where it places a true step.

python -m benchmarks.gate_history
"""

import numpy as np
from numpy.typing import NDArray

from benchmarks.gate_series import quiet_here, recorded_here
from distbench.judge.gate_self_test import RecordedSeries
from distbench.statistics.change_points import MIN_LAUNCHES, change_points

Floats = NDArray[np.float64]
WINDOW, STEP, NEAR = 20, 1.2, 1
QUIET = 0.05  # spread of a launch's p10 on a quiet machine, as a logarithm (docs/statistics.md)
SEED = 20260101


def logs_of(series: RecordedSeries) -> Floats:
    """Logarithms of 10th percentiles, [cases, launches]."""
    return np.log([[value.p10_s for value in row] for row in series.values])


def drifting(num_launches: int, spread: float, correlation: float, draw: np.random.Generator) -> Floats:
    """Made-up launches of 30 cases; half of their variance is the machine's level, which neighbours share."""
    level = draw.standard_normal(num_launches)
    for index in range(1, num_launches):
        level[index] = correlation * level[index - 1] + np.sqrt(1 - correlation**2) * level[index]
    return np.asarray(spread * np.sqrt(0.5) * (level + draw.standard_normal((30, num_launches))))


def reported(logs: Floats) -> bool:
    """Whether any case, or all together, changed."""
    result = change_points(logs)
    return bool(result.shared or any(result.own))


def unchanged(logs: Floats) -> float:
    """The share of all windows of WINDOW launches with a reported change; neighbouring windows share launches."""
    starts = range(logs.shape[1] - WINDOW + 1)
    return sum(reported(logs[:, start : start + WINDOW]) for start in starts) / len(starts)


def placed(logs: Floats, num_windows: int, draw: np.random.Generator, is_shared: bool = False) -> float:
    """The share of windows in which a step is found within NEAR launches: of one case, or of all cases."""
    result = 0
    for start in draw.integers(logs.shape[1] - WINDOW + 1, size=num_windows).tolist():
        window = logs[:, start : start + WINDOW].copy()
        at, row = int(draw.integers(MIN_LAUNCHES, WINDOW - MIN_LAUNCHES + 1)), int(draw.integers(len(logs)))
        window[slice(None) if is_shared else row, at:] += np.log(STEP)
        changes = change_points(window)
        cuts = changes.shared if is_shared else changes.own[row]
        result += any(abs(cut - at) <= NEAR for cut in cuts)
    return result / num_windows


def figures(num_windows: int) -> dict[str, float]:
    """Shares of windows, by what was tried."""
    draw = np.random.default_rng(SEED)
    busy, quiet = logs_of(recorded_here()), logs_of(quiet_here())
    made_up = [drifting(WINDOW, QUIET, 0.6, draw) for _ in range(num_windows)]
    return {
        "history, busy machine, unchanged, any change": unchanged(busy),
        "history, quiet machine, unchanged, any change": unchanged(quiet),
        "history, made-up launches, correlation 0.6, any change": sum(map(reported, made_up)) / num_windows,
        "history, quiet machine, +20 % of one case placed": placed(quiet, num_windows, draw),
        "history, quiet machine, +20 % of all cases placed": placed(quiet, num_windows, draw, is_shared=True),
    }


if __name__ == "__main__":
    for name, share in figures(200).items():
        print(f"{name}: {share:.3f}")
