"""The same step on one device: the parallel step's difference from it, and its rounding error.

Only rank 0 computes the step on one device. Gradients leave its device as backward finishes them, and are shared and
compared one at a time, so that other ranks never have more than one gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distbench.cases.trained_tensors import Trained, buffers_of, options_of, step_alone, trained_tensors
from distbench.plans.batch import batch_of, loss_of
from distbench.plans.model import (
    Blueprint,
    as_built,
    blueprint,
    load_initial_values,
    local_part,
    mapped,
    place_attributes,
    tensors_of,
    whole_on_cpu,
)
from distbench.plans.training_step import cache_of, forward_alone, output_of
from distbench.plans.user_step import call_step, kept_gradients, loss_of_step, made_optimizers
from distbench.ranks.context import RankContext
from distbench.ranks.device import random_states
from distbench.ranks.dtypes import default_dtype_kept, dtype_name
from distbench.ranks.failure import one_line, place_of
from distbench.redistribute.expected_shards import chunk_of, own_shard
from distbench.spec import Scenario
from distbench.spec.mesh import BATCH_DIMS
from distbench.torch_private import around_backward, no_collectives, reduction_dtype

Collect = Callable[[str, torch.Tensor], None]
F32 = torch.float32
# FSDP's units, deepest first: each unit's name in the model as built, and its mixed precision policy.
Units = Sequence[tuple[str, Any]]
# torch has no public name for their common base.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Reference:
    """Results of one device, on rank 0's CPU; other ranks have only the shapes."""

    shapes: dict[str, torch.Size]  # name to full shape of every parameter
    built: Blueprint
    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # full gradients of the parameters that have any
    output: torch.Tensor | None = None  # of the global batch, if the output is one tensor
    is_random: bool = False  # whether the step drew random numbers
    values: Mapping[str, torch.Tensor] | None = None  # of parameters, if the scenario sets them
    computed_in: torch.dtype = torch.float32  # the least precise dtype of modules' outputs, such as under autocast
    batch: Any = None  # the global batch
    stepped: "Stepped | None" = None  # after the optimizer's steps, if requested
    backwards: Sequence[Mapping[str, torch.Tensor]] = ()  # gradients after each backward of the user's own step


