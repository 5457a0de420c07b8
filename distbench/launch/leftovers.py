"""Processes that a scenario's own code started, and that outlived the ranks: they are known by their environment."""

import contextlib
import os
import signal
from pathlib import Path

from distbench.spec.job import PARENT_PID


def end_leftovers(parent: int) -> None:
    """End every process whose environment says that it descends from the ranks of this parent (a pid)."""
    mark = f"{PARENT_PID}={parent}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # Most are somebody else's, and any of them may end meanwhile.
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
