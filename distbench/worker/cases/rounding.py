"""What rounding does to a step on one device: the measure of what a plan's errors may be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from distbench.spec import FsdpPlan, Scenario
from distbench.worker.cases.reference import Reference, cast_floats, largest, model_on_device, run_step
from distbench.worker.plans.fully_sharded import data_parallel_size, policies_of, units_of
from distbench.worker.rank.dtypes import dtype_name
from distbench.worker.rank.rank_context import RankContext

F32 = torch.float32


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


def measured_rounding(scenario: Scenario, context: RankContext, reference: Reference) -> Rounding:
    """Rank 0 computes the step once more, rounded otherwise; of `reference` only the differences are left.

    A model of less than f32 is computed in f32; one under a mixed precision policy in what the policy says; any other
    with each parameter moved by one unit in its last place. That takes the memory and the time of the reference, and
    runs where the reference runs; f32 against f64 tells the same (tests/test_step_check.py). Two halves of the batch
    against the whole were seen to tell up to fifty times too little: each sample is rounded alike in both.

    Raises:
        Exception: whatever the model raises in another precision.
    """
    model = model_on_device(scenario, context, reference.built, reference.values)
    by, dtype = _round_otherwise(model, scenario.plan.fsdp)
    left = reference.gradients

    def subtract(name: str, finished: torch.Tensor) -> None:
        if name in left:
            left[name] -= finished

    step = run_step(scenario, context, model, subtract if left else None, dtype)
    apart = 0.0 if step.output is None or reference.output is None else largest(step.output - reference.output)
    return Rounding(by, abs(step.loss - reference.loss), {name: largest(one) for name, one in left.items()}, apart)


def lowest_precision(model: nn.Module, fsdp: FsdpPlan | None) -> torch.dtype:
    """The least precise dtype of a model's parameters and of what its plan's policies name; f32 at best."""
    named = [getattr(policy, f"{part}_dtype") for policy in _policies(fsdp) for part in ("param", "reduce", "output")]
    return _lowest([_held(model), *named])


def reduction_rounding(model: nn.Module, fsdp: FsdpPlan | None, context: RankContext) -> float:
    """What summing gradients over data parallel ranks costs them, relative: it grows with the root of their number.

    One device sums none. Each term, and each partial sum of a ring, is rounded to the dtype that gradients travel in.
    """
    if fsdp is None:
        return 0.0
    dtypes = [policy.reduce_dtype or policy.param_dtype for policy in _policies(fsdp)] or [_held(model)]
    return torch.finfo(_lowest(dtypes)).eps / 2 * math.sqrt(data_parallel_size(fsdp, context))


def _held(model: nn.Module) -> torch.dtype:
    return _lowest([parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()])


def _lowest(dtypes: list[torch.dtype | None]) -> torch.dtype:
    return max([F32, *(one for one in dtypes if one is not None)], key=lambda dtype: torch.finfo(dtype).eps)


def _policies(fsdp: FsdpPlan | None) -> list[Any]:
    return policies_of(fsdp) if fsdp is not None else []


def _round_otherwise(model: nn.Module, fsdp: FsdpPlan | None) -> tuple[str, torch.dtype | None]:
    """Change a model with its values; how, and what a batch's floats are to be cast to."""
    held = _held(model)
    if held != F32:
        model.float()
        return f"computing in f32 instead of {dtype_name(held)}", F32
    if fsdp is not None and (lowest := _lowest([policy.param_dtype for policy in _policies(fsdp)])) != F32:
        _apply_policies(model, fsdp)
        return f"computing in {dtype_name(lowest)} instead of f32", None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
                unit = torch.finfo(parameter.dtype).eps
                parameter.addcmul_(parameter, signs.to(parameter.device, parameter.dtype), value=unit)
    return "moving each parameter by one unit in its last place", None


def _apply_policies(model: nn.Module, fsdp: FsdpPlan) -> None:
    """What FSDP's mixed precision does to a unit, on one device: its parameters, inputs and output are cast."""
    done: set[int] = set()
    for unit, policy in units_of(model, fsdp):
        own = [parameter for parameter in unit.parameters() if id(parameter) not in done]
        done |= {id(parameter) for parameter in own}
        if policy is None:
            continue
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
