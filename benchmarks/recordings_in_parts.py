"""`python -m benchmarks.recordings_in_parts FOLDER`: as `distbench.worker.children.recordings`, on a device that has
RMSNorm in parts, as a CPU has it, and no kernel of its own for it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from distbench.spec import Job
from distbench.worker.children.answer import answer_jobs
from distbench.worker.children.recordings import recordings
from distbench.worker.torch_internals import shapes_only


def _of_jobs(jobs: Sequence[Job]) -> list[list[dict[str, str]]]:
    shapes_only.OWN_KERNELS = ()
    return [[*recordings(job, Path(sys.argv[1]) / str(number))] for number, job in enumerate(jobs)]


if __name__ == "__main__":
    answer_jobs(_of_jobs)
