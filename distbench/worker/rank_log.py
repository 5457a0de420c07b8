"""A rank's log: all output of the rank, in a file of the log folder."""

import faulthandler
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

from distbench.spec.errors import StorageFailed
from distbench.spec.job import pid_file


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
