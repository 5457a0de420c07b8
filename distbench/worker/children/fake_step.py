"""One step of a plan on a fake process group, on shapes alone: what only shows when the model runs, and where."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from distbench.spec import DdpPlan, ParallelPlan, Scenario, UserError
from distbench.worker.cases.reference import model_on_device
from distbench.worker.cases.step import parameter_bytes
from distbench.worker.inference import step_of
from distbench.worker.models.blueprint import blueprint, unregistered
from distbench.worker.models.likely_causes import of_forward
from distbench.worker.models.trees import tensors_of
from distbench.worker.plans.batch import loss_of
from distbench.worker.plans.checkpoint_compile import require_fusable
from distbench.worker.plans.materialise import place_attributes
from distbench.worker.plans.patterns import matching_modules, styles_by_module
from distbench.worker.plans.training_step import TrainingStep
from distbench.worker.rank.dtypes import dtype_name, shape_text
from distbench.worker.rank.failure import one_line_and_place, place_of
from distbench.worker.rank.rank_context import BATCH_DIMS, RankContext
from distbench.worker.torch_internals import NeedsValues, ShapesOnly, Skipped, Unsupported

# A model of no more parameters that fails on shapes alone is run again with values: it may need them.
MAX_REPEATED = 20_000_000
# One of no more, in parameters and in what its batch holds, is run with values whatever shapes tell.
SMALL = 2_000_000
# What an index says that was to come from another rank; memory that FSDP2 has freed is out of bounds on all of them.
NO_INDEX = re.compile(r"IndexError|(?<!selected index k )out of (range|bounds)(?! for storage)")
# Parts of a batch whose gradients are held against each other.
MOST_PARTS = 8
TOO_LARGE = "and the model is too large to be tried with values"


@dataclass(frozen=True)
class Rehearsal:
    """What came of trying a step.

    Args:
        problems: what keeps the plan from being applied, or the step from running.
        why_not: what kept forward and backward from being tried; None where they were, or the plan was refused.
        parameter_bytes: of the parameters that rank 0 holds.
    """

    problems: tuple[str, ...] = ()
    why_not: str | None = None
    parameter_bytes: int = 0


def rehearse(scenario: Scenario, context: RankContext, with_step: bool = True) -> Rehearsal:
    """Apply the plan, which has been checked against the mesh, then run forward, loss and backward as this rank would.

    `Skipped` where a part of the plan has nothing to do on this machine.

    Args:
        with_step: False applies the plan alone.
    """
    shapes, missing = None, ""
    try:
        shapes = ShapesOnly()
    except Unsupported as reason:
        missing = str(reason)
    assert scenario.build_model is not None

    def without_memory(model: nn.Module, context: RankContext, built: Any, *_: object) -> None:
        if shapes is not None:
            with shapes.on():
                model.to_empty(device=context.device)
                place_attributes(model, built, context.device, values=False)

    built = blueprint(scenario.build_model, context.seed, with_values=False)
    num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
    if scenario.plan.ddp is not None:
        require_fusable(scenario.plan.ddp, context.device)
    try:
        # DDP's buckets need values, and nothing of a model's shapes can be wrong for them.
        plain = replace(scenario, plan=replace(scenario.plan, ddp=None))
        step = step_of(plain, context, built, without_memory)
    except Skipped:
        raise
    except UserError as error:
        return Rehearsal((str(error),))
    except Exception as error:
        # What plan_check does not know of, torch says when the plan is applied.
        return Rehearsal((f"torch refuses the plan: {one_line_and_place(error)}",))
    if shapes is None or not with_step:
        return Rehearsal((), missing, parameter_bytes(step.model))
    if step.has_buckets and num_parameters > MAX_REPEATED:
        return Rehearsal((), f"DDP's buckets need values, {TOO_LARGE}", parameter_bytes(step.model))
    problems, why_not = _tried(step, shapes.on, scenario.plan.ddp, scenario.call)
    if problems or why_not:
        if num_parameters <= MAX_REPEATED:
            problems, why_not = _tried_with_values(plain, context, scenario.plan.ddp)
        else:
            problems = tuple(f"{problem} (tried on shapes alone)" for problem in problems)
    elif _is_small(step, num_parameters):
        problems, why_not = _tried_with_values(plain, context, scenario.plan.ddp)
        # What ranks should have received is not there to be an index.
        problems = tuple(problem for problem in problems if not NO_INDEX.search(problem))
    return Rehearsal(problems, why_not, parameter_bytes(step.model))


def _is_small(step: TrainingStep, num_parameters: int) -> bool:
    """Whether a step on this machine's CPU takes no time: kernels refuse what shapes do not tell (dtypes, say)."""
    numel = sum(tensor.numel() for _, tensor in tensors_of(step.batch.tree))
    is_here = step.microbatches and all(one.device.type == "cpu" for _, one in tensors_of(step.microbatches[0]))
    return bool(is_here) and num_parameters <= min(MAX_REPEATED, SMALL) and numel <= SMALL


def _tried_with_values(
    scenario: Scenario, context: RankContext, ddp: DdpPlan | None
) -> tuple[tuple[str, ...], str | None]:
    try:
        step = step_of(scenario, context)
    except UserError as error:
        return (str(error),), None
    problems, why_not = _tried(step, contextlib.nullcontext, ddp, scenario.call)
    plan = scenario.step_plan
    is_compared = plan.fsdp is not None and not (plan.ep or plan.cp or plan.pipeline or callable(plan.tp))
    if is_compared and not (problems or why_not or scenario.inference):
        lacking = any(one.requires_grad and one.grad is None for one in step.model.parameters())
        problems = tuple(_of_some_parts_only(scenario, step, context)) if lacking else ()
    return problems, why_not


