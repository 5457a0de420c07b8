"""Late ranks: binomial tests on plain numbers, with error rates of many simulated launches."""

import numpy as np
import pytest

from distbench.judge.late_ranks import (
    LATE,
    PASS,
    UNKNOWN,
    GroupArrivals,
    LatenessVerdict,
    fewest_last,
    fewest_samples,
    judge_arrivals,
    latenesses,
)
from distbench.spec.printable_text import ranks_text

MS = 1e-3


def verdict_of(arrivals_s: np.ndarray, least_s: float = 2 * MS, **facts: str) -> LatenessVerdict:
    names = tuple(f"rank {rank}" for rank in range(arrivals_s.shape[1]))
    group = GroupArrivals("0-3", names, ("a",) * len(names), arrivals_s, least_s, **facts)
    return judge_arrivals([group], "sampled steps", "More.")


def quiet(draw: np.random.Generator, num_samples: int, num_ranks: int = 4) -> np.ndarray:
    return draw.lognormal(np.log(100 * MS), 0.1, size=(num_samples, num_ranks))


def test_a_rank_that_is_always_last_is_named_with_its_interval() -> None:
    arrivals = quiet(np.random.default_rng(0), 10)
    arrivals[:, 2] = np.delete(arrivals, 2, axis=1).max(axis=1) + np.linspace(10, 19, 10) * MS
    verdict = verdict_of(arrivals)
    (late,) = verdict.late
    assert (late.rank, late.num_last, late.num_samples, late.host) == ("rank 2", 10, 10, "a")
    assert late.low_s <= late.late_s <= late.high_s
    assert late.p == pytest.approx(4 * 0.25**10)
    assert verdict.exit_code == LATE
    assert verdict.lines[0].startswith("FAIL: rank 2 (host a) arrives last in group 0-3 in 10 of 10 sampled steps, ")
    assert "per step after the median of the other ranks." in verdict.lines[0]
    assert verdict.lines[-1].startswith("Next: check host a (")


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.long
def test_without_a_late_rank_at_most_one_launch_in_twenty_names_one(num_ranks: int) -> None:
    draw = np.random.default_rng(num_ranks)
    named = [bool(verdict_of(quiet(draw, 20, num_ranks), least_s=0.0).late) for _ in range(400)]
    assert sum(named) <= 20


def test_a_disturbance_that_lasts_for_several_samples_is_not_taken_for_many_samples() -> None:
    draw = np.random.default_rng(3)
    named = 0
    for _ in range(400):
        disturbed = np.repeat(draw.integers(4, size=20), 3)[: 40 + draw.integers(3)]
        arrivals = quiet(draw, len(disturbed))
        arrivals[np.arange(len(disturbed)), disturbed] += 50 * MS
        named += bool(verdict_of(arrivals, least_s=0.0).late)
    assert named <= 20  # 164 if samples are taken as independent


def test_a_rank_20_ms_late_is_named_in_every_launch_also_if_only_in_every_other_step() -> None:
    draw = np.random.default_rng(1)
    for turns in (1, 2):
        for _ in range(40):
            arrivals = quiet(draw, 40)
            arrivals[::turns, 3] += 60 * MS
            assert [late.rank for late in verdict_of(arrivals).late] == ["rank 3"]


def test_a_small_lateness_is_not_reported_however_often() -> None:
    arrivals = np.full((50, 4), 0.1)
    arrivals[:, 0] += 1 * MS
    verdict = verdict_of(arrivals)
    assert verdict.exit_code == PASS
    assert "Detectable: a rank that is last in 21 of 50 sampled steps, by 2.00 ms per step or more." in verdict.lines[0]


def test_too_few_samples_and_groups_without_a_verdict_are_unknown() -> None:
    few = verdict_of(quiet(np.random.default_rng(2), 3))
    assert few.exit_code == UNKNOWN
    assert few.lines == ("UNKNOWN: 3 sampled steps of group 0-3 are too few; 4 are needed. More.",)
    none = judge_arrivals([], "sampled steps", "More.")
    assert none.lines == ("UNKNOWN: no group of ranks has sampled steps. More.",) and none.exit_code == UNKNOWN
    assert verdict_of(np.empty((0, 4)), why_not="it is dark").lines == ("UNKNOWN: group 0-3: it is dark.",)


def test_the_smallest_numbers_of_samples_are_those_of_the_test() -> None:
    for num_ranks in (2, 4, 8):
        needed = fewest_samples(num_ranks, num_ranks)
        arrivals = np.zeros((needed, num_ranks))
        arrivals[:, 0] = 1.0
        assert latenesses([arrivals])[0].p <= 0.05 < latenesses([arrivals[1:]])[0].p
        assert (
            fewest_last(needed, num_ranks, num_ranks) == needed
            and fewest_last(needed - 1, num_ranks, num_ranks) is None
        )


def test_ranks_as_text() -> None:
    assert [ranks_text(ranks) for ranks in ((4, 5, 6), (0, 2), (3,))] == ["4-6", "0,2", "3"]
