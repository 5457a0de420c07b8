"""What is wrong with the pipeline of a plan, found before anything is measured."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from distbench.spec import ParallelPlan, UserError
from distbench.spec.pipeline_plan import SCHEDULES, PipelinePlan
from distbench.spec.printable import count_text
from distbench.worker.pipelines.stage_modules import check_split, num_layers, stage_of


def pipeline_problems(model: nn.Module, plan: ParallelPlan, context: Any) -> Iterator[str]:
    """One sentence for each problem of the plan's pipeline, if it has one; `context` is a RankContext."""
    pipeline = plan.pipeline
    if pipeline is None:
        return
    if pipeline.schedule not in SCHEDULES:
        yield f"pipeline schedule {pipeline.schedule!r} is unknown; use {', '.join(SCHEDULES)}"
        return
    if pipeline.mesh_dim not in context.mesh_dims:
        yield f"a pipeline needs mesh dim {pipeline.mesh_dim!r}, the mesh has {', '.join(context.mesh_dims)}"
        return
    size = context.size(pipeline.mesh_dim)
    found = [*_parts_that_do_not_fit(plan), *_stages(pipeline, size), *_microbatches(plan, pipeline, size)]
    yield from found
    for mesh_dim in pipeline.activation_shards:
        if mesh_dim not in (*context.mesh_dims, *plan.tp_dims):
            yield f"activation_shards names mesh dim {mesh_dim!r}, the mesh has {', '.join(context.mesh_dims)}"
    if not found:
        yield from _split(model, pipeline, size)


def _parts_that_do_not_fit(plan: ParallelPlan) -> Iterator[str]:
    pipeline = plan.pipeline
    assert pipeline is not None
    parts = {
        "ddp": (plan.ddp, "use FsdpPlan, whose gradients torch's stages reduce once a step"),
        "cp": (plan.cp, "leave one of them out"),
        "ep": (plan.ep, "leave one of them out"),
        "loss_parallel": (plan.loss_parallel, "have the last stage return whole logits"),
        "state_dict": (plan.state_dict, "leave it out"),
        "FsdpPlan.whole": (plan.fsdp is not None and plan.fsdp.whole, "leave it out"),
        "FsdpPlan.offload": (plan.fsdp is not None and plan.fsdp.offload, "leave it out"),
    }
    for name, (given, instead) in parts.items():
        if given:
            yield f"a pipeline does not go together with {name} here; {instead}"
    # torch's stage_backward_input looks for weights among module.parameters(), which are not those that forward used
    # once FSDP2 has freed them.
    splits = SCHEDULES[pipeline.schedule].splits_backward
    if plan.fsdp is not None and splits and plan.fsdp.reshard_after_forward is not False:
        less = f"schedule {pipeline.schedule} has backward in parts, which loses gradients of what FSDP2 frees"
        yield f"{less} after forward; use FsdpPlan(reshard_after_forward=False), 1f1b or interleaved_1f1b"
    if plan.compile is not None and splits:
        yield f"torch does not compile stages of schedule {pipeline.schedule}, whose backward is in parts; use 1f1b"


def _stages(pipeline: PipelinePlan, size: int) -> Iterator[str]:
    schedule, count = SCHEDULES[pipeline.schedule], pipeline.stages_of_a_rank
    if count < 1 or (schedule.is_fixed and count != schedule.stages_per_rank):
        must = count_text(schedule.stages_per_rank, "stage") if schedule.is_fixed else "1 stage or more"
        yield f"schedule {pipeline.schedule} has {must} a rank, not {count}; leave stages_per_rank out"
    wanted = size * count - 1
    if pipeline.first_layers and (
        len(pipeline.first_layers) != wanted or list(pipeline.first_layers) != sorted({*pipeline.first_layers, 0} - {0})
    ):
        given = list(pipeline.first_layers)
        yield f"first_layers={given} must be {wanted} ascending layers, where stages 1 to {wanted} begin"


def _microbatches(plan: ParallelPlan, pipeline: PipelinePlan, size: int) -> Iterator[str]:
    count, name = plan.microbatches, pipeline.schedule
    num_stages = size * pipeline.stages_of_a_rank
    least = {"1f1b": num_stages, "dualpipev": num_stages}.get(name, 1)
    if count < least:
        yield (
            f"schedule {name} of {count_text(num_stages, 'stage')} needs "
            f"{count_text(least, 'micro-batch', 'micro-batches')} or more, not {count}"
        )
    elif name in ("interleaved_1f1b", "interleaved_zero_bubble") and count % (rounds := max(1, count // size)):
        fit = count // rounds * rounds
        yield (
            f"schedule {name} over {count_text(size, 'rank')} takes micro-batches in {rounds} even "
            f"rounds; use {fit}, not {count}"
        )


def _split(model: nn.Module, pipeline: PipelinePlan, size: int) -> Iterator[str]:
    num_stages = size * pipeline.stages_of_a_rank
    if pipeline.split is None:
        found = num_layers(model)
        if not found:
            yield "a pipeline splits a ModuleList or ModuleDict of the model, it has none; give PipelinePlan(split=...)"
            return
        last = max(pipeline.first_layers, default=0)
        if found < num_stages or last >= found:
            more = f", stage {num_stages - 1} begins with layer {last}" if last >= found else ""
            yield (
                f"{count_text(found, 'layer')} cannot be split into "
                f"{count_text(num_stages, 'stage')}{more}; use more layers, or fewer stages"
            )
            return
    try:
        check_split(model, [stage_of(model, pipeline, stage, num_stages) for stage in range(num_stages)])
    except UserError as error:
        yield str(error)
