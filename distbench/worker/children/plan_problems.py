"""`python -m distbench.worker.children.plan_problems`: whether plans can work, on a fake process group in one process.

For each job it answers with one entry a variant.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distbench.spec import Job, Scenario, UserError, format_mesh
from distbench.spec.job import Variant
from distbench.worker.children.answer import answer_jobs, rank_0_of
from distbench.worker.children.fake_step import rehearse
from distbench.worker.plans.materialise import blueprint
from distbench.worker.plans.plan_check import problems
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.session import load_scenario, variant_label
from distbench.worker.torch_internals import Skipped, fake_ranks


def answers(job: Job) -> Iterator[dict[str, Any]]:
    """For each variant: `label`, `problems`, and where there are none why it is skipped, or `num_parameters`,
    `parameter_bytes` of a rank, and `not_tried`: why no step was tried, or null."""
    function = load_scenario(Path(job.file), job.scenario)
    for variant in job.variants:
        yield {"label": variant_label(job, variant), **_of_variant(function, variant, job)}


def _of_variant(function: Callable[..., Scenario], variant: Variant, job: Job) -> dict[str, Any]:
    """What raises in the scenario's own code is one more problem: it must not hide those of the others."""
    try:
        scenario = function(**variant)
        if not isinstance(scenario, Scenario):
            return {"problems": [f"it returns {type(scenario).__name__}, it must return a Scenario"]}
        with fake_ranks(job.mesh) as mesh:
            answer = _answer(scenario, rank_0_of(mesh, job, job.device))
        if answer.pop("step_fails", False) and (other := _mesh_that_works(scenario, job)):
            answer["problems"] = [f"{problem}; --mesh {format_mesh(other)} works" for problem in answer["problems"]]
        return answer
    except UserError as error:
        return {"problems": [str(error)]}
    except (Exception, SystemExit) as error:
        return {"problems": [f"the scenario raises {one_line(error)}"]}


def _answer(scenario: Scenario, context: RankContext) -> dict[str, Any]:
    if scenario.build_model is None:
        return {"problems": [], "skipped": "it declares no model, so there is no plan to check"}
    if scenario.make_batch is None or scenario.loss is None:
        return {"problems": ["a scenario with build_model needs make_batch and loss as well"]}
    model = blueprint(scenario.build_model, context.seed).model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if found := problems(model, scenario.make_batch()[0], scenario.plan, context):
        return {"problems": found}
    try:
        tried = rehearse(scenario, context)
    except Skipped as reason:
        return {"problems": [], "skipped": str(reason)}
    if tried.problems:
        return {"problems": list(tried.problems), "step_fails": True}
    sizes = {"num_parameters": num_parameters, "parameter_bytes": tried.parameter_bytes}
    return {"problems": [], "not_tried": tried.why_not, **sizes}


def _mesh_that_works(scenario: Scenario, job: Job) -> dict[str, int] | None:
    """The mesh with the most tensor parallel ranks, fewer than there are, on which the step runs."""
    for name in reversed([name for name in scenario.plan.tp_dims if job.mesh.get(name, 1) > 1]):
        for size in range(job.mesh[name] - 1, 0, -1):
            if job.mesh[name] % size == 0:
                with fake_ranks({**job.mesh, name: size}) as mesh:
                    if not _answer(scenario, rank_0_of(mesh, job, job.device))["problems"]:
                        return {**job.mesh, name: size}
    return None


if __name__ == "__main__":
    answer_jobs(lambda jobs: [[*answers(job)] for job in jobs])
