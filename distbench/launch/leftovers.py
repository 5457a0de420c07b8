"""Processes that a scenario's own code started, and that outlived the ranks: they are known by their environment."""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from distbench.spec.job import PARENT_PID


def end_leftovers(parents: Iterable[int]) -> None:
    """End every process that one of these (pids of ranks, and of what starts ranks) started, and what that started.

    `worker/rank/parent_death.py` puts its own pid into the environment of whatever a rank starts.
    """
    marks = {f"{PARENT_PID}={parent}".encode() for parent in parents}
    for folder in Path("/proc").glob("[0-9]*"):
        # Most are somebody else's, and any of them may end meanwhile.
        with contextlib.suppress(OSError):
            if marks.intersection((folder / "environ").read_bytes().split(b"\0")):
                os.kill(int(folder.name), signal.SIGKILL)