@dataclass(frozen=True)
class Stepped:
    """Tensors after the optimizer's steps on one device, by label, on the CPU; `why_not` is the reason if there are no
    tensors.

    Unchanged frozen parameters are left out.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each parameter's group
    statistics: frozenset[str] = frozenset()  # labels of buffers that forward updates
    why_not: str | None = None


@dataclass(frozen=True)
class OneStep:
    """A step on one device; `output` is set if it is one tensor, and `is_random` if the step drew random numbers."""

    loss: float
    output: torch.Tensor | None
    is_random: bool
    made: Any = None  # the optimizers of the user's own step


def reference_of(
    scenario: Scenario,
    context: RankContext,
    with_gradients: bool = True,
    values: Mapping[str, torch.Tensor] | None = None,
    built: Blueprint | None = None,
    gradient_scale: float | None = None,
) -> Reference:
    """Compute the step on rank 0's device, and free the device's memory. Forward-only steps save no activations.

    `values` are parameter values that the scenario sets; `built` is the model on the meta device, unless a
    plan has changed that model. With a `gradient_scale` the optimizers step with gradients times the scale.
    """
    assert scenario.build_model is not None
    built = built or blueprint(scenario.build_model, context.seed)
    shapes = {name: parameter.shape for name, parameter in built.model.named_parameters()}
    if context.rank != 0:
        return Reference(shapes, built)
    gradients: dict[str, torch.Tensor] = {}
    dtypes: set[torch.dtype] = set()

    def note(_: nn.Module, args: Any, output: Any) -> None:
        dtypes.update(tensor.dtype for _, tensor in tensors_of(output) if tensor.is_floating_point())

    model, batch = model_on_device(scenario, context, built, values), batch_of(scenario).tree
    for module in model.modules():
        module.register_forward_hook(note)
    is_stepped, collect = gradient_scale is not None, partial(_add, gradients) if with_gradients else None
    values_before = _values_before(model, built) if is_stepped else {}
    backwards: list[dict[str, torch.Tensor]] = []

    def record() -> None:
        own = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        backwards.append({name: gradient.detach().cpu().float().clone() for name, gradient in own.items()})

    step = run_step(scenario, context, model, batch, collect, after_backward=record if is_stepped else None)
    stepped = None
    if gradient_scale is not None and scenario.step is None:
        stepped = _stepped(scenario, context, model, built, gradients, gradient_scale, values_before)
    elif gradient_scale is not None and (step.is_random or gradient_scale != 1):
        stepped = Stepped(why_not="the step draws random numbers" if step.is_random else "the plan scales gradients")
    elif is_stepped:
        trained = trained_tensors(dict(model.named_parameters()), step.made, model)
        stepped = _results(model, built, trained, step.made, values_before)
    result = step.loss, gradients, step.output, step.is_random
    computed_in = _lowest([*dtypes])
    return Reference(shapes, built, *result, values, computed_in, batch, stepped, backwards)


def _add(gradients: dict[str, torch.Tensor], name: str, finished: torch.Tensor) -> None:
    # A module that recomputes its forward in its own backward adds to a parameter's gradient several times.
    gradients[name] = gradients[name] + finished if name in gradients else finished


def _values_before(model: nn.Module, built: Blueprint) -> dict[str, torch.Tensor]:
    """Return copies of frozen parameters and of buffers."""
    frozen = {name: each.detach().clone() for name, each in model.named_parameters() if not each.requires_grad}
    return frozen | {name: each.tensor.detach().clone() for name, each in buffers_of(model, built).items()}


def _stepped(
    scenario: Scenario,
    context: RankContext,
    model: nn.Module,
    built: Blueprint,
    gradients: Mapping[str, torch.Tensor],
    scale: float,
    values_before: Mapping[str, torch.Tensor],
) -> Stepped:
    """Step the optimizers of a whole model; an optimizer's error on one device is not the step's failure."""
    states = random_states(context.device)
    try:
        trained, made = step_alone(scenario, model, gradients, scale)
    except Exception as error:
        return Stepped(why_not=one_line(error))
    if _differ(states, random_states(context.device)):
        return Stepped(why_not="the step draws random numbers")
    return _results(model, built, trained, made, values_before)


def _results(
    model: nn.Module,
    built: Blueprint,
    trained: dict[str, Trained],
    made: Any,
    values_before: Mapping[str, torch.Tensor],
) -> Stepped:
    """Return the trained tensors; of the buffers, only statistics and changed buffers."""
    trained = trained | buffers_of(model, built)
    unchanged = {
        label
        for label, before in values_before.items()
        if not trained[label].is_statistic and torch.equal(trained[label].tensor, before)
    }
    tensors = {label: each.tensor.detach().cpu().float() for label, each in trained.items() if label not in unchanged}
    statistics = frozenset(label for label, each in trained.items() if each.is_statistic)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return Stepped(tensors, options_of(made, names), statistics)


def reference_of_parts(
    scenario: Scenario, context: RankContext, whole: Reference, num_parts: int, kept_name: str = ""
) -> tuple[Reference, list[torch.Tensor]]:
    """Return the mean of the losses and gradients of `num_parts` equal parts of the batch, as a reference.

    Also return each part's gradient of the parameter `kept_name`.
    """
    if context.rank != 0:
        return whole, []
    loss, gradients, kept = 0.0, dict[str, torch.Tensor](), list[torch.Tensor]()

    def collect(name: str, finished: torch.Tensor) -> None:
        gradients[name] = gradients.get(name, 0) + finished / num_parts
        if name == kept_name:
            kept.append(finished)

    for index in range(num_parts):
        model = model_on_device(scenario, context, whole.built, whole.values)
        part = batch_of(scenario).part(index, num_parts, context.device)
        loss += run_step(scenario, context, model, part, collect if whole.gradients else None).loss / num_parts
    return replace(whole, loss=loss, gradients=gradients, output=None), kept


def drawn_in_eval_mode(scenario: Scenario, context: RankContext, whole: Reference) -> str | None:
    """Return the module, else the scenario's function, that draws random numbers in eval mode on one device.

    Return None if the step draws no random numbers.
    """
    model = model_on_device(scenario, context, whole.built, whole.values).eval()
    drawing, entered = list[str](), list[list[torch.Tensor]]()

    def enter(*_: object) -> None:
        entered.append(random_states(context.device))

    def leave(name: str, module: nn.Module, *_: object) -> None:
        if _differ(entered.pop(), random_states(context.device)):
            drawing.append(f"{name or 'the model'} ({type(module).__name__})")

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(partial(leave, name))
    if not run_step(scenario, context, model, whole.batch, None).is_random:
        return None
    if drawing:
        return drawing[0]  # the innermost module that draws comes first
    function, argument = (scenario.call, "call") if scenario.call is not None else (scenario.loss, "loss")
    return "the model" if function is None else f"{argument} ({place_of(function)})"


def _differ(states: Sequence[torch.Tensor], other_states: Sequence[torch.Tensor]) -> bool:
    return any(not torch.equal(*pair) for pair in zip(states, other_states, strict=True))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def model_on_device(
    scenario: Scenario, context: RankContext, built: Blueprint, values: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Return the whole model with its initial values, or with `values`, on this rank's device."""
    assert scenario.build_model is not None
    if built.needs_values:
        model: nn.Module = whole_on_cpu(scenario.build_model, context.seed).to(context.device)
    else:
        with torch.device(context.device):
            model = scenario.build_model()
    load_initial_values(model, context, built)
    place_attributes(model, built, context.device)
    with torch.no_grad():
        for name, value in (values or {}).items():
            model.get_parameter(name).copy_(value)
    return model


