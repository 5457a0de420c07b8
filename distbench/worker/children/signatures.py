"""`python -m distbench.worker.children.signatures`: what each case of some jobs communicates, on a fake process group.

For each job it answers {"torch": version, "cases": {case id: {"paths": [communication, ...], "peak_bytes": predicted or
null}}, "left_out": {case id: what it raises}}, or {"user_error": sentence}.
"""

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distbench.spec import Job, ParallelPlan, UserError
from distbench.worker.children.answer import answer_jobs, rank_of
from distbench.worker.children.fork_pool import answers_of
from distbench.worker.plans.training_step import TrainingStep
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.measure import no_stamp
from distbench.worker.rank.opened_case import OpenedCase
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.session import all_cases, load_scenario
from distbench.worker.torch_internals import Skipped, fake_ranks
from distbench.worker.tracing.attribution import communications_of
from distbench.worker.tracing.step_memory import predicted_peak_bytes


def signature(job: Job) -> dict[str, Any]:
    """What rank 0 communicates and holds in one call of each case, after one that sets things up; `UserError` where
    the plan is declared wrongly, or every case raises."""
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        context = rank_of(mesh, job)
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
        raise UserError(f"no case runs on a fake process group: {first} raises {reason}; see if distbench run runs it")
    return {"torch": torch.__version__, "cases": found, "left_out": left_out}


def _of_case(opened_case: OpenedCase, context: RankContext) -> dict[str, Any]:
    call = opened_case.call
    for _ in range(call.num_setup_steps if isinstance(call, TrainingStep) else 1):
        call(no_stamp)
    if isinstance(call, TrainingStep):
        rows = communications_of(call, call.phases, call.plan, context, call.model)
        peak = predicted_peak_bytes(call)
    else:
        rows, peak = communications_of(call, opened_case.phases, ParallelPlan(), context), None
    return {"paths": [asdict(row) for row in rows], "peak_bytes": peak}


if __name__ == "__main__":
    answer_jobs(lambda jobs: answers_of(signature, jobs, len(os.sched_getaffinity(0))))
