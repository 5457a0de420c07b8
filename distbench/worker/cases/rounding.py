"""What rounding does to a step on one device: the measure of what a plan's errors may be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from distbench.spec import Scenario
from distbench.worker.cases.reference import Reference, cast_floats, largest, model_on_device, run_step
from distbench.worker.rank.dtypes import dtype_name
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import reduction_dtype

F32 = torch.float32
# FSDP's units: the name that each had in the model as it was built, and its mixed precision policy; the deepest first.
Units = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Rounding:
    """By how much one device's step changes when it is rounded otherwise: largest absolute differences.

    Args:
        by: how it was measured, to follow "measured by ".
        loss: of the loss.
        gradients: parameter name to that of its gradient.
        output: of the output; 0 where it is not one tensor.
    """

    by: str
    loss: float
    gradients: dict[str, float]
    output: float


def measured_rounding(scenario: Scenario, context: RankContext, reference: Reference, units: Units = ()) -> Rounding:
    """Rank 0 computes the step once more, rounded otherwise; of `reference` only the differences are left.

    A model of less than f32 is computed in f32; one under a mixed precision policy in what the policy says; any other
    with each parameter moved by one unit in its last place, or in that of what it computes in, under autocast say. That
    takes the memory and the time of the reference, and runs where the reference runs; f32 against f64 tells the same
    (tests/test_step_check.py). Two halves of the batch against the whole were seen to tell up to fifty times too
    little: each sample is rounded alike in both.

    Args:
        units: FSDP's, with their policies (`TrainingStep.units`).

    Raises:
        Exception: whatever the model raises in another precision.
    """
    model = model_on_device(scenario, context, reference.built, reference.values)
    by, dtype = _round_otherwise(model, units, reference.computed_in)
    left = reference.gradients

    def subtract(name: str, finished: torch.Tensor) -> None:
        if name in left:
            left[name] -= finished

    step = run_step(scenario, context, model, reference.batch, subtract if left else None, dtype)
    apart = 0.0 if step.output is None or reference.output is None else largest(step.output - reference.output)
    return Rounding(by, abs(step.loss - reference.loss), {name: largest(one) for name, one in left.items()}, apart)


def lowest_precision(model: nn.Module, units: Units, computed_in: torch.dtype = F32) -> torch.dtype:
    """The least precise dtype of a model's parameters, of what the policies of its units name, and of what one device
    was seen to compute in (`Reference.computed_in`); f32 at best."""
    named = [getattr(policy, f"{part}_dtype") for _, policy in units for part in ("param", "reduce", "output")]
    return _lowest([_held(model), computed_in, *named])


def reduction_rounding(model: nn.Module, units: Units, num_ranks: int) -> float:
    """What summing gradients over data parallel ranks costs them, relative: it grows with the root of their number.

    One device sums none. Each term, and each partial sum of a ring, is rounded to the dtype that gradients travel in.
    """
    if not units:
        return 0.0
    dtypes: list[torch.dtype | None] = [reduction_dtype(policy, _held(model)) for _, policy in units]
    return torch.finfo(_lowest(dtypes)).eps / 2 * math.sqrt(num_ranks)


def _held(model: nn.Module) -> torch.dtype:
    return _lowest([parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()])


def _lowest(dtypes: list[torch.dtype | None]) -> torch.dtype:
    return max([F32, *(one for one in dtypes if one is not None)], key=lambda dtype: torch.finfo(dtype).eps)


def _round_otherwise(model: nn.Module, units: Units, computed_in: torch.dtype) -> tuple[str, torch.dtype | None]:
    """Change a model with its values; how, and what a batch's floats are to be cast to."""
    held = _held(model)
    if held != F32:
        model.float()
        return f"computing in f32 instead of {dtype_name(held)}", F32
    if (lowest := _lowest([one for _, policy in units for one in (policy.param_dtype, policy.output_dtype)])) != F32:
        _apply_policies(model, units)
        return f"computing in {dtype_name(lowest)} instead of f32", None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
                unit = max(torch.finfo(one).eps for one in (parameter.dtype, computed_in))
                parameter.addcmul_(parameter, signs.to(parameter.device, parameter.dtype), value=unit)
    of = "its" if computed_in == F32 else f"{dtype_name(computed_in)}'s"
    return f"moving each parameter by one unit in {of} last place", None


def _apply_policies(model: nn.Module, units: Units) -> None:
    """What FSDP's mixed precision does to a unit, on one device: its parameters, inputs and output are cast."""
    done: set[int] = set()
    modules = dict(model.named_modules())
    for name, policy in units:
        if (unit := modules.get(name)) is None:  # a wrapper that the function of the user's own made
            continue
        own = [parameter for parameter in unit.parameters() if id(parameter) not in done]
        done |= {id(parameter) for parameter in own}
        for parameter in own:
            parameter.data = cast_floats(parameter.data, policy.param_dtype)
        if policy.cast_forward_inputs:
            unit.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), with_kwargs=True)
        unit.register_forward_hook(partial(_cast_output, policy.output_dtype))


def _cast_inputs(
    dtype: torch.dtype | None, _: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(cast_floats(one, dtype) for one in given), {key: cast_floats(one, dtype) for key, one in named.items()}


def _cast_output(dtype: torch.dtype | None, _: nn.Module, given: Any, output: Any) -> Any:
    return cast_floats(output, dtype)
