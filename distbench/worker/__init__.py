"""Everything that touches torch. One process here is one rank."""

import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from distbench.spec.versions import INSTALL

if not dist.is_available():
    raise ImportError(f"torch {torch.__version__} was built without distributed support; {INSTALL}")


def _renew_threads() -> None:
    """Make torch's pool of threads again in a forked process, while it has one thread.

    torch does so at first use, and two threads of autograd that get there at once abort the process: "Invalid thread
    pool" (aten/src/ATen/ParallelOpenMP.cpp, caffe2/utils/threadpool; seen on torch 2.15).
    """
    torch.set_num_threads(torch.get_num_threads())


def leave(exit_code: int) -> NoReturn:
    """End this process at once; everything that counts is on the disk.

    An ordinary exit runs destructors of process groups that models still refer to: on gloo they now and then abort a
    rank that is done ("terminate called without an active exception"), and where other ranks hang they never return.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


os.register_at_fork(after_in_child=_renew_threads)
