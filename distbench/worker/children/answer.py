"""How a child process answers: jobs as a JSON list on stdin, one JSON value as the last line of stdout.

The answer is {"user_error": sentence} where there is none.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distbench.spec import Job, UserError
from distbench.worker.rank.rank_context import RankContext


def answer_jobs(answers: Callable[[Sequence[Job]], Any]) -> None:
    """Print what a function answers to the jobs on stdin, and nothing else: scenarios print and torch warns."""
    torch.set_num_threads(1)
    jobs = [Job.from_record(record) for record in json.load(sys.stdin)]
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = answers(jobs)
        except UserError as error:
            answer = {"user_error": str(error)}
    print(json.dumps(answer))


def rank_of(mesh: DeviceMesh, job: Job, device: str = "cpu") -> RankContext:
    """This rank of a fake process group, rank 0 unless that was told otherwise, whose mesh it is."""
    assert dist.group.WORLD is not None
    return RankContext(dist.get_rank(), torch.device(device), mesh, "gloo", dist.group.WORLD, job.settings.seed)
