"""Starts the ranks of one job, follows their progress, gives up on a hang, and closes the run file whatever happens."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from distbench.environment import load_average
from distbench.launch.explain import LAUNCH_LOG, Cause, cause_of
from distbench.launch.ranks import Joined, rank_environment, torchrun_command
from distbench.progress import FILE_NAME, Listener
from distbench.results import Case, CaseResult, append
from distbench.spec import Job, UserError
from distbench.spec.mesh import mesh_size

POLL_S = 0.1
TERMINATE_WAIT_S = 5.0
STACKS_WAIT_S = 0.5
MODULE = "distbench.worker"


class Watcher(Protocol):
    """Whoever shows progress to a person."""

    def event(self, event: dict[str, Any]) -> None:
        """One event of the ranks, as progress.py lists them."""


@dataclass
class Outcome:
    """What became of one launch.

    Args:
        job: the job.
        status: "complete", "failed", "timeout" or "interrupted".
        message: one sentence, empty when complete.
        user_can_mend: whether the user can fix the cause.
        num_by_status: cases by status.
    """

    job: Job
    status: str
    message: str = ""
    user_can_mend: bool = False
    num_by_status: dict[str, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 every case ok or skipped, 1 some case not, 2 the user can fix it, 130 interrupted."""
        if self.status == "interrupted":
            return 130
        if self.user_can_mend:
            return 2
        fine = set(self.num_by_status) <= {"ok", "skipped"}
        return 0 if self.status == "complete" and fine else 1


@dataclass
class _Seen:
    """What the ranks have told so far."""

    spent_s: dict[str, float] = field(default_factory=dict)
    num_by_status: dict[str, int] = field(default_factory=dict)
    running: Case | None = None
    ended: bool = False
    last_news: float = field(default_factory=time.monotonic)

    def note(self, event: dict[str, Any]) -> None:
        self.last_news = time.monotonic()
        self.spent_s = event.get("spent_s", self.spent_s)
        if event["event"] == "case":
            self.running = Case(event["id"], event["kind"], event["params"])
        elif event["event"] == "done":
            self.running = None
            self.num_by_status[event["status"]] = self.num_by_status.get(event["status"], 0) + 1
        elif event["event"] == "end":
            self.ended = True


def launch(job: Job, joined: Joined | None, watcher: Watcher, module: tuple[str, ...] = ("-m", MODULE)) -> Outcome:
    """Run one job to its end, whatever that is; the run file is closed with a footer.

    Args:
        job: the job.
        joined: the launch this process is a rank of, or None to start the ranks with torchrun.
        watcher: is shown every event.
        module: what a rank runs, as Python's arguments (tests put a mutant here).

    Raises:
        UserError: the results or log folder cannot be written.
    """
    environment = {**job.environment, "load_at_start": load_average()}
    job = replace(job, started_at=time.time(), environment=environment)
    log_dir = _make_folders(job)
    timeout_s = job.timeout_s if not joined or joined.rank == 0 else math.inf
    seen = _Seen()
    status, cause = "complete", Cause("", "")
    process = _start(job, joined, log_dir, module)
    try:
        with _terminated_as_interrupt():
            status = _follow(process, Listener(log_dir / FILE_NAME), seen, watcher, timeout_s)
        if status == "timeout":
            _ask_for_stacks(log_dir)
            hung = f"case {seen.running.id}" if seen.running else "set-up"
            cause = Cause("hung", f"{hung} made no progress for {job.timeout_s:g} s; each rank's stack is in {log_dir}")
        elif status == "failed":
            cause = cause_of(log_dir, process.returncode)
    except KeyboardInterrupt:
        status, cause = "interrupted", Cause("", "interrupted")
    finally:
        _stop(process)
    if not joined or joined.rank == 0:
        _close_run_file(job, seen, status, cause)
    mendable = cause.kind in ("user", "storage")
    return Outcome(job, status, cause.message, mendable, seen.num_by_status)


def _make_folders(job: Job) -> Path:
    log_dir = Path(job.log_dir)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        job.save(log_dir / "job.json")
        run_file = Path(job.run_file)
        run_file.parent.mkdir(parents=True, exist_ok=True)
        probe = run_file.with_suffix(f".probe{os.getpid()}")
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{error.filename or job.run_file} cannot be written ({error.strerror}); "
            "give a writable folder with --out or --log-dir"
        ) from error
    return log_dir


def _start(job: Job, joined: Joined | None, log_dir: Path, module: tuple[str, ...]) -> subprocess.Popen[bytes]:
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
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM (a scheduler's or torchrun's way to say stop) ends the run as Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _follow(
    process: subprocess.Popen[bytes], listener: Listener, seen: _Seen, watcher: Watcher, timeout_s: float
) -> str:
    while True:
        ended = process.poll() is not None
        for event in listener.news():
            seen.note(event)
            watcher.event(event)
        if ended:
            return "complete" if process.returncode == 0 else "failed"
        if time.monotonic() - seen.last_news > timeout_s:
            return "timeout"
        time.sleep(POLL_S)


def _ask_for_stacks(log_dir: Path) -> None:
    for pid in _rank_pids(log_dir):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)


def _rank_pids(log_dir: Path) -> list[int]:
    return [int(path.read_text()) for path in log_dir.glob("rank*.pid")]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launch if it still runs: torchrun is asked, then killed, and the kernel then kills its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_WAIT_S)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _close_run_file(job: Job, seen: _Seen, status: str, cause: Cause) -> None:
    """Record the case that was running when the launch broke, then the footer; a full disk keeps what it has."""
    run_file = Path(job.run_file)
    if not run_file.exists():
        return
    with contextlib.suppress(OSError):
        if seen.running and status != "complete" and cause.kind not in ("user", "storage"):
            verdict = {"timeout": "timeout", "interrupted": "aborted"}.get(status)
            verdict = verdict or ("raised" if cause.kind == "raised" else "aborted")
            lost = CaseResult(seen.running, verdict, error=cause.message)
            append(run_file, lost.to_record())
            seen.num_by_status[verdict] = seen.num_by_status.get(verdict, 0) + 1
        wall_s = time.time() - job.started_at
        spent_s = {**seen.spent_s, "other": max(wall_s - sum(seen.spent_s.values()), 0.0)}
        footer = {
            "type": "footer",
            "status": status,
            "message": cause.message,
            "finished_at": time.time(),
            "wall_s": wall_s,
            "spent_s": spent_s,
            "num_by_status": seen.num_by_status,
            "load_at_end": load_average(),
        }
        append(run_file, footer)
