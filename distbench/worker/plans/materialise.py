"""Memory and initial values for a model that was laid over the mesh on the meta device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import own_shard


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, and its buffers (name to initial value on the CPU), which no seed determines."""

    model: nn.Module
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def blueprint(build_model: Callable[[], Any], seed: int) -> Blueprint:
    """Build a model on the meta device; one that has buffers once more, to learn their values.

    The second time only the parameters are put on the meta device, each as it is registered, so no more than one of
    them has memory at a time. Buffers drawn at random start from the seed, the same on every rank.
    """
    with torch.device("meta"):
        model: nn.Module = build_model()
    if next(model.buffers(), None) is None:
        return Blueprint(model)
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        buffers = {name: buffer.detach().clone() for name, buffer in build_model().named_buffers()}
    return Blueprint(model, buffers)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def owners_of(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """id of each parameter to the (module name, module, attribute) of its holders: several where it is shared."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module_name, module, attribute))
    return owners


def materialise(
    model: nn.Module, context: RankContext, buffers: Mapping[str, torch.Tensor], device: torch.device | None = None
) -> None:
    """Give a sharded model memory and its initial values, one parameter at a time; needs no communication.

    Parameters go to the rank's device, or to `device` where they are offloaded.
    """
    allocate(model, context, device)
    load_initial_values(model, context, buffers)


def allocate(model: nn.Module, context: RankContext, device: torch.device | None = None) -> None:
    """The same without values."""
    shared = [owners for owners in owners_of(model).values() if len(owners) > 1]
    model.to_empty(device=device or context.device)
    # torch gives each holder of a shared parameter memory of its own, unless it is a DTensor.
    for (_, module, attribute), *others in shared:
        for _, other, name in others:
            other.register_parameter(name, getattr(module, attribute))
    if device is not None and device != context.device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(context.device))


@torch.no_grad()
def load_initial_values(model: nn.Module, context: RankContext, buffers: Mapping[str, torch.Tensor]) -> None:
    """Set every parameter (or this rank's shard of it) to the value that its name and the seed determine."""
    for name, parameter in model.named_parameters():
        _fill(parameter, initial_value(name, tuple(parameter.shape), context.seed).to(parameter.dtype))
    for name, buffer in model.named_buffers():
        _fill(buffer, buffers[name])


def _fill(tensor: Any, full: torch.Tensor) -> None:
    if hasattr(tensor, "to_local"):
        tensor, full = tensor.to_local(), own_shard(full, tensor.placements, tensor.device_mesh)
    tensor.copy_(full)


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A parameter's full initial value: normal with standard deviation 1/sqrt(last size); 1-D weights near one."""
    generator = torch.Generator().manual_seed(seed ^ int.from_bytes(name.encode(), "big") % (2**61 - 1))
    value = torch.randn(shape, generator=generator)
    if len(shape) >= 2:
        return value / shape[-1] ** 0.5
    return 1 + 0.1 * value if name.endswith("weight") else 0.1 * value
