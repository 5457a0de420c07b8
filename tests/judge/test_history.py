"""`distbench history`: levels and their changes in series whose truth is known, and what is left out."""

import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gate_runs import CASE, OTHER, case, write_side
from numpy.typing import NDArray

from benchmarks.gate_history import drifting, reported
from distbench.cli.main import main
from distbench.judge.history import figure_of, series_of
from distbench.records.baselines import read_side
from distbench.statistics.change_points import change_points


def noisy(levels: list[tuple[int, float]], spread: float, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [seconds * math.exp(rng.gauss(0, spread)) for count, seconds in levels for _ in range(count)]


def table(first: list[tuple[int, float]], num_cases: int = 8, spread: float = 0.03) -> NDArray[np.float64]:
    """Logarithms, [cases, launches]: the first case has these levels, the others one."""
    count = sum(number for number, _ in first)
    rows = [noisy(first, spread), *(noisy([(count, 1.0)], spread, seed) for seed in range(1, num_cases))]
    return np.log(np.array(rows))


def test_a_change_is_found_where_it_was_made() -> None:
    for levels, cuts in (([(12, 1.0), (8, 1.2)], [12]), ([(9, 1.0), (9, 0.7), (9, 1.0)], [9, 18])):
        result = change_points(table(levels))
        assert result.own[0] == pytest.approx(cuts, abs=1) and not result.shared and not any(result.own[1:])


def test_a_change_of_all_cases_is_found_and_is_no_cases_own() -> None:
    logs = table([(24, 1.0)])
    logs[:, 12:] += math.log(1.3)
    result = change_points(logs)
    assert result.shared == [12] and not any(result.own)


def test_drift_of_the_machine_and_single_outliers_are_no_change() -> None:
    """Half of the variance is the machine's level, whose neighbours correlate by 0.6: at most 5 % by design.

    A true 5 % exceeds 4 in 20 once in 390 times.
    """
    draw = np.random.default_rng(7)
    assert sum(reported(drifting(20, 0.05, 0.6, draw)[:5]) for _ in range(20)) <= 4
    logs = table([(20, 1.0)])
    logs[:, 10] += math.log(3)
    logs[0, 15] += math.log(3)
    assert not reported(logs) and not reported(np.zeros((3, 20))) and not reported(table([(4, 1.0)]))
    assert not reported(np.zeros((8, 1))) and not reported(np.zeros((1, 1)))


def test_a_case_alone_needs_more_launches_and_a_launch_may_lack_a_case() -> None:
    assert math.isnan(change_points(table([(9, 1.0), (8, 1.5)], num_cases=1)).own_share)
    assert change_points(table([(10, 1.0), (10, 1.5)], num_cases=1)).own == [[10]]
    logs = table([(12, 1.0), (8, 1.2)])
    logs[0, [2, 15]] = np.nan
    assert change_points(logs).own[0] == [12]


def run_history(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["history", *map(str, arguments)])
    return done.exit_code, done.output


CASES = [CASE, OTHER, *(f"collective/f32[{size}]/all_reduce/tp" for size in (8, 16, 32, 64))]
SLOWER = noisy([(12, 0.01), (8, 0.015)], 0.01, seed=1)


def write_runs(folder: Path, commits: str) -> Path:
    """A launch a letter, which is its commit: six cases, one of them slower by half in the last eight launches."""
    for index, commit in enumerate(commits):
        times = {name: noisy([(20, 1.0)], 0.01, seed=seed)[index] for seed, name in enumerate(CASES)}
        times[CASE] = SLOWER[index]
        one = {name: case([time_s] * 5) for name, time_s in times.items()}
        write_side(folder / f"{index}", lambda _, one=one: one, 1, start=1000.0 + index, git_commit=commit * 40)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs", "a" * 12 + "b" * 8)


@pytest.mark.long
def test_the_table_names_the_commit_of_a_change_and_the_changed_case_first(runs: Path, tmp_path: Path) -> None:
    code, output = run_history("--results", runs, "--plots", tmp_path / "plots")
    assert code == 0 and "FAIL: 1 of 6 cases changed" in output
    assert output.index(CASE) < output.index(OTHER)
    [line] = [line for line in output.splitlines() if "bbbbbbbb" in line and " ms" in line]
    change = int(line.split("+")[1].split()[0])
    assert 47 <= change <= 53 and " 8 " in line
    assert (tmp_path / "plots" / "history-00.png").stat().st_size > 1000


def test_the_penalty_is_printed_and_the_next_step_is_ab_of_both_commits(runs: Path, tmp_path: Path) -> None:
    _, output = run_history("--results", runs, "-v")
    flat = " ".join(output.split())
    assert re.search(
        r"penalty: a split is reported as a change if it explains more than \d+ % of a case's sum of squares", flat
    )
    assert "Next: distbench ab aaaaaaaa bbbbbbbb -- collectives" in output.splitlines()[-1]
    one_commit = run_history("--results", write_runs(tmp_path / "one", "a" * 20))[1]
    assert "Next: distbench ab REF_A REF_B -- collectives" in one_commit and "the commit is the same" in one_commit


def test_launches_of_commits_that_took_turns_are_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for index in range(20):
        side, place = "ab"[index % 2], index // 2
        one = {name: case([noisy([(20, 1.0)], 0.01, seed=seed)[index]] * 5) for seed, name in enumerate(CASES)}
        one[CASE] = case([(0.010, 0.012)[index % 2] * noisy([(20, 1.0)], 0.01, seed=9)[index]] * 5)
        write_side(folder / f"{side}{place}", lambda _, one=one: one, 1, 1000.0 + index, git_commit=side * 40)
    series, notes = series_of(read_side([folder], "--results", []), "*")
    [changed] = [one for one in series if one.changes]
    assert changed.case_id == CASE and [level.stop for level in changed.levels] == [10, 20]
    assert changed.changes[0][0].commit == "b" * 40 and changed.changes[0][1] == pytest.approx(0.2, abs=0.02)
    assert any("commits alternated" in note for note in notes)


def test_a_point_is_the_10th_percentile_and_the_figure_says_so(tmp_path: Path) -> None:
    samples = [float(number) for number in range(1, 12)]
    write_side(tmp_path / "runs", lambda _: {CASE: case(samples)}, 3)
    [series], _ = series_of(read_side([tmp_path / "runs"], "--results", []), "*")
    assert [point.seconds for point in series.points] == [2.0] * 3
    [axes] = figure_of(series).axes
    assert axes.get_title() == f"{CASE}: the 10th percentile of each launch's samples"


def test_a_pattern_narrows_and_one_that_matches_nothing_says_what_there_is(runs: Path) -> None:
    code, output = run_history(OTHER.replace("[", "[[]"), "--results", runs)
    assert code == 0 and CASE not in output
    code, output = run_history("-k", OTHER.rpartition("/")[0].rpartition("/")[0], "--results", runs)
    assert code == 0 and CASE not in output
    assert run_history("-k", "nothing", "--results", runs)[0] == 2 == run_history("-k", "(", "--results", runs)[0]
    code, output = run_history("nothing/*", "--results", runs)
    assert code == 2 and "no measured case or scenario matches" in output and "collective/" in output


def test_a_scenario_narrows_too_and_a_steady_case_is_one_line(runs: Path) -> None:
    code, output = run_history("collectives", "--results", runs)
    assert code == 0 and CASE in output
    assert sum(OTHER in line and " 20 " in line for line in output.splitlines()) == 1
    code, output = run_history("colectives", "--results", runs)
    assert code == 2 and "use one of the scenarios collectives," in output


def test_launches_of_another_machine_are_left_out_and_counted(runs: Path) -> None:
    write_side(runs / "other", lambda _: {CASE: case([9.0] * 5)}, 3, start=10.0, machine="other")
    code, output = run_history("--results", runs, "-v")
    assert code == 0 and "3 of 23 launches left out" in output and "9.00 s" not in output


def test_no_runs_is_a_sentence(tmp_path: Path) -> None:
    code, output = run_history("--results", tmp_path / "nowhere")
    assert code == 2 and "does not exist" in output
    (tmp_path / "empty").mkdir()
    code, output = run_history("--results", tmp_path / "empty")
    assert code == 2 and "has no run file" in output
