"""What became of a job over its attempts: the cases that broke one, what is left to run, and the run file's footer."""

import contextlib
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from distbench.launch.attempt import Attempt
from distbench.launch.display import Display
from distbench.launch.explain import Cause
from distbench.launch.ranks import Joined
from distbench.runs.machine import CpuUse, devices_here, load_average
from distbench.runs.progress import FILE_NAME
from distbench.runs.run_file import Case, CaseResult, append, read_run
from distbench.spec import Job
from distbench.spec.printable import count_text

NUM_NAMED = 3


class JobRecord:
    """The attempts of one job so far, and the cases that broke them, each with its row in the run file at once."""

    def __init__(self, job: Job, joined: Joined | None, display: Display) -> None:
        self._job, self._joined, self._display = job, joined, display
        self._run_file = Path(job.run_file)
        self._cpu_use = None if joined else CpuUse.now()
        # By this clock, for the wall clock may jump.
        self._began_s = time.monotonic()
        self.num_attempts = 0
        self.last = Attempt()
        self.lost: list[tuple[Case, str]] = []
        # Of a run that is resumed, the rows that it has count too.
        self.num_by_status = Counter(self._rows().values() if job.done_ids else ())
        self.spent_s: Counter[str] = Counter()
        self.measuring_s = 0.0
        self.cut_logs: Counter[Path] = Counter()

    @property
    def status(self) -> str:
        """The last attempt's; "complete" too where the last case of all broke it."""
        is_last = self.num_left == 0 and self.last.pass_number == 0
        return "complete" if is_last and self.last.lost_case else self.last.status

    @property
    def num_left(self) -> int | None:
        """Cases that have no row; None where the ranks never counted them."""
        total = self.last.num_cases
        return None if total is None else total - sum(self.num_by_status.values())

    @property
    def message(self) -> str:
        """One sentence for the user; empty where all went well."""
        if not self.lost:
            return self.summary
        named = "; ".join(f"{case.id}: {why}" for case, why in self.lost[:NUM_NAMED])
        more = f"; and {len(self.lost) - NUM_NAMED} more" if len(self.lost) > NUM_NAMED else ""
        return f"{self.summary}: {named}{more}"

    @property
    def summary(self) -> str:
        """The same for the footer, whose file has a row for each case that broke an attempt."""
        cause = self.last.cause.message
        if not self.lost:
            return cause
        also = "" if self.last.lost_case else f" and then {cause}" if cause else ""
        return f"{count_text(len(self.lost), 'case')} broke the launch{also} ({self._what_followed()})"

    def _what_followed(self) -> str:
        relaunches = self.num_attempts - 1
        if not self.num_left:
            if not relaunches:
                return "it was the last one"
            return f"the ranks were started again {count_text(relaunches, 'time')} and all cases have a row"
        left = f"{count_text(self.num_left, 'case')} not run"
        if self._joined:
            return f"{left}: ranks that another launcher started are not started again"
        return f"{left} after {count_text(relaunches, 'relaunch', 'relaunches')}"

    def add(self, ended: Attempt) -> None:
        """Count an attempt that ended, and give the case that broke it its row."""
        self.num_attempts += 1
        self.last = replace(ended, num_cases=ended.num_cases or self.last.num_cases)
        self.num_by_status.update(ended.num_by_status)
        self.spent_s.update(ended.spent_s)
        self.measuring_s += ended.measuring_s
        self.cut_logs.update(ended.cut_logs)
        if ended.running and ended.status != "complete" and not ended.cause.user_can_fix:
            self._add_row(ended, ended.running)

    def _add_row(self, ended: Attempt, case: Case) -> None:
        broken = "raised" if ended.cause.kind == "raised" else "aborted"
        status = {"timeout": "timeout", "interrupted": "aborted"}.get(ended.status, broken)
        written = self._rows().get(case.id)
        if written is not None and ended.pass_number == 0:
            # The rank died after its row was on the disk and before it could report it.
            self.num_by_status[written] += 1
            return
        if (self._joined and self._joined.rank != 0) or not self._run_file.exists():
            return
        record = CaseResult(case, status, error=ended.cause.message).to_record()
        if written is not None:
            if not ended.lost_case:
                return  # interrupted: the passes it has count
            same = {name: record[name] for name in ("status", "error")}
            record = {"type": "pass", "case_id": case.id, "number": ended.pass_number, **same}
            self.num_by_status[written] -= 1
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
        """The job ended between two attempts."""
        self.last = replace(self.last, status=status, cause=cause)

    def goes_on(self) -> bool:
        """Whether the cases after the one that was lost shall run in a new attempt."""
        lost = self.last.lost_case
        within = self.num_attempts <= self._job.settings.max_relaunches
        is_left = self.num_left or self.last.pass_number
        return bool(lost and not self._joined and within and is_left and lost.id in self._rows())

    def close_run_file(self) -> None:
        """Write the footer; a full disk keeps what it has."""
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
            # None where not all ranks are ours: their use of the CPUs cannot be told from that of others.
            **({"accelerators_at_end": devices} if (devices := devices_here()) else {}),
            "foreign_cpu": now.foreign_since(self._cpu_use) if now and self._cpu_use else None,
        }
        try:
            append(self._run_file, footer)
        except OSError:
            # Whatever it told has been read: its room is the footer's.
            with contextlib.suppress(OSError):
                os.truncate(Path(self._job.log_dir) / FILE_NAME, 0)
                append(self._run_file, footer)


def left_of(job: Job) -> Job:
    """The job without what stands in its run file already."""
    cases = read_run(Path(job.run_file)).cases if Path(job.run_file).exists() else []
    passes = {case["case"]["id"]: 1 + max(number for number, _ in case["passes"]) for case in cases}
    ended = [case["case"]["id"] for case in cases if case["status"] not in ("ok", "wrong")]
    return replace(job, done_ids=list(passes), ended_ids=ended, passes_done=passes)
