"""The same step on one device, and how far the parallel one is from it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distbench.spec import Scenario
from distbench.worker.fully_sharded import policies_of
from distbench.worker.materialise import blueprint, load_initial_values
from distbench.worker.place import Place
from distbench.worker.sharding import cut

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Reference:
    """Loss and gradients on one device, on every rank's CPU.

    Args:
        loss: the loss over the global batch.
        gradients: parameter name to full gradient.
    """

    loss: float
    gradients: dict[str, torch.Tensor]


def reference_of(scenario: Scenario, place: Place) -> Reference:
    """Rank 0 computes it on its device alone and tells the others.

    Args:
        scenario: model, batch and loss.
        place: this rank's place; all ranks must call this together.
    """
    assert scenario.build_model and scenario.make_batch and scenario.loss
    built = blueprint(scenario.build_model, place.seed)
    loss = torch.zeros(1)
    gradients = {name: torch.zeros(value.shape) for name, value in built.model.named_parameters()}
    if place.rank == 0:
        own_loss, own = _one_device(scenario, place, built.buffers)
        loss.fill_(own_loss)
        gradients = {name: own[name] for name in gradients}
    for tensor in (loss, *gradients.values()):
        dist.broadcast(tensor, src=0, group=place.control)
    return Reference(float(loss), gradients)


def _one_device(
    scenario: Scenario, place: Place, buffers: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    assert scenario.build_model and scenario.make_batch and scenario.loss
    with torch.device(place.device):
        model = scenario.build_model()
    load_initial_values(model, place, buffers)
    inputs, targets = (tensor.to(place.device) for tensor in scenario.make_batch())
    loss = scenario.loss(model(inputs), targets)
    loss.backward()
    gradients = {
        name: (torch.zeros_like(value) if value.grad is None else value.grad).float().cpu().contiguous()
        for name, value in model.named_parameters()
    }
    return float(loss), gradients


def compare(
    model: nn.Module, local_loss: float, reference: Reference, place: Place, gradient_scale: float = 1.0
) -> dict[str, Any]:
    """Relative errors of the loss and of the worst gradient, over all ranks.

    Each rank compares its own shard of each gradient with the same cut of the reference; an error is the largest
    absolute difference over the largest absolute value of the whole gradient.

    Args:
        model: the parallel model, after backward.
        local_loss: this rank's loss, a mean over its part of the batch.
        reference: what one device gave.
        place: this rank's place; all ranks must call this together.
        gradient_scale: what the plan multiplies gradients by, on purpose.
    """
    errors = {
        name: _gradient_error(parameter, gradient_scale * reference.gradients[name])
        for name, parameter in model.named_parameters()
    }
    gathered = place.gather((local_loss, errors))
    loss = sum(loss for loss, _ in gathered) / len(gathered)
    worst = {name: max(theirs[name] for _, theirs in gathered) for name in errors}
    name = max(worst, key=lambda key: worst[key])
    return {
        "loss": loss,
        "loss_rel_error": abs(loss - reference.loss) / max(abs(reference.loss), 1e-30),
        "grad_rel_error": worst[name],
        "worst_grad": name,
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
    for what, where in (("loss_rel_error", "the loss"), ("grad_rel_error", f"the gradient of {found['worst_grad']}")):
        if not found[what] <= tolerance:
            return f"{where} is {found[what]:.2e} (relative) off one device's; {tolerance:.0e} is allowed"
    return None


def tolerance_of(scenario: Scenario) -> float:
    """The relative error allowed to a scenario's step: its own, or that of the lowest precision its policy names."""
    if scenario.tolerance is not None:
        return scenario.tolerance
    policies = policies_of(scenario.plan.fsdp) if scenario.plan.fsdp else []
    dtypes = [getattr(policy, f"{part}_dtype") for policy in policies for part in ("param", "reduce", "output")]
    return max(TOLERANCE.get(dtype or torch.float32, LOW_PRECISION_TOLERANCE) for dtype in [None, *dtypes])
