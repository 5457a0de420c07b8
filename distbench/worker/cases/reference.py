"""The same step on one device, and how far the parallel one is from it.

Rank 0 alone computes it. Gradients leave its device as backward finishes them, and are shared and compared one by one,
so that no other rank ever holds more than one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distbench.spec import Scenario
from distbench.worker.plans.fully_sharded import policies_of
from distbench.worker.plans.materialise import blueprint, load_initial_values
from distbench.worker.rank.rank_context import BATCH_DIMS, RankContext
from distbench.worker.redistribute.expected_shards import chunk_of, own_shard

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Reference:
    """What one device computes, on rank 0's CPU; other ranks have the shapes alone."""

    shapes: dict[str, torch.Size]  # by name, the full shape of every parameter
    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # full, of the parameters that have one
    output: torch.Tensor | None = None  # of the global batch, where it is one tensor


def reference_of(scenario: Scenario, context: RankContext, with_gradients: bool = True) -> Reference:
    """Rank 0 computes it on its device; nothing stays there. The forward pass alone holds no activations either."""
    assert scenario.build_model and scenario.make_batch and scenario.loss
    built = blueprint(scenario.build_model, context.seed)
    shapes = {name: parameter.shape for name, parameter in built.model.named_parameters()}
    if context.rank != 0:
        return Reference(shapes)
    with torch.device(context.device):
        model: nn.Module = scenario.build_model()
    load_initial_values(model, context, built.buffers)
    gradients: dict[str, torch.Tensor] = {}
    if with_gradients:
        _collect_gradients(model, gradients)
    inputs, targets = (tensor.to(context.device) for tensor in scenario.make_batch())
    with torch.set_grad_enabled(with_gradients):
        output = model(inputs)
        loss = scenario.loss(output, targets)
    if with_gradients:
        loss.backward()
    whole = output.detach().cpu().float() if isinstance(output, torch.Tensor) else None
    return Reference(shapes, float(loss.detach()), gradients, whole)


def _collect_gradients(model: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """Have each gradient move to the CPU as soon as backward has finished it."""

    def collect(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        finished = parameter.grad.cpu().float().contiguous()
        # A part that recomputes its forward by a backward of its own adds to a parameter several times.
        gradients[name] = gradients[name] + finished if name in gradients else finished
        parameter.grad = None

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(collect, name))


def compare(
    model: nn.Module,
    local_loss: float,
    reference: Reference,
    context: RankContext,
    gradient_scale: float | None = 1.0,
    output: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Relative errors of the loss, of the worst gradient, and of the output if it is given, over all ranks.

    Each rank compares its own shard of each gradient with the same shard of the reference; an error is the largest
    absolute difference over the largest absolute value of the whole gradient. All ranks must call this together, after
    backward; the reference's gradients are dropped as they are compared. `local_loss` is a mean over this rank's part
    of the batch, `output` the model's output of that part. `gradient_scale` is what the plan multiplies gradients by on
    purpose; None compares none.
    """
    errors = {} if gradient_scale is None else _gradient_errors(model, reference, context, gradient_scale)
    output_error = None if output is None else _output_error(output, reference, context)
    gathered = context.gather((local_loss, reference.loss, errors, output_error))
    expected_loss = gathered[0][1]
    loss = sum(one[0] for one in gathered) / len(gathered)
    found = {"loss": loss, "loss_rel_error": abs(loss - expected_loss) / max(abs(expected_loss), 1e-30)}
    if errors:
        worst = {name: max(one[2][name] for one in gathered) for name in errors}
        name = max(worst, key=lambda key: worst[key])
        found |= {"grad_rel_error": worst[name], "worst_grad": name}
    if output_error is not None:
        found["output_rel_error"] = max(one[3] for one in gathered)
    return found


def _gradient_errors(model: nn.Module, reference: Reference, context: RankContext, scale: float) -> dict[str, float]:
    errors = {}
    for name, parameter in model.named_parameters():
        expected = _shared(reference.gradients.pop(name, None), reference.shapes[name], context).mul_(scale)
        errors[name] = _gradient_error(parameter, expected)
        # Before the next one is made.
        del expected
    return errors


def _shared(tensor: torch.Tensor | None, shape: Sequence[int], context: RankContext) -> torch.Tensor:
    """Rank 0's tensor on every rank's CPU; zeros where rank 0 has none."""
    tensor = torch.zeros(shape) if tensor is None else tensor
    dist.broadcast(tensor, src=0, group=context.control)
    return tensor


def _output_error(output: torch.Tensor, reference: Reference, context: RankContext) -> float:
    """Of this rank's part of the batch; the parts are shared one by one."""
    index, count = context.index(BATCH_DIMS)
    whole, error = reference.output, 0.0
    for part in range(count):
        chunk = None
        if whole is not None:
            chunk = chunk_of(whole.reshape(-1, *output.shape[1:]), 0, count, part).contiguous()
        expected = _shared(chunk, output.shape, context)
        if part == index:
            error = _largest(output, expected, expected)
    return error


def _gradient_error(parameter: Any, expected: torch.Tensor) -> float:
    gradient, wanted = parameter.grad, expected
    if gradient is None:
        return float("inf") if expected.abs().max() > 0 else 0.0
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        gradient = gradient.full_tensor()
    elif hasattr(gradient, "to_local"):
        gradient, wanted = gradient.to_local(), own_shard(expected, gradient.placements, gradient.device_mesh)
    return _largest(gradient, wanted, expected)


def _largest(got: torch.Tensor, wanted: torch.Tensor, whole: torch.Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    difference = float((got.float().cpu() - wanted).abs().max())
    return difference / max(float(whole.abs().max()), 1e-30)


def verdict(found: dict[str, Any], tolerance: float) -> str | None:
    """A sentence when an error is beyond the tolerance (or not a number), else None."""
    gradient = f"the gradient of {found.get('worst_grad')}"
    names = {"loss_rel_error": "the loss", "grad_rel_error": gradient, "output_rel_error": "the output"}
    for what, where in names.items():
        if what in found and not found[what] <= tolerance:
            return f"{where} is {found[what]:.2e} (relative) off one device's; {tolerance:.0e} is allowed"
    return None


def tolerance_of(scenario: Scenario) -> float:
    """The relative error allowed to a scenario's step: its own, or that of the lowest precision its policy names."""
    if scenario.tolerance is not None:
        return scenario.tolerance
    policies = policies_of(scenario.plan.fsdp) if scenario.plan.fsdp else []
    dtypes = [getattr(policy, f"{part}_dtype") for policy in policies for part in ("param", "reduce", "output")]
    return max(TOLERANCE.get(dtype or torch.float32, LOW_PRECISION_TOLERANCE) for dtype in [None, *dtypes])