def _of_some_parts_only(scenario: Scenario, step: TrainingStep, context: RankContext) -> Iterator[str]:
    """A parameter whose gradient some ranks have and some do not, as data decide (an expert that no token chose): FSDP2
    sums those that a rank has."""
    _, count = context.index(BATCH_DIMS)
    model = model_on_device(scenario, context, step.built)
    found: list[set[str]] = []
    for part in range(min(count, MOST_PARTS)):
        model.zero_grad(set_to_none=True)
        loss_of(scenario, model, step.batch.part(part, count, context.device)).backward()
        found.append({name for name, parameter in model.named_parameters() if parameter.grad is not None})
        if odd := sorted(found[0] ^ found[-1]):
            some, none = (0, part) if odd[0] in found[0] else (part, 0)
            yield (
                f"parameter {odd[0]} gets a gradient from part {some} of the batch and none from part {none}; FSDP2 "
                "sums what each rank has, and so ranks would wait for each other: have each part use it (add 0 times "
                "its sum to the loss), or name it in FsdpPlan(ignored=...)"
            )
            return


def _tried(
    step: TrainingStep,
    on: Callable[[], contextlib.AbstractContextManager[None]],
    ddp: DdpPlan | None,
    call: Callable[..., Any] | None,
) -> tuple[tuple[str, ...], str | None]:
    """The problems of one step, and why it could not be tried."""
    tracker = _ForwardTracker(step.model, step.plan)
    # Compiling takes longer than all the rest, and its time belongs to the run.
    stance = torch.compiler.set_stance("force_eager") if step.plan.compile else contextlib.nullcontext()
    try:
        with on(), stance:
            step.forward_backward(tracker.stamp)
        tracker.problems += _without_gradient(step.model, ddp)
        if ddp is not None and call is not None:
            tracker.problems += of_forward(
                f"call ({place_of(call)})", tracker.has_run, "DDP makes its reductions ready"
            )
        # Most optimizers ask for the value of a count of theirs; that is no reason to try all again with values.
        with contextlib.suppress(NeedsValues), on():
            tracker.phase = "the optimizer"
            if step.optimizer is not None:
                step.optimizer.step()
    except Skipped:
        raise
    except NeedsValues as reason:
        return (), f"{tracker.where()} {reason}, {TOO_LARGE}"
    except (Unsupported, UserError) as error:
        return (f"{tracker.where()} cannot run: {error}",), None
    except Exception as error:
        why = f"{one_line_and_place(error)}{step.batch.guessed()}{unregistered(step.built)}"
        if call is not None and "DTensor" in why:
            why = "; ".join([why, *of_forward(f"call ({place_of(call)})", tracker.has_run, "FSDP gathers parameters")])
        return (f"{tracker.where()} cannot run: {why}",), None
    return tuple(tracker.problems), None


def _without_gradient(model: nn.Module, ddp: DdpPlan | None) -> list[str]:
    """What DDP would wait for in vain."""
    if ddp is None or ddp.find_unused_parameters or ddp.static_graph or ddp.fuse:
        return []
    ignored = {id(one) for module in matching_modules(ddp.ignored, model).values() for one in module.parameters()}
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad and id(one) not in ignored]
    lacking = [name for name, parameter in named if parameter.grad is None]
    if not lacking:
        return []
    others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    what = f"parameter {lacking[0]}{others} gets no gradient, and DDP waits for it"
    return [f"{what}; use DdpPlan(find_unused_parameters=True), or freeze it (requires_grad_(False))"]


class _ForwardTracker:
    """Which module runs and what it was given; it keeps its state when the model raises, to say where."""

    def __init__(self, model: nn.Module, plan: ParallelPlan) -> None:
        self.problems: list[str] = []
        self._styles = {name: style for _, name, _, style in styles_by_module(plan, model)}
        self._at: list[str] = []
        self.phase = "the model"
        self.has_run = False  # the whole model, and not parts of it alone
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def where(self) -> str:
        """The innermost module whose forward has begun, its style, and what it was given; or the phase."""
        return self._at[-1] if self._at else self.phase

    def stamp(self) -> None:
        """Forward and loss are over, or backward."""
        self.phase = "backward"

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.has_run = self.has_run or not name
        style = self._styles.get(name)
        under = f" under {type(style).__name__}" if style is not None else ""
        given = [_text(one) for one in inputs] + [f"{key}={_text(one)}" for key, one in keywords.items()]
        self._at.append(f"{name or 'the root'}{under}, given {' and '.join(given) or 'nothing'},")
        inner = getattr(style, "prepare_module_input", style)
        for key in getattr(inner, "input_kwarg_layouts", None) or ():
            if key not in keywords:
                self.problems.append(
                    f"{name or 'the root'}{under} has a layout for input {key!r}, which is not passed by that name; "
                    f"it was given {' and '.join(given) or 'nothing'}"
                )

    def _leave(self, module: nn.Module, inputs: object, output: Any) -> None:
        self._at.pop()
        if not self._at:
            self.phase = f"the loss, given {_text(output)},"


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    text = f"{dtype_name(value.dtype)}{shape_text(value.shape)}"
    return f"{text} as {''.join(map(str, value.placements))}" if hasattr(value, "placements") else text
