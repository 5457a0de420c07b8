"""Processes that use torch; each rank is one process."""

import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from distbench.spec.versions import INSTALL

if not dist.is_available():
    raise ImportError(f"torch {torch.__version__} was built without distributed support; {INSTALL}")


def _renew_threads() -> None:
    """Create torch's thread pool in a forked process while the process has only one thread.

    torch creates the pool at first use. If two autograd threads do this at the same time, the process aborts: "Invalid
    thread pool" (aten/src/ATen/ParallelOpenMP.cpp, caffe2/utils/threadpool; seen on torch 2.15).
    """
    torch.set_num_threads(torch.get_num_threads())


def leave(exit_code: int) -> NoReturn:
    """End this process immediately; all results are on the disk.

    An ordinary exit runs the destructors of process groups to which models still refer. On gloo, these destructors
    sometimes abort a finished rank ("terminate called without an active exception"), or do not return if other ranks
    hang.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


os.register_at_fork(after_in_child=_renew_threads)
