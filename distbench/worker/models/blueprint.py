"""A model as its function builds it, on the meta device, and what it was then, whatever a plan does to it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distbench.spec import UserError
from distbench.spec.errors import nearest
from distbench.spec.printable import count_text
from distbench.worker.models.building import (
    OWN_ATTRIBUTES,
    attributes_of,
    built_on_meta,
    built_with_values,
    whole_on_cpu,
)
from distbench.worker.rank.dtypes import dtype_name
from distbench.worker.rank.failure import place_of

# How the one parameter ends that FSDP1 makes of many.
FLAT = "_flat_param"


@dataclass(frozen=True)
class Fact:
    """What is known of a parameter as it was built."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, and what it was when it was built, which stays whatever a plan does to it.

    Args:
        buffers: name to initial value on the CPU; no seed determines those.
        names: name of each parameter to itself; those that others share stand for the first of them.
        facts: by name.
        modules: by name.
        attributes: (module's name, attribute) to the tensors that a module keeps as neither parameter nor buffer, on
            the CPU where values were asked for; a tensor, or what holds some.
        needs_values: whether it can only be built where its parameters have values (`whole_on_cpu`).
    """

    model: nn.Module
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    needs_values: bool = False

    @property
    def parameters(self) -> list[str]:
        """Each parameter's name once, in the model's order."""
        return list(dict.fromkeys(self.names.values()))

    def first_names(self, model: nn.Module, found: Iterable[str]) -> dict[str, str]:
        """Names of parameters or buffers of a model that a plan changed, to those that they had when it was built: a
        wrapper changes names, and leaves what it wraps what it was. Those that are in no module of then are left out.
        """
        was = {id(module): name for name, module in self.modules.items()}
        modules = dict(model.named_modules(remove_duplicate=False))
        first = {}
        for name in found:
            holder, _, attribute = name.rpartition(".")
            if (then := was.get(id(modules.get(holder)))) is not None:
                first[name] = f"{then}.{attribute}" if then else attribute
        return first


def blueprint(build_model: Callable[[], Any], seed: int, with_values: bool = True) -> Blueprint:
    """Build a model on the meta device; where it has tensors that are no parameters, and their values are asked for,
    once more to learn them.

    The second time only the parameters are put on the meta device, each as it is registered, so no more than one of
    them has memory at a time; where other tensors are made of parameters, these have memory too. What is drawn at
    random starts from the seed, the same on every rank.

    Raises:
        UserError: it raises, builds no model or a lazy one, or values are made of the parameters of a large model.
    """
    model, needs_values = built_on_meta(build_model, seed)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(f"build_model ({place_of(build_model)}) returns {kind}, it must return an nn.Module")
    if lazy := next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None):
        what = f"build_model ({place_of(build_model)}) makes parameter {lazy!r} without a shape"
        raise UserError(f"{what}, as lazy modules do; give that module its sizes")
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    facts = {
        name: Fact(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    attributes = attributes_of(model)
    modules = dict(model.named_modules())
    if not with_values or not (attributes or next(model.buffers(), None) is not None):
        return Blueprint(model, {}, names, facts, modules, attributes, needs_values)
    if needs_values:
        valued = whole_on_cpu(build_model, seed)
    else:
        valued = built_with_values(build_model, seed, sum(one.numel() for one in model.parameters()), attributes)
    buffers = {name: buffer.detach().clone() for name, buffer in valued.named_buffers()}
    known = attributes_of(valued, attributes)
    attributes = {key: known[key] for key in attributes if key in known}
    return Blueprint(model, buffers, names, facts, modules, attributes, needs_values)


def unregistered(built: Blueprint) -> str:
    """A module that another one keeps in a plain list or dict, where its parameters are nobody's and get no memory: a
    half sentence, or nothing."""
    known = set(built.modules.values())
    for name, module in built.modules.items():
        for attribute, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if attribute not in OWN_ATTRIBUTES and any(isinstance(one, nn.Module) and one not in known for one in held):
                where = f"{name}.{attribute}" if name else attribute
                return f"; {where} holds modules in a plain {type(value).__name__}: use ModuleList or ModuleDict"
    return ""


def as_built(model: nn.Module, built: Blueprint, where: str = "") -> dict[str, nn.Parameter]:
    """Parameters of a parallel model by the names that they had when it was built.

    A wrapper, torch.compile's or activation checkpointing's say, may have put something before or into a name; then
    they are known by the modules that hold them, or else taken in their order. Of a pipeline's stages those that this
    rank holds.

    Args:
        where: what changed the model, for the sentence.

    Raises:
        UserError: the model has other parameters than were built.
    """
    found, names = dict(model.named_parameters()), built.names
    held = getattr(model, "held_names", names)
    wanted = [name for name in dict.fromkeys(names.values()) if name in held]
    for first in ({name: name for name in found}, built.first_names(model, found)):
        if all(first.get(name) in names for name in found):
            by_name = {names[first[name]]: parameter for name, parameter in found.items()}
            _require_tied(names, first, where)
            if len(by_name) == len(wanted):
                return {name: by_name[name] for name in wanted}
    if len(found) == len(wanted):
        return dict(zip(wanted, found.values(), strict=True))
    if flat := next((name for name in found if name.endswith(FLAT)), None):
        what = f"the parallel model{where} has a flat parameter {flat!r}, as FullyShardedDataParallel makes it"
        raise UserError(f"{what}; use fully_shard, which leaves parameters what they were")
    what = f"the parallel model{where} has {count_text(len(found), 'parameter')} where build_model made {len(wanted)}"
    new = next((name for name in found if name not in names), None)
    lost = next((name for name in wanted if name not in found), None)
    odd = f"lacks {lost!r}" if new is None else f"{new!r} is new ({nearest(new, wanted)})"
    raise UserError(f"{what}: {odd}; keep them all")


def _require_tied(names: Mapping[str, str], first: Mapping[str, str], where: str) -> None:
    """Refuse two parameters in the place of one that modules shared: values and gradients would be those of one."""
    holders: dict[str, str] = {}
    for was in first.values():
        other = holders.setdefault(names[was], was)
        if other != was:
            what = f"parameter {other} is shared with {was} in the model that build_model made, and the parallel model"
            raise UserError(
                f"{what}{where} has two, as when a style makes a DTensor of one alone; lay both out alike, or untie "
                "them (tie_word_embeddings=False in a config of transformers)"
            )


def require_as_built(model: nn.Module, built: Blueprint, where: str) -> None:
    """Refuse a parallel model whose parameters are others than were built, in number, shape, dtype, or whether they
    learn.

    Args:
        where: what made it so, for the sentence.
    """
    for name, parameter in as_built(model, built, where).items():
        fact = built.facts.get(name)
        if fact is None:
            continue
        shape, dtype = tuple(parameter.shape), parameter.dtype
        if shape != fact.shape:
            was, instead = f"has shape {list(shape)}", "shard it as a DTensor, which keeps the whole shape"
            then = str(list(fact.shape))
        elif dtype != fact.dtype:
            was, then = f"is of {dtype_name(dtype)}", dtype_name(fact.dtype)
            instead = "cast it in build_model, so that one device computes the same, or by a MixedPrecisionPolicy"
        elif parameter.requires_grad != fact.learns:
            was, then = ("is frozen", "not frozen") if fact.learns else ("is not frozen", "frozen")
            instead = "call requires_grad_ in build_model, so that one device does the same"
        else:
            continue
        raise UserError(
            f"parameter {name} {was} in the parallel model and {then} where build_model made it{where}; {instead}"
        )
