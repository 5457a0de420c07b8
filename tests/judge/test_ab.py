"""`distbench ab`: turns, looks, worktrees and refusals; a stand-in for the launched command writes run files."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gate_runs import CASE, case, records, steady, write
from processes import PATIENCE_S, Children

from distbench.cli.ab import _earlier_launch_s
from distbench.cli.main import main
from distbench.judge import ab as turns
from distbench.judge.ab import (
    Side,
    Terms,
    checked_out,
    launch_pair,
    looks_of,
    order_of,
    python_at,
    run_pairs,
    settled_by,
)
from distbench.judge.gate import CaseVerdict, Gated, MetricVerdict
from distbench.processes.signals import stopped_as_interrupt
from distbench.spec.errors import UserError
from distbench.statistics.verdicts import Options

# What stands in for distbench in a revision's folder: writes one run file, whose time the revision's file tells.
STAND_IN = """
import json, sys, time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
number = len(list(folder.glob("*.jsonl")))
lines = json.loads(Path("lines.json").read_text())
lines[0]["run_id"] = f"{folder.name}-{number}"
lines[0]["job"]["started_at"] = time.time()
wobble = 1 + 0.01 * ((number * 7 + len(folder.name) + ord(folder.name[-1])) % 5)
lines[-1]["finished_at"] = time.time()
lines[1]["samples_s"] = [float(Path("time_s").read_text()) * wobble] * 10
(folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
(folder.parent / "order").open("a").write(folder.name)
"""


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three revisions of one thing: `base` takes 1 s, `same` as long, `slow` 1.3 s."""
    folder = tmp_path / "repository"
    package = folder / "distbench"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    (folder / "lines.json").write_text(json.dumps(records("", 1.0, {CASE: case([1.0])})))
    git(tmp_path, "init", "-q", str(folder))
    for name, time_s in (("base", "1.0"), ("same", "1.0"), ("slow", "1.3")):
        (folder / "time_s").write_text(time_s)
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", name, "--allow-empty")
        git(folder, "tag", name)
    monkeypatch.chdir(folder)
    return folder


def run_ab(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["ab", *arguments])
    return done.exit_code, done.output


def drawn(seed: int, num_pairs: int) -> str:
    sides = [Side("a", ".", Path()), Side("b", ".", Path())]
    return "".join(side.name for pair in range(1, num_pairs + 1) for side in order_of(pair, sides, seed))


def test_each_pair_has_both_sides_in_an_order_tossed_by_a_fair_coin_of_its_own() -> None:
    orders = ["ab", "ba"]
    tosses = [orders.index(drawn(seed, 2)[:2]) + 2 * orders.index(drawn(seed, 2)[2:]) for seed in range(400)]
    # Four outcomes of two independent coins, 100 of each expected; 16.3 is chi-square's 0.999 at 3 degrees of freedom.
    counts = [tosses.count(outcome) for outcome in range(4)]
    assert sum((count - 100) ** 2 / 100 for count in counts) < 16.3
    assert drawn(5, 20) == drawn(5, 20) != drawn(6, 20)


@pytest.mark.parametrize(
    ("max_pairs", "min_launches", "looks"),
    [(20, 5, (7, 11, 16, 20)), (20, 10, (10, 13, 17, 20)), (10, 5, (7, 8, 9, 10)), (8, 5, (6, 8)), (6, 5, (6,))],
)
def test_looks_begin_where_there_can_be_a_verdict_and_end_with_the_last_pair(
    max_pairs: int, min_launches: int, looks: tuple[int, ...]
) -> None:
    assert looks_of(max_pairs, Options(min_launches=min_launches)) == looks


def test_a_slowdown_of_a_third_is_found_at_the_first_look(repository: Path, tmp_path: Path) -> None:
    code, output = run_ab("base", "slow", "--seed", "8", "--results", str(tmp_path / "out"), "--", "scenario")
    assert code == 1 and "FAIL: 1 regression" in output and "found a regression" in output
    assert "random order within each pair: --seed 8\n" in output
    assert (tmp_path / "out" / "order").read_text() == drawn(8, 7)
    assert "a: base (" in output and "b: slow (" in output
    # The worktrees are gone, and the repository is as it was.
    assert git(repository, "worktree", "list").count("\n") == 0
    assert git(repository, "status", "--porcelain") == ""


def test_no_change_passes(repository: Path, tmp_path: Path) -> None:
    code, output = run_ab("base", "same", "--results", str(tmp_path / "out"), "--tolerance", "20%", "--", "scenario")
    assert code == 0 and "PASS" in output and "all cases are decided" in output


def test_the_working_tree_is_a_side_too(repository: Path, tmp_path: Path) -> None:
    (repository / "time_s").write_text("2.0")
    code, output = run_ab("slow", ".", "--results", str(tmp_path / "out"), "--", "scenario")
    assert code == 1 and "b: the working tree" in output


def test_a_budget_ends_it_between_pairs_and_says_so(repository: Path, tmp_path: Path) -> None:
    sides = [Side(name, ".", repository) for name in "ab"]
    launch = partial(launch_pair, sides=sides, run_arguments=["x"], out=tmp_path, seed=1)
    settled = run_pairs(launch, Options(), Terms(20, 1e-9, (5, 20), 1), lambda line: None)
    assert settled.num_pairs == 1 and "would take longer than --max-time" in settled.reason
    assert settled.gated.exit_code() == 4


def looked(num_pass: int, *still_open: tuple[float, int | None, str | None]) -> Gated:
    """A look at so many cases that passed, and open ones: change, pairs more, what is suspected."""

    def one(verdict: str, change: float, more: int | None, suspected: str | None) -> CaseVerdict:
        metric = MetricVerdict(
            "mean", verdict, 1.0, 1.0, change, 0.0, 0.1, 1.0, 0.05, 0.1, 7, more, suspected
        )  # fmt: skip
        return CaseVerdict("s", "case", verdict, "", True, (metric,))

    passed = [one("pass", 0.0, None, None)] * num_pass
    return Gated([*passed, *(one("inconclusive", *each) for each in still_open)], Options(), 7, 7)


@pytest.mark.parametrize(
    ("look", "ends"),
    [
        (looked(29, (0.02, 50, None)), True),
        (looked(29, (0.02, None, None)), True),
        (looked(5, (0.02, 50, None)), True),
        (looked(58, *[(0.02, 50, None)] * 3), True),
        (looked(57, *[(0.02, 50, None)] * 4), False),  # more than 5 % are open
        (looked(0, (0.02, 50, None)), False),  # nothing passed
        (looked(29, (0.02, 13, None)), False),  # the pairs left would do
        (looked(29, (0.06, 50, None)), False),  # it looks slower than the tolerance
        (looked(29, (0.02, None, "regression")), False),
    ],
)
def test_it_ends_early_where_few_cases_are_open_and_would_stay_so(look: Gated, ends: bool) -> None:
    message = settled_by(look, num_left=13)
    assert (message is not None) == ends
    assert message is None or "would need more than 13 further pairs" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", ".", "--", "x"), "'nowhere' is not a revision"),
        ((".", ".", "--env-b", "NCCL", "--", "x"), "--env-b 'NCCL' is not NAME=VALUE"),
        ((".", ".", "--", "x", "--results", "here"), "--results is not allowed after --"),
        ((".", ".", "--", "x", "--results=here"), "--results is not allowed after --"),
        ((".", ".", "--python-b", "/nowhere", "--", "x"), "--python-b /nowhere cannot be started"),
        ((".", ".", "--python-a", "lines.json", "--", "x"), "--python-a lines.json cannot be started"),
        ((".", ".", "--results", "lines.json", "--", "x"), "--results lines.json is not a folder"),
        ((".", ".", "--results", "lines.json/x", "--", "x"), "--results lines.json/x cannot be written"),
        ((".", ".", "--env-b", "A=\0", "--", "x"), "cannot be started: embedded null byte"),
        ((".", ".", "--allow-different", "colour", "--", "x"), "not a field that must agree"),
    ],
)
def test_what_cannot_work_is_a_sentence(repository: Path, arguments: tuple[str, ...], message: str) -> None:
    code, output = run_ab(*arguments)
    assert code == 2 and message in output and "Traceback" not in output


