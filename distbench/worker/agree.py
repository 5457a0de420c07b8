"""`python -m distbench.worker.agree`: do two methods see the same collectives of each step, on ranks that do not exist?

Reads jobs as a JSON list on stdin; its last line of output is a JSON list, for each job one entry a step:
{"case_id": id, "num_rows": collectives, "differences": sentences}, or {"case_id": id, "skipped": why}.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbench.spec import Job, Settings, UserError
from distbench.worker.place import Place
from distbench.worker.session import load_scenario, variant_label
from distbench.worker.torch_internals import Forwarding, Skipped, fake_ranks
from distbench.worker.trace import Row, StepTrace, differences
from distbench.worker.workloads.step import step_benches


def answers(job: Job) -> Iterator[dict[str, Any]]:
    """What the two methods see of each step of a job; none for a scenario without a model.

    Raises:
        UserError: the scenario or its plan is declared wrongly.
        Unsupported: torch is not the one we know.
    """
    for case_id, seen in traces(job):
        if isinstance(seen, str):
            yield {"case_id": case_id, "skipped": seen}
        else:
            forwarded, dispatched = seen
            found = differences([row.what for row in forwarded], dispatched)
            yield {"case_id": case_id, "num_rows": len(forwarded), "differences": found}


def traces(job: Job) -> Iterator[tuple[str, tuple[list[Row], list[Any]] | str]]:
    """Case id, and what forwarding groups and the dispatch mode see on rank 0, or why the case is skipped."""
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        assert dist.group.WORLD is not None
        place = Place(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, job.settings.seed)
        forwarding = Forwarding(mesh)
        for variant in job.variants:
            for bench in step_benches(function(**variant), variant_label(job, variant), place):
                try:
                    with bench.open() as prepared:
                        assert isinstance(prepared.trace, StepTrace)
                        _, [told] = prepared.trace.forwarded(forwarding, 1)
                        yield bench.case.id, (told.rows, prepared.trace.dispatched())
                except Skipped as reason:
                    yield bench.case.id, str(reason)


def main() -> None:
    """Answer for every job on stdin."""
    torch.set_num_threads(1)
    found: Any
    # What a scenario prints or torch warns of is not the answer.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            jobs = [Job(**{**record, "settings": Settings(**record["settings"])}) for record in json.load(sys.stdin)]
            found = [[*answers(job)] for job in jobs]
        except UserError as error:
            found = {"user_error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
