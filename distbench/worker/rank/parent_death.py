"""No launch leaves orphans: a process asks the kernel to be killed when the one that started it is gone."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have SIGKILL sent to this process when its parent ends (prctl(2), Linux only; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
