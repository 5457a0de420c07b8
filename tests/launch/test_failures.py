"""What can go wrong with real ranks: a sentence, the right exit code, no process left, finished cases kept."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import DATA, run_files
from processes import PATIENCE_S, Children, Ranks, slowness

from distbench.launch import watch_ranks
from distbench.launch.watch_ranks import ask_for_stacks, where_ranks_are
from distbench.records.run_file import read_run

MISDEEDS = f"{DATA / 'misdeeds.py'}::misdeeds"
# What goes wrong needs no more samples than there must be.
SHORT = ("--quick", "--passes", "1", "--budget", "0.2")


def outcome_of(folder: Path) -> list[str]:
    (file,) = run_files(folder)
    return [record["status"] for record in read_run(file).cases]


def footer_of(folder: Path) -> dict[str, object]:
    (file,) = run_files(folder)
    footer = read_run(file).footer
    assert footer is not None
    return footer


def assert_nothing_runs(folder: Path) -> None:
    assert_gone([int(path.read_text()) for path in folder.rglob("rank*.pid")])


def assert_gone(pids: list[int]) -> None:
    assert pids and len(pids) % 2 == 0
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def run_misdeed(ranks: Ranks, folder: Path, misdeed: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = ("run", MISDEEDS, *SHORT, "--results", str(folder))
    return ranks.cli(*command, "--set", f"misdeed={misdeed}", *more)


def test_a_rank_that_raises_alone_is_told_with_its_traceback_and_the_rest_go_on(ranks: Ranks, tmp_path: Path) -> None:
    done = run_misdeed(ranks, tmp_path, "raise")
    assert done.returncode == 1, done.stderr
    sentence = next(line for line in done.stderr.splitlines() if line.startswith("distbench:"))
    assert "rank 1 raised ValueError: rank one refuses" in sentence
    log = Path(sentence.rpartition(" ")[2])
    assert "Traceback" in log.read_text() and "rank one refuses" in log.read_text()
    assert "Traceback" not in done.stderr
    assert outcome_of(tmp_path) == ["ok", "ok", "raised", "ok", "ok"]
    assert footer_of(tmp_path)["status"] == "complete"
    assert_nothing_runs(tmp_path)


OUTCOMES = {"raise_everywhere": "raised", "raise_apart": "raised", "wrong": "wrong", "nan": "wrong"}


def test_cases_that_go_wrong_on_every_rank_or_in_their_values_cost_only_themselves(
    ranks: Ranks, tmp_path: Path
) -> None:
    """One launch: of each misdeed's two cases the first goes wrong.

    Where ranks raise seconds apart, the first waits while the other is at work: none is taken to have failed alone.
    """
    done = run_misdeed(ranks, tmp_path, "raise_everywhere,raise_apart,wrong,nan", "--set", "case=3,4")
    assert done.returncode == 1, done.stderr
    (file,) = run_files(tmp_path)
    cases = [(record["case"]["params"]["variant"], record["status"]) for record in read_run(file).cases]
    assert dict(cases) == {
        f"case={case},misdeed={misdeed}": status if case == 3 else "ok"
        for misdeed, status in OUTCOMES.items()
        for case in (3, 4)
    }
    # After each of them something went on.
    assert [status for _, status in cases][-1] == "ok" and footer_of(tmp_path)["status"] == "complete"
    assert footer_of(tmp_path)["num_relaunches"] == 0
    shown = ranks.cli("report", "--full", "--results", str(tmp_path))
    assert shown.returncode == 0 and "every rank refuses" in shown.stdout


def torchrun(ranks: Ranks, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command as two ranks of somebody else's launch."""
    more = ("--quick", "--budget", "1", "--timeout", str(PATIENCE_S), "--results", folder)
    return ranks.torchrun(2, "--no-python", *arguments, *more, cwd=folder, variables={"PYTHON": ranks.forked_python})


BY_RANK = "from distbench.spec import *\nimport os\n@scenario(mesh={'tp': 2})\ndef by_rank():\n    ops = %s\n"
BY_RANK += "    return Scenario(collectives=(Collectives(ops=ops, sizes_bytes=(1024,)),))\n"


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (("('all_gather',)", "('broadcast',)"), "the scenario file of rank 1 differs from rank 0's"),
        (("('all_gather', 'broadcast')[int(os.environ['RANK']):]",) * 2, "the list of cases of rank 1 differs"),
    ],
)
def test_ranks_of_another_launcher_that_would_run_different_cases_are_refused(
    ranks: Ranks, tmp_path: Path, ops: tuple[str, str], message: str
) -> None:
    """As where a host has an older copy of a file: the ranks would wait for one another until the timeout."""
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
        (tmp_path / f"host{rank}" / "by_rank.py").write_text(BY_RANK % ops[rank])
    done = torchrun(
        ranks, tmp_path, "sh", "-c", 'cd host$RANK && exec "$PYTHON" -m distbench run by_rank.py "$@"', "sh"
    )
    assert f"distbench: by_rank: {message}" in done.stderr
    assert "give all ranks the same command and files" in done.stderr and run_files(tmp_path) == []


