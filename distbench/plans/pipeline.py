"""A pipeline: the stages of a model, torch's schedule over the stages of one rank, and the idle time of the rank."""

import contextlib
import copy
import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distbench.plans.model import named_refusal
from distbench.ranks.context import RankContext
from distbench.ranks.device import synchronize
from distbench.spec import ParallelPlan, UserError
from distbench.spec.plan import SCHEDULES, PipelinePlan, layers_of_stages
from distbench.statistics.intervals import median
from distbench.torch_private import V_SCHEDULES, Skipped, forget_step, require, vote_on_fake_group, with_values_again

LAYERS = (nn.ModuleList, nn.ModuleDict)
PREFERRED = "layers"
Activations = tuple[torch.Tensor, ...]
# Methods of a stage that occupy its rank. Collectives of FSDP and TP run inside of them.
OCCUPYING = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad")
NUM_STEPS = 3
CONFIG = "torch.distributed.config"
PER_EDGE = "pipeline_per_edge_p2p"


class HandOn(nn.Module):
    """Placeholder for a module of another stage, which returns its first argument."""

    def forward(self, given: Any, *_: Any, **__: Any) -> Any:
        """Return the first argument."""
        return given


class LocalStages(nn.Module):
    """The stages of one rank as one module, with names of parameters, buffers and modules as in the whole model.

    `stages` maps stage index to a pruned copy of the model. `held_names` has the parameters' names in model order,
    before any change by wrappers.
    """

    def __init__(self, stages: dict[int, nn.Module], held_names: tuple[str, ...]) -> None:
        super().__init__()
        self.indices = tuple(stages)
        self.held_names = held_names
        self.stages = nn.ModuleList(stages.values())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield each stage's modules; this module and the stages themselves have the prefix as their name."""
        memo = set() if memo is None else memo
        yield prefix, self
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)


def _layers_name(model: nn.Module) -> str | None:
    """Return the name of the list of layers at which a model is split: "layers", else the longest list attribute."""
    lengths = {name: len(child) for name, child in model.named_children() if isinstance(child, LAYERS) and len(child)}
    return PREFERRED if PREFERRED in lengths else max(lengths, key=lambda name: lengths[name], default=None)


def num_layers(model: nn.Module) -> int:
    """Return the number of layers that can be split between stages; 0 if the model has no list of layers."""
    name = _layers_name(model)
    return 0 if name is None else len(list(model.get_submodule(name).children()))


def stage_of(model: nn.Module, plan: PipelinePlan, stage: int, num_stages: int) -> nn.Module:
    """Return a stage of an unchanged model on the meta device. Raise UserError if `split` returns no module."""
    copied = copy.deepcopy(model)
    if plan.split is None:
        return _pruned(copied, layers_of_stages(num_layers(model), num_stages, plan.first_layers), stage)
    stage_module = plan.split(copied, stage, num_stages)
    if not isinstance(stage_module, nn.Module):
        kind = type(stage_module).__name__
        raise UserError(f"PipelinePlan.split returns {kind} for stage {stage}; return an nn.Module")
    return stage_module


def _pruned(model: nn.Module, layers: list[range], stage: int) -> nn.Module:
    name_of_layers, is_before = _layers_name(model), True
    for name, child in list(model.named_children()):
        # Modules with buffers only, such as a rotary table, are part of every stage.
        is_shared = next(child.parameters(), None) is None and next(child.buffers(), None) is not None
        if name == name_of_layers:
            is_before = False
            for place, (layer, _) in enumerate(list(child.named_children())):
                if place not in layers[stage]:
                    setattr(child, layer, HandOn())
        elif stage != (0 if is_before else len(layers) - 1) and not is_shared:
            setattr(model, name, HandOn())
    return model


