"""Memory and initial values for a model that was laid over the mesh on the meta device."""

from typing import Any

import torch
from torch import nn

from distbench.plans.model import Blueprint, as_built, mapped
from distbench.ranks.context import RankContext
from distbench.redistribute.expected_shards import own_shard
from distbench.spec import UserError


def owners_of(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """id of each parameter to the (module name, module, attribute) of its holders: several where it is shared."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module_name, module, attribute))
    return owners


def materialise(model: nn.Module, context: RankContext, built: Blueprint, device: torch.device | None = None) -> None:
    """Give a sharded model memory and its initial values, one parameter at a time; needs no communication.

    Parameters go to the rank's device, or to `device` where they are offloaded. Buffers that the plan added keep the
    values that they were given.

    Raises:
        UserError: a buffer that build_model did not make has no values.
    """
    added = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    allocate(model, context, device)
    with torch.no_grad():
        for name, buffer in load_initial_values(model, context, built).items():
            if name not in added:
                problem = (
                    f"the parallel model has a buffer {name!r} that build_model did not make and that has no values"
                )
                raise UserError(f"{problem}; make it in build_model, or with a device of its own")
            buffer.copy_(added[name])
    place_attributes(model, built, context.device)


def allocate(model: nn.Module, context: RankContext, device: torch.device | None = None) -> None:
    """The same without values, and without plain attributes."""
    shared = [owners for owners in owners_of(model).values() if len(owners) > 1]
    model.to_empty(device=device or context.device)
    # torch gives each holder of a shared parameter memory of its own, unless it is a DTensor.
    for (_, module, attribute), *other_holders in shared:
        for _, holder, name in other_holders:
            holder.register_parameter(name, getattr(module, attribute))
    if device is not None and device != context.device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(context.device))


@torch.no_grad()
def load_initial_values(model: nn.Module, context: RankContext, built: Blueprint) -> dict[str, torch.Tensor]:
    """Set every parameter (or this rank's shard of it) to the value that its place among the parameters that were
    built, its shape and the seed determine: a wrapper, which changes names, changes no value.

    Buffers get the values that they were built with; those that were not built are returned by name.
    """
    places = {name: place for place, name in enumerate(built.parameters)}
    for name, parameter in as_built(model, built).items():
        full = initial_value(places[name], name.rpartition(".")[2], tuple(parameter.shape), context.seed)
        _fill(parameter, full.to(parameter.dtype))
    buffers = dict(model.named_buffers())
    first = {**built.first_names(model, buffers), **{name: name for name in buffers if name in built.buffers}}
    unknown = {}
    for name, buffer in buffers.items():
        if (value := built.buffers.get(first.get(name, ""))) is not None:
            _fill(buffer, value)
        else:
            unknown[name] = buffer
    return unknown


def place_attributes(model: nn.Module, built: Blueprint, device: torch.device, values: bool = True) -> None:
    """Give the tensors that modules keep as plain attributes memory on a device, and their values where asked for.

    Args:
        model: the one that was built, changed or not, or another one that the same function built.
    """

    def placed(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.to(device) if values else torch.empty_like(tensor, device=device)

    modules, by_name = set(model.modules()), dict(model.named_modules())
    for (name, attribute), value in built.attributes.items():
        module = built.modules[name] if built.modules[name] in modules else by_name.get(name)
        if module is not None:
            setattr(module, attribute, mapped(value, placed))


def _fill(tensor: Any, full: torch.Tensor) -> None:
    if hasattr(tensor, "to_local"):
        tensor, full = tensor.to_local(), own_shard(full, tensor.placements, tensor.device_mesh)
    tensor.copy_(full)


def initial_value(place: int, role: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A parameter's full initial value: normal with standard deviation 1/sqrt(last size); 1-D weights near one.

    Args:
        place: its index among the model's parameters.
        role: the last part of its name, by which weights of norms are told from biases.
        shape: the whole parameter's.
        seed: of the run.
    """
    generator = torch.Generator().manual_seed((seed << 32) + place)
    value = torch.randn(shape, generator=generator, dtype=torch.float32)
    if len(shape) >= 2:
        return value / shape[-1] ** 0.5
    return 1 + 0.1 * value if role == "weight" else 0.1 * value


def local_part(tensor: Any) -> torch.Tensor:
    """What a rank holds of a parameter, without its history."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
