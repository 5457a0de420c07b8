"""`distbench history`: levels and their changes in series whose truth is known, and what is left out."""

import math
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from gate_runs import CASE, OTHER, case, write_side

from distbench.cli import main
from distbench.history.history_report import figure_of
from distbench.history.series import levels_of, series_of
from distbench.runs.sides import read_side


def noisy(levels: list[tuple[int, float]], spread: float, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [seconds * math.exp(rng.gauss(0, spread)) for count, seconds in levels for _ in range(count)]


def test_a_change_is_found_where_it_was_made_and_as_large_as_it_is() -> None:
    before, after = levels_of(noisy([(20, 1.0), (12, 1.2)], 0.02))
    assert (before.stop, after.start) == (20, 20) and after.seconds / before.seconds == pytest.approx(1.2, rel=0.03)
    assert [level.start for level in levels_of(noisy([(9, 1.0), (9, 0.7), (9, 1.0)], 0.03))] == [0, 9, 18]


def test_noise_alone_and_single_outliers_are_no_change() -> None:
    cut = sum(len(levels_of(noisy([(30, 1.0)], 0.1, seed))) > 1 for seed in range(100))
    assert cut <= 5
    series = noisy([(20, 1.0)], 0.02)
    series[10] *= 3
    assert len(levels_of(series)) == 1
    assert len(levels_of([1.0, 2.0, 1.0])) == 1 and len(levels_of([1.0] * 12)) == 1


def run_history(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["history", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Twelve launches: one case slower by half from the eighth on, another one steady."""
    steady = noisy([(12, 1.0)], 0.01)
    slower = noisy([(7, 0.01), (5, 0.015)], 0.01, seed=1)
    folder = tmp_path / "runs"
    for index in range(12):
        commit = ("a" if index < 7 else "b") * 40
        one = {CASE: case([slower[index]] * 5), OTHER: case([steady[index]] * 5)}
        write_side(folder / f"{index}", lambda _, one=one: one, 1, start=1000.0 + index, git_commit=commit)
    return folder


def test_the_table_names_the_commit_of_a_change_and_the_changed_case_first(runs: Path, tmp_path: Path) -> None:
    code, output = run_history("--runs", runs, "--plots", tmp_path / "plots")
    assert code == 0 and "2 cases, 1 of them changed" in output
    assert output.index(CASE) < output.index(OTHER)
    [line] = [line for line in output.splitlines() if "bbbbbbbb" in line]
    change = int(line.split("+")[1].split()[0])
    assert 47 <= change <= 53 and " 5 " in line
    assert (tmp_path / "plots" / "history-00.png").stat().st_size > 1000


def test_a_point_is_the_10th_percentile_and_the_figure_says_so(tmp_path: Path) -> None:
    samples = [float(number) for number in range(1, 12)]
    write_side(tmp_path / "runs", lambda _: {CASE: case(samples)}, 3)
    [series], _ = series_of(read_side([tmp_path / "runs"], "--runs", []), "*")
    assert [point.seconds for point in series.points] == [2.0] * 3
    [axes] = figure_of(series).axes
    assert axes.get_title() == f"{CASE}: the 10th percentile of each launch's samples"


def test_a_pattern_narrows_and_one_that_matches_nothing_says_what_there_is(runs: Path) -> None:
    code, output = run_history(OTHER.replace("[", "[[]"), "--runs", runs)
    assert code == 0 and CASE not in output
    code, output = run_history("nothing/*", "--runs", runs)
    assert code == 2 and "no measured case or scenario matches" in output and "collective/" in output


def test_a_scenario_narrows_too_and_a_steady_case_is_one_line(runs: Path) -> None:
    code, output = run_history("collectives", "--runs", runs)
    assert code == 0 and CASE in output
    assert sum(OTHER in line and " 12 " in line for line in output.splitlines()) == 1
    code, output = run_history("colectives", "--runs", runs)
    assert code == 2 and "scenarios here are collectives;" in output


def test_launches_of_another_machine_are_left_out_and_counted(runs: Path) -> None:
    write_side(runs / "other", lambda _: {CASE: case([9.0] * 5)}, 3, start=10.0, machine="other")
    code, output = run_history("--runs", runs)
    assert code == 0 and "3 of 15 launches were left out" in output and "9.00 s" not in output


def test_no_runs_is_a_sentence(tmp_path: Path) -> None:
    code, output = run_history("--runs", tmp_path / "nowhere")
    assert code == 2 and "does not exist" in output
    (tmp_path / "empty").mkdir()
    code, output = run_history("--runs", tmp_path / "empty")
    assert code == 2 and "holds no run file" in output