def check_split(model: nn.Module, stages: list[nn.Module]) -> None:
    """Check that the stages have each parameter of the model exactly once, under its name in the model.

    Raises:
        UserError: a parameter is in no stage, in several stages, or not in the model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    holders: dict[nn.Parameter, list[int]] = {parameter: [] for parameter in model.parameters()}
    for index, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            if name not in parameters:
                wrong = f"stage {index} has a parameter {name!r} that the model does not have"
                raise UserError(f"{wrong}; PipelinePlan.split must keep names")
            holders[parameters[name]].append(index)
    for name, parameter in model.named_parameters():
        if len(held_by := holders[parameter]) != 1:
            where = f"stages {', '.join(map(str, held_by))}" if held_by else "no stage"
            wrong = f"parameter {name!r} is in {where} of the pipeline instead of exactly one stage"
            raise UserError(f"{wrong}; give PipelinePlan(split=...), or a model without tied weights")


def activations_of(stages: list[nn.Module], inputs: Activations) -> list[Activations]:
    """Run all stages on the meta device; return each stage's inputs and the last stage's outputs.

    Raises:
        UserError: a stage does not run, or returns neither a tensor nor a tuple of tensors.
    """
    activations = [inputs]
    for index, stage in enumerate(stages):
        try:
            with torch.no_grad():
                output = stage(*activations[-1])
        except Exception as error:
            shapes = ", ".join(str(list(value.shape)) for value in activations[-1])
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            wrong = f"stage {index} of the pipeline fails for inputs {shapes} on the meta device ({first_line})"
            raise UserError(
                f"{wrong}; give PipelinePlan(split=...) whose stages accept the outputs of the previous stage"
            ) from error
        outputs = tuple(output) if isinstance(output, list | tuple) else (output,)
        if not all(isinstance(value, torch.Tensor) for value in outputs) and index < len(stages) - 1:
            kinds = ", ".join(type(value).__name__ for value in outputs)
            raise UserError(f"stage {index} of the pipeline returns {kinds}; return a tensor or a tuple of tensors")
        activations.append(outputs)
    return activations


class LocalStage(NamedTuple):
    """A stage of this rank: its module, and its inputs and outputs on the meta device."""

    module: nn.Module
    given: Activations
    returned: Activations


def local_stages(
    model: nn.Module, plan: ParallelPlan, context: RankContext, inputs: Activations
) -> dict[int, LocalStage]:
    """Return this rank's stages by index; `inputs` belong to a micro-batch. UserError if the model cannot be split."""
    pipeline = plan.pipeline
    assert pipeline is not None
    position, size = context.index((pipeline.mesh_dim,))
    num_stages = size * pipeline.stages_of_a_rank
    # Tensors without values must remain on the meta device: copies could not be given memory.
    with with_values_again():
        stages = [stage_of(model, pipeline, stage, num_stages) for stage in range(num_stages)]
        check_split(model, stages)
        inputs = tuple(torch.empty(value.shape, dtype=value.dtype, device="meta") for value in inputs)
        passed = [inputs, *(_passed_on(each, plan, context) for each in activations_of(stages, inputs)[1:])]
    return {
        stage: LocalStage(stages[stage], *passed[stage : stage + 2]) for stage in pipeline.stages_on(position, size)
    }


def _passed_on(activations: Activations, plan: ParallelPlan, context: RankContext) -> Activations:
    """Return a rank's part of the activations that one device would pass on."""
    assert plan.pipeline is not None
    policy = plan.fsdp.mixed_precision if plan.fsdp is not None else None
    dtype = getattr(policy, "output_dtype", None) or getattr(policy, "param_dtype", None)
    passed_on = []
    for activation in activations:
        shape = list(activation.shape)
        for mesh_dim, tensor_dim in plan.pipeline.activation_shards.items():
            shape[tensor_dim] //= context.size(mesh_dim)
        is_float = activation.is_floating_point()
        tensor = torch.empty(shape, dtype=dtype if dtype is not None and is_float else activation.dtype, device="meta")
        passed_on.append(tensor.requires_grad_(is_float))
    return tuple(passed_on)


def inputs_and_targets(batch: Any, has_loss: bool) -> tuple[Activations, torch.Tensor]:
    """Split a batch into the first stage's arguments and the targets of the last stage's loss.

    Raises:
        UserError: the batch is not a pair of tensors, or there is no loss of outputs and targets.
    """
    is_pair = has_loss and isinstance(batch, list | tuple) and len(batch) == 2
    inputs, targets = batch if is_pair else (None, None)
    inputs = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    if not (isinstance(targets, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in inputs)):
        raise UserError(
            "a pipeline needs loss=(output, targets) -> scalar for its last stage, and batches of (inputs, targets) "
            "in which targets is a tensor, and inputs is a tensor or a tuple of positional arguments for the first "
            "stage"
        )
    return inputs, targets


