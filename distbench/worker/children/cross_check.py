"""`python -m distbench.worker.children.cross_check`: do two methods see the same collectives, on a fake process group?

For each job it answers with one entry a step: {"case_id": id, "num_rows": collectives, "num_owned": those with a known
owner, "counts": {"mesh dim and kind": number}, "differences": sentences}, or {"case_id": id} and "skipped" or "failed"
with a reason.
"""

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distbench.spec import Job, UserError
from distbench.worker.cases.step import step_cases
from distbench.worker.children.answer import answer_jobs, rank_of
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.opened_case import CaseSpec
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.session import declared, load_scenario, variant_label
from distbench.worker.torch_internals import Forwarding, Skipped, fake_ranks
from distbench.worker.tracing.trace import StepTrace


def answers(jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """What the two methods see of each step of each job; nothing for a scenario without a model."""
    found: dict[int, list[dict[str, Any]]] = {}
    meshes = [tuple(job.mesh.items()) for job in jobs]
    # One mesh object for all jobs on equal meshes: they would share DTensor's caches, and with them dead groups.
    for shape in dict.fromkeys(meshes):
        with fake_ranks(dict(shape)) as mesh:
            context, forwarding = rank_of(mesh, jobs[0]), Forwarding(mesh)
            for index in [index for index, other in enumerate(meshes) if other == shape]:
                found[index] = [*_of_job(jobs[index], context, forwarding)]
    return [found[index] for index in range(len(jobs))]


def _of_job(job: Job, context: RankContext, forwarding: Forwarding) -> Iterator[dict[str, Any]]:
    try:
        function = load_scenario(Path(job.file), job.scenario)
        for variant in job.variants:
            for case_spec in step_cases(declared(function, variant), variant_label(job, variant), context):
                yield {"case_id": case_spec.case.id, **differences_of_step(case_spec, forwarding)}
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        yield {"case_id": job.scenario, "failed": one_line(error)}


def differences_of_step(case_spec: CaseSpec, forwarding: Forwarding) -> dict[str, Any]:
    """One step seen by two methods: `num_rows`, `num_owned`, `counts` and `differences`, or why it was skipped."""
    try:
        with case_spec.open() as opened_case:
            assert isinstance(opened_case.trace, StepTrace)
            _, [traced] = opened_case.trace.forwarded(forwarding, 1)
            dispatched = opened_case.trace.dispatched()
            forwarded = [row.what for row in traced.rows]
            found = opened_case.trace.differing(forwarded, dispatched)
    except Skipped as reason:
        return {"skipped": str(reason)}
    return {
        "num_rows": len(forwarded),
        "num_owned": sum(row.owner_known for row in forwarded),
        "counts": Counter(f"{row.mesh_dim} {row.kind}" for row in forwarded),
        "differences": found,
    }


if __name__ == "__main__":
    answer_jobs(answers)
