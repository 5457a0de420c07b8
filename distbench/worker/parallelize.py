"""A plan onto a model: tensor parallel first, then FSDP; context parallel wraps each step (see workloads.step)."""

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from distbench.spec import ParallelPlan
from distbench.worker.place import Place
from distbench.worker.sharding import cut
from distbench.worker.torch_internals import flatten_mesh


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Module names that a glob pattern matches, part by part: `*` never crosses a dot."""
    parts = pattern.split(".")
    return [
        name
        for name in names
        if len(name.split(".")) == len(parts)
        and all(fnmatch.fnmatchcase(given, part) for given, part in zip(name.split("."), parts, strict=True))
    ]


def styles_by_module(plan: ParallelPlan, model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """(pattern, module name, module, style) for every match of a TP plan of patterns; nothing for a callable plan."""
    if plan.tp is None or callable(plan.tp):
        return
    modules = dict(model.named_modules())
    for pattern, style in plan.tp.items():
        for name in matching(pattern, modules):
            yield pattern, name, modules[name], style


def parallelize(model: nn.Module, plan: ParallelPlan, place: Place) -> nn.Module:
    """Apply the plan to a model on the meta device; parameters become DTensors, still without memory.

    Args:
        model: the model, every parameter on the meta device.
        plan: the plan, already checked against the mesh.
        place: this rank's place.
    """
    if plan.tp is not None and plan.tp_dim in place.mesh_dims:
        tp_mesh = place.mesh[plan.tp_dim]
        if callable(plan.tp):
            model = plan.tp(model, tp_mesh)
        else:
            from torch.distributed.tensor.parallel import parallelize_module

            styles = {name: style for _, name, _, style in styles_by_module(plan, model)}
            model = parallelize_module(model, tp_mesh, styles)
    if plan.fsdp is not None:
        _fully_shard(model, plan, place)
    return model


def _fully_shard(model: nn.Module, plan: ParallelPlan, place: Place) -> None:
    from torch.distributed.fsdp import fully_shard

    assert plan.fsdp is not None
    mesh_dims = [name for name in plan.fsdp.mesh_dims if name in place.mesh_dims]
    options: dict[str, Any] = {"mesh": flatten_mesh(place.mesh, mesh_dims)}
    if plan.fsdp.reshard_after_forward is not None:
        options["reshard_after_forward"] = plan.fsdp.reshard_after_forward
    if plan.fsdp.mixed_precision is not None:
        options["mp_policy"] = plan.fsdp.mixed_precision
    modules = dict(model.named_modules())
    for pattern in plan.fsdp.wrap:
        for name in matching(pattern, modules):
            fully_shard(modules[name], **options)
    fully_shard(model, **options)


def materialise(model: nn.Module, place: Place) -> None:
    """Give a sharded model memory and its initial values, one parameter at a time; needs no communication."""
    model.to_empty(device=place.device)
    load_initial_values(model, place)


@torch.no_grad()
def load_initial_values(model: nn.Module, place: Place) -> None:
    """Set every parameter (or this rank's shard of it) to the value that its name and the seed determine."""
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    for name, parameter in parameters:
        full = initial_value(name, tuple(parameter.shape), place.seed).to(parameter.dtype)
        if hasattr(parameter, "to_local"):
            mesh = parameter.device_mesh
            shard = cut(full, parameter.placements, tuple(mesh.mesh.shape), tuple(mesh.get_coordinate() or ()))
            parameter.to_local().copy_(shard)
        else:
            parameter.copy_(full)


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A parameter's full initial value: normal with standard deviation 1/sqrt(last size); 1-D weights near one."""
    generator = torch.Generator().manual_seed(seed ^ int.from_bytes(name.encode(), "big") % (2**61 - 1))
    value = torch.randn(shape, generator=generator)
    if len(shape) >= 2:
        return value / shape[-1] ** 0.5
    return 1 + 0.1 * value if name.endswith("weight") else 0.1 * value
