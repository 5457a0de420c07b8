"""Tensors that an optimizer changes (parameters, state, copies that it keeps, buffers), and their parts on a rank."""

import contextlib
import functools
import hashlib
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distbench.plans.model import Blueprint, local_part, tensors_of
from distbench.plans.user_step import made_optimizers, optimizers_of, steppable
from distbench.redistribute.expected_shards import own_shard
from distbench.spec import Scenario
from distbench.torch_private import no_collectives

# The number of steps is two, because one step of Adam or of momentum shows less: moments start at zero.
NUM_STEPS = 2
# The depth to which objects below an optimizer are searched for tensors.
DEPTH = 8
# Modules whose buffers are statistics of earlier batches.
STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Options of a parameter group that may differ between ranks.
OWN_OPTIONS = frozenset({"params", "param_names"})


@dataclass(frozen=True)
class Trained:
    """A tensor that a step changes: a whole tensor, a DTensor, or this rank's part as a plain tensor."""

    tensor: Any
    owner: str = ""  # name of the parameter that the tensor belongs to
    is_statistic: bool = False  # a statistic of batches that forward updates


def trained_tensors(parameters: Mapping[str, nn.Parameter], made: Any, model: nn.Module) -> dict[str, Trained]:
    """Map labels to the parameters, and to the floating-point tensors that optimizers have or can reach."""
    by_id = {id(parameter): name for name, parameter in parameters.items()}
    names = {key: by_id[key] for key in map(id, model.parameters()) if key in by_id} or by_id
    seen = {id(module) for module in model.modules()}
    trained = {name: Trained(parameter, name) for name, parameter in parameters.items()}
    for path, owner, tensor in _reached(made, (), "", names, seen, DEPTH):
        label = ".".join(part for part in path if part != "state")
        trained[f"{label} of {owner}" if owner else label] = Trained(tensor, owner)
    return trained


def buffers_of(model: nn.Module, built: Blueprint) -> dict[str, Trained]:
    """Map names in the model as built to floating-point buffers."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    first = {**built.first_names(model, buffers), **{name: name for name in buffers if name in built.buffers}}
    modules = dict(model.named_modules())
    return {
        first[name]: Trained(buffer, is_statistic=isinstance(modules[name.rpartition(".")[0]], STATISTICS))
        for name, buffer in buffers.items()
        if first.get(name) in built.buffers
    }


def _reached(
    value: Any,
    path: tuple[str, ...],
    owner: str,
    names: Mapping[int, str],
    seen: set[int],
    depth: int,
) -> Iterator[tuple[tuple[str, ...], str, torch.Tensor]]:
    """Yield (path, name of the parameter that is a key of it, tensor), once for each tensor except the parameters."""
    if depth < 0 or id(value) in names or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield path, owner, value
        return
    parts = _parts(value)
    if isinstance(value, list | tuple) and len(value) == len(names):
        # This includes averages of the parameters, in the optimizer's order of parameters.
        parts = list(zip(names.values(), value, strict=True))
    for key, item in parts:
        name = names.get(id(key)) or (key if isinstance(key, str) and key in names.values() else "")
        yield from _reached(item, path if name else (*path, str(key)), name or owner, names, seen, depth - 1)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, nn.Module):
        parts = [*value.named_parameters(), *value.named_buffers()]
    elif isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list | tuple | deque):
        parts = list(enumerate(value))
    elif isinstance(value, functools.partial):
        parts = [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    elif isinstance(value, types.MethodType):
        parts = [("self", value.__self__)]
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts = [(name, _content(cell)) for name, cell in cells]
    elif not isinstance(value, type | types.ModuleType) and not type(value).__module__.startswith("torch.distributed"):
        parts = list(getattr(value, "__dict__", {}).items())
    return parts


def _content(cell: Any) -> Any:
    with contextlib.suppress(ValueError):  # an empty cell
        return cell.cell_contents


def own_part(
    trained: Trained, whole: torch.Tensor, parameters: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's part of a tensor and the same part of the whole tensor; None if the two do not match."""
    tensor = trained.tensor.detach()
    if (placements := getattr(tensor, "placements", None)) is not None:
        if tensor.shape != whole.shape:
            return None
        if any(placement.is_partial() for placement in placements):
            return tensor.full_tensor(), whole
        return tensor.to_local(), own_shard(whole, placements, tensor.device_mesh)
    if tensor.shape == whole.shape:
        return tensor, whole
    holders = [parameters[trained.owner]] if trained.owner in parameters else parameters.values()
    layouts = {
        (parameter.placements, parameter.device_mesh)
        for parameter in holders
        if hasattr(parameter, "placements")
        and parameter.shape == whole.shape
        and local_part(parameter).shape == tensor.shape
    }
    if len(layouts) != 1:
        return None
    return tensor, own_shard(whole, *layouts.pop())


def part_of(tensor: Any) -> tuple[int, ...]:
    """Return this rank's index along each mesh dim that shards a DTensor; () for a plain tensor."""
    placements = getattr(tensor, "placements", ())
    if not placements:
        return ()
    coordinate = tensor.device_mesh.get_coordinate()
    return tuple(at for at, placement in zip(coordinate, placements, strict=True) if not placement.is_replicate())


def has_copies(tensor: Any) -> bool:
    """Return whether other ranks may hold the same part of a tensor; False for a pending sum."""
    placements = getattr(tensor, "placements", ())
    if any(placement.is_partial() for placement in placements):
        return False
    is_everywhere = not placements or tensor.device_mesh.size() < dist.get_world_size()
    return is_everywhere or any(placement.is_replicate() for placement in placements)


def digests_of_gradients(model: nn.Module) -> dict[tuple[str, tuple[int, ...]], str]:
    """Map each parameter's name and the part of its gradient on this rank to a hash of that part's bits."""
    gradients: dict[str, Any] = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {
        (name, part_of(gradient)): fingerprint(local_part(gradient))
        for name, gradient in gradients.items()
        if has_copies(gradient)
    }


def options_of(made: Any, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Map each parameter's name to its parameter group's options that are numbers or strings."""
    options: dict[str, dict[str, Any]] = {}
    groups = [group for each in optimizers_of(made).values() for group in getattr(each, "param_groups", ())]
    for group in groups:
        plain = {key: _plain(value) for key, value in group.items() if key not in OWN_OPTIONS}
        plain = {key: value for key, value in plain.items() if isinstance(value, float | int | str | tuple)}
        options |= {names[id(parameter)]: plain for parameter in group["params"] if id(parameter) in names}
    return options


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def step_alone(
    scenario: Scenario, model: nn.Module, gradients: Mapping[str, torch.Tensor], scale: float
) -> tuple[dict[str, Trained], Any]:
    """Step the scenario's optimizers with the same gradients in each step; return all tensors and the optimizers.

    Sums over ranks return this rank's value, as on one device.
    """
    parameters = dict(model.named_parameters())
    made = made_optimizers(scenario, model)
    with no_collectives(is_alone=True):
        for _ in range(NUM_STEPS):
            for name, parameter in parameters.items():
                gradient = gradients.get(name)
                parameter.grad = None if gradient is None else (gradient * scale).to(parameter.device, parameter.dtype)
            for optimizer in steppable(made):
                optimizer.step()
    return trained_tensors(parameters, made, model), made


def fingerprint(tree: Any) -> str:
    """Return a text that is equal only for batches with equal tensors."""
    hasher = hashlib.sha256()
    for name, tensor in tensors_of(tree):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        hasher.update(dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