def test_a_launch_that_distbench_itself_fails_ends_it_in_a_later_pair_too(repository: Path, tmp_path: Path) -> None:
    fails = "\nif number == 1: sys.exit(print('distbench: internal error', file=sys.stderr) or 70)\n"
    stand_in = STAND_IN.replace("lines = json", f"{fails}lines = json", 1)
    (repository / "distbench" / "__main__.py").write_text(stand_in)
    out = tmp_path / "out"
    code, output = run_ab("base", ".", "--pairs", "3", "--results", str(out), "--", "x")
    assert code == 2 and "b: the working tree: internal error" in output
    assert (out / "b" / "0.jsonl").exists()


@pytest.mark.parametrize(
    ("ends", "message"),
    [("os.kill(os.getpid(), 9)", "launch killed by SIGKILL"), ("sys.exit(1)", "exit code 1, without a run file")],
)
def test_a_launch_that_leaves_no_run_file_is_no_pair_though_earlier_ones_did(
    repository: Path, tmp_path: Path, ends: str, message: str
) -> None:
    stand_in = STAND_IN.replace("lines = json", f"import os\nif number == 1: {ends}\nlines = json", 1)
    (repository / "distbench" / "__main__.py").write_text(stand_in)
    out = tmp_path / "out"
    code, output = run_ab("base", ".", "--pairs", "3", "--results", str(out), "--", "x")
    assert code == 2 and f"b: the working tree: {message}" in output and "pair 2" not in output
    assert (out / "b" / "0.jsonl").exists()


