"""One attempt of a job: start ranks, follow their progress, end hung ranks, explain failures; folders of logs."""

import contextlib
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct

from distbench.launch.display import Display
from distbench.launch.rank_processes import RankProcesses
from distbench.launch.rendezvous import Joined, Meeting
from distbench.processes.signals import Stop
from distbench.records.progress_events import FILE_NAME, ProgressReader
from distbench.records.rank_logs import shorten_logs
from distbench.records.run_file import Case
from distbench.spec import Job, UserError
from distbench.spec.errors import FAILURES, place_in_user_code
from distbench.spec.job import JOB_FILE, LAUNCH_LOG
from distbench.spec.json_decoder import Count, Date, Format, among, read_record
from distbench.spec.printable_text import clean, listed, ranks_text

POLL_S = 0.1
STACKS_WAIT_S = 0.5
PROBE_BYTES = 8192  # more than the record of a rank's failure
MAX_ERROR = 300  # characters
MAX_PLACES = 4
# In a log: the stack of the main thread, which gets the signal, and its frames, innermost first.
_STACK = re.compile(r"^Current thread .*\(most recent call first\):\n((?:  .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)


# Folders of logs and results.


def make_folders(job: Job) -> None:
    """Create the folders of logs and run file, and write the job. Raise OSError if a folder is not writable."""
    log_dir, folder = Path(job.log_dir), Path(job.run_file).parent
    log_dir.mkdir(parents=True, exist_ok=True)
    job.save(log_dir / JOB_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    _try_to_write(folder)


def why_unwritable(job: Job) -> str:
    """Return one sentence on a full or missing folder; "" if both folders are writable."""
    for folder in (Path(job.run_file).parent, Path(job.log_dir)):
        try:
            _try_to_write(folder)
        except OSError as error:
            return cannot_be_written(error, folder)
    return ""


def cannot_be_written(error: OSError, where: Path) -> str:
    """Return one sentence on a write error; `where` is the file or folder if the error has no file name, as with a full
    disk."""
    return f"{error.filename or where} cannot be written: {error.strerror or error}"


def _try_to_write(folder: Path) -> None:
    probe = folder / f".probe{os.getpid()}"
    try:
        with probe.open("wb", buffering=0) as file:
            if file.write(bytes(PROBE_BYTES)) < PROBE_BYTES:
                file.write(b"\0")  # raises the cause
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


# The cause of a failed launch, from the files that the ranks and the launcher wrote.


class _Failure(Struct):
    """The record that a rank writes at a failure; `at`: seconds since the epoch."""

    kind: Annotated[str, among(FAILURES)]
    message: str
    rank: Count
    at: Date


@dataclass(frozen=True)
class Cause:
    """The cause of a failed launch in one sentence, and the rank that failed first, if known.

    `kind` is one of FAILURES, "killed" or "hung". The user can fix the kinds "user" and "storage".
    """

    kind: str
    message: str
    rank: int | None = None

    @property
    def user_can_fix(self) -> bool:
        """Whether the cause is a user's error or full storage."""
        return self.kind in ("user", "storage")


def cause_of(log_dir: Path, exit_code: int, log: Path | None = None) -> Cause:
    """Return the first failure of a launch. Its launcher, or its only rank, ended with a non-zero exit code.

    Args:
        log: output of the launcher or only rank; by default LAUNCH_LOG.
    """
    log = log or log_dir / LAUNCH_LOG
    failures = []
    for path in sorted(log_dir.glob("failure-rank*.json")):
        with contextlib.suppress(UserError):  # a damaged file
            failures.append(read_record(path, _Failure, Format("failure", "see the logs next to it")))
    if failures:
        first = min(failures, key=lambda failure: failure.at)
        if first.kind != "raised":
            return Cause(first.kind, first.message, first.rank)
        traceback = log_dir / f"rank{first.rank}.log"
        return Cause("raised", f"rank {first.rank} raised {first.message}; its traceback is in {traceback}", first.rank)
    text = ""
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
    # The launcher's log names the first rank that failed.
    if match := re.search(r"^rank (\d+) ended with exit code (-?\d+)$", text, re.MULTILINE):
        rank = int(match[1])
        return Cause(
            "killed", f"rank {rank} {exit_text(int(match[2]))}; its log is {log_dir / f'rank{rank}.log'}", rank
        )
    errors = re.findall(r"^([\w.]*(?:Error|Exception)):\s*(.+)", text, re.MULTILINE)
    last_error = f" ({clean(': '.join(errors[-1]))[:MAX_ERROR]})" if errors else ""
    process = "the launcher" if log.name == LAUNCH_LOG else "the rank"
    return Cause("killed", f"{process} {exit_text(exit_code)}{last_error}; see {log}")


def exit_text(exit_code: int) -> str:
    """Describe a process's end, such as `was killed by SIGKILL`; a negative code is the number of a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}" + ("" if exit_code else " before its work was done")
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


# One attempt of a job.


@dataclass
class Attempt:
    """One launch, and the events that its ranks reported.

    Args:
        status: "complete", "failed", "timeout" or "interrupted".
        num_cases: number of cases of the whole job; None before the ranks counted the cases.
        is_meeting: whether the reporting rank waits for the other ranks.
        pass_number: number of the running case's pass.
        spent_s: activity to seconds on rank 0.
        measuring_s: seconds from opening the first case to closing the last case, on rank 0.
        last_event_s: time of the last event, in seconds of the monotonic clock.
        none_chosen: number of cases and a few of their ids, if -k matches no case; else None.
        cut_logs: log file to the number of removed bytes.
        has_left: whether all ranks of this job have ended successfully while their launch continues.
    """

    status: str = "complete"
    cause: Cause = field(default_factory=lambda: Cause("", ""))
    num_cases: int | None = None
    is_meeting: bool = False
    running: Case | None = None
    pass_number: int = 0
    num_by_status: Counter[str] = field(default_factory=Counter)
    spent_s: dict[str, float] = field(default_factory=dict)
    measuring_s: float = 0.0
    last_event_s: float = field(default_factory=time.monotonic)
    reached_end: bool = False
    cut_logs: Counter[Path] = field(default_factory=Counter)
    has_left: bool = False
    none_chosen: tuple[int, list[str]] | None = None

    @property
    def lost_case(self) -> Case | None:
        """The case that broke the launch; None for a user's error, full storage, or a failure outside of cases."""
        broke = self.status in ("failed", "timeout") and not self.cause.user_can_fix
        return self.running if broke else None

    def note(self, event: dict[str, Any]) -> None:
        """Update this attempt from one event."""
        self.last_event_s = time.monotonic()
        self.spent_s = event.get("spent_s", self.spent_s)
        self.measuring_s = event.get("measuring_s", self.measuring_s)
        self.is_meeting = event["event"] == "meeting"
        match event["event"]:
            case "none_chosen":
                self.none_chosen = event["num_cases"], event["ids"]
            case "plan":
                self.num_cases = event["num_cases"]
            case "case":
                self.running = Case(event["id"], event["kind"], event["params"])
                self.pass_number = event.get("number", 0)
            case "done":
                self.running = None
                self.num_by_status[event["status"]] += 1
            case "turn":
                self.running = None
            case "end":
                self.reached_end = True
            case "left":
                self.has_left = True


def attempt(job: Job, ranks: RankProcesses, display: Display, stop: Stop) -> Attempt:
    """Run a job on the ranks, and follow the ranks to the job's end.

    Afterwards no process continues, except for a launch whose ranks wait for their next job. `stop` is set when the
    user stops the command. The job's log folder contains `job.json` and no file of another launch.

    Raises:
        UserError: the machine's limit on processes is reached.
        OSError: the log folder cannot be written.
    """
    log_dir = Path(job.log_dir)
    ranks.begin(job)
    with contextlib.closing(ProgressReader(log_dir / FILE_NAME)) as reader:
        this_attempt = Attempt("")
        try:
            this_attempt.status = _follow(ranks, reader, this_attempt, display, job, stop)
            # If the disk is full, ranks can report neither progress nor the cause of a failure.
            why = why_unwritable(job) if this_attempt.status in ("timeout", "failed") else ""
            if this_attempt.status == "timeout":
                ask_for_stacks(log_dir, ranks.pid)
            if why:
                this_attempt.cause = Cause("storage", why)
            elif this_attempt.status == "timeout":
                this_attempt.cause = Cause("hung", _why_hung(job, ranks.joined, this_attempt))
            elif this_attempt.status == "failed":
                this_attempt.cause = cause_of(log_dir, ranks.exit_code or 0, ranks.log)
            elif this_attempt.status == "interrupted":
                this_attempt.cause = Cause("", "interrupted")
        finally:
            if not (this_attempt.status == "complete" and ranks.are_kept):
                ranks.stop()
        this_attempt.cut_logs.update(shorten_logs(log_dir))
        # The events after the last poll contain the running case.
        _take_in(reader, this_attempt, display)
    if this_attempt.status == "complete" and not this_attempt.reached_end:
        # A scenario that ends its process with exit code 0 must not count as complete.
        ranks.stop()
        rank = ranks.joined.rank if ranks.joined else None
        processes = "the ranks" if rank is None else f"rank {rank}"
        message = f"{processes} {exit_text(0)}; see the logs in {log_dir}"
        this_attempt.status, this_attempt.cause = "failed", Cause("killed", message, rank)
    return this_attempt


def _take_in(reader: ProgressReader, attempt: Attempt, display: Display) -> None:
    for event in reader.news():
        attempt.note(event)
        display.event(event)


def _follow(
    ranks: RankProcesses, reader: ProgressReader, attempt: Attempt, display: Display, job: Job, stop: Stop
) -> str:
    meeting, launcher = Meeting(ranks.joined), os.getppid()
    while True:
        exit_code = ranks.exit_code
        _take_in(reader, attempt, display)
        attempt.cut_logs.update(shorten_logs(Path(job.log_dir)))
        if exit_code is not None:
            return "complete" if exit_code == 0 else "failed"
        if ranks.are_kept and attempt.has_left:
            return "complete"
        # A launcher that has ended or was killed cannot end the ranks.
        if stop.is_requested or (ranks.joined and ranks.joined.launch and os.getppid() != launcher):
            return "interrupted"
        silent_s = time.monotonic() - attempt.last_event_s
        if attempt.is_meeting:
            meeting.waited(silent_s)
        if silent_s > job.timeout_s:
            return "timeout"
        time.sleep(POLL_S)


def _why_hung(job: Job, joined: Joined | None, attempt: Attempt) -> str:
    if joined and attempt.is_meeting:
        problem = f"rank {joined.rank} waited {job.timeout_s:g} s at {joined.address} for the other ranks"
        return f"{problem}; start all {joined.world_size} ranks with the same MASTER_ADDR and MASTER_PORT"
    if attempt.reached_end:
        return f"the launch did not end for {job.timeout_s:g} s after its last case; its logs are in {job.log_dir}"
    between = "set-up" if attempt.num_cases is None else "the launch"
    hung = f"case {attempt.running.id}" if attempt.running else between
    stacks = f"each rank's stack is in {job.log_dir}"
    return f"{hung} made no progress for {job.timeout_s:g} s{where_ranks_are(Path(job.log_dir))}; {stacks}"


def where_ranks_are(log_dir: Path) -> str:
    """Return the line of the user's code at which each rank of this host is, by the stacks in the logs.

    A rank outside of the user's code has left that code, or has not entered it. "" if no rank is in the user's code.
    """
    ranks: dict[str, list[int]] = {}
    for path in log_dir.glob("rank*.log"):
        with contextlib.suppress(OSError, ValueError):
            if stacks := _STACK.findall(path.read_text(encoding="utf-8", errors="replace")):
                frames = [(file, int(line)) for file, line in _FRAME.findall(stacks[-1])]
                ranks.setdefault(place_in_user_code(frames), []).append(int(path.stem.removeprefix("rank")))
    places = sorted(
        (sorted(numbers), f"at {place}" if place else "outside of your code") for place, numbers in ranks.items()
    )
    texts = [f"rank{'s' * (len(numbers) > 1)} {ranks_text(numbers)} {place}" for numbers, place in places]
    return f" ({listed(texts, MAX_PLACES)})" if any(ranks) else ""


def ask_for_stacks(log_dir: Path, launcher: int) -> None:
    """Send a signal to every running rank, so that it writes its stacks to its log.

    Args:
        launcher: the pid of the process that started the ranks, or of the only rank.
    """
    for path in log_dir.glob("rank*.pid"):
        # If the disk is full, a pid file is empty.
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text())
            if _is_rank_of(launcher, pid):
                os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)


def _is_rank_of(launcher: int, pid: int) -> bool:
    """Whether a process is `launcher` or its descendant; another process may have the pid of an ended rank."""
    while pid not in (launcher, 0):
        try:
            # The format of proc(5) is "pid (name) state ppid ..."; the name may contain any character, also closing
            # brackets.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == launcher
