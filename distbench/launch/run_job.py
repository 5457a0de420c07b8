"""Execution of one job: launch and relaunch of ranks, completion and resumption of the run file."""

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distbench.launch.display import Display
from distbench.launch.rank_processes import RankProcesses
from distbench.launch.rendezvous import Joined
from distbench.launch.watch_ranks import Attempt, Cause, attempt, cannot_be_written, make_folders
from distbench.processes.signals import noted_stop
from distbench.records.machine import CpuUse, devices_here, host_facts, load_average
from distbench.records.progress_events import FILE_NAME
from distbench.records.rank_logs import cut_warning, moved_logs
from distbench.records.run_file import Case, CaseResult, append, read_run
from distbench.spec import Job, UserError
from distbench.spec.file_io import write_whole
from distbench.spec.job import JOB_FILE, digest_of, none_chosen
from distbench.spec.printable_text import count_text, listed
from distbench.spec.versions import installed_torch

MODULE = ("-m", "distbench.worker")
INTERRUPTED = "interrupted"
NUM_NAMED = 3


class JobRecord:
    """The attempts of one job. A case that breaks an attempt gets its row in the run file immediately."""

    def __init__(self, job: Job, joined: Joined | None, display: Display) -> None:
        self._job, self._joined, self._display = job, joined, display
        self._run_file = Path(job.run_file)
        # None with another launcher: its ranks' CPU use cannot be separated from the CPU use of other processes.
        self._cpu_use = None if joined else CpuUse.now()
        self._began_s = time.monotonic()
        self.num_attempts = 0
        self.last = Attempt()
        self.lost: list[tuple[Case, str]] = []
        # Count the rows of a resumed run.
        self.num_by_status = Counter(self._rows().values() if job.done_ids else ())
        self.spent_s: Counter[str] = Counter()
        self.measuring_s = 0.0
        self.cut_logs: Counter[Path] = Counter()

    @property
    def status(self) -> str:
        """The last attempt's status; "complete" also if the last case of all broke the launch."""
        is_last = self.num_left == 0 and self.last.pass_number == 0
        return "complete" if is_last and self.last.lost_case else self.last.status

    @property
    def num_left(self) -> int | None:
        """The number of cases without a row; None if the ranks never counted the cases."""
        total = self.last.num_cases
        return None if total is None else total - sum(self.num_by_status.values())

    @property
    def message(self) -> str:
        """One sentence on the problem, with each lost case; "" without a problem."""
        if not self.lost:
            return self.summary
        lost_cases = listed([f"{case.id}: {why}" for case, why in self.lost], NUM_NAMED, "; ", "; and {} more")
        return f"{self.summary}: {lost_cases}"

    @property
    def summary(self) -> str:
        """The sentence for the footer, without the lost cases, which have rows in the file."""
        cause = self.last.cause.message
        if not self.lost:
            return cause
        also = "" if self.last.lost_case else f" and then {cause}" if cause else ""
        relaunches = self.num_attempts - 1
        not_run = f"{count_text(self.num_left or 0, 'case')} not run"
        if self.num_left and self._joined:
            after = f"{not_run}, because distbench does not restart ranks of another launcher"
        elif self.num_left:
            after = f"{not_run} after {count_text(relaunches, 'relaunch', 'relaunches')}"
        elif relaunches:
            after = f"all cases have a row after {count_text(relaunches, 'relaunch', 'relaunches')}"
        else:
            after = "it was the last case"
        return f"{count_text(len(self.lost), 'case')} broke the launch{also} ({after})"

    def add(self, ended: Attempt) -> None:
        """Count an ended attempt, and write the row of the case that broke the attempt."""
        self.num_attempts += 1
        self.last = replace(ended, num_cases=ended.num_cases or self.last.num_cases)
        self.num_by_status.update(ended.num_by_status)
        self.spent_s.update(ended.spent_s)
        self.measuring_s += ended.measuring_s
        self.cut_logs.update(ended.cut_logs)
        if ended.running and ended.status != "complete":
            self._add_row(ended, ended.running)

    def _add_row(self, ended: Attempt, case: Case) -> None:
        broken = "raised" if ended.cause.kind == "raised" else "aborted"
        status = {"timeout": "timeout", "interrupted": "aborted"}.get(ended.status, broken)
        written_status = self._rows().get(case.id)
        if written_status is not None and ended.pass_number == 0:
            # The rank died between writing its row and reporting it.
            self.num_by_status[written_status] += 1
            return
        if ended.cause.user_can_fix:
            return
        if (self._joined and self._joined.rank != 0) or not self._run_file.exists():
            return
        record = CaseResult(case, status, error=ended.cause.message).to_record()
        if written_status is not None:
            if not ended.lost_case:
                return  # interrupted: the finished passes remain valid
            outcome = {name: record[name] for name in ("status", "error")}
            record = {"type": "pass", "case_id": case.id, "number": ended.pass_number, **outcome}
            self.num_by_status[written_status] -= 1
        with contextlib.suppress(OSError):
            append(self._run_file, record)
            self.num_by_status[status] += 1
            if ended.lost_case:
                self.lost.append((case, ended.cause.message))
                self._display.event({"event": "done", "id": case.id, "status": status})

    def _rows(self) -> dict[str, str]:
        if not self._run_file.exists():
            return {}
        return {record["case"]["id"]: record["status"] for record in read_run(self._run_file).cases}

    def end(self, status: str, cause: Cause) -> None:
        """Record the end of the job between two attempts."""
        self.last = replace(self.last, status=status, cause=cause)

    def goes_on(self) -> bool:
        """Whether the cases after the lost case run in a new attempt."""
        lost_case = self.last.lost_case
        within = self.num_attempts <= self._job.settings.max_relaunches
        is_left = self.num_left or self.last.pass_number
        return bool(lost_case and not self._joined and within and is_left and lost_case.id in self._rows())

    def close_run_file(self) -> None:
        """Write the footer; if the disk is full, the existing lines remain."""
        if not self._run_file.exists():
            return
        now, wall_s = CpuUse.now(), time.monotonic() - self._began_s
        footer = {
            "type": "footer",
            "status": self.status,
            "message": self.summary,
            "finished_at": time.time(),
            "wall_s": wall_s,
            "spent_s": {**self.spent_s, "other": max(wall_s - sum(self.spent_s.values()), 0.0)},
            "measuring_s": self.measuring_s,
            "num_by_status": dict(self.num_by_status),
            "num_relaunches": self.num_attempts - 1,
            "num_not_run": self.num_left,
            "load_at_end": load_average(),
            **({"accelerators_at_end": devices} if (devices := devices_here()) else {}),
            "foreign_cpu": now.foreign_since(self._cpu_use) if now and self._cpu_use else None,
        }
        try:
            append(self._run_file, footer)
        except OSError:
            # The progress file is no longer needed, so the footer may use its space.
            with contextlib.suppress(OSError):
                os.truncate(Path(self._job.log_dir) / FILE_NAME, 0)
                append(self._run_file, footer)


