"""Slurm: write, submit and follow a batch job, or run srun inside an allocation."""

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.launch.nodes import COUNTS, OWN_COUNTS, NodeLaunch, refuse_words, require_program, run_here
from distbench.launch.rendezvous import FIRST_PORT, NUM_PORTS, address_by_slurm, slurm_command, slurm_port
from distbench.spec import UserError
from distbench.spec.devices import ANY_ACCELERATOR
from distbench.spec.errors import INTERRUPTED
from distbench.spec.file_io import unique_stem, writing
from distbench.spec.printable_text import count_text

# Options of sbatch that distbench does not support, because it submits and follows one job; --chdir would move the
# results.
NOT_FOLLOWED = {"--array": "-a", "--wait": "-W", "--test-only": "", "--output": "-o", "--error": "-e", "--chdir": "-D"}
ONE_JOB = (
    "distbench submits one job and shows its output; leave out this option, or submit the file of --dry-run yourself"
)
# The state of a job if Slurm's controller does not respond. Slurm has no such state.
UNANSWERED = "UNANSWERED"
# Slurm's states of an ended job: squeue(1), JOB STATE CODES. Each version has further states of jobs that have not
# ended.
OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
OVER |= {"REVOKED", "TIMEOUT", ""}
# Slurm's reasons of jobs that would wait forever: squeue(1), JOB REASON CODES.
IN_VAIN = {
    "PartitionNodeLimit": "the partition has fewer nodes; give fewer --nodes, or another partition",
    "PartitionTimeLimit": "its time exceeds the partition's limit; shorten the time (--launcher-args '--time=MINUTES')",
    "BadConstraints": "no node meets the job's constraints; change --launcher-args",
    "InvalidAccount": "the account is not valid; give another account with --launcher-args '--account=NAME'",
    "InvalidQOS": "the quality of service is not valid; give another with --launcher-args '--qos=NAME'",
    "AccountNotAllowed": "the partition rejects the account; give another with --launcher-args '--account=NAME'",
    "QOSNotAllowed": "the partition rejects the quality of service; give another with --launcher-args '--qos=NAME'",
    "DependencyNeverSatisfied": "a job in --dependency has failed; leave out --dependency",
    **dict.fromkeys(
        ("AssocMaxNodePerJobLimit", "QOSMaxNodePerJobLimit"), "your limit of nodes per job is lower; give fewer --nodes"
    ),
    **dict.fromkeys(
        ("AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit"),
        "your limit of time per job is lower; give a shorter time with --launcher-args '--time=MINUTES'",
    ),
}
# Advice on temporary reasons.
ADVICE = {
    "PartitionConfig": "the partition may never have this many nodes or CPUs; Ctrl-C cancels the job",
    "JobHeldUser": "the job's options hold the job; `scontrol release {job_id}` releases it",
    "JobHeldAdmin": "an administrator of this cluster holds the job; contact the administrator",
    "ReqNodeNotAvail": "a node of this job is down or reserved",
}
WHY = {
    "TIMEOUT": "the job reached its time limit; give a longer time with --launcher-args '--time=MINUTES'",
    "NODE_FAIL": "a node was lost; `scontrol show job {job_id}` shows the node",
    "CANCELLED": "the job was cancelled",
    "OUT_OF_MEMORY": "a node had no memory left",
    "PREEMPTED": "another job took its nodes",
}
PENDING = "PENDING"
# The partition in sbatch's arguments, and the GPUs in a node's generic resources, such as gpu:h100:8(S:0-1).
PARTITION, GPUS = re.compile(r"(?:^| )(?:-p ?|--partition[= ])(\S+)"), re.compile(r"\bgpu(?::[\w.-]+)?:(\d+)")
FIELD = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode|StartTime)=([^\s,]*(?:, ?[^\s,]+)*)")


@dataclass(frozen=True)
class JobState:
    """The state of a job.

    Args:
        word: Slurm's state, such as RUNNING; "" if Slurm no longer lists the job.
        exit_code: the script's exit code, after its end.
        reason: the reason for waiting or ending, in Slurm's words.
        begins: the start time that Slurm expects; "" if unknown.
    """

    word: str
    exit_code: int = 0
    reason: str = ""
    begins: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, with or without success."""
        return self.word in OVER

    @property
    def why(self) -> str:
        """Slurm's reason without details: `ReqNodeNotAvail` of `ReqNodeNotAvail, UnavailableNodes:n1`."""
        return self.reason.partition(",")[0]


