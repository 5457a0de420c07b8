import math

import numpy as np
import pytest

from distbench.statistics.pass_comparison import compare_passes
from distbench.statistics.size_crossings import Crossing, crossings_of, fastest_by_size

SIZES = [1024.0, 4096.0, 16384.0, 65536.0]
F, S, N = "faster", "slower", "within noise"


@pytest.mark.parametrize(
    ("ratios", "verdicts", "result"),
    [
        ([2.0, 2.0, 0.5, 0.5], [S, S, F, F], [Crossing(4096, 16384, 8192, F)]),
        ([2.0, 2.0, 0.5, 0.5], [S, N, N, F], [Crossing(1024, 65536, 8192, F)]),
        ([1.0, 1.1, 0.5, 0.5], [N, N, F, F], [Crossing(0, 16384, math.nan, F)]),
        ([0.5] * 4, [F] * 4, []),
        ([1.0] * 4, [N] * 4, []),
        ([2.0, 0.5, 0.5, 2.0], [S, F, F, S], [Crossing(1024, 4096, 2048, F), Crossing(16384, 65536, 32768, S)]),
    ],
)
def test_crossings_of_verdicts(ratios: list[float], verdicts: list[str], result: list[Crossing]) -> None:
    got = crossings_of(SIZES, ratios, verdicts)
    assert [(one.low, one.high, one.becomes) for one in got] == [(one.low, one.high, one.becomes) for one in result]
    assert [one.size for one in got] == pytest.approx([one.size for one in result], nan_ok=True)


def test_the_way_of_a_size_is_kept_until_it_is_slower() -> None:
    seconds = [[1.0] * 4, [2.0, 0.9, 1.0, 0.5], [1.0, 0.8, 1.0, 0.6]]
    assert fastest_by_size(SIZES, seconds, [[N] * 4, [S, F, N, F], [N, F, N, F]]) == [(0, 0), (4096, 2), (65536, 1)]
    assert fastest_by_size(SIZES, seconds, [[N] * 4, [F, N, S, N], [N] * 4]) == [(0, 0), (1024, 1), (16384, 0)]
    assert fastest_by_size(SIZES, seconds, [[N] * 4] * 3) == [(0, 0)]


def tables(rng: np.random.Generator, crossing: float, slope: float) -> list[Crossing]:
    """Crossings of a way whose log time over the reference's falls by `slope` per log size, and is 0 at `crossing`."""
    sizes = [1024.0 * 2**step for step in range(12)]
    drift = rng.normal(0, 0.1, 12)
    reference = np.exp(drift + rng.normal(0, 0.1, (12, 12)))
    ratios = np.array([slope * math.log(crossing / size) for size in sizes])
    way = reference * np.exp(ratios[:, None] + rng.normal(0, 0.1, (12, 12)))
    comparison = compare_passes(np.vstack([reference, way]), [-1] * 12 + [*range(12)])
    return crossings_of(sizes, comparison.ratio[12:].tolist(), comparison.verdict[12:])


@pytest.mark.long
def test_equal_ways_have_a_crossing_in_at_most_5_percent_of_tables() -> None:
    rng = np.random.default_rng(1)
    # 100 tables of which 5 % are wrong have more than 12 in 1 of 1000 series.
    assert sum(bool(tables(rng, 32768.0, 0.0)) for _ in range(100)) <= 12


@pytest.mark.long
def test_a_known_crossing_is_inside_its_interval_in_95_of_100_tables() -> None:
    rng, inside, result = np.random.default_rng(2), 0, 0
    for _ in range(100):
        got = tables(rng, 40000.0, 0.2)
        result += bool(got)
        inside += len(got) == 1 and got[0].low < 40000 < got[0].high and got[0].becomes == F
    assert result >= 97 and inside >= 0.95 * result
