"""One rank's jobs in turn, each in a process of its own: forked from one that has torch imported and has done nothing.

So a job finds what a new process would find, whatever the one before it did: patched modules, compiled code, threads,
caches, memory. What is shared is the time that a launch and imports take.
"""

import gc
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from distbench.runs.progress import FILE_NAME, ProgressWriter
from distbench.worker.rank.parent_death import die_with_parent

POLL_S = 0.01


def own_job(paths: Sequence[Path]) -> Path:
    """The job that is this process's to run, once the parent has written it.

    The process that began forks one for every job but the last, which is its own, and waits for each to end; one that
    fails ends it alike.

    Raises:
        StorageFailed: the log folder takes no more.
    """
    for path in paths[:-1]:
        _wait_for(path)
        gc.freeze()  # what is imported by now is shared with every job's process, as long as nobody writes to it
        pid = os.fork()
        if not pid:
            die_with_parent()
            return path
        _end_unless_well(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        progress = ProgressWriter(path.parent / FILE_NAME)
        progress.tell("left")
        progress.close()
    _wait_for(paths[-1])
    return paths[-1]


def _wait_for(path: Path) -> None:
    """Return when the file is there; a parent that has ended will write none, but it also ends this process."""
    while not path.exists():
        time.sleep(POLL_S)


def _end_unless_well(exit_code: int) -> None:
    """End this process as its child ended, for torchrun names what it sees; return where that was well."""
    if exit_code < 0:
        # One memory image is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    if exit_code:
        os._exit(abs(exit_code))
