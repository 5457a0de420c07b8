"""A model as its function builds it on the meta device; its memory and initial values; containers of tensors."""

import contextlib
import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from distbench.ranks.context import RankContext
from distbench.ranks.dtypes import dtype_name
from distbench.ranks.failure import blamed, one_line, place_of
from distbench.redistribute.expected_shards import own_shard
from distbench.spec import UserError
from distbench.spec.errors import nearest
from distbench.spec.printable_text import count_text
from distbench.torch_private import Unsupported

# Sequences whose constructors accept more arguments than the items.
FILLED = (deque, UserList)
# Larger models are not built with values to find tensors that are computed from parameters.
MOST_DRAWN = 100_000_000
# Attributes of every module.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
# End of the name of a flat parameter, into which FSDP1 joins many parameters.
FLAT = "_flat_param"


def kind_of(tree: Any) -> str:
    """Describe the type of a returned value, for messages."""
    name = type(tree).__name__
    return "None" if tree is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def tensors_of(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a batch with its name: keys, fields and positions joined by dots."""
    return ((name, leaf) for name, leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor))


def leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a batch with its name."""
    parts = _parts(tree)
    if not parts:
        yield name, tree
    for key, value in parts:
        yield from leaves_of(value, f"{name}.{key}" if name else str(key))


def mapped(tree: Any, change: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """Return the same structure with each tensor changed; containers without a changed tensor are returned as is."""
    if isinstance(tree, torch.Tensor):
        return change(name, tree)
    parts = _parts(tree)
    new = {key: mapped(value, change, f"{name}.{key}" if name else str(key)) for key, value in parts}
    return tree if all(new[key] is value for key, value in parts) else _with_parts(tree, new)


def _with_parts(tree: Any, new: dict[Any, Any]) -> Any:
    """Copy the container and change the copy, because a constructor may accept other arguments, or change its
    arguments.
    """
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree._replace(**new)  # type: ignore[attr-defined]
    if isinstance(tree, list | tuple):
        return type(tree)(list(new.values()))
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return new
    changed = copy.copy(tree)
    if isinstance(changed, FILLED):
        changed.clear()
        changed.extend(new.values())
    elif isinstance(changed, MutableMapping):
        # A copy of a user's mapping may share the dict with its items.
        for attribute, value in list(getattr(changed, "__dict__", {}).items()):
            if isinstance(value, MutableMapping):
                changed.__dict__[attribute] = copy.copy(value)
        for key, value in new.items():
            changed[key] = value  # not update(), which ModelOutput of transformers rejects
    else:
        for key, value in new.items():
            object.__setattr__(changed, key, value)
    return changed


def _parts(tree: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple, *FILLED)):
        return list(enumerate(tree))
    return () if isinstance(tree, torch.Tensor | nn.Module | type) else _fields_of(tree)


def _fields_of(tree: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass or attrs class; of other objects the attributes, if one of them is a tensor."""
    kind: Any = type(tree)
    declared = dataclasses.fields(tree) if dataclasses.is_dataclass(tree) else getattr(kind, "__attrs_attrs__", None)
    if declared is not None:
        names = [field.name for field in declared if hasattr(tree, field.name)]
        return [(name, getattr(tree, name)) for name in names]
    attributes = getattr(tree, "__dict__", {})
    return list(attributes.items()) if any(isinstance(value, torch.Tensor) for value in attributes.values()) else []


def whole_on_cpu(build_model: Callable[[], Any], seed: int) -> Any:
    """Build a model with all values, equal on all ranks, for a function that reads parameter values.

    Raises:
        MemoryError: the model has more than 100 M parameters.
    """
    total = 0

    def counted(parameter: nn.Parameter) -> nn.Parameter:
        nonlocal total
        total += parameter.numel()
        if total > MOST_DRAWN:
            raise MemoryError(f"more than {MOST_DRAWN:,} parameters")
        return parameter

    with _seeded(seed), torch.device("cpu"), _registering(counted):
        return build_model()


def _built_on_meta(build_model: Callable[[], Any], seed: int) -> tuple[Any, bool]:
    """Return the model, and whether it can only be built with all values.

    A function that reads values of other tensors than its parameters (such as the rates of stochastic depth) runs on
    the CPU, with only its parameters on the meta device; a function that reads parameters runs with all values first.
    """
    needs_values = False
    with blamed("build_model", build_model):
        try:
            with torch.device("meta"):
                return build_model(), False
        except Exception as error:
            try:
                with _registering(_on_meta), torch.device("cpu"):
                    model = build_model()
            except Exception:
                needs_values = True
                try:
                    model = whole_on_cpu(build_model, seed)
                except Exception:
                    raise error from None
    if isinstance(model, nn.Module):
        _move_parameters(model)
        for module in model.to("meta").modules():
            for attribute, value in list(vars(module).items()):
                if attribute not in OWN_ATTRIBUTES and _tensors(value):
                    setattr(module, attribute, mapped(value, lambda _, tensor: tensor.to("meta")))
    return model, needs_values


def _move_parameters(model: nn.Module) -> None:
    """Move a model to the meta device. Shared parameters remain shared; torch would make a parameter per module."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in moved:
                moved[parameter] = _on_meta(parameter)
            module.register_parameter(name, moved[parameter])


def _built_with_values(
    build_model: Callable[[], Any], seed: int, num_parameters: int, attributes: Mapping[tuple[str, str], Any]
) -> nn.Module:
    """Return the model with values for tensors other than parameters, and for the parameters that determine them."""
    with blamed("build_model", build_model), _seeded(seed), torch.device("cpu"):
        with _registering(_on_meta):
            model: nn.Module = build_model()
        # Tensors that are still on the meta device are computed from parameters.
        values = _attributes_of(model, attributes)
        of_parameters = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        of_parameters += [
            ".".join(filter(None, key))
            for key in attributes
            if any(tensor.is_meta for tensor in _tensors(values.get(key)))
        ]
        if not of_parameters:
            return model
        if num_parameters > MOST_DRAWN:
            problem = f"build_model ({place_of(build_model)}) computes {of_parameters[0]} from parameters"
            raise UserError(
                f"{problem}, which have no values in a model of {num_parameters:,} parameters; use constants instead"
            )
        return build_model()  # type: ignore[no-any-return]


def _attributes_of(model: nn.Module, wanted_keys: Iterable[tuple[str, str]] = ()) -> dict[tuple[str, str], Any]:
    """Return meta tensors that are plain attributes of modules, alone or in containers, and the wanted attributes."""
    keys = set(wanted_keys)
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if (name, attribute) in keys
        or (attribute not in OWN_ATTRIBUTES and any(tensor.is_meta for tensor in _tensors(value)))
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an attribute, without parameters, which are registered elsewhere."""
    if not isinstance(value, torch.Tensor | list | tuple | dict):
        return []
    return [tensor for _, tensor in tensors_of(value) if not isinstance(tensor, nn.Parameter)]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter on the meta device; the same object if it is there, as modules may share it."""
    if parameter.is_meta:
        return parameter
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def _registering(change: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_changed(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else change(param))

    nn.Module.register_parameter = register_changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True)
class Fact:
    """Properties of a parameter when the model was built."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, and its properties as built, which plans do not change."""

    model: nn.Module
    # Names to initial values on the CPU, for values that do not depend on the seed
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    # Name of each parameter to itself; names of shared parameters to the first name
    names: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)  # by name
    modules: dict[str, nn.Module] = field(default_factory=dict)  # by name
    # (module's name, attribute) to tensors that are neither parameter nor buffer, on the CPU if values were requested:
    # a tensor, or a container of tensors
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    needs_values: bool = False  # whether building requires parameters with values (`whole_on_cpu`)

    @property
    def parameters(self) -> list[str]:
        """Return each parameter's name once, in the model's order."""
        return list(dict.fromkeys(self.names.values()))

    def first_names(self, model: nn.Module, names: Iterable[str]) -> dict[str, str]:
        """Map names of parameters or buffers of a changed model to their names in the model as built.

        A wrapper changes names but not the wrapped module. Names in new modules are left out.
        """
        was = {id(module): name for name, module in self.modules.items()}
        modules = dict(model.named_modules(remove_duplicate=False))
        first = {}
        for name in names:
            holder, _, attribute = name.rpartition(".")
            if (then := was.get(id(modules.get(holder)))) is not None:
                first[name] = f"{then}.{attribute}" if then else attribute
        return first


def blueprint(build_model: Callable[[], Any], seed: int, with_values: bool = True) -> Blueprint:
    """Build a model on the meta device.

    If values are requested and the model has tensors other than parameters, the model is built a second time, with only
    parameters on the meta device. Each parameter moves there when registered, so at most one parameter has memory at a
    time. Parameters from which other tensors are computed also have memory. Random numbers start from the same seed on
    every rank.

    Raises:
        UserError: `build_model` raises, returns no model or a lazy model, or computes values from parameters of a large
            model.
    """
    model, needs_values = _built_on_meta(build_model, seed)
    origin = f"build_model ({place_of(build_model)})"
    if not isinstance(model, nn.Module):
        raise UserError(f"{origin} returns {type(model).__name__}; return an nn.Module")
    if lazy := next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None):
        raise UserError(
            f"{origin} makes parameter {lazy!r} without a shape, as lazy modules do; give the module its sizes"
        )
    first = {parameter: name for name, parameter in model.named_parameters()}
    names = {name: first[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    facts = {
        name: Fact(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for parameter, name in first.items()
    }
    attributes, buffers = _attributes_of(model), dict[str, torch.Tensor]()
    if with_values and (attributes or next(model.buffers(), None) is not None):
        if needs_values:
            valued = whole_on_cpu(build_model, seed)
        else:
            num_parameters = sum(tensor.numel() for tensor in model.parameters())
            valued = _built_with_values(build_model, seed, num_parameters, attributes)
        buffers = {name: buffer.detach().clone() for name, buffer in valued.named_buffers()}
        values = _attributes_of(valued, attributes)
        attributes = {key: values[key] for key in attributes if key in values}
    return Blueprint(model, buffers, names, facts, dict(model.named_modules()), attributes, needs_values)


def unregistered(built: Blueprint) -> str:
    """Return a half sentence on modules in a plain list or dict, whose parameters get no memory; "" without such
    modules.
    """
    registered = set(built.modules.values())
    for name, module in built.modules.items():
        for attribute, value in vars(module).items():
            children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            plain = [child for child in children if isinstance(child, nn.Module) and child not in registered]
            if plain and attribute not in OWN_ATTRIBUTES:
                where = f"{name}.{attribute}" if name else attribute
                return f"; {where} has modules in a plain {type(value).__name__} (use ModuleList or ModuleDict)"
    return ""


def as_built(model: nn.Module, built: Blueprint, where: str = "") -> dict[str, nn.Parameter]:
    """Return the parameters of a parallel model by their names in the model as built; `where` describes the change.

    Wrappers, such as those of torch.compile and activation checkpointing, may extend names. Then parameters are
    identified by their modules, or else by their order. For a pipeline, only parameters of this rank's stages are
    returned.

    Raises:
        UserError: the model has other parameters than the model as built.
    """
    parameters, names = dict(model.named_parameters()), built.names
    held_names = getattr(model, "held_names", names)
    expected_names = [name for name in built.parameters if name in held_names]
    for first in ({name: name for name in parameters}, built.first_names(model, parameters)):
        if all(first.get(name) in names for name in parameters):
            by_name = {names[first[name]]: parameter for name, parameter in parameters.items()}
            _require_tied(names, first, where)
            if len(by_name) == len(expected_names):
                return {name: by_name[name] for name in expected_names}
    if len(parameters) == len(expected_names):
        return dict(zip(expected_names, parameters.values(), strict=True))
    if flat := next((name for name in parameters if name.endswith(FLAT)), None):
        problem = f"the parallel model{where} has a flat parameter {flat!r} of FullyShardedDataParallel"
        raise UserError(f"{problem}; use fully_shard, which keeps each parameter")
    count = count_text(len(parameters), "parameter")
    problem = f"the parallel model{where} has {count}, but build_model's model has {len(expected_names)}"
    new = next((name for name in parameters if name not in names), None)
    lost_name = next((name for name in expected_names if name not in parameters), None)
    odd = f"lacks {lost_name!r}" if new is None else f"{new!r} is new ({nearest(new, expected_names)})"
    raise UserError(f"{problem} ({odd}); keep every parameter")


def _require_tied(names: Mapping[str, str], first: Mapping[str, str], where: str) -> None:
    """Raise UserError if two parameters replace a shared parameter, because values and gradients would differ."""
    holders: dict[str, str] = {}
    for was in first.values():
        other_name = holders.setdefault(names[was], was)
        if other_name != was:
            raise UserError(
                f"parameter {other_name} is shared with {was} in build_model's model, but the parallel model{where} "
                "has two parameters, for example because a TP style or an FSDP unit includes only one of the modules; "
                "give both the same layout, or untie them (tie_word_embeddings=False in transformers)"
            )


def require_as_built(model: nn.Module, built: Blueprint, where: str) -> None:
    """Raise UserError if the parameters of a parallel model differ from the model as built.

    The number, shapes, dtypes and `requires_grad` are compared; `where` describes the change.
    """
    for name, parameter in as_built(model, built, where).items():
        fact = built.facts.get(name)
        if fact is None:
            continue
        if (shape := tuple(parameter.shape)) != fact.shape:
            now, then = f"has shape {list(shape)}", str(list(fact.shape))
            instead = "shard it as a DTensor, which keeps the full shape"
        elif parameter.dtype != fact.dtype:
            now, then = f"is of {dtype_name(parameter.dtype)}", dtype_name(fact.dtype)
            instead = (
                "cast it in build_model, so that the single-device reference does the same, or use MixedPrecisionPolicy"
            )
        elif parameter.requires_grad != fact.learns:
            now, then = ("is frozen", "not frozen") if fact.learns else ("is not frozen", "frozen")
            instead = "call requires_grad_ in build_model, so that the single-device reference does the same"
        else:
            continue
        raise UserError(
            f"parameter {name} {now} in the parallel model{where}, but {then} in build_model's model; {instead}"
        )


def owners_of(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Map parameter ids to (module name, module, attribute) of the modules that have the parameter."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module_name, module, attribute))
    return owners


def materialise(model: nn.Module, context: RankContext, built: Blueprint, device: torch.device | None = None) -> None:
    """Give a sharded model memory and its initial values, one parameter at a time, without communication.

    Parameters are allocated on the rank's device, or on `device` if offloaded. Buffers that the plan added are
    unchanged.

    Raises:
        UserError: a buffer that build_model did not make has no values.
    """
    added = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    allocate(model, context, device)
    with torch.no_grad():
        for name, buffer in load_initial_values(model, context, built).items():
            if name not in added:
                raise UserError(
                    f"the parallel model has a buffer {name!r} that build_model did not make and that has no values; "
                    "create the buffer in build_model, or on an explicit device"
                )
            buffer.copy_(added[name])
    place_attributes(model, built, context.device)


def allocate(model: nn.Module, context: RankContext, device: torch.device | None = None) -> None:
    """Give a sharded model memory without values, and without plain attributes."""
    shared = [owners for owners in owners_of(model).values() if len(owners) > 1]
    model.to_empty(device=device or context.device)
    # torch gives each holder of a shared parameter its own memory, unless it is a DTensor.
    for (_, module, attribute), *other_holders in shared:
        for _, holder, name in other_holders:
            holder.register_parameter(name, getattr(module, attribute))
    if device is not None and device != context.device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(context.device))


@torch.no_grad()
def load_initial_values(model: nn.Module, context: RankContext, built: Blueprint) -> dict[str, torch.Tensor]:
    """Set every parameter (or this rank's shard of it) to its initial value.

    The value depends on the seed, the shape and the parameter's index in the model as built, so wrappers, which change
    names, change no value. Buffers get their values in the model as built; buffers without built values are returned by
    name.
    """
    places = {name: place for place, name in enumerate(built.parameters)}
    for name, parameter in as_built(model, built).items():
        full = initial_value(places[name], name.rpartition(".")[2], tuple(parameter.shape), context.seed)
        _fill(parameter, full.to(parameter.dtype))
    buffers = dict(model.named_buffers())
    first = {**built.first_names(model, buffers), **{name: name for name in buffers if name in built.buffers}}
    unknown = {name: buffer for name, buffer in buffers.items() if first.get(name) not in built.buffers}
    for name, buffer in buffers.items():
        if name not in unknown:
            _fill(buffer, built.buffers[first[name]])
    return unknown


def place_attributes(model: nn.Module, built: Blueprint, device: torch.device, values: bool = True) -> None:
    """Allocate tensors that are plain attributes of modules on a device, and set their values if `values`.

    `model` is the built model, changed or unchanged, or another model of the same function.
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
    """Return a parameter's full initial value: normal with standard deviation 1/sqrt(last size); 1-D weights near one.

    `place` is the parameter's index in the model; `role`, the last part of its name, separates norms from biases.
    """
    generator = torch.Generator().manual_seed((seed << 32) + place)
    value = torch.randn(shape, generator=generator, dtype=torch.float32)
    if len(shape) >= 2:
        return value / shape[-1] ** 0.5
    return 1 + 0.1 * value if role == "weight" else 0.1 * value


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a parameter, without its history."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def name_of(model: Any) -> str:
    """Return the original class name of a model, without the prefix of fully_shard and replicate."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed."))


@contextlib.contextmanager
def named_refusal(field: str, name: str = "", module: nn.Module | None = None) -> Iterator[None]:
    """Add the plan's field and the module to errors of torch, which rarely include either.

    `name` is empty for the root; without a `module` the field applies to several modules.

    Raises:
        UserError: torch raised an error other than a communication failure.
    """
    try:
        yield
    except (UserError, Unsupported, dist.DistError):
        raise
    except Exception as error:
        module_text = f"{name or 'the root'}, a {name_of(module)}" if module is not None else "this"
        why = one_line(error).rstrip(".")
        raise UserError(f"{field}: torch rejects {module_text} ({why}); change this part of the plan") from error
