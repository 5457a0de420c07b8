"""`python -m distbench.worker.children.plan_problems`: whether plans can work, on a fake process group in one process.

For each job it answers with one entry a variant.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distbench.spec import Job, Scenario, UserError
from distbench.spec.job import Variant
from distbench.spec.mesh import mesh_size
from distbench.spec.pipeline_plan import SCHEDULES
from distbench.spec.plan_knobs import mesh_of
from distbench.worker.cases.step import NEEDS_A_BATCH, step_case
from distbench.worker.children.answer import answer_jobs, rank_of
from distbench.worker.children.fake_step import rehearse
from distbench.worker.models.blueprint import blueprint
from distbench.worker.plans.batch import batch_of
from distbench.worker.plans.plan_check import problems
from distbench.worker.rank.dtypes import dtype_name
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.session import declared, load_scenario, variant_label
from distbench.worker.torch_internals import Skipped, fake_ranks, reduction_dtype

# Of this process, for looking for meshes that work, all variants of a scenario together.
SEARCH_S = 15.0
MANY = 16  # ranks along a mesh dim of which every size is tried


def answers(job: Job) -> Iterator[dict[str, Any]]:
    """For each variant: `label` and `problems`. Where there are some, `works`: a mesh that has been tried and has none,
    or null; where there are none why it is skipped, or `num_parameters`, `parameter_bytes` of a rank, `advice`:
    sentences, and `not_tried`: why no step was tried, or null."""
    find = partial(_mesh_that_works, job, time.process_time() + SEARCH_S, [])
    function = load_scenario(Path(job.file), job.scenario)
    for variant in job.variants:
        yield {"label": variant_label(job, variant), **_of_variant(function, variant, job, find)}


def _of_variant(
    function: Callable[..., Scenario], variant: Variant, job: Job, find: Callable[[Scenario], Mapping[str, int] | None]
) -> dict[str, Any]:
    """What raises in the scenario's own code is one more problem: it must not hide those of the others."""
    try:
        scenario = declared(function, variant)
        answer = answer_on(mesh_of(variant, job.mesh), scenario, job)
        step_fails = answer.pop("step_fails", False)
        if found := answer["problems"]:
            may_fit = step_fails or all("mesh dim" in problem for problem in found)
            answer["works"] = find(scenario) if may_fit else None
        return answer
    except UserError as error:
        return {"problems": [str(error)]}
    except (Exception, SystemExit) as error:
        return {"problems": [f"the scenario raises {one_line(error)}"]}


def answer_on(shape: Mapping[str, int], scenario: Scenario, job: Job) -> dict[str, Any]:
    """What `answers` says of a variant, without a mesh that works, on a mesh of that shape: rank 0's answer, and what
    keeps other ranks from a step."""
    with fake_ranks(shape) as mesh:
        answer = answer_of(scenario, rank_of(mesh, job, job.device))
    if "parameter_bytes" not in answer:
        return answer
    tried = _other_ranks(scenario, shape)
    for rank in [*tried, *(rank for rank in _ranks_of_a_function(scenario, shape) if rank not in tried)]:
        with fake_ranks(shape, rank=rank) as mesh:
            if found := rehearse(scenario, rank_of(mesh, job, job.device), with_step=rank in tried).problems:
                return {"problems": [f"on rank {rank}: {problem}" for problem in found], "step_fails": True}
    return answer


def _other_ranks(scenario: Scenario, shape: Mapping[str, int]) -> list[int]:
    """Ranks whose step may fail where rank 0's does not.

    Of inference the last one: a token that cannot be split may be all rank 0's. Of a pipeline the first one that has
    the last stage and with it the loss, where that is not rank 0.
    """
    if scenario.inference:
        return [mesh_size(shape) - 1]
    pipeline = scenario.step_plan.pipeline
    if pipeline is None or SCHEDULES[pipeline.schedule].is_v or shape[pipeline.mesh_dim] == 1:
        return []
    names = list(shape)
    stride = math.prod(shape[name] for name in names[names.index(pipeline.mesh_dim) + 1 :])
    return [(shape[pipeline.mesh_dim] - 1) * stride]


def _ranks_of_a_function(scenario: Scenario, shape: Mapping[str, int]) -> list[int]:
    """Ranks on which a function of the user's own is called, as it may raise on one only; of many the first ones, rank
    0's neighbours along each mesh dim, and the last one."""
    if not callable(scenario.step_plan.tp):
        return []
    size = mesh_size(shape)
    strides = itertools.accumulate(reversed([*shape.values()]), int.__mul__)
    return sorted({*range(1, min(size, MANY)), size - 1, *strides} & set(range(1, size)))


def answer_of(scenario: Scenario, context: RankContext) -> dict[str, Any]:
    """What `answers` says of a variant, without a mesh that works; `step_fails` where a step did not run."""
    if scenario.build_model is None:
        return {"problems": [], "skipped": "it declares no model, so there is no plan to check"}
    if scenario.make_batch is None:
        return {"problems": [NEEDS_A_BATCH]}
    built, batch = blueprint(scenario.build_model, context.seed, with_values=False), batch_of(scenario)
    num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
    if found := problems(built.model, batch, scenario.step_plan, context):
        return {"problems": found}
    step_case(scenario, "the scenario", built, batch)
    try:
        tried = rehearse(scenario, context)
    except Skipped as reason:
        return {"problems": [], "skipped": str(reason)}
    if tried.problems:
        return {"problems": list(tried.problems), "step_fails": True}
    sizes = {"num_parameters": num_parameters, "parameter_bytes": tried.parameter_bytes}
    return {"problems": [], "not_tried": tried.why_not, "advice": _advice(scenario, built.model), **sizes}


def _advice(scenario: Scenario, model: nn.Module) -> list[str]:
    """What works, and may cost more than one expects."""
    given = getattr(scenario.step_plan.fsdp, "mixed_precision", None)
    policies = [*given.values()] if isinstance(given, Mapping) else [given]
    held = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    policy = next(
        (one for one in policies if one and not one.reduce_dtype and one.param_dtype not in (None, held)), None
    )
    if policy is None:
        return []
    own, gathered = dtype_name(held), dtype_name(policy.param_dtype)
    return [
        f"mixed_precision sets no reduce_dtype: torch {torch.__version__} reduces gradients in "
        f"{dtype_name(reduction_dtype(policy, held))} (torch 2.15 and newer in {own}, older ones in {gathered}); set "
        f"reduce_dtype for the same bytes on every version"
    ]


def _mesh_that_works(
    job: Job, until: float, worked: list[dict[str, int]], scenario: Scenario
) -> Mapping[str, int] | None:
    """The mesh of the most ranks, no mesh dim larger than it is, that passes this check; None where time runs out.

    Those that worked for other variants are tried first.
    """
    for other in [*worked, *smaller_meshes(job.mesh)]:
        if time.process_time() > until:
            break
        if not answer_on(other, scenario, job)["problems"]:
            worked[:] = [other]
            return other
    return None


def smaller_meshes(given: Mapping[str, int]) -> list[dict[str, int]]:
    """Meshes whose mesh dims are no larger, the most ranks first; of long mesh dims only sizes that may well do."""
    sizes = [
        [size for size in range(1, most + 1) if most <= MANY or most % size == 0 or size & (size - 1) == 0]
        for most in given.values()
    ]
    meshes = [dict(zip(given, chosen, strict=True)) for chosen in itertools.product(*sizes)]
    return sorted((mesh for mesh in meshes if mesh != given), key=mesh_size, reverse=True)


if __name__ == "__main__":
    answer_jobs(lambda jobs: [[*answers(job)] for job in jobs])
