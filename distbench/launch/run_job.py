"""A job to its end: its ranks are launched, launched again after a case that broke them, and the run file is closed."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distbench.launch.attempt import attempt
from distbench.launch.display import Display
from distbench.launch.explain import Cause
from distbench.launch.job_record import JobRecord, left_of
from distbench.launch.processes import RankProcesses
from distbench.launch.ranks import Joined
from distbench.launch.storage import cannot_be_written, make_folders, moved_logs, too_long
from distbench.spec import Job, UserError
from distbench.spec.case_choice import none_chosen
from distbench.spec.job import JOB_FILE
from distbench.spec.signals import noted_stop

MODULE = ("-m", "distbench.worker")


@dataclass
class JobOutcome:
    """What became of one job.

    Args:
        status: "complete", "failed", "timeout" or "interrupted".
        message: one sentence, or empty.
        is_storage_full: whether a folder took no more, as it will for other jobs.
        none_chosen: one sentence where the user's choice of cases leaves none.
        warning: one sentence on what changes no result.
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
        """0 every case ok or skipped, 1 some case not, 2 the user can fix it, 130 interrupted."""
        if self.status == "interrupted":
            return 130
        if self.user_can_fix:
            return 2
        fine = set(self.num_by_status) <= {"ok", "skipped"}
        return 0 if self.status == "complete" and fine else 1


def launch(job: Job, joined: Joined | None, display: Display, module: tuple[str, ...] = MODULE) -> JobOutcome:
    """`launch_on` for a job on its own; the arguments are those of it and of `RankProcesses`."""
    with RankProcesses([job], joined, module) as ranks:
        return launch_on(ranks, job, display)


def launch_on(ranks: RankProcesses, job: Job, display: Display) -> JobOutcome:
    """Run one job to its end, whatever that is; the run file is closed with a footer.

    A case that kills or hangs a rank, or that one rank alone fails, becomes a row, and new ranks go on with the cases
    after it (at most `Settings.max_relaunches` times; never for ranks that somebody else started). Signals that ask to
    stop end it as "interrupted", in whatever order and number they come. `UserError` where the results or log folder
    cannot be written.

    Args:
        ranks: the processes of this job's ranks and those of others.
        job: the next of theirs.
        display: is given every event.
    """
    joined = ranks.joined
    reporting_rank = joined.rank if joined else 0
    clock_s = time.monotonic()
    job = replace(job, started_at=time.time(), started_clock_s=clock_s, reporting_rank=reporting_rank)
    try:
        make_folders(job)
    except OSError as error:
        advice = "give a writable folder with --out or --log-dir"
        raise UserError(f"{cannot_be_written(error, Path(job.run_file).parent)}; {advice}") from error
    record = JobRecord(job, joined, display)
    with noted_stop() as stop:
        try:
            record.add(attempt(job, ranks, display, stop))
            while record.goes_on() and not stop.asked:
                record.add(attempt(_relaunched(job, record), ranks, _WithoutPlan(display), stop))
        except OSError as error:
            record.end("failed", Cause("storage", cannot_be_written(error, Path(job.log_dir))))
        except UserError as error:
            record.end("failed", Cause("user", str(error)))
        if stop.asked and record.status != "complete":
            record.end("interrupted", Cause("", "interrupted"))
        if reporting_rank == 0:
            record.close_run_file()
    # What the other ranks of another launcher count is in rank 0's file alone.
    counts = dict(record.num_by_status) if reporting_rank == 0 else {}
    # Asked too late for this job, but no other one shall begin.
    status = "interrupted" if stop.asked else record.status
    message = record.message or ("interrupted after its last case" if stop.asked else "")
    left_out = none_chosen(job.chosen, *record.last.none_chosen) if record.last.none_chosen else ""
    warning = too_long(record.cut_logs)
    if logs := moved_logs(job):
        message, warning = (text.replace(job.log_dir, str(logs)) for text in (message, warning))
        job = replace(job, log_dir=str(logs))
    cause = record.last.cause
    return JobOutcome(job, status, message, cause.user_can_fix, counts, left_out, cause.kind == "storage", warning)


class _WithoutPlan(Display):
    """Shows the events of a relaunch: the number of cases is known already."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def event(self, event: dict[str, Any]) -> None:
        """Show all but the plan."""
        if event["event"] != "plan":
            self._display.event(event)


def _relaunched(job: Job, record: JobRecord) -> Job:
    """The same job for new ranks: the cases that have a row left out, logs in a folder of their own."""
    log_dir = Path(job.log_dir) / f"relaunch{record.num_attempts}"
    clock_s = time.monotonic()
    again = replace(left_of(job), log_dir=str(log_dir), started_at=time.time(), started_clock_s=clock_s)
    log_dir.mkdir()
    again.save(log_dir / JOB_FILE)
    return again