def schedule_parameters(schedule: str) -> list[str]:
    """Return the parameters of a schedule's class that `PipelinePlan.configure` may set."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind: Any = get_schedule_class(SCHEDULES[schedule].torch_name)
    fields = ("stage", "stages", "n_microbatches", "loss_fn", "args", "kwargs")
    return [name for name in inspect.signature(kind).parameters if name not in fields]


def is_in_config(name: str) -> bool:
    """Return whether an option of pipelines belongs to `torch.distributed.config` in this version of torch."""
    with contextlib.suppress(ImportError):
        return name.startswith("pipeline_") and hasattr(importlib.import_module(CONFIG), name)
    return False


class StageWork(NamedTuple):
    """Interval in which this rank worked on a stage, in seconds of the monotonic clock, and the activity."""

    begun_s: float
    ended_s: float
    what: str


class Pipeline:
    """A rank's stages, with memory, under a schedule; `loss` (output, targets) -> scalar is a mean."""

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
        self._context = context
        group = context.mesh.get_group(self.plan.mesh_dim)
        kind, size = SCHEDULES[self.plan.schedule], context.size(self.plan.mesh_dim)
        if kind.is_v and dist.get_backend(group) == "gloo":
            require(V_SCHEDULES)  # torch 2.11 sends between unconnected ranks
        for name in self.plan.configure:
            require(name)
        options = dict(self.plan.configure)
        self._config = {name: options.pop(name) for name in self.plan.configure if is_in_config(name)}
        if self._config.get(PER_EDGE) and dist.get_backend(group) == "gloo":
            raise Skipped(f"{PER_EDGE} needs a backend that splits process groups, such as nccl; this is gloo")
        num_stages = size * self.plan.stages_of_a_rank
        with self._configured():  # a stage reads the configuration when it is built
            self._stages = [
                PipelineStage(module, index, num_stages, context.device, stage.given, stage.returned, group=group)
                for index, module, stage in zip(model.indices, model.stages, stages, strict=True)
            ]
        for stage, local_stage in zip(self._stages, stages, strict=True):
            if not stage.is_last:
                _hold_to(stage, local_stage.returned)
        schedule: Any = get_schedule_class(kind.torch_name)
        stages_given = self._stages[0] if kind.stages_per_rank == 1 else self._stages
        parts = plan.microbatches
        self.facts: dict[str, Any] = {
            "mesh_dim": self.plan.mesh_dim,
            "schedule": self.plan.schedule,
            "num_stages": num_stages,
            "microbatches": parts,
            "least_idle_share": self.plan.least_bubble(size, parts),
        }
        with named_refusal(f"PipelinePlan.schedule {self.plan.schedule!r} with microbatches={parts}"):
            timed_loss = partial(self._timed, loss, "loss")
            with self._configured():
                self._schedule = schedule(stages_given, n_microbatches=parts, loss_fn=timed_loss, **options)
        vote_on_fake_group(self._schedule, group, context.device)
        self._spans: list[StageWork] | None = None

    def _configured(self) -> contextlib.AbstractContextManager[Any]:
        if not self._config:
            return contextlib.nullcontext()
        return importlib.import_module(CONFIG).patch(**self._config)  # type: ignore[no-any-return]

    def run(self, batch: Any) -> torch.Tensor | None:
        """Run forward and backward on a rank's part of the batch; return the loss on the last stage's rank, else None.

        Gradients are means over the micro-batches.
        """
        inputs, targets = inputs_and_targets(batch, True)
        losses: list[torch.Tensor] = []
        is_last = any(stage.is_last for stage in self._stages)
        arguments = inputs if any(stage.is_first for stage in self._stages) else ()
        kwargs = {"target": targets, "losses": losses} if is_last else {}
        try:
            with self._configured():
                self._schedule.step(*arguments, **kwargs, return_outputs=False)
        except Exception as error:
            forget_step(self._schedule)
            # torch wraps errors of a stage in a sentence about its arguments.
            if error.__cause__ is not None and "failed to run" in str(error).lower():
                raise error.__cause__ from None
            raise
        return torch.stack([loss.detach() for loss in losses]).mean() if is_last else None

    @contextlib.contextmanager
    def observed(self) -> Iterator[list[StageWork]]:
        """Record when this rank works on its stages; on accelerators each end waits for the device."""
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
    """Compare a stage's first output with the shape that the next stage has memory for."""

    def compare(_: nn.Module, args: Any, output: Any) -> None:
        handle.remove()
        outputs = output if isinstance(output, list | tuple) else (output,)
        ours, theirs = _text(outputs), _text(promised)
        is_dtensor = any(hasattr(tensor, "placements") for tensor in outputs)
        if ours != theirs or is_dtensor:
            raise UserError(
                f"stage {stage.stage_index} of the pipeline returns {ours}{' as DTensors' if is_dtensor else ''}, but "
                f"the next stage expects {theirs}; return plain tensors, and set activation_shards if each rank has a "
                "part of a tensor"
            )

    handle = stage.submod.register_forward_hook(compare)


def _text(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def idle_counters(pipeline: Pipeline, run: Callable[[], object], context: RankContext) -> dict[str, Any]:
    """Return a step row's counters of idle time, from NUM_STEPS untimed steps; all ranks must call this together.

    `idle_shares`: per rank, the share of forward and backward without forward, loss, backward or gradient reduction of
    a stage, the median over steps. Ranks start together; forward and backward end with the slowest rank. `idle_share`:
    the mean of `idle_shares`. `least_idle_share`: the value for stages of equal duration (`PipelinePlan.least_bubble`),
    None for schedules without this figure.
    """
    step_times: list[tuple[float, float]] = []
    for _ in range(NUM_STEPS):
        with pipeline.observed() as working:
            dist.barrier(context.control)
            begun_s = time.monotonic()
            run()
            length_s = time.monotonic() - begun_s
        # The time of the loss is not part of another span, and other spans do not nest.
        step_times.append((length_s, sum(span.ended_s - span.begun_s for span in working)))
    of_ranks = context.gather(step_times)
    longest_s = [max(length_s for length_s, _ in of_step) for of_step in zip(*of_ranks, strict=True)]
    shares = [
        median([max(1 - busy_s / whole_s, 0.0) for (_, busy_s), whole_s in zip(rank_times, longest_s, strict=True)])
        for rank_times in of_ranks
    ]
    return {
        "idle_shares": shares,
        "idle_share": sum(shares) / len(shares),
        "least_idle_share": pipeline.facts["least_idle_share"],
    }