def left_of(job: Job) -> Job:
    """Return the job without the cases and passes of its run file."""
    cases = read_run(Path(job.run_file)).cases if Path(job.run_file).exists() else []
    passes = {case["case"]["id"]: 1 + max(number for number, _ in case["passes"]) for case in cases}
    ended = [case["case"]["id"] for case in cases if case["status"] not in ("ok", "wrong")]
    return replace(job, done_ids=list(passes), ended_ids=ended, passes_done=passes)


@dataclass
class JobOutcome:
    """The result of one job.

    Args:
        status: "complete", "failed", "timeout" or "interrupted".
        message: one sentence on the problem, or "".
        none_chosen: one sentence if -k matches no case, or "".
        is_storage_full: whether a folder could not be written, so that other jobs would fail too.
        warning: one sentence on an event that does not affect the results.
    """

    job: Job
    status: str
    message: str = ""
    user_can_fix: bool = False
    num_by_status: dict[str, int] = field(default_factory=dict)
    none_chosen: str = ""
    is_storage_full: bool = False
    warning: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code: 0 every case ok or skipped, 1 a case not ok, 2 the user can fix the cause, 130 interrupted."""
        if self.status == "interrupted":
            return 130
        if self.user_can_fix:
            return 2
        fine = set(self.num_by_status) <= {"ok", "skipped"}
        return 0 if self.status == "complete" and fine else 1

    @property
    def is_refused(self) -> bool:
        """Whether the cause is an error in the user's scenario or options."""
        return self.user_can_fix and not self.is_storage_full


def launch(job: Job, joined: Joined | None, display: Display, module: tuple[str, ...] = MODULE) -> JobOutcome:
    """Run a single job. `launch_on` and `RankProcesses` describe the arguments."""
    with RankProcesses([job], joined, module) as ranks:
        return launch_on(ranks, job, display)


