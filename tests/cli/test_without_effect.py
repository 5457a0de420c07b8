"""Options that have no effect together are refused before anything is read, started or written."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from conftest import ROOT

from distbench.cli.main import main
from distbench.cli.report import _command as report_command
from distbench.spec import find

STEPS = str(ROOT / "tests" / "golden" / "steps.jsonl")


def command(words: str) -> Result:
    return CliRunner().invoke(main, words.split())


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (f"report --paths {STEPS} --full", "--full"),
        (f"report --diff {STEPS} {STEPS} --full", "--full"),
        (f"report --diff {STEPS} {STEPS} --results results", "--results"),
        (f"report --diff {STEPS} {STEPS} --label ci", "--label"),
        (f"report --group-by kind --full {STEPS}", "--full"),
        (f"report {STEPS} --results results", "--results"),
        (f"report {STEPS} tp_mlp --results results", "--results"),
        (f"report {STEPS} --chrome trace.json", "--chrome"),
        ("list --results results", "--results"),
        ("list tp_mlp --format json --results results", "--results"),
        ("run tp_mlp --launcher-args x --dry-run", "--launcher-args"),
        ("run tp_mlp --ranks-per-node 2 --dry-run", "--ranks-per-node"),
        ("run tp_mlp --fail-on-outlier", "--fail-on-outlier"),
        ("calibrate --only profile --hardware-out h.json", "--hardware-out"),
        ("calibrate --only hardware --plots plots", "--plots"),
        ("calibrate --only hardware --hardware-out h.json -o p.json", "--output"),
        ("tune tp_mlp --mesh tp=2", "--mesh"),
        ("tune tp_mlp --memory 80GB", "--memory"),
        ("tune tp_mlp --float8 layers.*", "--float8"),
        ("simulate --recording r.jsonl --quick", "--quick"),
        ("redistribute --all-pairs --mesh 2x2 --shape 8 --picture p.png", "--picture"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(
    words: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(words)
    assert done.exit_code == 2 and option in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.output
    assert not list(tmp_path.iterdir())


def test_the_width_goes_with_everything() -> None:
    assert "no trace of a step" in command(f"report --diff {STEPS} {STEPS} --width 80").stderr.replace("\n", " ")


def test_a_project_s_own_default_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for the calls in which it has an effect."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.distbench]\nresults = "elsewhere"\n[tool.distbench.report]\nfull = true\n'
    )
    monkeypatch.chdir(tmp_path)
    done = command(f"report --group-by kind {STEPS}")
    assert done.exit_code == 0, done.stderr
    # Nor is what a report says to type, which has the folder only where it has an effect.
    assert "--results" not in report_command((Path(STEPS),), Path("elsewhere"), "")
    assert "--results elsewhere" in report_command((Path("tp_mlp"),), Path("elsewhere"), "")
    reached: list[Path] = []
    monkeypatch.setattr("distbench.launch.run_job.job_left_of", reached.append)
    command(f"run --resume {STEPS}")
    assert reached == [Path(STEPS)]


def test_a_resumed_run_without_links_is_refused_before_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = find("tp_mlp")
    left = SimpleNamespace(file=str(entry.file), scenario="tp_mlp", mesh={"tp": 2})
    monkeypatch.setattr("distbench.launch.run_job.job_left_of", lambda file: left)
    done = command(f"run --resume {STEPS} --fail-on-outlier")
    assert done.exit_code == 2 and "--fail-on-outlier" in done.stderr and not done.stdout
