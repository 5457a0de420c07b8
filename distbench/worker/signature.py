"""`python -m distbench.worker.signature`: what each case of some jobs communicates, with no other ranks there.

Reads jobs as a JSON list on stdin. Prints a JSON list as the last line, one object a job: {"torch": version, "cases":
{case id: {"paths": [communication, ...], "peak_bytes": predicted, or null}}, "left_out": {case id: what it raises}}, or
{"user_error": sentence}.
"""

import contextlib
import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbench.spec import Job, ParallelPlan, UserError
from distbench.worker.attribution import communications_of
from distbench.worker.bench import Prepared
from distbench.worker.failure import one_line
from distbench.worker.forked import answers_of
from distbench.worker.place import Place
from distbench.worker.session import all_benches, load_scenario
from distbench.worker.torch_internals import Skipped, fake_ranks, tracked_peak_bytes
from distbench.worker.workloads.step import Step


def signature(job: Job) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Case id to what rank 0 communicates and holds in one call of it, and to what it raises where it cannot run.

    The call before has set things up.

    Raises:
        UserError: the scenario or its plan is declared wrongly, or every case raises.
    """
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        assert dist.group.WORLD is not None
        place = Place(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, job.settings.seed)
        found: dict[str, dict[str, Any]] = {}
        left_out: dict[str, str] = {}
        for bench in all_benches(job, function, place):
            try:
                # A case with nothing to measure here communicates nothing either.
                with contextlib.suppress(Skipped), bench.open() as prepared:
                    found[bench.case.id] = _of_case(prepared, place)
            except UserError:
                raise
            except Exception as error:
                left_out[bench.case.id] = one_line(error)
    if left_out and not found:
        first, reason = next(iter(left_out.items()))
        raise UserError(
            f"no case runs on ranks that do not exist: {first} raises {reason}; see if distbench run runs it"
        )
    return found, left_out


def _of_case(prepared: Prepared, place: Place) -> dict[str, Any]:
    call = prepared.call
    call(_nothing)
    if not isinstance(call, Step):
        rows = communications_of(call, prepared.phases, ParallelPlan(), place)
        return {"paths": [asdict(row) for row in rows], "peak_bytes": None}
    rows = communications_of(call, prepared.phases, call.plan, place, call.model)
    others = [call.optimizer] if call.optimizer is not None else []
    peak = tracked_peak_bytes(lambda: call(_nothing), call.model, *others)
    return {"paths": [asdict(row) for row in rows], "peak_bytes": peak}


def _nothing() -> None:
    """No phase is timed here."""


def main() -> None:
    """Print the signature of every job on stdin, or why it has none."""
    torch.set_num_threads(1)
    jobs = [Job.from_record(record) for record in json.load(sys.stdin)]
    # What a scenario prints or torch warns of is not the answer.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = answers_of(_answer, jobs, len(os.sched_getaffinity(0)))
    print(json.dumps(answers))


def _answer(job: Job) -> dict[str, Any]:
    cases, left_out = signature(job)
    return {"torch": torch.__version__, "cases": cases, "left_out": left_out}


if __name__ == "__main__":
    main()
