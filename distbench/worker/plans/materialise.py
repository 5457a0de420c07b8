"""Memory and initial values for a model that was laid over the mesh on the meta device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distbench.spec import UserError
from distbench.spec.errors import nearest
from distbench.worker.rank.failure import blamed, place_of
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import own_shard

# How the one parameter ends that FSDP1 makes of many.
FLAT = "_flat_param"


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, its buffers (name to initial value on the CPU), which no seed determines, and the
    names of its parameters; those that others share stand for the first of them, whose shapes are kept as well."""

    model: nn.Module
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        """Each parameter's name once, in the model's order."""
        return list(dict.fromkeys(self.names.values()))


def blueprint(build_model: Callable[[], Any], seed: int, with_values: bool = True) -> Blueprint:
    """Build a model on the meta device; one that has buffers once more, to learn their values, where asked for.

    The second time only the parameters are put on the meta device, each as it is registered, so no more than one of
    them has memory at a time. Buffers drawn at random start from the seed, the same on every rank.
    """
    with blamed("build_model", build_model), torch.device("meta"):
        model: nn.Module = build_model()
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(f"build_model ({place_of(build_model)}) returns {kind}, it must return an nn.Module")
    if lazy := next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None):
        what = f"build_model ({place_of(build_model)}) makes parameter {lazy!r} without a shape"
        raise UserError(f"{what}, as lazy modules do; give that module its sizes")
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    if not with_values or next(model.buffers(), None) is None:
        return Blueprint(model, {}, names, shapes)
    with blamed("build_model", build_model), _parameters_on_meta(), _seeded(seed), torch.device("cpu"):
        buffers = {name: buffer.detach().clone() for name, buffer in build_model().named_buffers()}
    return Blueprint(model, buffers, names, shapes)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def as_built(model: nn.Module, names: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """Parameters of a parallel model by the names that they had when it was built (`Blueprint.names`).

    A wrapper, torch.compile's or activation checkpointing's say, may have put something before or into a name; then
    they are taken in their order. Of a pipeline's stages those that this rank holds.

    Raises:
        UserError: the model has other parameters than were built.
    """
    found = dict(model.named_parameters())
    held = getattr(model, "held_names", names)
    wanted = [name for name in dict.fromkeys(names.values()) if name in held]
    if all(name in names for name in found):
        by_name = {names[name]: parameter for name, parameter in found.items()}
        if len(by_name) == len(wanted):
            return {name: by_name[name] for name in wanted}
    if len(found) == len(wanted):
        return dict(zip(wanted, found.values(), strict=True))
    if flat := next((name for name in found if name.endswith(FLAT)), None):
        what = f"the parallel model has a flat parameter {flat!r}, as FullyShardedDataParallel makes it"
        raise UserError(f"{what}; use fully_shard, which leaves parameters what they were")
    what = f"the parallel model has {len(found)} parameters where build_model made {len(wanted)}"
    new = next((name for name in found if name not in names), None)
    lost = next((name for name in wanted if name not in found), None)
    odd = f"lacks {lost!r}" if new is None else f"{new!r} is new ({nearest(new, wanted)})"
    raise UserError(f"{what}: {odd}; keep them all")


def require_as_built(model: nn.Module, built: Blueprint, where: str) -> None:
    """Refuse a parallel model whose parameters are others than were built, in number or shape.

    Args:
        where: what made it so, for the sentence.
    """
    for name, parameter in as_built(model, built.names).items():
        shape = tuple(parameter.shape)
        if built.shapes and shape != built.shapes[name]:
            was = f"{list(shape)} in the parallel model and {list(built.shapes[name])} where build_model made it"
            raise UserError(
                f"parameter {name} has shape {was}{where}; shard it as a DTensor, which keeps the whole shape"
            )


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


def materialise(model: nn.Module, context: RankContext, built: Blueprint, device: torch.device | None = None) -> None:
    """Give a sharded model memory and its initial values, one parameter at a time; needs no communication.

    Parameters go to the rank's device, or to `device` where they are offloaded.
    """
    allocate(model, context, device)
    load_initial_values(model, context, built)


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
def load_initial_values(model: nn.Module, context: RankContext, built: Blueprint) -> None:
    """Set every parameter (or this rank's shard of it) to the value that its place among the parameters that were
    built, its shape and the seed determine: a wrapper, which changes names, changes no value."""
    places = {name: place for place, name in enumerate(built.parameters)}
    for name, parameter in as_built(model, built.names).items():
        full = initial_value(places[name], name.rpartition(".")[2], tuple(parameter.shape), context.seed)
        _fill(parameter, full.to(parameter.dtype))
    values = list(built.buffers.values())
    for place, (name, buffer) in enumerate(model.named_buffers()):
        if name in built.buffers:
            _fill(buffer, built.buffers[name])
        elif len(values) > place and values[place].shape == buffer.shape:
            _fill(buffer, values[place])
        else:
            raise UserError(f"the parallel model has a buffer {name!r} that build_model did not make; make it there")


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
    value = torch.randn(shape, generator=generator)
    if len(shape) >= 2:
        return value / shape[-1] ** 0.5
    return 1 + 0.1 * value if role == "weight" else 0.1 * value


def local_part(tensor: Any) -> torch.Tensor:
    """What a rank holds of a parameter, without its history."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
