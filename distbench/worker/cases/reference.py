"""The same step on one device, and how far the parallel one is from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distbench.spec import Scenario
from distbench.worker.plans.fully_sharded import policies_of
from distbench.worker.plans.materialise import blueprint, load_initial_values
from distbench.worker.rank.rank_context import BATCH_DIMS, RankContext
from distbench.worker.redistribute.expected_shards import chunk_of, cut

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Reference:
    """Loss and gradients on one device, on every rank's CPU.

    Args:
        loss: the loss over the global batch.
        gradients: parameter name to full gradient.
        output: the model's output of this rank's part of the batch; None where it was not asked for.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    output: torch.Tensor | None = None


def reference_of(scenario: Scenario, context: RankContext, output_shape: Sequence[int] | None = None) -> Reference:
    """Rank 0 computes it on its device alone and tells the others.

    Args:
        scenario: model, batch and loss.
        context: this rank's context; all ranks must call this together.
        output_shape: shape of the output of this rank's part of the batch, where outputs shall be compared too.
    """
    assert scenario.build_model and scenario.make_batch and scenario.loss
    built = blueprint(scenario.build_model, context.seed)
    loss = torch.zeros(1)
    gradients = {name: torch.zeros(value.shape) for name, value in built.model.named_parameters()}
    index, count = context.index(BATCH_DIMS)
    outputs = [torch.zeros(output_shape[0] * count, *output_shape[1:])] if output_shape is not None else []
    if context.rank == 0:
        own_loss, own, output = _one_device(scenario, context, built.buffers)
        loss.fill_(own_loss)
        gradients = {name: own[name] for name in gradients}
        outputs = [output.reshape(whole.shape) for whole in outputs]
    for tensor in (loss, *gradients.values(), *outputs):
        dist.broadcast(tensor, src=0, group=context.control)
    return Reference(float(loss), gradients, *(chunk_of(whole, 0, count, index) for whole in outputs))


def _one_device(
    scenario: Scenario, context: RankContext, buffers: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor], Any]:
    assert scenario.build_model and scenario.make_batch and scenario.loss
    with torch.device(context.device):
        model = scenario.build_model()
    load_initial_values(model, context, buffers)
    inputs, targets = (tensor.to(context.device) for tensor in scenario.make_batch())
    output = model(inputs)
    loss = scenario.loss(output, targets)
    loss.backward()
    gradients = {
        name: (torch.zeros_like(value) if value.grad is None else value.grad).float().cpu().contiguous()
        for name, value in model.named_parameters()
    }
    return float(loss), gradients, output.detach().float().cpu() if isinstance(output, torch.Tensor) else None


def compare(
    model: nn.Module,
    local_loss: float,
    reference: Reference,
    context: RankContext,
    gradient_scale: float = 1.0,
    output: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Relative errors of the loss, of the worst gradient, and of the output if it is given, over all ranks.

    Each rank compares its own shard of each gradient with the same cut of the reference; an error is the largest
    absolute difference over the largest absolute value of the whole gradient.

    Args:
        model: the parallel model, after backward.
        local_loss: this rank's loss, a mean over its part of the batch.
        reference: what one device gave.
        context: this rank's context; all ranks must call this together.
        gradient_scale: what the plan multiplies gradients by, on purpose.
        output: the model's whole output of this rank's part of the batch.
    """
    errors = {
        name: _gradient_error(parameter, gradient_scale * reference.gradients[name])
        for name, parameter in model.named_parameters()
    }
    gathered = context.gather((local_loss, errors))
    loss = sum(loss for loss, _ in gathered) / len(gathered)
    worst = {name: max(theirs[name] for _, theirs in gathered) for name in errors}
    name = max(worst, key=lambda key: worst[key])
    outputs = {}
    if output is not None and reference.output is not None:
        outputs["output_rel_error"] = max(context.gather(_largest(output, reference.output, reference.output)))
    return {
        "loss": loss,
        "loss_rel_error": abs(loss - reference.loss) / max(abs(reference.loss), 1e-30),
        "grad_rel_error": worst[name],
        "worst_grad": name,
        **outputs,
    }


def _gradient_error(parameter: Any, expected: torch.Tensor) -> float:
    if parameter.grad is None:
        return float("inf") if expected.abs().max() > 0 else 0.0
    gradient = parameter.grad
    if hasattr(gradient, "to_local"):
        if any(placement.is_partial() for placement in gradient.placements):
            gradient = gradient.full_tensor()
        else:
            mesh = gradient.device_mesh
            coordinate = tuple(mesh.get_coordinate() or ())
            wanted = cut(expected, gradient.placements, tuple(mesh.mesh.shape), coordinate)
            return _largest(gradient.to_local(), wanted, expected)
    return _largest(gradient, expected, expected)


def _largest(got: torch.Tensor, wanted: torch.Tensor, whole: torch.Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    difference = float((got.float().cpu() - wanted).abs().max())
    return difference / max(float(whole.abs().max()), 1e-30)


def verdict(found: dict[str, Any], tolerance: float) -> str | None:
    """A sentence when an error is beyond the tolerance (or not a number), else None."""
    gradient = f"the gradient of {found['worst_grad']}"
    told = {"loss_rel_error": "the loss", "grad_rel_error": gradient, "output_rel_error": "the output"}
    for what, where in told.items():
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