@pytest.mark.long
def test_one_launch_of_another_launcher_runs_several_scenarios(ranks: Ranks, tmp_path: Path) -> None:
    """torchrun's store outlives a job: the next one must not find the last one's keys in it."""
    names = [f"{DATA / 'tiny.py'}", f"{MISDEEDS}"]
    done = torchrun(ranks, tmp_path, ranks.forked_python, "-m", "distbench", "run", *names, "--mesh", "dp_shard=2")
    assert done.returncode == 0, done.stderr
    statuses = [[record["status"] for record in read_run(file).cases] for file in run_files(tmp_path)]
    # The second one compares five steps, and so measures the first of them again.
    assert sorted(map(len, statuses)) == [1, 6] and {status for run in statuses for status in run} == {"ok"}


def test_a_process_whose_parent_is_gone_before_it_can_ask_to_die_with_it_ends_at_once(
    children: Children,
) -> None:
    code = "from distbench.processes.supervisor import die_with_parent; die_with_parent(); print('goes on')"

    def said_by_child_of(parent: int) -> str:
        return children.python("-c", code, variables={"DISTBENCH_PARENT_PID": str(parent)}).stdout

    assert said_by_child_of(os.getpid()) == "goes on\n"
    assert said_by_child_of(os.getppid()) == ""


def test_only_ranks_of_this_launch_are_asked_for_their_stacks(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ended leaves its pid behind, which may be anybody's by now: SIGUSR1 would end that process."""
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    stranger, own = (children.start(*sleeping) for _ in range(2))
    try:
        (tmp_path / "rank0.pid").write_text(str(own.pid))
        (tmp_path / "rank1.pid").write_text(str(stranger.pid))
        monkeypatch.setattr("distbench.launch.watch_ranks.STACKS_WAIT_S", 0.0)
        ask_for_stacks(tmp_path, launcher=own.pid)
        assert own.wait(PATIENCE_S) == -signal.SIGUSR1
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.5)
    finally:
        for process in (stranger, own):
            process.kill()
            process.wait()


def test_the_line_of_each_hung_rank_is_read_from_its_stack(tmp_path: Path) -> None:
    """Some ranks wait in a backward that rank 1 does not run; a rank without a stack is left out."""
    other = 'Thread 0x00 (most recent call first):\n  File "/mine/loader.py", line 3 in load\n\n'
    waiting = (
        f'  File "{torch.__path__[0]}/autograd/graph.py", line 8 in run\n  File "/mine/step.py", line 24 in step\n'
    )
    outside = f'  File "{watch_ranks.__file__}", line 9 in gather\n'
    for rank, frames in enumerate((waiting, outside, waiting, "")):
        stack = frames and f"{other}Current thread 0x01 [python] (most recent call first):\n{frames}"
        (tmp_path / f"rank{rank}.log").write_text(f"text of the model\n{stack}")
    assert where_ranks_are(tmp_path) == " (ranks 0,2 at /mine/step.py:24, rank 1 outside of your code)"
    (tmp_path / "rank0.log").unlink()
    (tmp_path / "rank2.log").unlink()
    assert where_ranks_are(tmp_path) == ""