def run_step(
    scenario: Scenario,
    context: RankContext,
    model: nn.Module,
    batch: Any,
    collect: Collect | None,
    dtype: torch.dtype | None = None,
    after_backward: Callable[[], None] | None = None,
) -> OneStep:
    """Run forward, and backward if gradients are collected; each gradient moves to the CPU once backward has finished
    it.

    Other ranks do not run the step, so the step must not communicate. The batch is copied, with floats cast to `dtype`
    if given. A forward-only scenario returns an output and the loss 0. The user's own step runs as a whole; the
    collected gradients are from each optimizer's first step, and `after_backward` is called after each backward.
    """
    collect = None if scenario.inference else collect
    runs_forward_backward = collect is not None and scenario.step is None

    def hand_over(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None and collect is not None
        collect(name, parameter.grad.cpu().float().contiguous())
        parameter.grad = None

    for name, parameter in model.named_parameters() if runs_forward_backward else ():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(hand_over, name))
    batch = mapped(batch, lambda _, tensor: cast_floats(tensor.to(context.device, copy=True), dtype))
    before = random_states(context.device)
    outputs: list[torch.Tensor] = []

    def keep(output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs.append(output.detach().cpu().float())

    made = made_optimizers(scenario, model) if scenario.step is not None else None
    with no_collectives(is_alone=scenario.step is not None), default_dtype_kept():
        if scenario.step is not None:
            with around_backward(lambda: None, after_backward or (lambda: None)):
                loss = _run_user_step(scenario, model, batch, made, collect)
        elif scenario.inference:
            loss = torch.zeros((), dtype=torch.float32)
            with forward_alone(context.device):
                keep(output_of(scenario, model, batch, cache_of(scenario, model, batch)))
            outputs = [
                output.clone() for output in outputs
            ]  # inference tensors cannot be sent outside of inference mode
        else:
            with torch.set_grad_enabled(collect is not None):
                loss = loss_of(scenario, model, batch, keep)
            if collect is not None:
                loss.backward()
    is_random = _differ(before, random_states(context.device))
    return OneStep(float(loss.detach()), outputs[0] if outputs else None, is_random, made)


def _run_user_step(
    scenario: Scenario, model: nn.Module, batch: Any, made: Any, collect: Collect | None
) -> torch.Tensor:
    with kept_gradients(model, made) as kept:
        losses = [loss_of_step(call_step(scenario, model, batch, made)) for _ in range(scenario.period)]
    for name, parameter in model.named_parameters():
        gradient = kept.get(parameter, parameter.grad)
        if collect is not None and gradient is not None:
            collect(name, gradient.cpu().float().contiguous())
    return torch.stack(losses).mean()


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a tensor of floats cast to `dtype`; with None, or for other values, return the value unchanged."""
    is_cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference (inf: nothing to compare), and the largest absolute expected value."""

    apart: float
    size: float


@dataclass(frozen=True)
class Differences:
    """Largest differences of a step from one device's over all ranks, and rank 0's notes; equal on all ranks."""

    mean_loss: float | None
    loss: Difference | None
    gradients: dict[str, Difference] = field(default_factory=dict)
    output: Difference | None = None
    is_random: bool = False
    batch_statistics: str | None = None
    expected_loss: float = 0.0


def compare(
    model: nn.Module,
    local_loss: float | None,
    reference: Reference,
    context: RankContext,
    gradient_scale: float | None = 1.0,
    output: torch.Tensor | None = None,
    is_given: bool = False,
) -> Differences:
    """Compare each rank's shards of gradients with the same shards of the reference; return the largest difference.

    All ranks must call this together, after backward. `local_loss` is a mean over this rank's part of the batch, None
    without a loss; `output` is the model's output for that part. `gradient_scale` is the factor that the plan applies
    to gradients; with None, gradients are not compared. With `is_given`, one device's gradients replace each rank's.
    """
    differences = {}
    if gradient_scale is not None:
        differences = gradient_differences(model, reference, reference.gradients, context, gradient_scale, is_given)
    own_output = None if output is None else _output_difference(output, reference, context)
    gathered = context.gather((local_loss, differences, own_output, reference.loss, reference.is_random))
    all_losses, all_gradients, outputs, (expected_loss, *_), (is_random, *_) = zip(*gathered, strict=True)
    losses = [loss for loss in all_losses if loss is not None]
    loss = sum(losses) / len(losses) if losses else None
    return Differences(
        loss,
        None if loss is None else Difference(_or_inf(abs(loss - expected_loss)), abs(expected_loss)),
        {
            name: largest_of([gradients[name] for gradients in all_gradients if name in gradients])
            for name in (() if gradient_scale is None else reference.built.parameters)
        },
        None if output is None else largest_of(outputs),
        is_random,
        batch_statistics_of(reference.built.model),
        expected_loss,
    )


def gradient_differences(
    model: nn.Module,
    reference: Reference,
    gradients: Mapping[str, torch.Tensor],
    context: RankContext,
    scale: float = 1.0,
    is_given: bool = False,
) -> dict[str, Difference]:
    """Compare this rank's gradients with rank 0's whole gradients; `is_given` then replaces them. Collective."""
    differences = {}
    parameters = as_built(model, reference.built)
    # In a pipeline each rank has some of the gradients, and all ranks take part in sharing each gradient.
    for name in reference.built.parameters:
        expected = _shared(gradients.get(name), reference.shapes[name], context)
        if name in parameters:
            expected = expected if scale == 1 else expected * scale
            differences[name] = _gradient_difference(parameters[name], expected)
            if is_given and parameters[name].grad is not None:
                _give(parameters[name].grad, expected)
        # Free the memory before the next gradient is shared.
        del expected
    return differences


def _shared(tensor: torch.Tensor | None, shape: Sequence[int], context: RankContext) -> torch.Tensor:
    """Return rank 0's tensor on every rank's CPU; zeros if rank 0 has no tensor."""
    tensor = torch.zeros(shape, dtype=torch.float32) if tensor is None else tensor
    dist.broadcast(tensor, src=0, group=context.control)
    return tensor


def _output_difference(output: torch.Tensor, reference: Reference, context: RankContext) -> Difference:
    index, count = context.index(BATCH_DIMS)
    whole_output, difference = reference.output, Difference(0.0, 0.0)
    # A tensor of another shape on one rank would make the broadcasts below fail.
    shapes = context.gather((tuple(output.shape), None if whole_output is None else tuple(whole_output.shape)))
    if (full := shapes[0][1]) is not None and any(shape != (full[0] // count, *full[1:]) for shape, _ in shapes):
        return Difference(math.inf, 0.0)
    for part in range(count):
        chunk = None
        if whole_output is not None:
            chunk = chunk_of(whole_output.reshape(-1, *output.shape[1:]), 0, count, part).contiguous()
        expected = _shared(chunk, output.shape, context)
        if part == index:
            difference = _difference(output, expected, expected)
    return difference


def _gradient_difference(parameter: Any, expected: torch.Tensor) -> Difference:
    gradient, expected_shard = parameter.grad, expected
    if gradient is None:
        size = largest(expected)
        return Difference(math.inf if size > 0 else 0.0, size)
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        gradient = gradient.full_tensor()
    elif hasattr(gradient, "to_local"):
        gradient, expected_shard = gradient.to_local(), own_shard(expected, gradient.placements, gradient.device_mesh)
    return _difference(gradient, expected_shard, expected)


def _give(gradient: Any, expected: torch.Tensor) -> None:
    """Replace this rank's part of a gradient by the same part of the whole gradient."""
    if placements := getattr(gradient, "placements", ()):
        # A pending sum has the whole value on the first rank.
        places = zip(placements, gradient.device_mesh.get_coordinate(), strict=True)
        is_first = not any(at and each.is_partial() and each.reduce_op == "sum" for each, at in places)
        expected = own_shard(expected, placements, gradient.device_mesh) * is_first
    local_part(gradient).copy_(expected)


def _difference(got: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> Difference:
    if got.shape != expected.shape:
        return Difference(math.inf, largest(whole))
    return Difference(_or_inf(largest(got.float().cpu() - expected)), largest(whole))


def largest_of(differences: Sequence[Difference]) -> Difference:
    """Return the largest values over several ranks' differences."""
    return Difference(max(each.apart for each in differences), max(each.size for each in differences))


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 for a tensor without elements."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass(frozen=True)
class Rounding:
    """Change of one device's step under another rounding: largest absolute differences."""

    by: str  # the method, text after "measured by "
    loss: float
    gradients: dict[str, float]
    output: float  # 0 if the output is not one tensor


def measured_rounding(scenario: Scenario, context: RankContext, reference: Reference, units: Units = ()) -> Rounding:
    """Compute the step again on rank 0 with other rounding.

    A model of lower precision than f32 is computed in f32, and a model under a mixed precision policy in the policy's
    dtype. In any other model each parameter moves by one unit in the last place of its dtype, or of the dtype of its
    operators, such as under autocast. The second step needs the memory and time of the reference. A comparison of f32
    with f64 gives the same result (tests/cases/test_step_check.py). A comparison of two halves of the batch with the
    whole batch gave values up to 50x too small, because both sides round each sample equally. Raises any error that the
    model raises in another precision.
    """
    model = model_on_device(scenario, context, reference.built, reference.values)
    by, dtype = _round_otherwise(model, units, reference.computed_in)
    rounded: dict[str, torch.Tensor] = {}
    step = run_step(
        scenario, context, model, reference.batch, partial(_add, rounded) if reference.gradients else None, dtype
    )
    apart = 0.0 if step.output is None or reference.output is None else largest(step.output - reference.output)
    # A gradient without measured rounding consists of rounding only.
    gradients = {
        name: largest(gradient - rounded[name] if name in rounded else gradient)
        for name, gradient in reference.gradients.items()
    }
    return Rounding(by, abs(step.loss - reference.loss), gradients, apart)


def lowest_precision(model: nn.Module, units: Units, computed_in: torch.dtype = F32) -> torch.dtype:
    """Return the least precise dtype of f32, a model's parameters, its units' policies, and `computed_in`, the dtype
    observed on one device.
    """
    policy_dtypes = [getattr(policy, f"{part}_dtype") for _, policy in units for part in ("param", "reduce", "output")]
    return _lowest([_held(model), computed_in, *policy_dtypes])


def reduction_rounding(model: nn.Module, units: Units, num_ranks: int) -> float:
    """Return the relative error of summing gradients over data parallel ranks, which grows with the root of the number
    of ranks.

    One device has no such sum. Each term and each partial sum of a ring is rounded to the dtype of the communication.
    """
    if not units:
        return 0.0
    dtypes: list[torch.dtype | None] = [reduction_dtype(policy, _held(model)) for _, policy in units]
    return _eps(_lowest(dtypes)) / 2 * math.sqrt(num_ranks)


def _held(model: nn.Module) -> torch.dtype:
    return _lowest([parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()])


def _lowest(dtypes: Sequence[torch.dtype | None]) -> torch.dtype:
    return max([F32, *filter(None, dtypes)], key=_eps)


def _round_otherwise(model: nn.Module, units: Units, computed_in: torch.dtype) -> tuple[str, torch.dtype | None]:
    """Change a model with its values; return a description, and the dtype that a batch's floats are cast to."""
    if (held := _held(model)) != F32:
        model.float()
        return f"computing in f32 instead of {dtype_name(held)}", F32
    lowest = _lowest([dtype for _, policy in units for dtype in (policy.param_dtype, policy.output_dtype)])
    if lowest != F32:
        _apply_policies(model, units)
        return f"computing in {dtype_name(lowest)} instead of f32", None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
                unit = max(_eps(parameter.dtype), _eps(computed_in))
                parameter.addcmul_(parameter, signs.to(parameter.device, parameter.dtype), value=unit)
    of = "its" if computed_in == F32 else f"{dtype_name(computed_in)}'s"
    return f"moving each parameter by one unit in {of} last place", None


def _apply_policies(model: nn.Module, units: Units) -> None:
    """Apply FSDP's mixed precision to units on one device: cast their parameters, inputs and outputs."""
    done: set[int] = set()
    modules = dict(model.named_modules())
    for name, policy in units:
        if (unit := modules.get(name)) is None:  # a wrapper made by the user's function
            continue
        parameters = [parameter for parameter in unit.parameters() if id(parameter) not in done]
        done |= {id(parameter) for parameter in parameters}
        for parameter in parameters:
            parameter.data = cast_floats(parameter.data, policy.param_dtype)
        if policy.cast_forward_inputs:
            unit.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), with_kwargs=True)
        unit.register_forward_hook(lambda _, args, output, dtype=policy.output_dtype: cast_floats(output, dtype))


def _cast_inputs(dtype: torch.dtype | None, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    cast = partial(cast_floats, dtype=dtype)
    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}


def batch_statistics_of(model: nn.Module) -> str | None:
    """Return the first module that computes statistics over its batch."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            return f"{name} ({type(module).__name__})"
    return None
