"""`distbench run --nodes` as far as no launcher is needed: what would be launched, and what is refused."""

import io
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import DATA

from distbench.cli.main import main
from distbench.cli.on_nodes import NodeOptions, on_allocation, without_where
from distbench.launch import nodes, slurm
from distbench.launch.nodes import NodeLaunch
from distbench.launch.rendezvous import first_host
from distbench.launch.slurm import JobState, state_of
from distbench.records.results_folder import runs_kept_and_deleted
from distbench.spec import UserError


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test does not say what Slurm answers, it is not there."""
    monkeypatch.setattr(slurm, "slurm_command", lambda *command, **how: (1, "", f"{command[0]}: not found"))


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["run", str(DATA / "tiny.py"), *words])
    return done.exit_code, done.output


def torchrun_words(words: str) -> tuple[str, ...]:
    return ("--nodes", "2", "--launcher", "torchrun", "--launcher-args", words)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["a", "--nodes", "2", "--quick"], ("a", "--quick")),
        (["--nodes=2", "a", "--launcher=slurm", "--mesh", "tp=4"], ("a", "--mesh", "tp=4")),
        (["a", "--launcher-args", "--time=1 -p x", "--dry-run", "-k", "x"], ("a", "-k", "x")),
        (["--ranks-per-node", "8", "a", "--label=--nodes"], ("a", "--label=--nodes")),
        (["a", "--launcher-args=", "--quick"], ("a", "--quick")),
    ],
)
def test_a_node_is_given_the_command_without_what_says_where(given: list[str], kept: tuple[str, ...]) -> None:
    assert without_where(given) == kept


def test_the_batch_file_has_the_nodes_and_the_command() -> None:
    requested = ("--mesh", "tp=4", "--device", "cpu")
    code, text = run(*requested, "--nodes", "2", "--launcher", "slurm", "--dry-run", "--launcher-args=-p gpu -t 5")
    lines = text.splitlines()
    assert code == 0 and lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "#SBATCH -p gpu -t 5"} <= set(lines)
    assert shlex.split(lines[-1])[-8:] == ["-m", "distbench", "run", str(DATA / "tiny.py"), *requested]
    assert "--gpus-per-node" not in text


def test_torchrun_is_shown_for_each_node() -> None:
    code, text = run("--mesh", "tp=4", "--nodes", "2", "--launcher", "torchrun", "--dry-run")
    commands = [shlex.split(line) for line in text.splitlines() if "torch.distributed.run" in line]
    assert code == 0 and len(commands) == 2
    for rank, command in enumerate(commands):
        assert {"--nnodes=2", "--nproc-per-node=2", f"--node-rank={rank}", "--master-addr=$HOST"} <= set(command)


def test_torchx_gets_its_words_on_both_sides_of_its_component() -> None:
    requested = ("--nodes", "2", "--ranks-per-node", "1", "--launcher", "torchx", "--dry-run")
    code, text = run(*requested, "--launcher-args", "-s kubernetes -cfg queue=q -- --image distbench:1")
    before, after = shlex.split(text)[:], shlex.split(text)
    at = before.index("dist.ddp")
    assert code == 0 and before[:at] == ["torchx", "run", "--wait", "--log", "-s", "kubernetes", "-cfg", "queue=q"]
    assert after[at + 1 : at + 3] == ["-j", "2x1"] and after[after.index("--image") + 1] == "distbench:1"
    assert after[after.index("-m") + 1 : after.index("-m") + 5] == ["distbench", "--", "run", str(DATA / "tiny.py")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh", "tp=3", "--nodes", "2"), "which is not divisible by 2 nodes; give --ranks-per-node"),
        (("--mesh", "tp=4", "--nodes", "2", "--ranks-per-node", "8"), "2 nodes of 8 ranks have 16"),
        (("--nodes", "2", "--launcher", "torchrun"), "needs this node's rank"),
        (("--nodes", "2", "--launcher-args", "'x"), "quote the words as for a shell"),
        (("--nodes", "0"), "0 is not in the range"),
        (("--nodes", "-1"), "-1 is not in the range"),
        (("--nodes", "two"), "'two' is not a valid integer"),
        (("--nodes", "2", "--launcher", "mpi"), "'mpi' is not one of"),
        (
            torchrun_words("--node-rank 2 --master-addr a"),
            "--node-rank 2 is not valid for 2 nodes; give each node a different rank, 0 to 1",
        ),
        (torchrun_words("--node-rank one --master-addr a"), "--node-rank one is not valid for 2 nodes"),
        (torchrun_words("--node-rank 1"), "needs the address of node 0"),
        (
            torchrun_words("--node-rank 1 --nproc-per-node=4"),
            "--nproc-per-node=4: --nodes and --ranks-per-node set the number of nodes",
        ),
        # argparse takes them shortened, and so do TorchX and Slurm's getopt.
        (
            torchrun_words("--node-rank 1 --nproc_per=4"),
            "--nproc_per=4: --nodes and --ranks-per-node set the number of nodes",
        ),
        (torchrun_words("--node-rank 1 --nnode 1"), "--nnode: --nodes and --ranks-per-node set the number of nodes"),
        (
            ("--nodes", "2", "--launcher", "torchx", "--launcher-args", "-- --j 1x8"),
            "--j: --nodes and --ranks-per-node set",
        ),
        (("--nodes", "2", "--launcher", "slurm", "--launcher-args", "--ntasks-per=8"), "--ntasks-per=8: --nodes and"),
        (("--nodes", "2", "--launcher", "slurm", "--dry-run", "--launcher-args", "'a\nx'"), "has several lines"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    code, text = run(*words)
    assert code == 2 and message in text


@pytest.mark.parametrize(("launcher", "program"), [("slurm", "sbatch"), ("torchx", "torchx")])
def test_a_launcher_that_is_not_here_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str, program: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, text = run("--nodes", "2", "--launcher", launcher)
    assert code == 2 and f"needs the program {program}, which is not installed on this host" in text


@pytest.mark.long
def test_ranks_that_another_launcher_started_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    code, text = run("--nodes", "2")
    assert code == 2 and "--nodes does not work in a process that a launcher started" in text


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("JobId=3 JobState=RUNNING Reason=None ExitCode=0:0", JobState("RUNNING", 0, "None")),
        ("JobId=3 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", JobState("TIMEOUT", 143, "TimeLimit")),
        ("JobId=3 JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0", JobState("FAILED", 2, "NonZeroExitCode")),
        (
            "JobState=RUNNING Reason=None ExitCode=0:0 Comment=is JobState=FAILED Reason=x",
            JobState("RUNNING", 0, "None"),
        ),
        ("JobState=PENDING Reason=ReqNodeNotAvail, Unav:n1 x=1", JobState("PENDING", 0, "ReqNodeNotAvail, Unav:n1")),
    ],
)
def test_what_slurm_says_of_a_job(monkeypatch: pytest.MonkeyPatch, output: str, expected: JobState) -> None:
    monkeypatch.setattr(slurm, "slurm_command", lambda *command: (0, output, ""))
    assert state_of("3") == expected


@pytest.mark.parametrize("word", ["SIGNALING", "STOPPED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "of a later version"])
def test_a_word_that_is_no_end_is_none(word: str) -> None:
    assert not JobState(word).is_over and JobState("DEADLINE").is_over and JobState("").is_over


def followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: list[tuple[int, str, str]]
) -> tuple[object, list[str]]:
    """How a job ends whose states Slurm tells so, and what is said; the last answer is that to scancel."""
    monkeypatch.setattr(
        slurm, "slurm_command", lambda *command: answers.pop(0) if command[0] != "scancel" else answers[-1]
    )
    monkeypatch.setattr(slurm, "require_program", lambda *words: None)
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    message: list[str] = []
    requested = NodeLaunch(("tiny",), 2, 1, "cpu", tmp_path, "distbench-tiny")
    try:
        return slurm.run_by_slurm(requested, message.append), message
    except (UserError, KeyboardInterrupt) as error:
        return error, message


def test_why_a_job_waits_is_said_once_with_when_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits = (0, "JobId=3 JobState=PENDING Reason=Resources StartTime=2026-01-01T10:00:00", "")
    gone = (1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    over = (0, "JobId=3 JobState=FAILED Reason=JobLaunchFailure ExitCode=0:53", "")
    code, message = followed(monkeypatch, tmp_path, [(0, "3", ""), waits, waits, gone, gone, over])
    assert code == 1 and len(message) == 4
    assert message[1] == "Slurm job 3 waits: Resources; Slurm expects to start the job at 2026-01-01T10:00:00"
    assert message[2].startswith("Slurm does not respond (slurm_load_jobs error: Unable to contact slurm controller)")
    assert "give a --results folder that this host and all nodes share" in message[3]


def test_a_job_of_another_cluster_is_asked_for_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a site has its sbatch print beside the job's number is no number, and its warnings are shown."""
    commands: list[tuple[str, ...]] = []
    answers = {
        "sbatch": (
            0,
            "Welcome to node 7\nproject 12 has 90 h left\n31;west\n",
            "sbatch: warning: no memory was asked for",
        ),
        "scontrol": (0, "JobState=FAILED Reason=JobLaunchFailure", ""),
    }
    monkeypatch.setattr(slurm, "slurm_command", lambda *command: commands.append(command) or answers[command[0]])  # type: ignore[func-returns-value]
    monkeypatch.setattr(slurm, "require_program", lambda *words: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    message: list[str] = []
    out = tmp_path / "100% %j"
    slurm.run_by_slurm(NodeLaunch(("k\udce4fer",), 2, 1, "cpu", out, "distbench-tiny"), message.append)
    assert message[0] == "sbatch: warning: no memory was asked for" and message[1].startswith("Slurm job 31;west: ")
    assert commands[1] == ("scontrol", "--clusters=west", "--oneliner", "show", "job", "31")
    output = next(word for word in commands[0] if word.startswith("--output="))
    assert "/100%% %%j/slurm/" in output, "Slurm would put the job's number there"


def test_a_job_from_a_login_node_requests_the_gpus_of_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node has no GPUs: without a request, the ranks would run on CPUs."""
    asked_of: list[tuple[str, ...]] = []

    def lists(*lines: str, code: int = 0) -> None:
        def ask(*command: str, **how: Any) -> tuple[int, str, str]:
            asked_of.append(command)
            return code, "".join(f"{line}\n" for line in lines), ""

        monkeypatch.setattr(slurm, "slurm_command", ask)

    lists("(null)", "gpu:h100:8(S:0-1)")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    nodes = ("--nodes", "2", "--launcher", "slurm", "--dry-run")
    requested = ("--mesh", "tp=4", *nodes)
    text = run(*requested)[1]
    assert "distbench: the job requests GPUs, because nodes have 8 GPUs" in text and "warning" not in text
    assert "#SBATCH --gpus-per-node=2" in text
    assert "#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in run(*nodes, "--launcher-args=-p big")[1]
    assert asked_of[-1][-1] == "--partition=big"
    assert "gpus" not in run(*requested, "--device", "cpu")[1]
    lists("gpu:h100:8", "gpu:a100:4,gpu:t4:1")
    warning = "warning: the job requests no GPUs, because this machine has no GPUs, but nodes of this cluster"
    assert warning in run(*requested)[1]
    lists(code=1)
    assert "warning: the job requests no GPUs, because this machine has no GPUs. Give --device" in run(*requested)[1]
    lists("(null)")
    assert "GPUs" not in run(*requested)[1], "no node of this cluster has GPUs"
    lists("gpu:h100:8", "gpu:a100:4")
    for words in ("--gres=gpu:8", "-p gpu -G 16", "--gpus-per-task 1"):
        assert "warning" not in run(*requested, "--launcher-args", words)[1], "the job asks for them itself"
    assert "warning" in run(*requested, "--launcher-args", "-p gpu")[1]
    code, text = run(*requested, "--device", "cuda")
    assert code == 0 and "warning" not in text and "#SBATCH --gpus-per-node=2" in text
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "_meeting_of", lambda environ: {"MASTER_PORT": "20007"})
    assert run(*requested, "--device", "cpu")[1].startswith("MASTER_PORT=20007 srun --overlap "), (
        "what would be started"
    )


def test_a_job_that_slurm_would_never_begin_is_cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits = (0, "JobId=3 JobState=PENDING Reason=PartitionTimeLimit StartTime=Unknown", "")
    error, _said = followed(monkeypatch, tmp_path, [(0, "3", ""), waits, (0, "", "")])
    assert str(error).startswith("Slurm would never start job 3 (PartitionTimeLimit): its time exceeds the partition's")


def test_a_job_that_cannot_be_cancelled_is_not_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(job_id: str) -> JobState:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm, "state_of", interrupted)
    error, message = followed(monkeypatch, tmp_path, [(0, "3", ""), (1, "", "Unable to contact slurm controller")])
    assert isinstance(error, KeyboardInterrupt)
    assert "could not be cancelled (Unable to contact slurm controller), and may continue" in message[-1]


@pytest.mark.parametrize(
    "word", ["--array=0-3", "-a0-3", "--wait", "-W", "--test-only", "--output=x", "-e x", "-D /x", "--chdir=/x"]
)
def test_words_with_which_sbatch_makes_no_job_that_can_be_followed_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str
) -> None:
    monkeypatch.setattr(slurm, "require_program", lambda *words: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, text = run("--nodes", "2", "--launcher", "slurm", "--results", str(tmp_path / "out"), "--launcher-args", word)
    assert code == 2 and "distbench submits one job and shows its output" in text and not (tmp_path / "out").exists()


def test_an_allocation_with_fewer_nodes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "require_program", lambda *words: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    code, text = run("--nodes", "2", "--launcher", "slurm")
    assert code == 2 and "--nodes 2: this allocation has 1 node; give at most 1" in text
    code, text = run("--nodes", "2", "--launcher", "slurm", "--launcher-args", "-N1")
    assert code == 2 and "-N1: --nodes and --ranks-per-node set the number" in text


def test_jobs_that_are_submitted_in_one_second_have_files_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm.time, "strftime", lambda form, moment: "20260101T000000Z")
    for job in "34":
        followed(monkeypatch, tmp_path, [(0, job, ""), (0, "JobState=FAILED Reason=JobLaunchFailure", "")])
    assert len(list((tmp_path / "slurm").glob("*.sbatch"))) == 2


def test_a_job_that_sbatch_does_not_name_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error, message = followed(monkeypatch, tmp_path, [(0, "", "sbatch: Job 3 to start at noon")])
    assert isinstance(error, UserError) and "Job 3 to start at noon" in str(error) and not message


def test_a_step_that_was_killed_has_its_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`scancel JOB.STEP`: the job itself has failed, and no rank could say why."""
    ended = (0, "JobState=FAILED Reason=NonZeroExitCode ExitCode=137:0", "")
    monkeypatch.setattr(slurm, "_is_missing", lambda log, wait_s: False)
    code, message = followed(monkeypatch, tmp_path, [(0, "3", ""), ended])
    assert code == 137 and message[-1].startswith(
        "Slurm job 3 ended with exit code 137 (srun's message is above); finished cases"
    )


def test_the_output_of_a_job_that_is_queued_again_is_shown_from_its_beginning(tmp_path: Path) -> None:
    log, message = tmp_path / "log", list[str]()
    log.write_text("first launch\n")
    shown = slurm._show(log, 0, message.append)
    log.write_text("second\n")
    slurm._show(log, shown, message.append)
    assert message == ["first launch", "second"]


def test_of_torchxs_traceback_its_last_line_is_kept() -> None:
    message: list[str] = []
    complaint = nodes._Complaint(message.append)
    first = f'{nodes._TRACEBACK}\n  File "x", line 1\na.FirstError: x\n\n'
    second = f"{nodes._TRACEBACK}\ndocker.Error: none\n  more of it\n"
    text = f"sh/0 {nodes._TRACEBACK}\nINFO built\n{first}{second}"
    process = SimpleNamespace(stderr=io.BytesIO(text.encode()))
    complaint.follow(process)  # type: ignore[arg-type]
    assert (
        message == ["sh/0 Traceback (most recent call last):", "INFO built"] and complaint.last == "docker.Error: none"
    )


def test_within_an_allocation_the_job_is_a_step_of_it() -> None:
    requested = NodeLaunch(("tiny", "--quick"), 2, 4, "cuda", Path("results"), "distbench-tiny", ("--exclusive",))
    command = slurm.srun_words(requested)
    assert command[0] == "srun" and {"--overlap", "--nodes=2", "--ntasks=8", "--exclusive"} <= set(command)
    assert command[-2:] == ["tiny", "--quick"]


def test_old_runs_go_with_the_logs_of_every_rank(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "slurm-7.2-tiny"
    for rank in "01":
        (logs / f"rank{rank}").mkdir(parents=True)
        (logs / f"rank{rank}" / "rank.log").write_text("x")
    header = f'{{"type": "run", "schema_version": 2, "run_id": "a", "job": {{"log_dir": "{logs / "rank0"}"}}}}'
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "a.jsonl").write_text(header + '\n{"type": "footer", "status": "complete"}\n')
    _kept, (old,) = runs_kept_and_deleted(tmp_path, 0, None)
    assert {path.parent.name for path in old.files} == {"box", "rank0", "rank1"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu03", "gpu03"),
        ("gpu[08-10,12],x1, x1", "gpu08 gpu09 gpu10 gpu12 x1"),
        ("r[1-2]n[3,5].site", "r1n3.site r1n5.site r2n3.site r2n5.site"),
    ],
)
def test_a_list_of_hosts_is_expanded_as_by_slurm(text: str, hosts: str) -> None:
    assert nodes.hosts_of(text) == hosts.split() and first_host(text) == hosts.split()[0]