@pytest.mark.long
def test_a_rank_that_hangs_is_given_up_with_every_stack(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is forked is no child of what asks for its stacks; which processes are asked is tested above.
    monkeypatch.setattr("distbench.launch.watch_ranks._is_rank_of", lambda launcher, pid: True)
    # Longer than the first step takes beside other tests: that is no progress either.
    timeout_s = max(4, round(3 * slowness()))
    given = ("--results", str(tmp_path), "--set", "misdeed=hang", "--timeout", str(timeout_s))
    done = ranks.run_here("run", MISDEEDS, *SHORT, *given)
    assert done.exit_code == 1, done.output
    assert re.search(rf"made no progress for {timeout_s} s \(.*rank 1 at \S+misdeeds\.py:\d+\)", done.stderr), (
        done.stderr
    )
    assert outcome_of(tmp_path) == ["ok", "ok", "timeout", "ok", "ok"]
    log, again = sorted(tmp_path.rglob("rank1.log"))
    assert again.parent.name == "relaunch1" or log.parent.name == "relaunch1"
    stacks = [path for path in (log, again) if "misdeeds.py" in path.read_text()]
    assert [path.parent.name == "relaunch1" for path in stacks] == [False], (
        "the hung rank's stack names where it sleeps"
    )
    assert_nothing_runs(tmp_path)


def test_killed_ranks_are_named_and_two_cases_that_kill_one_cost_only_themselves(ranks: Ranks, tmp_path: Path) -> None:
    """The second is the last of all: nothing is left to start ranks for."""
    done = run_misdeed(ranks, tmp_path, "kill", "--set", "bad=2+5")
    assert done.returncode == 1, done.stderr
    assert outcome_of(tmp_path) == ["ok", "aborted", "ok", "ok", "aborted"]
    footer = footer_of(tmp_path)
    assert (footer["status"], footer["num_relaunches"], footer["num_not_run"]) == ("complete", 1, 0)
    assert footer["num_by_status"] == {"ok": 3, "aborted": 2}
    (file,) = run_files(tmp_path)
    assert [json.loads(line)["type"] for line in file.read_text().splitlines()] == ["run", *["case"] * 5, "footer"]
    sentence = next(line for line in done.stderr.splitlines() if line.startswith("distbench:"))
    assert "2 cases broke the launch" in sentence and "case=2" in sentence and "case=5" in sentence
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert_nothing_runs(tmp_path)
    shown = ranks.cli("report", "--full", "--results", str(tmp_path))
    assert shown.returncode == 0 and "case=1" in shown.stdout and "aborted" in shown.stdout


def test_a_rank_that_leaves_without_an_error_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """The others would wait for them until the timeout, and the exit code 0 would name no rank."""
    done = run_misdeed(ranks, tmp_path, "leave,interrupt", "--set", "case=3,4", "--timeout", "60")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (file,) = run_files(tmp_path)
    rows = {record["case"]["params"]["variant"]: record for record in read_run(file).cases}
    assert {name: row["status"] for name, row in rows.items()} == {
        "case=3,misdeed=leave": "aborted",
        "case=3,misdeed=interrupt": "raised",
        "case=4,misdeed=leave": "ok",
        "case=4,misdeed=interrupt": "ok",
    }
    assert "rank 1 ended with exit code 0 before its work was done" in rows["case=3,misdeed=leave"]["error"]
    assert "rank 1 raised KeyboardInterrupt" in rows["case=3,misdeed=interrupt"]["error"]


def test_a_log_that_grows_too_long_is_cut_with_a_warning(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distbench.records.rank_logs.MAX_LOG_BYTES", 1_500_000)
    given = (*SHORT, "--results", str(tmp_path), "--set", "misdeed=print", "--set", "case=3")
    done = ranks.run_here("run", MISDEEDS, *given)
    assert done.exit_code == 0, done.output
    message = next(line for line in done.stderr.splitlines() if line.startswith("distbench: warning: misdeeds: "))
    cut = float(re.findall(r"([\d,]+) MB were removed", message)[0].replace(",", ""))
    assert cut >= 1 and all(path.stat().st_size <= 1_500_000 for path in tmp_path.rglob("*.log"))


def test_a_scenario_that_is_refused_keeps_no_other_from_running(ranks: Ranks, tmp_path: Path) -> None:
    named = (f"{DATA / 'tiny.py'}", f"{DATA / 'bad_plans.py'}::undividable", MISDEEDS)
    given = (*SHORT, "--results", str(tmp_path), "--set", "case=1")
    done = ranks.cli("run", *named, *given)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == "distbench: error: of 3 scenarios, undividable was rejected"
    runs = [read_run(file) for file in run_files(tmp_path)]
    assert len(runs) == 2 and "misdeeds" in [run.scenario for run in runs]
    assert {case["status"] for run in runs for case in run.cases} == {"ok"}


NEXT = """import os
from torch import nn, ones
from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

def build():
    left = [pid for pid in os.listdir(os.environ["LEFT"]) if os.path.exists(f"/proc/{pid}")]
    assert not left, left
    return nn.Linear(8, 8)

@scenario(mesh={"dp_shard": 2})
def after() -> Scenario:
    batch, plan = (ones(4, 8), ones(4, 8)), ParallelPlan(fsdp=FsdpPlan())
    return Scenario(build_model=build, make_batch=lambda: batch, loss=nn.functional.mse_loss, plan=plan)
"""


def test_what_a_step_forks_ends_with_the_launch(ranks: Ranks, tmp_path: Path) -> None:
    """And before the next scenario of that launch begins: it would be measured beside them."""
    (tmp_path / "left").mkdir()
    (tmp_path / "next.py").write_text(NEXT)
    given = (*SHORT, "--results", str(tmp_path), "--set", "misdeed=fork")
    done = ranks.cli("run", MISDEEDS, tmp_path / "next.py", *given, LEFT=str(tmp_path / "left"))
    assert done.returncode == 0, done.stderr
    left = [int(path.name) for path in (tmp_path / "left").iterdir()]
    assert len(left) >= 2 and not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_a_plan_that_cannot_work_is_refused_before_anything_is_measured(ranks: Ranks, tmp_path: Path) -> None:
    done = ranks.cli("run", f"{DATA / 'bad_plans.py'}::undividable", "--results", str(tmp_path))
    assert done.returncode == 2, done.stderr
    message = " ".join(done.stderr.split())
    assert (
        "mesh dim 'tp' of size 2 does not divide 15" in message
        and "{up_proj,down_proj}.weight; up_proj.bias" in message
    )
    assert message.endswith("Use --mesh tp=1 (checked), or change the plan") and len(done.stderr.splitlines()) <= 12
    assert run_files(tmp_path) == []
    assert_nothing_runs(tmp_path)


def start(ranks: Ranks, folder: Path, python: str = sys.executable) -> subprocess.Popen[str]:
    command = (python, "-m", "distbench", "run", MISDEEDS, "--quick", "--results", folder, "--set", "misdeed=slow")
    return ranks.start(*command, stderr=subprocess.PIPE, start_new_session=True)


def wait_for_case_3(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        message = [
            json.loads(line) for path in folder.rglob("progress.jsonl") for line in path.read_text().splitlines()
        ]
        if any(event["event"] == "case" and event["index"] == 2 for event in message):
            return
        time.sleep(0.05)
    raise AssertionError("case 3 never began")


@pytest.mark.parametrize("sent", [(signal.SIGINT,) * 3, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)])
def test_an_interrupted_run_keeps_its_cases_and_leaves_nothing_behind(
    ranks: Ranks, tmp_path: Path, sent: tuple[signal.Signals, ...]
) -> None:
    process = start(ranks, tmp_path)
    wait_for_case_3(tmp_path)
    for each in sent:
        process.send_signal(each)
        time.sleep(0.3)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr and "Traceback" not in stderr
    assert outcome_of(tmp_path) == ["ok", "ok", "aborted"]
    footer = footer_of(tmp_path)
    assert footer["status"] == "interrupted" and footer["num_by_status"] == {"ok": 2, "aborted": 1}
    assert footer["num_relaunches"] == 0
    assert_nothing_runs(tmp_path)


def test_killing_the_command_itself_leaves_no_orphans_and_a_readable_file(ranks: Ranks, tmp_path: Path) -> None:
    process = start(ranks, tmp_path)
    wait_for_case_3(tmp_path)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert_nothing_runs(tmp_path)
    shown = ranks.cli("report", "--full", "--results", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert "interrupted" in shown.stdout + shown.stderr and "case=2" in shown.stdout


def mounted(folder: Path, options: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_results_folder_that_fills_up_ends_the_run_and_keeps_what_it_holds(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    if not mounted(folder, "size=16k"):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        log_dir = ["--log-dir", str(tmp_path / "logs")]
        done = ranks.cli("run", "collectives", "--quick", "--mesh", "tp=2", "--results", folder, *log_dir)
        assert done.returncode == 2, done.stderr
        assert "No space left" in done.stderr and "Traceback" not in done.stderr
        shown = ranks.cli("report", "--results", str(folder))
        assert shown.returncode == 0, shown.stderr
        (file,) = run_files(folder)
        kept = read_run(file).cases
        assert kept and all(record["status"] == "ok" for record in kept)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_results_folder_is_refused_before_anything_starts(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "fixed"
    if not mounted(folder, "ro,size=16k"):
        pytest.skip("needs the right to mount a read-only tmpfs")
    try:
        done = ranks.cli("run", "collectives", "--quick", "--results", folder)
        assert done.returncode == 2, done.stderr
        assert "cannot be written" in done.stderr and "--results" in done.stderr and "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", str(folder)], check=True)
