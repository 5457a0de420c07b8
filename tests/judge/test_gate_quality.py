"""The gate's error rates on synthetic launches of the variance that was measured: generous bounds, fixed seeds.

The claim itself is made on recorded launches (benchmarks/gate_quality.py); this holds the arithmetic to it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gate_runs import CASE, OTHER, case, records, steady, write, write_side

from benchmarks.gate_looks import looks_table
from benchmarks.gate_made_up import disturbed, steady_among_noisy
from benchmarks.gate_peers import PEERS, RULES
from benchmarks.gate_quality import main
from benchmarks.gate_series import synthetic
from distbench.cli.main import main as cli
from distbench.judge.gate_self_test import CHANGES, Rates, RecordedSeries, rates, recorded
from distbench.spec import UserError

FEW = 60


@pytest.fixture(autouse=True)
def fewer_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test that takes a second; what is expected of it here is all or nothing."""
    monkeypatch.setattr("distbench.cli.gate.NUM_COMPARISONS", 40)


@pytest.fixture(scope="module", params=["quiet", "loaded"])
def trial(request: pytest.FixtureRequest) -> RecordedSeries:
    # Long enough that few windows overlap: comparisons are nearly independent.
    return synthetic(request.param, num_cases=30, num_launches=800, num_samples=20, seed=3)


def ours(trial: RecordedSeries, num_pairs: int, change: str, count: int = FEW) -> Rates:
    return rates(trial, num_pairs, change, count, seed=4)


@pytest.mark.parametrize("num_pairs", [5, 10])
@pytest.mark.long
def test_unchanged_code_is_called_slower_in_few_jobs(trial: RecordedSeries, num_pairs: int) -> None:
    """At most 5 % by design; a true 5 % exceeds 9 in 60 once in 1,000 times."""
    assert ours(trial, num_pairs, "none").false_jobs <= 9


@pytest.mark.long
def test_what_is_found_and_what_is_never_called_a_pass(trial: RecordedSeries) -> None:
    slow = ours(trial, 10, "+20 %")
    assert slow.passed == 0
    if trial.name == "quiet":
        assert slow.detected >= 0.95 * FEW
        assert ours(trial, 10, "+10 %").detected >= 0.5 * FEW
        assert ours(trial, 5, "+20 %").detected >= 0.8 * FEW
    else:
        assert slow.detected >= 0.05 * FEW
        assert ours(trial, 10, "+50 %").detected >= 0.6 * FEW


def test_other_tools_on_the_same_launches_cry_wolf(trial: RecordedSeries) -> None:
    assert ours(trial, 5, "none", 20).false_jobs <= 4
    peer = rates(trial, 5, "none", 20, seed=4, rule=RULES["pytest-benchmark mean:5%"])
    assert peer.false_jobs >= 10


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
    assert "night: 5 pairs, 2 cases, 14 launches: 10 comparisons per column, in windows from 5 starts" in printed
    row = next(line for line in printed.splitlines() if line.startswith("| distbench gate"))
    assert len(row.split("|")) == 11
    many = "night has 14 launches"
    for bad, message in ((["--ab", "8"], many), (["--pairs", "5", "10"], many), (["--ab", "0"], "are 1 or more")):
        with pytest.raises(SystemExit, match="2"):
            main([f"night={folder}", *bad])
        assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="record at least"):
        recorded(write_side(tmp_path / "few", cases, count=3))


def test_windows_are_consecutive_pairs_each_in_an_order_of_its_own() -> None:
    trial = synthetic("quiet", num_cases=2, num_launches=6, num_samples=5)
    draw = np.random.default_rng(1)
    windows = [trial.window(number, 2, CHANGES["none"], draw) for number in range(200)]
    sides = {(tuple(window.baseline), tuple(window.candidate)) for window in windows}
    orders = {(first, second) for first in (0, 1) for second in (2, 3)}
    expected = {((a + s, b + s), (1 - a + s, 5 - b + s)) for a, b in orders for s in (0, 1, 2)}
    assert trial.num_starts(2) == 3 and sides == expected