def test_the_cost_is_printed_before_the_first_pair_and_after_it(repository: Path, tmp_path: Path) -> None:
    _, output = run_ab("base", "same", "--pairs", "8", "--results", str(tmp_path / "out"), "--", "x")
    before, _, after = output.partition("pair 1 of 8: ")
    assert "cost: 12 to 16 launches, unknown time; at most 30 min (--max-time)." in before
    assert re.search(r"\ncost: 12 to 16 launches of [0-9.]+ s, \d+ s.*; at most 30 min \(--max-time\)\n", after)


@pytest.mark.parametrize(
    ("num_commits", "launch_s", "budget_s", "message"),
    [
        (0, 60.0, 1800.0, "cost: 14 to 40 launches of 60.0 s, 14 min to 30 min; at most 30 min (--max-time)"),
        (32, 10.0, 1800.0, "cost: usually 24 to 64 launches of 10.0 s, 4 min to 11 min; at most 30 min (--max-time)"),
        (1, None, 60.0, "cost: usually 16 to 40 launches, unknown time; at most 60 s (--max-time)."),
        (0, 60.0, 240.0, "which allows about 4 launches. A verdict needs 14 launches of 60.0 s: give --max-time"),
    ],
)
def test_the_cost_is_launches_and_time(num_commits: int, launch_s: float | None, budget_s: float, message: str) -> None:
    assert message in Terms(20, budget_s, (7, 11, 16, 20), 1, num_commits).cost_text(launch_s)