# Seconds between two queries of a job: short in the first minute, while a user waits for the start.
LOOK_S, LATER_LOOK_S, LATER_S, POLL_S = 1.0, 5.0, 60.0, 0.2
AT_ONCE_S = 5.0
# Seconds between two lines on a waiting job, and until a node's file is visible on this host (NFS may take a minute).
SAY_AGAIN_S, OUTPUT_S = 600.0, 60.0
JOB_ID = re.compile(r"^(\d+)(?:;(\S+))?$", re.MULTILINE)  # output of `sbatch --parsable`
LAST_OWN_CODE = 3  # before it exits with a code up to 3, a rank prints the cause
# Slurm's reason if a node could not open the output file.
NOT_BEGUN = "JobLaunchFailure"
# After the loss of a rank, the other ranks end without help. Slurm must not kill the rank that writes the run file.
PATIENT = ("--kill-on-bad-exit=0", "--wait=60")


def slurm_script(launch: NodeLaunch) -> str:
    """Return the batch file. Each rank is a task of one srun. The ranks' rendezvous is at the first node's address,
    because the node's name may not resolve on all nodes.

    Raises:
        UserError: a word of --launcher-args has several lines.
    """
    # A batch file has one option per line; sbatch would run the next line as a command.
    if word := next((word for word in launch.extra if set(word) & set("\r\n")), ""):
        raise UserError(f"--launcher-args {word!r} has several lines; give one line")
    options = [
        f"--job-name={launch.name}",
        # The run file contains the cases measured before the loss of a node; these cases must not be measured again.
        "--no-requeue",
        f"--nodes={launch.num_nodes}",
        f"--ntasks-per-node={launch.ranks_per_node}",
        *([f"--gpus-per-node={launch.ranks_per_node}"] if launch.device != "cpu" else []),
        *([shlex.join(launch.extra)] if launch.extra else []),
    ]
    head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    address = "export MASTER_ADDR=$(scontrol show node \"$head\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            head,
            address,
            f"export MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))",
            shlex.join(["srun", *PATIENT, *launch.command]),
            "",
        ]
    )


def slurm_text(launch: NodeLaunch) -> str:
    """Return the input of `run_by_slurm` as text: the srun command within an allocation, else the batch file."""
    if "SLURM_JOB_ID" not in os.environ:
        return slurm_script(launch)
    variables = [f"{name}={value}" for name, value in _meeting_of(os.environ).items()]
    return " ".join([*variables, shlex.join(srun_words(launch))])


def devices_of_cluster(extra: Sequence[str], say: Callable[[str], None]) -> tuple[str, int]:
    """Return the type and number of devices per node, on a host without devices, such as a login node."""
    if count := gpus_of_allocation(os.environ):
        return "gpu", count
    counts = gpus_per_node(extra)
    if counts is not None and len(counts) == 1 and "SLURM_JOB_ID" not in os.environ:
        (count,) = counts
        say(f"distbench: the job requests GPUs, because nodes have {count} GPUs; --device cpu requests none")
        return "gpu", count
    # If Slurm does not respond, nodes may also have GPUs.
    if counts is None or counts:
        nodes_have = ", but nodes of this cluster have GPUs" if counts else ""
        problem = f"the job requests no GPUs, because this machine has no GPUs{nodes_have}"
        say(f"distbench: warning: {problem}. Give --device ({ANY_ACCELERATOR}), or --device cpu")
    return "cpu", 0


def gpus_per_node(extra: Sequence[str]) -> set[int] | None:
    """Return the numbers of GPUs of this cluster's nodes with GPUs, in the partition of `extra`, sbatch's arguments.

    None if Slurm does not respond within AT_ONCE_S seconds.
    """
    partition = PARTITION.search(" ".join(extra))
    words = [f"--partition={partition[1]}"] if partition else []
    code, output, _ = slurm_command("sinfo", "--noheader", "--format=%G", *words, timeout_s=AT_ONCE_S)
    counts = {sum(map(int, GPUS.findall(line))) for line in output.lower().splitlines()}
    return None if code else counts - {0}


