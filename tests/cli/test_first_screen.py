"""What stands around a launch: a question before very many ranks, and the summary of what was measured."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from conftest import ROOT
from gate_runs import CASE, case, records, write

from distbench.cli import run
from distbench.cli.main import main
from distbench.launch import Request, jobs_of
from distbench.show.terminal import ask_width
from distbench.spec import Job, UserError
from distbench.spec.mesh import mesh_size

GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture
def job(known_host: None, tmp_path: Path) -> Job:
    (job,) = jobs_of(Request(("tp_mlp",), device="cpu", quick=True, out=tmp_path), None)
    return replace(job, environment={**job.environment, "num_cpus": 2})


def on_terminal(monkeypatch: pytest.MonkeyPatch, answer: bool) -> list[str]:
    """What was asked; standard input and error are a terminal on which somebody gives this answer."""
    requested: list[str] = []

    def confirm(text: str, err: bool) -> bool:
        requested.append(text)
        return answer

    monkeypatch.setattr(run, "is_terminal", lambda: True)
    monkeypatch.setattr(click, "confirm", confirm)
    return requested


@pytest.mark.parametrize(("ranks", "is_refused"), [(4, False), (8, False), (9, True), (64, True)])
def test_more_than_four_ranks_a_cpu_are_refused_where_nobody_can_be_asked(
    job: Job, monkeypatch: pytest.MonkeyPatch, ranks: int, is_refused: bool
) -> None:
    monkeypatch.setattr(run, "is_terminal", lambda: False)
    large = replace(job, mesh={"tp": ranks})
    run.confirm_ranks([job, large], yes=True)
    if not is_refused:
        run.confirm_ranks([job, large], yes=False)
        return
    with pytest.raises(UserError, match=f"tp={ranks} starts {ranks} ranks on 2 CPUs.*--yes"):
        run.confirm_ranks([job, large], yes=False)


def test_on_a_terminal_more_ranks_are_a_question(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(job, mesh={"tp": 9})
    assert mesh_size(large.mesh) == 9
    requested = on_terminal(monkeypatch, answer=True)
    run.confirm_ranks([large], yes=False)
    assert requested == ["tp_mlp on tp=9 starts 9 ranks on 2 CPUs. Start them?"]
    on_terminal(monkeypatch, answer=False)
    with pytest.raises(UserError, match="nothing was started"):
        run.confirm_ranks([large], yes=False)


def test_ranks_on_accelerators_are_never_asked_about(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "is_terminal", lambda: False)
    run.confirm_ranks([replace(job, mesh={"tp": 64}, device="xpu")], yes=False)


def test_what_was_measured_is_summed_up_on_standard_output(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "a.jsonl").write_text((GOLDEN / "steps.jsonl").read_text())
    jobs = [replace(job, run_file=str(folder / name)) for name in ("a.jsonl", "never_begun.jsonl")]
    run.show_summary(jobs)
    message = capsys.readouterr()
    assert message.out.startswith("distbench: 1 scenario: 4 ok, 1 raised\n") and not message.err
    assert f"distbench report --results {tmp_path} toy" in " ".join(message.out.split())
    run.show_summary(jobs[1:])
    assert not capsys.readouterr().out


def report(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.long
def test_report_shows_the_summary_a_scenarios_own_tables_or_everything(tmp_path: Path) -> None:
    runs = [GOLDEN / f"{name}.jsonl" for name in ("collectives", "steps")]
    for path in runs:
        (tmp_path / path.name).write_text(path.read_text())
    summary, own, full = report(tmp_path), report(tmp_path, "toy"), report(tmp_path, "--full")
    assert "step time" not in summary and "all_reduce 1.26" in summary
    assert "step time" in own and "mesh dim tp" not in own
    assert "agreement with one device" in full and "agreement with one device" not in own
    assert "time spent" in full and "time spent" not in own + summary and "mesh dim tp" in full
    # Without a path, the latest run of that scenario, whatever else was measured since.
    assert "step time" in report("toy", "--results", tmp_path) and "toy" in report("--results", tmp_path)


@pytest.mark.long
def test_many_runs_of_one_scenario_are_called_so_and_the_latest_come_first(tmp_path: Path) -> None:
    header, *others = (GOLDEN / "steps.jsonl").read_text().splitlines()
    for number in range(25):
        record = json.loads(header)
        record["job"]["started_at"] = 1e9 + number
        (tmp_path / f"{number:02}.jsonl").write_text("\n".join([json.dumps(record), *others, ""]))
    lines = report(tmp_path).splitlines()
    heads = [line for line in lines if line.startswith("toy (")]
    assert lines[0].startswith("distbench: 25 runs of 1 scenario: 100 ok, 25 raised")
    assert len(heads) == 20 and "24.jsonl" in heads[0] and "... 5 more" in lines


def test_an_interrupted_run_is_told_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my runs").mkdir()
    lines = (GOLDEN / "collectives.jsonl").read_text().splitlines()
    kept = [line for line in lines if '"type":"footer"' not in line.replace(" ", "")]
    Path("my runs/a.jsonl").write_text("\n".join([*kept, ""]))
    shown = report("my runs")
    assert "\nNext: distbench run --resume 'my runs/a.jsonl'   (measures the missing cases)" in shown


def test_a_name_that_is_nothing_is_answered_with_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text((GOLDEN / "steps.jsonl").read_text())
    for arguments in (["toyy", "--results", str(tmp_path)], [str(tmp_path), "toyy"]):
        done = CliRunner().invoke(main, ["report", *arguments])
        assert done.exit_code == 2 and "toyy" in done.stderr and "measured scenarios: toy" in done.stderr


def test_width_is_an_option(tmp_path: Path) -> None:
    for width in (60, 200):
        text = report(GOLDEN / "steps.jsonl", "--full", "--width", width.__str__())
        assert max(map(len, text.splitlines())) <= width
    assert CliRunner().invoke(main, ["report", "--width", "59"]).exit_code == 2
    ask_width(None)


def job_at(path: Path) -> Any:
    return SimpleNamespace(run_file=str(path))


def test_the_first_time_of_several_scenarios_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", records("a", 1e9, {CASE: case([0.002] * 3)}))
    run._say_first(job_at(path), 8)
    assert capsys.readouterr().out == f"First result: 2.00 ms per iteration of {CASE}. Scenarios left: 8\n"
    run._say_first(job_at(tmp_path / "none.jsonl"), 8)
    assert capsys.readouterr().out == ""
