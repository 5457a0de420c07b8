"""Processes that use torch. One process here is one rank."""

import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from distbench.spec.versions import INSTALL

if not dist.is_available():
    raise ImportError(f"torch {torch.__version__} was built without distributed support; {INSTALL}")


def _renew_threads() -> None:
    """Create torch's thread pool in a forked process, while it has one thread.

    torch creates it at first use. If two threads of autograd get there at once, the process aborts: "Invalid thread
    pool" (aten/src/ATen/ParallelOpenMP.cpp, caffe2/utils/threadpool; seen on torch 2.15).
    """
    torch.set_num_threads(torch.get_num_threads())


def leave(exit_code: int) -> NoReturn:
    """End this process at once; all results are on the disk.

    An ordinary exit runs destructors of process groups that models still refer to. On gloo they sometimes abort a rank
    that is done ("terminate called without an active exception"), and if other ranks hang they never return.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


os.register_at_fork(after_in_child=_renew_threads)
