"""`python -m distbench.worker.children.case_ids`: the cases of some jobs, on a fake process group in one process.

For each job it answers {"ids": [case id, ...]} in their order, as the job chooses them, or {"user_error": sentence}.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from distbench.spec import Job, UserError
from distbench.spec.case_choice import MAX_NAMED, none_chosen
from distbench.worker.children.answer import answer_jobs, rank_of
from distbench.worker.children.fork_pool import answers_of
from distbench.worker.rank.rank_context import profile_of
from distbench.worker.session import all_cases, chosen_cases, load_scenario
from distbench.worker.torch_internals import fake_ranks


def case_ids(job: Job) -> dict[str, Any]:
    """The ids of a job's cases. `UserError` where the scenario is declared wrongly."""
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        found = all_cases(job, function, replace(rank_of(mesh, job), profile=profile_of(job)))
    ids = [case_spec.case.id for case_spec in chosen_cases(job, found)]
    if not ids:
        raise UserError(none_chosen(job.chosen, len(found), [one.case.id for one in found[:MAX_NAMED]]))
    return {"ids": ids}


if __name__ == "__main__":
    answer_jobs(lambda jobs: answers_of(case_ids, jobs, len(os.sched_getaffinity(0))))
