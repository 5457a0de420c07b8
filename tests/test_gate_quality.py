"""The gate's error rates on synthetic launches of the variance that was measured: generous bounds, fixed seeds.

The claim itself is made on recorded launches (benchmarks/gate_quality.py); this holds the arithmetic to it.
"""

from pathlib import Path

import numpy as np
import pytest
from gate_runs import CASE, OTHER, case, steady, write_side

from benchmarks.gate_peers import PEERS
from benchmarks.gate_quality import OURS, Rates, Trial, main, rates
from benchmarks.gate_series import recorded, synthetic

FEW = 100


@pytest.fixture(scope="module", params=["quiet", "loaded"])
def trial(request: pytest.FixtureRequest) -> Trial:
    # Long enough that few windows overlap: comparisons are nearly independent.
    return Trial(synthetic(request.param, num_cases=30, num_launches=800, num_samples=20, seed=3))


def ours(trial: Trial, num_pairs: int, change: str, count: int = FEW) -> Rates:
    return rates(trial, num_pairs, change, count, seed=4, peers=False)[OURS]


@pytest.mark.parametrize("num_pairs", [5, 10])
def test_unchanged_code_is_called_slower_in_few_jobs(trial: Trial, num_pairs: int) -> None:
    """At most 5 % by design; a true 5 % exceeds 12 in 100 once in 700 times."""
    assert ours(trial, num_pairs, "none").false_jobs <= 12


def test_what_is_found_and_what_is_never_called_a_pass(trial: Trial) -> None:
    slow = ours(trial, 10, "+20 %")
    assert slow.passed == 0
    if trial.series.name == "quiet":
        assert slow.found >= 95
        assert ours(trial, 10, "+10 %").found >= 50
        assert ours(trial, 5, "+20 %").found >= 80
    else:
        assert slow.found >= 5
        assert ours(trial, 10, "+50 %").found >= 80


def test_other_tools_on_the_same_launches_cry_wolf(trial: Trial) -> None:
    found = rates(trial, 5, "none", 20, seed=4, peers=True)
    assert found[OURS].false_jobs <= 4
    assert found["pytest-benchmark mean:5%"].false_jobs >= 10


@pytest.mark.parametrize("name", PEERS)
def test_the_peers_rules_see_a_plain_slowdown_and_no_speed_up(name: str) -> None:
    draw = np.random.default_rng(1)
    left = 1 + 0.01 * draw.random((3, 50))
    slower = PEERS[name](left, left[:, ::-1] * np.array([[1.3], [1.0], [0.7]]))
    assert slower.tolist() == [True, False, False]


def test_recorded_launches_can_be_dropped_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cases(index: int) -> dict[str, dict[str, object]]:
        extra = {"collective/f32[9]/only/here": case([1.0])} if index == 3 else {}
        return {CASE: case(steady(1e-3, index)), OTHER: case(steady(2e-3, index + 1)), **extra}

    folder = write_side(tmp_path / "runs", cases, count=14)
    series = recorded(folder)
    assert series.case_ids == (CASE, OTHER) and series.num_launches == 14
    assert main([f"night={folder}", "--pairs", "5", "--comparisons", "10"]) == 0
    printed = capsys.readouterr().out
    assert "night: 5 pairs, 2 cases, 10 comparisons out of 14 launches" in printed
    row = next(line for line in printed.splitlines() if line.startswith("| distbench gate"))
    assert len(row.split("|")) == 9
    with pytest.raises(ValueError, match="record at least"):
        recorded(write_side(tmp_path / "few", cases, count=3))
