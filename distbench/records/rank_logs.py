"""Logs of ranks: a rank writes all its output to a file of the log folder, and the parent cuts long files."""

import contextlib
import faulthandler
import io
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distbench.spec import Job
from distbench.spec.errors import StorageFailed
from distbench.spec.job import pid_file

MAX_LOG_BYTES, KEPT_LOG_BYTES = 50_000_000, 1_000_000  # size of each log


class RankLog(io.FileIO):
    """An output stream of a rank that drops output without an error if the disk is full."""

    def write(self, data: Any) -> int:
        """Write as much as possible, and return the size of all data as written."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def log_to(log_dir: Path, rank: int) -> None:
    """Redirect all output of this rank to the rank's log; SIGUSR1 adds the stacks of all threads to the log.

    Raises:
        StorageFailed: the folder cannot be written.
    """
    try:
        descriptor = os.open(log_dir / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        pid_file(log_dir, rank).write_text(str(os.getpid()))
    except OSError as error:
        raise StorageFailed(f"{log_dir} cannot be written: {error.strerror}") from error
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(RankLog(number, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
        )
        for number in (1, 2)
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def shorten_logs(log_dir: Path) -> dict[Path, int]:
    """Cut each log larger than MAX_LOG_BYTES to its first KEPT_LOG_BYTES; return the bytes removed per log.

    Without this limit, a model that prints in each step would fill the disk. Ranks append, so later output, such as a
    traceback, follows.
    """
    removed = {}
    for path in log_dir.glob("*.log"):
        with contextlib.suppress(OSError):
            if (size := path.stat().st_size) > MAX_LOG_BYTES:
                os.truncate(path, KEPT_LOG_BYTES)
                removed[path] = size - KEPT_LOG_BYTES
    return removed


def cut_warning(cut_logs: Mapping[Path, int]) -> str:
    """Return one sentence on logs that were cut; "" without a cut log."""
    if not cut_logs:
        return ""
    longest = max(cut_logs, key=lambda path: cut_logs[path])
    more = f" ({len(cut_logs)} logs were cut)" if len(cut_logs) > 1 else ""
    problem = f"{longest} is too long, and {cut_logs[longest] / 1e6:,.0f} MB were removed{more}"
    return f"{problem}; print less in the model, because the measured times include printing"


def moved_logs(job: Job) -> Path | None:
    """Return the folder, next to rank 0's folder, to which this rank moved its logs; None if the logs were not moved.

    The link at the old path is removed, and the links' folder after the last rank.
    """
    log_dir = Path(job.log_dir)
    if not log_dir.is_symlink():
        return None
    now = log_dir.resolve()
    with contextlib.suppress(OSError):
        log_dir.unlink()
        log_dir.parent.rmdir()  # fails until the last rank of this host
    return now