def launch_on(ranks: RankProcesses, job: Job, display: Display) -> JobOutcome:
    """Run one job to its end or failure; the run file is closed with a footer.

    A case that kills or hangs a rank, or fails on one rank only, gets a row, and new ranks run the later cases (at most
    `Settings.max_relaunches` times; never for ranks of another launcher). Any number of stop signals ends the job with
    status "interrupted".

    Args:
        ranks: the rank processes of this job and of other jobs.
        job: the next job of `ranks`.
        display: shows every event of the ranks.

    Raises:
        UserError: the results or log folder cannot be written.
    """
    joined = ranks.joined
    reporting_rank = joined.rank if joined else 0
    job = _starting_now(job, reporting_rank=reporting_rank)
    try:
        make_folders(job)
    except OSError as error:
        advice = "give a writable folder with --results or --log-dir"
        raise UserError(f"{cannot_be_written(error, Path(job.run_file).parent)}; {advice}") from error
    record = JobRecord(job, joined, display)
    with noted_stop() as stop:
        try:
            record.add(attempt(job, ranks, display, stop))
            while record.goes_on() and not stop.is_requested:
                record.add(attempt(_relaunched(job, record), ranks, display, stop))
        except OSError as error:
            record.end("failed", Cause("storage", cannot_be_written(error, Path(job.log_dir))))
        except UserError as error:
            record.end("failed", Cause("user", str(error)))
        if stop.is_requested and record.status != "complete":
            record.end("interrupted", Cause("", "interrupted"))
        if reporting_rank == 0:
            record.close_run_file()
    # Under another launcher rank 0 alone counts rows.
    counts = dict(record.num_by_status) if reporting_rank == 0 else {}
    # A stop signal after the job's end prevents the next jobs.
    status = "interrupted" if stop.is_requested else record.status
    message = record.message or ("interrupted after its last case" if stop.is_requested else "")
    left_out = none_chosen(job.chosen, *record.last.none_chosen) if record.last.none_chosen else ""
    warning = cut_warning(record.cut_logs)
    if logs := moved_logs(job):
        message, warning = (text.replace(job.log_dir, str(logs)) for text in (message, warning))
        job = replace(job, log_dir=str(logs))
    cause = record.last.cause
    return JobOutcome(job, status, message, cause.user_can_fix, counts, left_out, cause.kind == "storage", warning)


def _starting_now(job: Job, **changes: Any) -> Job:
    return replace(job, started_at=time.time(), started_clock_s=time.monotonic(), **changes)


def _relaunched(job: Job, record: JobRecord) -> Job:
    """Return the job for new ranks: without the cases that have a row, and with a new folder for logs."""
    log_dir = Path(job.log_dir) / f"relaunch{record.num_attempts}"
    again = _starting_now(left_of(job), log_dir=str(log_dir))
    log_dir.mkdir()
    again.save(log_dir / JOB_FILE)
    return again


def job_left_of(file: Path) -> Job:
    """Return the rest of an interrupted run as a job that appends to the same file. Cases with a row are not run again.

    The file's footer, and the row of the interrupted case, are removed.

    Raises:
        UserError: the run is complete, has no row yet, or was measured on several hosts, on another machine, or with
            another commit, scenario file or torch.
    """
    run = read_run(file)
    facts = host_facts()
    try:
        job = Job.from_record({**(run.header.get("job") or {}), "environment": facts})
    except ValueError as error:
        wrong = f"the settings in run file {file} are not valid for this version of distbench ({error})"
        raise UserError(f"{wrong}; measure again") from error
    if len(set(run.about.environment.hosts or ())) > 1:
        problem = "the run used several hosts, but --resume starts ranks on this host only"
        raise UserError(f"--resume {file}: {problem}; measure the remaining cases with --nodes and -k")
    then = run.about.environment
    facts_then_and_now = {
        "the machine": (then.machine, facts["machine"]),
        "the commit": (then.git_commit, facts["git_commit"]),
        # The version of an installed package may lack the build's suffix.
        "torch": (str(then.torch).partition("+")[0], installed_torch().partition("+")[0]),
        "the scenario file": (job.file_digest, digest_of(Path(job.file)) or f"gone ({job.file})"),
    }
    for name, (was, now) in facts_then_and_now.items():
        if was and was != now:
            now_is = "unknown" if now is None else now
            advice = "restore the former state, or measure again without --resume"
            raise UserError(f"--resume {file}: {name} was {was}, and is now {now_is}; {advice}")
    footer = run.footer or {}
    if footer.get("status") == "complete" and not footer.get("num_not_run"):
        cases_text = "its one case" if len(run.cases) == 1 else f"each of its {len(run.cases)} cases"
        raise UserError(f"--resume {file}: no case is left to run, because {cases_text} has a row")
    if all(map(_was_cut_short, run.cases)):
        raise UserError(f"--resume {file}: this run has no finished case; run the scenario again without --resume")
    lines = file.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _counts(line)]
    if len(kept) < len(lines):
        write_whole(file, "".join(f"{line}\n" for line in kept))
    log_dir = Path(job.log_dir)
    number = next(number for number in itertools.count(1) if not (log_dir / f"resume{number}").exists())
    job = replace(job, run_file=str(file.resolve()), log_dir=str(log_dir / f"resume{number}"), note="")
    return left_of(job)


def _was_cut_short(record: dict[str, Any]) -> bool:
    """Whether this is the row of the case during which the user stopped the run."""
    return record.get("status") == "aborted" and record.get("error") == INTERRUPTED


def _counts(line: str) -> bool:
    """Whether a line of an interrupted run file remains valid."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return not isinstance(record, dict) or not (record.get("type") == "footer" or _was_cut_short(record))