def test_a_file_of_hosts_is_read_as_mpirun_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# rack 1\nnode1 slots=8\nnode2:8\n\nnode2\nnode[3-4]  # new\n")
    assert nodes.hosts_of(str(file)) == ["node1", "node2", "node3", "node4"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not a list of hosts"),
        ("a[1-", "'a[1-' is not a list of hosts"),
        ("a]b", "'a]b' is not a list of hosts"),
        ("a[4-1]", "[4-1] descends"),
        ("a[1-x]", "[1-x] is not a range"),
        ("a[1-999999999]", "has more than 65,536 hosts"),
        ("a[1-999][1-999]", "are more than 65,536"),
        ("a[" + "1" * 5000 + "]", "is not a range"),
        ("--exclude", "'--exclude' is not the name of a host"),
        ("a;b", "'a;b' is not the name of a host"),
        ("./nowhere", "cannot be read: No such file"),
        ("/dev/null", "cannot be read: it is a device"),
    ],
)
def test_a_list_of_hosts_that_is_not_valid_is_a_sentence(text: str, why: str) -> None:
    code, output = run("--hosts", text, "--launcher", "slurm", "--dry-run", "--device", "cpu")
    assert code == 2 and why in " ".join(output.split()) and "Traceback" not in output


def test_hosts_are_those_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = ("--mesh", "tp=4", "--device", "cpu", "--dry-run", "--hosts")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, text = run(*requested, "n[1-2]", "--launcher", "slurm")
    assert code == 0 and "#SBATCH --nodes=2\n" in text and "#SBATCH --nodelist=n1,n2\n" in text
    assert "--hosts" not in text
    assert "--hosts has 2 hosts, but --nodes is 3" in run(*requested, "n1,n2", "--nodes", "3")[1]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    assert (
        "srun --overlap" in (text := run(*requested, "n1,n3", "--launcher", "slurm")[1]) and "--nodelist=n1,n3" in text
    )
    code, text = run(*requested, "n1,n4,m", "--launcher", "slurm")
    assert code == 2 and "--hosts has n4, m, but Slurm job 7 has n1, n2, n3; give hosts of this job" in text
    monkeypatch.setattr(nodes.os, "uname", lambda: SimpleNamespace(nodename="n2.site"))
    text = run(*requested, "n1,n2", "--launcher", "torchrun")[1]
    assert "--node-rank 1 --master-addr n1" in text and text.count("torch.distributed.run") == 1
    code, text = run(*requested, "n1,n3", "--launcher", "torchrun")
    assert code == 2 and "--hosts has n1, n3, but this host is n2.site; start the same command on each" in text
    assert "--hosts does not work with --launcher torchx" in run(*requested, "n1,n2", "--launcher", "torchx")[1]


def test_a_preflight_in_an_allocation_has_all_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(main, ["preflight", "--dry-run", "--quick"])
    assert done.exit_code == 0, done.output
    assert "distbench: preflight on all 3 nodes of Slurm job 7: n[1-3]" in done.output
    assert "srun --overlap" in done.output and "--nodes=3 --ntasks=24 --ntasks-per-node=8" in done.output
    assert done.output.rstrip().endswith("-m distbench run links --fail-on-outlier --quick")
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes.os.uname().nodename)
    assert on_allocation(NodeOptions()) == NodeOptions(), "this node alone needs no launcher"
