"""torch's own stages and schedule over the stages of one rank: what runs a step's forward and backward."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distbench.spec import ParallelPlan, UserError
from distbench.spec.pipeline_plan import SCHEDULES, PipelinePlan
from distbench.worker.pipelines.stage_modules import LocalStages, activations_of, check_split, stage_of
from distbench.worker.rank.device import synchronize
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import V_SCHEDULES, forget_step, require, vote_on_fake_group, with_values_again

Activations = tuple[torch.Tensor, ...]
# Of a stage: what occupies its rank. Collectives of FSDP and TP run inside of them.
OCCUPYING = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad")


class LocalStage(NamedTuple):
    """A stage of this rank: its module, and what it is given and returns, on the meta device."""

    module: nn.Module
    given: Activations
    returned: Activations


def local_stages(
    model: nn.Module, plan: ParallelPlan, context: RankContext, inputs: Activations
) -> dict[int, LocalStage]:
    """The stages of this rank by their index; `inputs` are a micro-batch's, on the meta device.

    Raises:
        UserError: the model cannot be split so.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    position, size = context.index((pipeline.mesh_dim,))
    num_stages = size * pipeline.stages_of_a_rank
    # Where tensors have no values, copies of what is on the meta device could not be given memory.
    with with_values_again():
        stages = [stage_of(model, pipeline, stage, num_stages) for stage in range(num_stages)]
        check_split(model, stages)
        inputs = tuple(torch.empty(one.shape, dtype=one.dtype, device="meta") for one in inputs)
        passed = [inputs, *(_passed_on(one, plan, context) for one in activations_of(stages, inputs)[1:])]
    return {
        stage: LocalStage(stages[stage], *passed[stage : stage + 2]) for stage in pipeline.stages_on(position, size)
    }


def _passed_on(activations: Activations, plan: ParallelPlan, context: RankContext) -> Activations:
    """What one rank passes on, of what one device would."""
    assert plan.pipeline is not None
    policy = plan.fsdp.mixed_precision if plan.fsdp is not None else None
    dtype = getattr(policy, "output_dtype", None) or getattr(policy, "param_dtype", None)
    found = []
    for one in activations:
        shape = list(one.shape)
        for mesh_dim, tensor_dim in plan.pipeline.activation_shards.items():
            shape[tensor_dim] //= context.size(mesh_dim)
        is_float = one.is_floating_point()
        own = torch.empty(shape, dtype=dtype if dtype is not None and is_float else one.dtype, device="meta")
        found.append(own.requires_grad_(is_float))
    return tuple(found)


def inputs_and_targets(batch: Any, has_loss: bool) -> tuple[Activations, torch.Tensor]:
    """A batch as a pipeline takes it: the first stage's arguments, and what the last one's loss is held against.

    Raises:
        UserError: it is no pair of tensors, or there is no loss of outputs and targets.
    """
    is_pair = has_loss and isinstance(batch, list | tuple) and len(batch) == 2
    inputs, targets = batch if is_pair else (None, None)
    inputs = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    if not (isinstance(targets, torch.Tensor) and all(isinstance(one, torch.Tensor) for one in inputs)):
        raise UserError(
            "a pipeline needs loss=(output, targets) -> scalar, which its last stage calls, and batches of (inputs, "
            "targets): targets a tensor, inputs a tensor or a tuple of them, which its first stage takes by position"
        )
    return inputs, targets


class StageWork(NamedTuple):
    """When this rank worked on a stage, seconds of the monotonic clock, and what it did."""

    begun_s: float
    ended_s: float
    what: str


