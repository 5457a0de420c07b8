"""Why a launch ended as it did, in one sentence, from what the ranks and what started them left behind."""

import contextlib
import re
import signal
from collections.abc import Iterator
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


class Failure(Struct):
    """What a rank writes as it fails; `at`: seconds since the epoch."""

    kind: Annotated[str, among(FAILURES)]
    message: str
    rank: Count
    at: Date


@dataclass(frozen=True)
class Cause:
    """Why a launch failed: what kind of cause, in one sentence, and the rank that failed first, where known.

    `kind` is one of FAILURES, or "killed" or "hung"; the user can fix "user" and "storage".
    """

    kind: str
    message: str
    rank: int | None = None

    @property
    def user_can_fix(self) -> bool:
        """Whether the user can fix it."""
        return self.kind in ("user", "storage")


def cause_of(log_dir: Path, exit_code: int, log: Path | None = None) -> Cause:
    """The first failure of a launch whose launcher, or only rank, ended with a non-zero exit code.

    `log` has what that process printed; the launcher's, where none is given.
    """
    log = log or log_dir / LAUNCH_LOG
    if failures := list(_failures(log_dir)):
        first = min(failures, key=lambda failure: failure.at)
        message = first.message
        if first.kind == "raised":
            message = f"rank {first.rank} raised {message}; its traceback is in {log_dir / _rank_log(first.rank)}"
        return Cause(first.kind, message, first.rank)
    if rank_and_code := _killed_rank(log):
        rank, code = rank_and_code
        return Cause("killed", f"rank {rank} {_how(code)}; its log is {log_dir / _rank_log(rank)}", rank)
    who = "the launcher" if log.name == LAUNCH_LOG else "the rank"
    return Cause("killed", f"{who} {_how(exit_code)}{_last_error(log)}; see {log}")


def _last_error(log: Path) -> str:
    """What ended a process that failed before any rank could say why, in brackets; empty where its log has nothing."""
    errors = re.findall(r"^([\w.]*(?:Error|Exception)):\s*(.+)", _text(log), re.MULTILINE)
    return f" ({clean(': '.join(errors[-1]))[:MAX_ERROR]})" if errors else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _failures(log_dir: Path) -> Iterator[Failure]:
    """What the ranks wrote as they failed, without damaged files."""
    for path in sorted(log_dir.glob("failure-rank*.json")):
        with contextlib.suppress(UserError):
            yield read_record(path, Failure, Format("failure", "see the logs next to it"))


def _rank_log(rank: int) -> str:
    return f"rank{rank}.log"


def _killed_rank(launch_log: Path) -> tuple[int, int] | None:
    """(rank, exit code) that the launcher names as the first that did not end well."""
    match = re.search(r"^rank (\d+) ended with exit code (-?\d+)$", _text(launch_log), re.MULTILINE)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _how(exit_code: int) -> str:
    if not exit_code:
        return "ended with exit code 0 before all was done"
    if exit_code > 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"
