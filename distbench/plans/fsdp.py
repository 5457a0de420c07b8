"""DDP or FSDP2 applied to a model: units, mesh, shard placements, and averaging of gradients that FSDP ignores."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from distbench.plans.model import named_refusal, owners_of
from distbench.plans.module_patterns import matching_modules
from distbench.ranks.context import RankContext
from distbench.ranks.failure import blamed
from distbench.spec import DdpPlan, FsdpPlan, LargestDim
from distbench.spec.devices import ANY_ACCELERATOR, is_accelerator
from distbench.spec.plan import matching
from distbench.torch_private import (
    Skipped,
    flatten_mesh,
    hybrid_mesh,
    on_spmd_mesh,
    replicate_by_unit,
    replicate_in_buckets,
    require,
    require_symmetric_memory,
)


@dataclass
class Sharded:
    """Result of FSDP or DDP on a model: roots, names of parameters that FSDP keeps whole, and the row's counters."""

    roots: list[Any] = field(default_factory=list)
    kept_whole: tuple[str, ...] = ()
    counters: dict[str, Any] = field(default_factory=dict)


def present(mesh_dims: Sequence[str], context: RankContext) -> list[str]:
    """Return the given mesh dims that this mesh has."""
    return [name for name in mesh_dims if name in context.mesh_dims]


def shard_fully(model: nn.Module, plan: FsdpPlan, context: RankContext) -> Sharded:
    """Apply `fully_shard` to every unit (`replicate` without sharding), deepest first, then to the root.

    Raises:
        Skipped: CPU offload on a CPU device.
    """
    from torch.distributed.fsdp import fully_shard

    if plan.offload is not None and not is_accelerator(context.device.type):
        raise Skipped(
            "CPU offload needs an accelerator, because the shards of a CPU run are in host memory; use --device "
            f"{ANY_ACCELERATOR}"
        )
    for name in plan.configure:
        require(name)
    if "set_symm_mem_for_comm" in plan.configure:
        require_symmetric_memory(context.device.type, "set_symm_mem_for_comm")
    if plan.gather_extension is not None:
        _extend_gathers(model, plan.gather_extension)
    least = plan.shard_placement.min_numel if isinstance(plan.shard_placement, LargestDim) else 0
    small = {name: parameter for name, parameter in model.named_parameters() if parameter.numel() < least}
    unsharded, ignored = {**small, **_named(model, plan.whole)}, _named(model, plan.ignored)
    options: dict[str, Any] = {
        **_mesh(plan, context),
        "ignored_params": {*unsharded.values(), *ignored.values()},
        "reshard_after_forward": plan.reshard_after_forward,
        "offload_policy": plan.offload,
        "shard_placement_fn": shard_placement_of(plan, context.index(plan.mesh_dims)[1]),
    }
    own_meshes = {
        module: flatten_mesh(context.mesh, present(mesh_dims, context))
        for pattern, mesh_dims in plan.unit_mesh_dims.items()
        for module in matching_modules((pattern,), model).values()
    }
    modules = {**matching_modules(plan.wrap, model), **matching_modules(plan.unit_mesh_dims, model), "": model}
    units = {name: modules[name] for name in sorted(modules, key=lambda name: -name.count(".") if name else 1)}
    fields = ", ".join(plan.changed_fields()) or "the default"
    apply: Callable[..., Any] = fully_shard if plan.mesh_dims else replicate_by_unit()
    for name, unit in units.items():
        unit_options = {**options, "mp_policy": _policy_of(plan, name), "mesh": own_meshes.get(unit, options["mesh"])}
        with named_refusal(f"FsdpPlan ({fields})", name, unit):
            apply(unit, **{option: value for option, value in unit_options.items() if value is not None})
    own_units: list[Any] = list(own_meshes)
    for unit in own_units:
        unit.set_gradient_divide_factor(data_parallel_size(plan, context))
    _configure(units, plan, context)
    _prefetch(list(matching_modules(plan.wrap, model).values()), plan)
    return Sharded([model], tuple(unsharded), _counters(model, {**unsharded, **ignored}, plan))


def replicate(model: nn.Module, plan: DdpPlan, context: RankContext) -> Sharded:
    """Apply DDP, which averages the model's gradients in buckets."""
    group = flatten_mesh(context.mesh, present(plan.mesh_dims, context)).get_group()
    names = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    options = {name: value for name in names if (value := getattr(plan, name)) is not None}
    for name in plan.configure:
        require(name)
    ignored = list(matching_modules(plan.ignored, model).values())
    replicate_in_buckets(model, ignored, process_group=group, device_id=context.device, **{**options, **plan.configure})
    if plan.comm_hook is not None:
        with blamed("DdpPlan.comm_hook", plan.comm_hook):
            state, hook = plan.comm_hook(group)
        model.register_comm_hook(state, hook)  # type: ignore[operator]
    return Sharded([model])


def _policy_of(plan: FsdpPlan, unit: str) -> Any:
    """Return the policy by module name, "" for the root; None for torch's default."""
    if not isinstance(plan.mixed_precision, Mapping):
        return plan.mixed_precision
    return next((policy for pattern, policy in plan.mixed_precision.items() if matching(pattern, [unit])), None)


def policies_of(plan: FsdpPlan) -> list[Any]:
    """Return every mixed precision policy in the plan."""
    if isinstance(plan.mixed_precision, Mapping):
        return list(plan.mixed_precision.values())
    return [] if plan.mixed_precision is None else [plan.mixed_precision]


