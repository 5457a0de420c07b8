"""One launch of a job's ranks: start them, follow their progress, give up on a hang, stop them, say why it ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distbench.launch.display import Display
from distbench.launch.explain import LAUNCH_LOG, Cause, cause_of
from distbench.launch.leftovers import end_leftovers
from distbench.launch.ranks import Joined, rank_environment, torchrun_command
from distbench.launch.storage import why_unwritable
from distbench.runs.progress import FILE_NAME, ProgressReader
from distbench.runs.run_file import Case
from distbench.spec import Job, UserError
from distbench.spec.mesh import mesh_size
from distbench.spec.signals import Stop

POLL_S = 0.1
TERMINATE_WAIT_S = 5.0
STACKS_WAIT_S = 0.5


@dataclass
class Attempt:
    """One launch, and what its ranks reported.

    Args:
        status: "complete", "failed", "timeout" or "interrupted".
        num_cases: of the whole job, None before the ranks counted them.
        is_meeting: whether the reporting rank waits for the others.
        pass_number: the pass that the running case was in.
        spent_s: seconds of rank 0 by what they were spent on.
        last_event_s: when the last event came, seconds, monotonic.
    """

    status: str = "complete"
    cause: Cause = field(default_factory=lambda: Cause("", ""))
    num_cases: int | None = None
    is_meeting: bool = False
    running: Case | None = None
    pass_number: int = 0
    num_by_status: Counter[str] = field(default_factory=Counter)
    spent_s: dict[str, float] = field(default_factory=dict)
    last_event_s: float = field(default_factory=time.monotonic)
    reached_end: bool = False

    @property
    def lost_case(self) -> Case | None:
        """The case that broke the launch, where one did: not the user, the storage, or a failure outside of cases."""
        broke = self.status in ("failed", "timeout") and not self.cause.user_can_fix
        return self.running if broke else None

    def note(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        self.last_event_s = time.monotonic()
        self.spent_s = event.get("spent_s", self.spent_s)
        self.is_meeting = event["event"] == "meeting"
        if event["event"] == "plan":
            self.num_cases = event["num_cases"]
        elif event["event"] == "case":
            self.running = Case(event["id"], event["kind"], event["params"])
            self.pass_number = event.get("number", 0)
        elif event["event"] == "done":
            self.running = None
            self.num_by_status[event["status"]] += 1
        elif event["event"] == "turn":
            self.running = None
        elif event["event"] == "end":
            self.reached_end = True


def attempt(job: Job, joined: Joined | None, display: Display, module: tuple[str, ...], stop: Stop) -> Attempt:
    """Launch the job's ranks and follow them to their end, whatever that is; none of them is left behind.

    The arguments are those of `run_job.launch`, and what says that the user wants an end; the job's log folder holds
    `job.json` and nothing of another launch.

    Raises:
        UserError: this machine starts no more processes.
        OSError: the log folder cannot be written.
    """
    log_dir = Path(job.log_dir)
    process, log = _start(job, joined, log_dir, module)
    with contextlib.closing(ProgressReader(log_dir / FILE_NAME)) as reader:
        seen = Attempt()
        try:
            seen.status = _follow(process, reader, seen, display, job.timeout_s, stop)
            if seen.status == "timeout":
                ask_for_stacks(log_dir, process.pid)
                seen.cause = Cause("hung", _why_hung(job, joined, seen))
            elif seen.status == "failed":
                # First, for on a full disk a rank cannot say why it failed.
                why = why_unwritable(job)
                seen.cause = Cause("storage", why) if why else cause_of(log_dir, process.returncode, log)
            elif seen.status == "interrupted":
                seen.cause = Cause("", "interrupted")
        finally:
            _stop(process)
            end_leftovers([process.pid, *_pids_of_ranks(log_dir)])
        # Events between the last look and the end say which case was running.
        _take_in(reader, seen, display)
    if seen.status == "complete" and not seen.reached_end:
        # An exit code of 0 is no proof: a scenario that calls sys.exit leaves nothing measured and nobody alarmed.
        message = f"the ranks ended with exit code 0 before they were done; their logs are in {log_dir}"
        seen.status, seen.cause = "failed", Cause("killed", message)
    return seen


def _take_in(reader: ProgressReader, seen: Attempt, display: Display) -> None:
    for event in reader.news():
        seen.note(event)
        display.event(event)


def _start(
    job: Job, joined: Joined | None, log_dir: Path, module: tuple[str, ...]
) -> tuple[subprocess.Popen[bytes], Path]:
    """torchrun, or the only rank here, and the file that has what it prints."""
    arguments = [*module, str(log_dir / "job.json")]
    num_ranks = mesh_size(job.mesh)
    if joined:
        command, here = [sys.executable, *arguments], int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        log = log_dir / f"launch-rank{joined.rank}.log"
    else:
        command, here = torchrun_command(num_ranks, arguments, str(log_dir / "torchrun")), num_ranks
        log = log_dir / LAUNCH_LOG
    environment = rank_environment(here, int(job.environment["num_cpus"]), joined.variables if joined else {})
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        except OSError as error:
            raise UserError(
                f"the ranks cannot be started ({error}); see `ulimit -a` for what this shell allows"
            ) from error
    return process, log


def _follow(
    process: subprocess.Popen[bytes],
    reader: ProgressReader,
    seen: Attempt,
    display: Display,
    timeout_s: float,
    stop: Stop,
) -> str:
    while True:
        ended = process.poll() is not None
        _take_in(reader, seen, display)
        if ended:
            return "complete" if process.returncode == 0 else "failed"
        if stop.asked:
            return "interrupted"
        if time.monotonic() - seen.last_event_s > timeout_s:
            return "timeout"
        time.sleep(POLL_S)


def _why_hung(job: Job, joined: Joined | None, seen: Attempt) -> str:
    if joined and seen.is_meeting:
        what = f"rank {joined.rank} waited {job.timeout_s:g} s at {joined.address} for the other ranks"
        return f"{what}, in vain; start all {joined.world_size} with the same MASTER_ADDR and MASTER_PORT"
    if seen.reached_end:
        return f"the launch did not end for {job.timeout_s:g} s after its last case; its logs are in {job.log_dir}"
    between = "set-up" if seen.num_cases is None else "the launch"
    hung = f"case {seen.running.id}" if seen.running else between
    return f"{hung} made no progress for {job.timeout_s:g} s; each rank's stack is in {job.log_dir}"


def ask_for_stacks(log_dir: Path, launcher: int) -> None:
    """Have every rank that still runs write its stacks to its log; `launcher` is the pid of torchrun, or the only
    rank."""
    for pid in _pids_of_ranks(log_dir):
        with contextlib.suppress(OSError):
            if _is_rank_of(launcher, pid):
                os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)


def _pids_of_ranks(log_dir: Path) -> list[int]:
    """Of those that have begun; a full disk leaves a pid's file empty."""
    pids = []
    for path in log_dir.glob("rank*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(path.read_text()))
    return pids


def _is_rank_of(launcher: int, pid: int) -> bool:
    """Whether a process is our child or its child; the pid of a rank that ended may be anybody's by now."""
    try:
        # proc(5): "pid (name) state ppid ..."; the name may hold anything, closing brackets too.
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return launcher in (pid, parent)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launch if it still runs: torchrun is asked, then killed, and the kernel then kills its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_WAIT_S)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that waits for a device or a server's disk is not killed before that answers.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_WAIT_S)
