"""The cause of a failed launch, from the files that the ranks and the launcher wrote."""

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from distbench.spec import UserError
from distbench.spec.errors import FAILURES
from distbench.spec.job import LAUNCH_LOG
from distbench.spec.json_decoder import Count, Date, Format, among, read_record
from distbench.spec.printable_text import clean

MAX_ERROR = 300  # characters


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