def _mesh(plan: FsdpPlan, context: RankContext) -> dict[str, Any]:
    """Return the mesh argument of fully_shard and, for the whole mesh, which of its mesh dims are data parallel."""
    shards = present(plan.mesh_dims, context)
    if not plan.mesh_dims:
        return {"mesh": flatten_mesh(context.mesh, present(plan.replicate_dims, context))}
    # A single replica needs no hybrid sharding.
    replicas = [name for name in plan.replicate_dims if context.size(name) > 1]
    if "set_all_reduce_hook" in plan.configure:
        replicas = []  # FSDP2 gets the shards only; a hook reduces over replicas
    if plan.spmd_mesh:
        return on_spmd_mesh(context.mesh, shards, replicas)
    return {"mesh": hybrid_mesh(context.mesh, replicas, shards) if replicas else flatten_mesh(context.mesh, shards)}


def data_parallel_size(plan: FsdpPlan, context: RankContext) -> int:
    """Return the number of ranks over which gradients are summed, the default divisor of the sum."""
    return context.index((*plan.mesh_dims, *plan.replicate_dims))[1]


def shard_placement_of(plan: FsdpPlan, num_shards: int) -> Callable[[Any], Any] | None:
    """Return the plan's `shard_placement_fn`; None if all parameters are sharded on tensor dim 0."""
    if not isinstance(plan.shard_placement, LargestDim):
        return plan.shard_placement

    def largest_dim(parameter: Any) -> Any:
        from torch.distributed.tensor import Shard

        used_dims = {placement.dim for placement in getattr(parameter, "placements", ()) if placement.is_shard()}
        fitting = [dim for dim, size in enumerate(parameter.shape) if dim not in used_dims and size % num_shards == 0]
        return Shard(max(fitting, key=lambda dim: parameter.shape[dim])) if fitting else None

    return largest_dim


def _named(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for pattern in patterns for name in matching(pattern, parameters)}


def _extend_gathers(model: nn.Module, extension: Callable[[Any], Any]) -> None:
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    for key, owners in owners_of(model).items():
        plain = parameters[key]
        if plain.ndim < 2:
            continue
        extended = nn.Parameter(extension(plain.detach()), requires_grad=plain.requires_grad)
        for _, module, attribute in owners:
            module.register_parameter(attribute, extended)


def _configure(units: Mapping[str, Any], plan: FsdpPlan, context: RankContext) -> None:
    for setter, value in plan.configure.items():
        # A setter with `recurse` also reaches the units inside: once on the root, so that a process group is made once;
        # or a unit at a time, so that the root's value does not replace other units' values.
        recurses = "recurse" in inspect.signature(getattr(units[""], setter)).parameters
        alone = {"recurse": False} if recurses and is_function(value) else {}
        for name, unit in ({"": units[""]} if recurses and not alone else units).items():
            with named_refusal(f"FsdpPlan.configure[{setter!r}]", name, unit):
                argument = value
                if is_function(value):
                    with blamed(f"FsdpPlan.configure[{setter!r}]", value):
                        argument = value(name, context.mesh)
                args, kwargs = setter_arguments(argument)
                getattr(unit, setter)(*args, **{**alone, **kwargs})


def is_function(value: Any) -> bool:
    """Return whether a value of `configure` is a function, other than an object, for the setter's argument."""
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def setter_arguments(argument: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the (positional, keyword) arguments of a setter."""
    return ((), argument) if isinstance(argument, dict) else ((argument,), {})


def _prefetch(units: list[Any], plan: FsdpPlan) -> None:
    for index, unit in enumerate(units):
        if plan.prefetch_forward is not None:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + plan.prefetch_forward])
        if plan.prefetch_backward is not None:
            before = units[max(index - plan.prefetch_backward, 0) : index]
            unit.set_modules_to_backward_prefetch(before[::-1])


def _counters(model: nn.Module, unsharded: dict[str, nn.Parameter], plan: FsdpPlan) -> dict[str, Any]:
    if plan.shard_placement is None:
        return {}
    tensor_dims: Counter[int] = Counter(
        next(placement.dim for placement in getattr(parameter, "placements", ()) if hasattr(placement, "dim"))
        for name, parameter in model.named_parameters()
        if name not in unsharded
    )
    shards = ", ".join(f"{count} on tensor dim {tensor_dim}" for tensor_dim, count in sorted(tensor_dims.items()))
    return {"fsdp_shards": shards, "fsdp_kept_whole": ", ".join(unsharded) or "none"}


def average_whole_gradients(model: nn.Module, sharded: Sharded, plan: FsdpPlan | None, context: RankContext) -> None:
    """Average the gradients of parameters that FSDP ignores, as soon as backward has completed each gradient.

    A second average changes nothing, so micro-batches may accumulate gradients.
    """
    if plan is None or not sharded.kept_whole:
        return
    mesh_dims = [name for name in context.mesh_dims if name in (*plan.mesh_dims, *plan.replicate_dims)]
    group = flatten_mesh(context.mesh, mesh_dims).get_group()
    size = data_parallel_size(plan, context)

    def average(parameter: Any) -> None:
        gradient = parameter.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        dist.all_reduce(local, group=group)
        local.div_(size)

    for name, parameter in model.named_parameters():
        if name in sharded.kept_whole and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