def gpus_of_allocation(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs per node of this allocation; 0 if unknown."""
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE") or ""
    count = text.rpartition(":")[2]
    return int(count) if count.isascii() and count.isdecimal() else 0


def run_by_slurm(launch: NodeLaunch, say: Callable[[str], None]) -> int:
    """Run in this shell's allocation, or submit a job and follow the job to its end; return the exit code.

    Raises:
        UserError: Slurm is not installed, or rejects the job.
    """
    refuse_words(COUNTS["slurm"], launch.extra, OWN_COUNTS)
    if "SLURM_JOB_ID" in os.environ:
        require_program("srun", "slurm", "start distbench on a host with Slurm's commands")
        num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
        if num_nodes.isdecimal() and launch.num_nodes > int(num_nodes):
            problem = f"--nodes {launch.num_nodes}: this allocation has {count_text(int(num_nodes), 'node')}"
            raise UserError(f"{problem}; give at most {num_nodes}, or start distbench outside the allocation")
        return run_here(srun_words(launch), {**os.environ, **_meeting_of(os.environ)})
    require_program("sbatch", "slurm", "start distbench on a login node")
    refuse_words(NOT_FOLLOWED, launch.extra, ONE_JOB)
    folder = (launch.out / "slurm").resolve()
    stem = unique_stem(time.time(), launch.name)
    script, log = folder / f"{stem}.sbatch", folder / f"{stem}.log"
    with writing(str(script), "--results"):
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(slurm_script(launch), encoding="utf-8", errors="surrogateescape")
    job_id = _submit(script, log, say)
    try:
        say(f"Slurm job {job_id}: {script}; the job's output follows, and is also in {log}")
        state = _follow(job_id, log, say)
    except KeyboardInterrupt:
        code, _, complaint = slurm_command(*_of_job("scancel", job_id))
        done = f"could not be cancelled ({complaint}), and may continue" if code else "is cancelled"
        say(f"Slurm job {job_id} {done}; finished cases are in {launch.out}")
        raise
    if state.word == PENDING:
        slurm_command(*_of_job("scancel", job_id))
        raise UserError(f"Slurm would never start job {job_id} ({state.reason}): {IN_VAIN[state.why]}")
    if _is_missing(log, 0 if state.reason == NOT_BEGUN else OUTPUT_S):
        problem = f"Slurm job {job_id} ended ({state.word}, {state.reason}), and {log} does not exist on this host"
        say(f"{problem}; give a --results folder that this host and all nodes share")
        return state.exit_code if state.word == "FAILED" and state.reason == "NonZeroExitCode" else 1
    return _end(job_id, state, launch.out, say)


def srun_words(launch: NodeLaunch) -> list[str]:
    """Return srun's command within an allocation, with `--overlap` since this shell may be a step."""
    counts = [f"--nodes={launch.num_nodes}", f"--ntasks={launch.num_nodes * launch.ranks_per_node}"]
    counts.append(f"--ntasks-per-node={launch.ranks_per_node}")
    return ["srun", "--overlap", *PATIENT, *counts, *launch.extra, *launch.command]


def _meeting_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with the rendezvous address of this allocation's ranks."""
    hosts = slurm_command("scontrol", "show", "hostnames", environ.get("SLURM_JOB_NODELIST", ""))[1].split()
    address = address_by_slurm(hosts[0]) if hosts else ""
    return {**({"MASTER_ADDR": address} if address else {}), "MASTER_PORT": str(slurm_port(environ))}


def _submit(script: Path, log: Path, say: Callable[[str], None]) -> str:
    """Submit a batch file; return the job's number, followed by `;CLUSTER` if Slurm reports a cluster."""
    # Slurm replaces patterns such as %j, also in names of folders.
    code, output, complaint = slurm_command(
        "sbatch", "--parsable", f"--output={str(log).replace('%', '%%')}", str(script)
    )
    job_ids = JOB_ID.findall(output)  # on some sites sbatch prints other lines
    if code or not job_ids:
        why = complaint.removeprefix("sbatch: ").replace("\n", "; ") or f"exit code {code}, without a job id"
        raise UserError(
            f"sbatch rejects {script}: {why}; change the job by --launcher-args, such as '--partition=NAME'"
        )
    if complaint:
        say(complaint)
    number, cluster = job_ids[-1]
    return f"{number};{cluster}" if cluster else str(number)


def _of_job(command: str, job_id: str, *words: str) -> list[str]:
    """Return the words of a Slurm command for a job, with the job's cluster."""
    number, _, cluster = job_id.partition(";")
    return [command, *([f"--clusters={cluster}"] if cluster else []), *words, number]


def state_of(job_id: str) -> JobState:
    """Return a job's state by `scontrol show job`, which lists jobs for minutes after their end (MinJobAge)."""
    code, output, complaint = slurm_command(*_of_job("scontrol", job_id, "--oneliner", "show", "job"))
    if code:
        return JobState("" if "Invalid job id" in complaint else UNANSWERED, reason=complaint.replace("\n", "; "))
    fields = dict(reversed(FIELD.findall(output)))  # a later comment may contain text that looks like a field
    status, _, number = fields.get("ExitCode", "0:0").partition(":")
    exit_code = int(status) if status.isdigit() else 1
    if not exit_code and number.isdigit() and int(number):
        exit_code = 128 + int(number)
    begins = fields.get("StartTime", "").replace("Unknown", "")
    return JobState(fields.get("JobState", ""), exit_code, fields.get("Reason", ""), begins)


def _follow(job_id: str, log: Path, say: Callable[[str], None]) -> JobState:
    """Show a job's output until the job ends or is found to wait forever."""
    began, num_shown, last_reason, shown_s = time.monotonic(), 0, "", 0.0
    while True:
        state = state_of(job_id)
        num_shown = _show(log, num_shown, say)
        if state.is_over or (state.word == PENDING and state.why in IN_VAIN):
            return state
        waited_s = time.monotonic() - began
        waits = state.word in (PENDING, UNANSWERED) and state.reason != "None"
        if waits and (state.reason != last_reason or waited_s - shown_s > SAY_AGAIN_S):
            last_reason, shown_s = state.reason, waited_s
            say(_why_waiting(job_id, state, waited_s))
        time.sleep(LOOK_S if waited_s < LATER_S else LATER_LOOK_S)


def _why_waiting(job_id: str, state: JobState, waited_s: float) -> str:
    if state.word == UNANSWERED:
        problem = f"Slurm does not respond ({state.reason})"
        return f"{problem}; distbench retries. Job {job_id} is not affected and writes its run file while it runs"
    after = f" for {waited_s / 60:.0f} min" if waited_s > LATER_S else ""
    begins = f"; Slurm expects to start the job at {state.begins}" if state.begins else ""
    advice = f" ({ADVICE[state.why].format(job_id=job_id.partition(';')[0])})" if state.why in ADVICE else ""
    return f"Slurm job {job_id} waits{after}: {state.reason}{advice}{begins}"


def _show(log: Path, num_shown: int, say: Callable[[str], None]) -> int:
    """Print the complete lines after `num_shown` bytes; return the number of bytes printed so far."""
    try:
        with log.open("rb") as file:
            # A requeued job writes a new file.
            num_shown = num_shown if log.stat().st_size >= num_shown else 0
            file.seek(num_shown)
            news = file.read()
    except OSError:
        return num_shown
    complete = news[: news.rfind(b"\n") + 1]
    if complete:
        say(complete.decode(errors="replace").rstrip("\n"))
    return num_shown + len(complete)


def _end(job_id: str, state: JobState, out: Path, say: Callable[[str], None]) -> int:
    kept = f"finished cases are in {out}"
    if state.word in ("COMPLETED", "FAILED", ""):
        if not state.word:
            say(f"Slurm no longer lists job {job_id}; finished cases are in {out}")
        elif state.exit_code > LAST_OWN_CODE and state.exit_code != INTERRUPTED:
            say(f"Slurm job {job_id} ended with exit code {state.exit_code} (srun's message is above); {kept}")
        return state.exit_code
    why = WHY.get(state.word, f"{state.word}, {state.reason}").replace("{job_id}", job_id.partition(";")[0])
    say(f"Slurm ended job {job_id}: {why}; {kept}")
    return state.exit_code or 1


def _is_missing(log: Path, wait_s: float) -> bool:
    """Whether an ended job's output is missing on this host, after a delay for shared disks."""
    until = time.monotonic() + wait_s
    while not log.exists():
        if time.monotonic() > until:
            return True
        time.sleep(POLL_S)
    return False
