"""No launch leaves orphans: a process asks the kernel to be killed when the one that started it is gone."""

import ctypes
import os
import signal
import sys

from distbench.spec.job import PARENT_PID

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have SIGKILL sent to this process when its parent ends, and end at once where it has ended already.

    prctl(2), Linux only; elsewhere nothing happens. The parent is the process of PARENT_PID in the environment,
    where no other is given.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = parent_pid or os.environ.get(PARENT_PID)
    # A parent that ended before the kernel was asked sends no signal.
    if expected and os.getppid() != int(expected):
        os._exit(1)
    os.environ[PARENT_PID] = str(os.getpid())  # of the processes that this one starts
