"""`python -m distbench.worker JOB.json`: one rank; `rank_launcher.py` or another launcher sets the rank's variables."""

import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from distbench.processes.supervisor import die_with_parent
from distbench.ranks.device import calm_scheduler
from distbench.ranks.measure import SPENT_BEFORE, Stopwatch
from distbench.records.rank_logs import log_to
from distbench.spec import Job
from distbench.spec.job import pid_file
from distbench.worker import leave

STARTED_S = time.monotonic()


def main(job_path: str) -> NoReturn:
    """Run one rank of a job, and end the process: 0 on success, else 1."""
    from distbench.ranks.failure import HostLost, RankFailed, one_line, report_failure
    from distbench.spec import UserError
    from distbench.spec.errors import StorageFailed

    # SIGINT kills a rank, as other signals do; Ctrl-C reaches only the parent.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    log_dir = Path(job_path).parent
    try:
        log_to(log_dir, rank)
        job = Job.load(Path(job_path))
        calm_scheduler(job.device)
        _run(job)
    except (UserError, StorageFailed, RankFailed) as error:
        kind = {UserError: "user", StorageFailed: "storage", HostLost: "lost"}.get(type(error), "raised")
        report_failure(log_dir, rank, kind, str(error))
    except BaseException as error:
        traceback.print_exc()
        report_failure(log_dir, rank, "raised", one_line(error))
    else:
        # While this file exists, the rank has not finished, even if the exit code is 0: a model may call os._exit.
        with contextlib.suppress(OSError):
            pid_file(log_dir, rank).unlink()
        leave(0)
    leave(1)


def _run(job: Job) -> None:
    stopwatch = Stopwatch()
    for activity, seconds in (SPENT_BEFORE or {"launch": max(STARTED_S - job.started_clock_s, 0.0)}).items():
        stopwatch.add(activity, seconds)
    with stopwatch.on("imports"):
        from distbench.worker.rank_session import run_session
    run_session(job, stopwatch)


if __name__ == "__main__":
    main(*sys.argv[1:])