class Pipeline:
    """A rank's stages under a schedule.

    Args:
        model: with memory; one module a stage.
        stages: what each is given and returns.
        loss: (output, targets) -> scalar, a mean.
    """

    def __init__(
        self,
        model: LocalStages,
        stages: Sequence[LocalStage],
        plan: ParallelPlan,
        context: RankContext,
        loss: Callable[[Any, Any], Any],
    ) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        assert plan.pipeline is not None
        self.plan: PipelinePlan = plan.pipeline
        self._context, self._loss = context, loss
        group = context.mesh.get_group(self.plan.mesh_dim)
        if SCHEDULES[self.plan.schedule].is_v and dist.get_backend(group) == "gloo":
            require(V_SCHEDULES)  # torch 2.11 sends on pairs of ranks that it has not connected
        num_stages = context.size(self.plan.mesh_dim) * self.plan.stages_of_a_rank
        self._stages = [
            PipelineStage(module, index, num_stages, context.device, one.given, one.returned, group=group)
            for index, module, one in zip(model.indices, model.stages, stages, strict=True)
        ]
        for stage, one in zip(self._stages, stages, strict=True):
            if not stage.is_last:
                _hold_to(stage, one.returned)
        schedule: Any = get_schedule_class(SCHEDULES[self.plan.schedule].torch_name)
        is_single = SCHEDULES[self.plan.schedule].stages_per_rank == 1
        stages_given = self._stages[0] if is_single else self._stages
        size, parts = context.size(self.plan.mesh_dim), plan.microbatches
        self.facts: dict[str, Any] = {
            "mesh_dim": self.plan.mesh_dim,
            "schedule": self.plan.schedule,
            "num_stages": num_stages,
            "microbatches": parts,
            "least_idle_share": self.plan.least_bubble(size, parts),
        }
        self._schedule = schedule(stages_given, n_microbatches=parts, loss_fn=self._loss_of)
        vote_on_fake_group(self._schedule, group, context.device)
        self._spans: list[StageWork] | None = None

    def run(self, batch: Any) -> torch.Tensor | None:
        """Forward and backward of a rank's part of the batch; its loss where this rank has the last stage, else None.

        Gradients are means over the micro-batches.
        """
        inputs, targets = inputs_and_targets(batch, True)
        losses: list[torch.Tensor] = []
        is_first = any(stage.is_first for stage in self._stages)
        is_last = any(stage.is_last for stage in self._stages)
        given = {"target": targets, "losses": losses} if is_last else {}
        try:
            self._schedule.step(*(inputs if is_first else ()), **given, return_outputs=False)
        except Exception as error:
            forget_step(self._schedule)
            # torch wraps what a stage raises in a sentence about its arguments.
            if error.__cause__ is not None and "failed to run" in str(error).lower():
                raise error.__cause__ from None
            raise
        return torch.stack([loss.detach() for loss in losses]).mean() if is_last else None

    def _loss_of(self, output: Any, targets: Any) -> Any:
        return self._timed(self._loss, "loss", output, targets)

    @contextlib.contextmanager
    def observed(self) -> Iterator[list[StageWork]]:
        """Note when this rank works on its stages; on accelerators the device is waited for at each end."""
        spans: list[StageWork] = []
        self._spans = spans
        for stage in self._stages:
            for name in OCCUPYING:
                plain = getattr(stage, name)
                setattr(stage, name, partial(self._timed, plain, f"{name} of stage {stage.stage_index}"))
        try:
            yield spans
        finally:
            self._spans = None
            for stage in self._stages:
                for name in OCCUPYING:
                    delattr(stage, name)

    def _timed(self, call: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> Any:
        if self._spans is None:
            return call(*args, **kwargs)
        synchronize(self._context.device)
        begun_s = time.monotonic()
        done = call(*args, **kwargs)
        synchronize(self._context.device)
        self._spans.append(StageWork(begun_s, time.monotonic(), what))
        return done


def _hold_to(stage: Any, promised: Activations) -> None:
    """Have a stage's first output compared with what its neighbour has memory for."""

    def compare(_: nn.Module, given: Any, output: Any) -> None:
        handle.remove()
        found = output if isinstance(output, list | tuple) else (output,)
        ours, theirs = ([(tuple(one.shape), one.dtype) for one in some] for some in (found, promised))
        if ours != theirs or any(hasattr(one, "placements") for one in found):
            kind = " as DTensors" if any(hasattr(one, "placements") for one in found) else ""
            raise UserError(
                f"stage {stage.stage_index} of the pipeline returns {_text(ours)}{kind}, the next one expects "
                f"{_text(theirs)}; return plain tensors, and say activation_shards where a rank has a part of them"
            )

    handle = stage.submod.register_forward_hook(compare)


def _text(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in tensors)