def test_the_cost_is_that_of_the_last_run_of_the_same_scenario(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTBENCH_MACHINE", "box")
    assert _earlier_launch_s(("collectives", "--quick")) is None
    lines = records("run", 1.0, {CASE: case([1.0])}, mesh={"dp_shard": 2, "tp": 2})
    lines[0]["job"]["settings"] = {}
    lines[-1]["wall_s"] = 12.5
    write(tmp_path / "results" / "ab" / "20260101T000000Z" / "a" / "box" / "run.jsonl", lines)
    assert _earlier_launch_s(("collectives", "--quick")) == 12.5
    assert _earlier_launch_s(("collectives", "--quick", "--mesh", "tp=2")) is None
    assert _earlier_launch_s(("nowhere.py", "--fly")) is None


def test_a_launch_that_cannot_work_says_which_side_and_why(repository: Path, tmp_path: Path) -> None:
    (repository / "distbench" / "__main__.py").write_text("import sys; sys.exit('distbench: no such scenario')")
    code, output = run_ab("base", ".", "--results", str(tmp_path / "out"), "--", "x")
    assert code == 2 and "b: the working tree: no such scenario" in output
    # Where nothing was measured, what was mended runs into the same folder.
    again = (".", ".", "--pairs", "2", "--results", str(tmp_path / "again"), "--", "x")
    assert run_ab(*again)[0] == 2 and (tmp_path / "again").is_dir()
    git(repository, "checkout", "-q", ".")
    assert "2 pairs" in run_ab(*again)[1]


@contextlib.contextmanager
def interrupted_ab(
    children: Children, repository: Path, tmp_path: Path, candidate: str, mark: Path
) -> Iterator["subprocess.Popen[str]"]:
    """`ab base CANDIDATE` once the file `mark` has text; at the end it was interrupted and left no worktree."""
    (tmp_path / "temporary").mkdir()
    command = (sys.executable, "-P", "-m", "distbench", "ab", "base", candidate, "--results", str(tmp_path / "out"))
    temporary = {"TMPDIR": str(tmp_path / "temporary")}
    with children.start(*command, "--", "x", cwd=repository, variables=temporary, stderr=subprocess.PIPE) as ab:
        started_s = time.monotonic()
        while not (mark.exists() and mark.read_text()):
            assert ab.poll() is None and time.monotonic() - started_s < PATIENCE_S
            time.sleep(0.02)
        yield ab
        errors = ab.communicate(timeout=PATIENCE_S)[1]
    assert ab.returncode == 130 and errors.splitlines()[-1] == "distbench: interrupted"
    assert git(repository, "worktree", "list").count("\n") == 0
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_launch_and_takes_the_worktrees_away(
    children: Children, repository: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    """By a process of its own: side b's launch is under way, and side a has a worktree."""
    slow = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    (repository / "distbench" / "__main__.py").write_text(slow)
    with interrupted_ab(children, repository, tmp_path, ".", repository / "pid") as ab:
        pid = int((repository / "pid").read_text())
        assert git(repository, "worktree", "list").count("\n") == 1
        ab.send_signal(signum)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_signal_while_a_launch_starts_leaves_none_running(
    children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It comes when the launch has begun and nobody has it yet: seen once where the machine was busy."""
    pids: list[int] = []

    class SignalledAsItStarts(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            pids.append(self.pid)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(turns.subprocess, "Popen", SignalledAsItStarts)
    side = Side("a", ".", tmp_path)
    with pytest.raises(KeyboardInterrupt), stopped_as_interrupt():
        turns.launch_once(side, ("x",), tmp_path / "out")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_revision_is_checked_out_leaves_no_worktree(
    children: Children, repository: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\necho begun > {tmp_path}/checking-out\nexec sleep 3\n")
    hook.chmod(0o755)
    with interrupted_ab(children, repository, tmp_path, "slow", tmp_path / "checking-out") as ab:
        ab.send_signal(signum)


def test_what_was_found_is_written_in_the_gates_forms(repository: Path, tmp_path: Path) -> None:
    junit = tmp_path / "ab.xml"
    given = ("base", "slow", "--results", str(tmp_path / "out"), "--github", "--write", f"junit={junit}", "--", "x")
    code, output = run_ab(*given)
    assert code == 1 and "::error title=regression" in output and "<failure" in junit.read_text()
    refused, message = run_ab("base", "slow", "--write", "pdf=x", "--", "x")
    assert refused == 2 and "is not FORMAT=FILE" in message


def test_a_dry_run_starts_and_writes_nothing(repository: Path, tmp_path: Path) -> None:
    code, output = run_ab("base", "slow", "--dry-run", "--results", str(tmp_path / "out"), "--", "x")
    assert code == 0 and "each launch: distbench run x" in output and "b: slow" in output
    assert not (tmp_path / "out").exists()


def test_a_folder_with_older_runs_is_refused(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "out" / "a" / "old.jsonl", records("old", 1.0, {CASE: case(steady(1.0, 0))}))
    code, output = run_ab(".", ".", "--results", str(tmp_path / "out"), "--", "x")
    assert code == 2 and "is not empty" in output


def test_outside_of_a_repository_only_the_working_tree_is_known(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with checked_out([Side("a", ".", tmp_path), Side("b", ".", tmp_path)]) as sides:
        assert [side.folder for side in sides] == [tmp_path, tmp_path]
    with pytest.raises(UserError, match="not in a git repository"), checked_out([Side("a", "main", tmp_path)]):
        pass


def test_a_python_is_found_from_anywhere_and_its_link_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert python_at("./python", "--python-a") == str(tmp_path / "python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert python_at("python", "--python-a") == str(tmp_path / "python")
    assert python_at(None, "--python-a") == sys.executable


def test_each_side_has_its_own_variables_and_imports_its_own_code(tmp_path: Path) -> None:
    side = Side("b", ".", tmp_path, variables={"NCCL_ALGO": "Tree"})
    environment = side.environment()
    assert environment["NCCL_ALGO"] == "Tree" and environment["PYTHONPATH"].startswith(str(tmp_path))
    assert side.python == sys.executable and side.text() == "b: the working tree, NCCL_ALGO=Tree"