@pytest.mark.long
def test_the_gate_tries_itself_on_a_folder_of_launches(tmp_path: Path) -> None:
    """Launches that hardly differ: no false alarm, and a plain slowdown is always found."""
    folder = write_side(tmp_path / "same", lambda index: {CASE: case(steady(1e-3, index))}, count=22)
    done = CliRunner().invoke(cli, ["self-test", str(folder)])
    assert done.exit_code == 0, done.output
    rows = [line.split("|") for line in done.output.splitlines() if line.startswith("| distbench gate")]
    assert [float(row[2]) for row in rows] == [0.0, 0.0] and [float(row[5]) for row in rows] == [100.0, 100.0]
    few, many = json.loads(CliRunner().invoke(cli, ["self-test", str(folder), "--json"]).stdout)
    assert (few["num_pairs"], many["num_pairs"], many["num_launches"]) == (5, 10, 22)
    assert many["changes"]["none"]["false_jobs"] == 0 and many["changes"]["+20 %"]["detected"] == 40


@pytest.mark.long
def test_a_launch_of_several_scenarios_is_one_launch_and_failed_ones_are_left_out(tmp_path: Path) -> None:
    """What `self-test -- tp_mlp llama_2d` records: a run file a scenario, both of one invocation."""
    for index in range(12):
        for place, (scenario, ids) in enumerate((("tp_mlp", (CASE,)), ("llama_2d", (CASE, OTHER)))):
            status = "failed" if (index, scenario) == (4, "llama_2d") else "complete"
            cases = {case_id: case(steady(1e-3, index)) for case_id in (ids if status == "complete" else ())}
            lines = records(
                f"{scenario}-{index}", 10.0 * index + place, cases,
                scenario=scenario, invocation_id=f"made-{index}", status=status,
            )  # fmt: skip
            write(tmp_path / "runs" / f"{scenario}-{index}.jsonl", lines)
    series = recorded(tmp_path / "runs")
    assert series.num_launches == 11
    assert set(series.case_ids) == {f"tp_mlp: {CASE}", f"llama_2d: {CASE}", f"llama_2d: {OTHER}"}
    done = CliRunner().invoke(cli, ["self-test", str(tmp_path / "runs")])
    assert done.exit_code == 0 and "5 pairs, 3 cases, 11 launches" in done.output


def test_a_self_test_that_cannot_work_is_refused(tmp_path: Path) -> None:
    folder = write_side(tmp_path / "few", lambda index: {CASE: case(steady(1e-3, index))}, count=4)
    failed = write_side(tmp_path / "failed", lambda index: {CASE: case([1.0])}, count=9, status="failed")
    write_side(tmp_path / "failed" / "but", lambda index: {CASE: case([1.0])}, count=3)
    for arguments, message in (
        ([str(folder)], "has 4 launches; record"),
        ([str(failed)], "has 3 launches that finished, and 9 that did not"),
        (["--launches", "4", "--", "tp_mlp"], "--launches 4 is too small"),
        (["--", "tp_mlp", "--results=here"], "--results is not allowed after --"),
    ):
        done = CliRunner().invoke(cli, ["self-test", *arguments])
        assert done.exit_code == 2 and done.stderr.startswith("distbench: ") and message in done.stderr


def test_a_steady_case_is_not_hidden_by_noisy_neighbours() -> None:
    """With eight degrees of freedom lent without a bound it was found in none of 60."""
    assert steady_among_noisy(30) >= 0.9


@pytest.mark.long
def test_a_disturbance_of_every_second_pair_is_no_slowdown_where_a_coin_gives_the_order() -> None:
    assert disturbed(10, is_tossed=False) == 1.0
    # A true 5 % exceeds 8 of 50 once in 1,000 times.
    assert disturbed(50, is_tossed=True) <= 8 / 50


@pytest.mark.long
def test_ab_finds_a_slowdown_at_its_first_look_and_cries_wolf_rarely() -> None:
    """Its looks share the 5 %; unchanged launches are looked at again, a plain slowdown is settled at once."""
    quiet = synthetic("quiet", num_cases=5, num_launches=54, num_samples=20, seed=5)
    table = looks_table(quiet, 20, num_comparisons=20, seed=1)
    assert "(looks after 7, 11, 16, 20), 5 cases, 54 launches: 20 comparisons a row" in table
    rows = {cells[1].strip(): cells[2:6] for line in table.splitlines() if len(cells := line.split("|")) == 7}
    assert float(rows["none"][0]) <= 10 and float(rows["none"][3]) > 7
    assert [float(cell) for cell in rows["+50 %"]] == [0.0, 100.0, 0.0, 7.0]
