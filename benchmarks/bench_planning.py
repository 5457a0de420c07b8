"""Planning speed against torch's min-cost planner: the same pairs on both sides, taking turns.

What each state of the caches is stands in `planning_turns.py`. The pairs are drawn by a seed, whatever they take; it is
about a minute and a half.
"""

import math
from collections.abc import Iterator, Sequence

from benchmarks.claims import Claim, Row

# name, mesh, tensor ndim, pairs; torch takes seconds for one pair of the last
CASES = (
    ("4x4x4/3-D", (4, 4, 4), 3, 60),
    ("4x4x4x4/4-D", (4, 4, 4, 4), 4, 12),
    ("2x2x2x2x2/4-D", (2, 2, 2, 2, 2), 4, 6),
)
NUM_PAIRS = ", ".join(str(count) for *_, count in CASES)
HOOK = "through DTensor"
# Speed-ups that were promised; of the others, no more than that there is one.
WANTED = {
    "warm, 4x4x4/3-D": 200.0,
    "warm, 4x4x4x4/4-D": 500.0,
    "warm, 2x2x2x2x2/4-D": 1500.0,
    "first, 4x4x4/3-D": 80.0,
    f"{HOOK}, 4x4x4/3-D": 80.0,
}
ALL_PAIRS, ALL_PAIRS_LIMIT_S = "seconds for all pairs, 4x4x4/3-D", 1.0
ONE = "{:.0f}x [{:.0f}, {:.0f}]"
THREE = "; ".join([ONE] * len(CASES))

CLAIMS = (
    Claim(
        f"speed-up of planning over torch's min_cost, warm, geometric mean over {NUM_PAIRS} pairs: "
        + ", ".join(name for name, *_ in CASES),
        THREE,
        "200x, 500x, 1500x",
        ("warm, *",),
    ),
    Claim(
        "the same, first plan of a tensor (graph of layouts available, no prices)",
        THREE,
        "80x, faster, faster",
        ("first, *",),
    ),
    Claim("the same, first plan of a process", THREE, "faster", ("cold, *",)),
    Claim("the same through DTensor, warm, 4x4x4/3-D", ONE, "80x", (f"{HOOK}, *",)),
)


def main() -> list[Row]:
    """(name, measured, minus what is wanted): speed-ups with their 95 % intervals, and the time of all pairs."""
    from benchmarks import planning_turns

    rows: list[Row] = []
    with planning_turns.fake_ranks():
        for name, mesh_shape, tensor_ndim, num_pairs in CASES:
            for state, ratios in planning_turns.ratios(mesh_shape, tensor_ndim, num_pairs).items():
                rows += speed_up(f"{state}, {name}", ratios)
        name, mesh_shape, tensor_ndim, num_pairs = CASES[0]
        rows += speed_up(f"{HOOK}, {name}", planning_turns.ratios_through_dtensor(mesh_shape, tensor_ndim, num_pairs))
        rows.append((ALL_PAIRS, planning_turns.all_pairs_seconds(mesh_shape, tensor_ndim), ALL_PAIRS_LIMIT_S))
    return rows


def speed_up(name: str, ratios: Sequence[float]) -> Iterator[Row]:
    """The geometric mean, and its 95 % interval: Student's t on the logarithms."""
    import numpy as np
    from scipy import stats

    logs = np.log(ratios)
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    for what, value in (("", 0.0), (", from", -half), (", to", half)):
        allowed = math.inf if what else -WANTED.get(name, 1.0)
        yield f"{name}, {len(logs)} pairs{what}", float(np.exp(logs.mean() + value)), allowed
