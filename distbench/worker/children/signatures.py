"""`python -m distbench.worker.children.signatures`: what each case of some jobs communicates, on a fake process group.

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
from distbench.worker.children.fork_pool import answers_of
from distbench.worker.plans.training_step import TrainingStep
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.opened_case import OpenedCase
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.session import all_cases, load_scenario
from distbench.worker.torch_internals import Skipped, fake_ranks, tracked_peak_bytes
from distbench.worker.tracing.attribution import communications_of


def signature(job: Job) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Case id to what rank 0 communicates and holds in one call of it, and to what it raises where it cannot run.

    The call before has set things up.

    Raises:
        UserError: the scenario or its plan is declared wrongly, or every case raises.
    """
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        assert dist.group.WORLD is not None
        context = RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, job.settings.seed)
        found: dict[str, dict[str, Any]] = {}
        left_out: dict[str, str] = {}
        for case_spec in all_cases(job, function, context):
            try:
                # A case with nothing to measure here communicates nothing either.
                with contextlib.suppress(Skipped), case_spec.open() as opened_case:
                    found[case_spec.case.id] = _of_case(opened_case, context)
            except UserError:
                raise
            except Exception as error:
                left_out[case_spec.case.id] = one_line(error)
    if left_out and not found:
        first, reason = next(iter(left_out.items()))
        raise UserError(
            f"no case runs on ranks that do not exist: {first} raises {reason}; see if distbench run runs it"
        )
    return found, left_out


def _of_case(opened_case: OpenedCase, context: RankContext) -> dict[str, Any]:
    call = opened_case.call
    call(_nothing)
    if not isinstance(call, TrainingStep):
        rows = communications_of(call, opened_case.phases, ParallelPlan(), context)
        return {"paths": [asdict(row) for row in rows], "peak_bytes": None}
    rows = communications_of(call, opened_case.phases, call.plan, context, call.model)
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
