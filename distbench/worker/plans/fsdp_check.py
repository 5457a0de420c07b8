"""What keeps FSDP2's knobs from working on a model and a mesh."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from distbench.spec import DdpPlan, FsdpPlan, LargestDim, ParallelPlan
from distbench.spec.errors import nearest
from distbench.worker.plans.divisibility import Undivided, undivided
from distbench.worker.plans.fully_sharded import policies_of, present
from distbench.worker.plans.materialise import owners_of
from distbench.worker.plans.patterns import annotations_by_parameter, matching, matching_modules, styles_by_module
from distbench.worker.plans.tp_check import local_shape
from distbench.worker.rank.dtypes import dtype_name
from distbench.worker.rank.rank_context import BATCH_DIMS, RankContext

# Fields of FsdpPlan that mean nothing where every rank has all parameters.
OF_SHARDS: tuple[str, ...] = (
    "reshard_after_forward",
    "offload",
    "shard_placement",
    "prefetch_forward",
    "prefetch_backward",
)
OF_SHARDS += ("reshard_each_microbatch", "all_reduce_each_microbatch", "not_in_backward", "unshard_ahead")
OF_SHARDS += (
    "all_reduce_hook",
    "all_gather",
    "reduce_scatter",
    "gather_extension",
    "whole",
    "unit_mesh_dims",
    "spmd_mesh",
)
# Those that torch has not, or that leave plain parameters among the DTensors of one mesh.
NOT_ON_SPMD_MESH = ("all_reduce_hook", "gather_extension", "whole", "ignored", "unit_mesh_dims")
# Fields of DdpPlan that torch's reducer in Python does not read.
OF_REDUCER = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def fsdp_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    """One sentence for each problem of the plan's FSDP part, if it has one."""
    fsdp = plan.fsdp
    if fsdp is None:
        return
    shards = present(fsdp.mesh_dims, context)
    if not fsdp.mesh_dims and present(fsdp.replicate_dims, context):
        yield from _replicas_alone(fsdp)
        yield from _tied_across_units(model, fsdp)
        return
    if not shards:
        over = f"shards over {', '.join(fsdp.mesh_dims)}" if fsdp.mesh_dims else "has no mesh_dims to shard over"
        yield f"FSDP {over}, the mesh has only {', '.join(context.mesh_dims)}"
        return
    if both := sorted(set(fsdp.mesh_dims) & set(fsdp.replicate_dims)):
        yield f"FSDP shards and replicates over mesh dim {both[0]!r}; name it in one of mesh_dims and replicate_dims"
    yield from _resharding(fsdp, plan, context, shards)
    if fsdp.shard_placement is not None and not isinstance(fsdp.shard_placement, LargestDim):
        yield from _placements(model, fsdp.shard_placement, plan, context, shards)
    yield from _tied_across_units(model, fsdp)
    yield from _scalars(model, fsdp)
    yield from _own_mesh_dims(fsdp, context)
    yield from _small_parameters(fsdp)
    yield from _prefetch(fsdp)
    yield from _communication(model, fsdp)
    if fsdp.spmd_mesh:
        yield from _on_spmd_mesh(fsdp, plan)
    if fsdp.gather_extension is not None:
        yield from _extension(model, fsdp.gather_extension, plan, context, shards)


def _replicas_alone(fsdp: FsdpPlan) -> Iterator[str]:
    plain = FsdpPlan()
    if given := [name for name in OF_SHARDS if getattr(fsdp, name) != getattr(plain, name)]:
        yield f"{', '.join(given)} of FSDP need shards, and mesh_dims is empty; leave them out, or name mesh dims"


def ddp_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str]:
    """One sentence for each problem of the plan's DDP part, if it has one."""
    ddp = plan.ddp
    if ddp is None:
        return
    if not present(ddp.mesh_dims, context):
        yield f"DDP replicates over {', '.join(ddp.mesh_dims)}, the mesh has only {', '.join(context.mesh_dims)}"
    if plan.fsdp is not None:
        yield "ddp and fsdp both take care of gradients; for both at once use FsdpPlan(replicate_dims=...)"
    if plan.tp is not None or plan.shard_params or plan.ep:
        instead = "use FsdpPlan(mesh_dims=(), replicate_dims=...)"
        yield f"ddp averages plain parameters, and tp, ep and shard_params make DTensors; {instead}"
    if ddp.bucket_cap_mb is not None and not ddp.bucket_cap_mb > 0:
        yield f"bucket_cap_mb={ddp.bucket_cap_mb} is no size of a bucket; use more than 0"
    if ddp.static_graph and not ddp.sync_each_microbatch and plan.microbatches > 1:
        yield "static_graph is learned in the first backward, which sync_each_microbatch=False leaves out; drop one"
    ignored = {id(one) for module in matching_modules(ddp.ignored, model).values() for one in module.parameters()}
    if not any(parameter.requires_grad and id(parameter) not in ignored for parameter in model.parameters()):
        which = "that it does not ignore " if ignored else ""
        yield f"ddp has nothing to average: no parameter of the model {which}requires a gradient"
    if ddp.fuse is not None:
        yield from _fused(model, plan, ddp)


def _fused(model: nn.Module, plan: ParallelPlan, ddp: DdpPlan) -> Iterator[str]:
    plain = DdpPlan()
    if given := [name for name in OF_REDUCER if getattr(ddp, name) != getattr(plain, name)]:
        yield f"{', '.join(given)} of DDP are of its reducer in C++, which fuse={ddp.fuse!r} replaces; leave one out"
    dtypes = {dtype_name(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    if len(dtypes) > 1:
        yield f"torch fuses gradients of one dtype, the model's are {', '.join(sorted(dtypes))}; leave fuse out"
    if plan.cp is not None:
        # Tried for 100 s with the ring on a fake process group.
        what = "has backward compiled, and that of context parallel is not in time"
        yield f"fuse={ddp.fuse!r} {what}; leave one of them out"
    compiled = matching_modules(plan.compile.modules if plan.compile else (), model)
    for name in matching_modules(plan.checkpoint, model):
        if not any(outer in ("", name) or name.startswith(f"{outer}.") for outer in compiled):
            # Tried: its backward breaks at every tensor that is computed again, and compiles piece after piece.
            what = f"fuse={ddp.fuse!r} has backward compiled, and {name} computes its forward again outside of that"
            yield f"{what}; compile it too (CompilePlan), or leave checkpoint out"


def expert_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    """One sentence for each problem of the plan's expert parallel part, if it has one."""
    if not plan.ep:
        return
    ep_dims, fsdp = present(plan.ep_dims, context), plan.fsdp
    if not ep_dims:
        over = " or ".join(map(repr, plan.ep_dims))
        yield f"expert parallel works on mesh dim {over}, the mesh has only {', '.join(context.mesh_dims)}"
        return
    if plan.ep_tp_dim in (*plan.ep_dims, *BATCH_DIMS):
        differ = "tokens" if plan.ep_tp_dim in BATCH_DIMS else "experts"
        why = f"whose ranks have different {differ}; name that of tensor parallel"
        yield f"ep_tp_dim={plan.ep_tp_dim!r} shards each expert over a mesh dim {why}"
        return
    summed = (*fsdp.mesh_dims, *fsdp.replicate_dims) if fsdp else ()
    alone_in = [name for name in ep_dims if name in BATCH_DIMS and name not in summed]
    if plan.ddp is None and alone_in:
        where = f"ranks along {alone_in[0]!r} have different data"
        yield f"{where} and nobody sums other gradients; name it in FSDP's mesh_dims"
    own = (fsdp.unit_mesh_dims if fsdp else {}).items()
    alone = set(matching_modules({pattern: dims for pattern, dims in own if not {*ep_dims} & {*dims}}, model))
    num_parts = context.index(tuple(ep_dims))[1]
    for name, module in matching_modules(plan.ep, model).items():
        if fsdp is not None and name not in alone and {*ep_dims} & {*summed}:
            over = "x".join(ep_dims)
            yield f"FSDP shards {name} over {over!r} as expert parallel does; give it others in unit_mesh_dims"
        for attribute, parameter in module.named_parameters(name):
            if not parameter.ndim or parameter.shape[0] % num_parts:
                what = f"parameter {attribute} of shape {list(parameter.shape)} cannot be sharded by experts"
                yield undivided(what, parameter.shape[0] if parameter.ndim else 1, ep_dims, context, attribute)


def _own_mesh_dims(fsdp: FsdpPlan, context: RankContext) -> Iterator[str]:
    for pattern, mesh_dims in fsdp.unit_mesh_dims.items():
        if not present(mesh_dims, context):
            over, known = ", ".join(mesh_dims) or "nothing", ", ".join(context.mesh_dims)
            yield f"unit_mesh_dims shards {pattern!r} over {over}, the mesh has only {known}"


def _resharding(fsdp: FsdpPlan, plan: ParallelPlan, context: RankContext, shards: list[str]) -> Iterator[str]:
    to = fsdp.reshard_after_forward
    if to is None or isinstance(to, bool):
        return
    size = context.index(tuple(shards))[1]
    if to < 2 or to >= size or size % to:
        fitting = [str(part) for part in range(2, size) if size % part == 0]
        works = f"use {', '.join(fitting)}, True or False" if fitting else "use True or False"
        where = f"mesh dim {'x'.join(shards)!r} of size {size}"
        yield f"reshard_after_forward={to} is no proper divisor of {where}; {works}"
    if fsdp.shard_placement is not None:
        yield f"reshard_after_forward={to} works with shards on tensor dim 0 only; leave shard_placement out"
    if plan.tp is not None or plan.shard_params:
        yield f"reshard_after_forward={to} does not work on parameters that TP shards; use True or False"
    if fsdp.gather_extension is not None:
        yield f"reshard_after_forward={to} does not work with a gather_extension; use True or False"


def _placements(
    model: nn.Module, choose: Callable[[Any], Any], plan: ParallelPlan, context: RankContext, shards: list[str]
) -> Iterator[str | Undivided]:
    size = context.index(tuple(shards))[1]
    for name, parameter in model.named_parameters():
        placement: Any = choose(parameter)
        if placement is None:
            continue
        tensor_dim = placement.dim if placement.dim >= 0 else placement.dim + parameter.ndim
        shape = list(parameter.shape)
        if not 0 <= tensor_dim < parameter.ndim:
            yield f"parameter {name} of shape {shape} has no tensor dim {placement.dim} for FSDP to shard"
        elif tensor_dim > 0 and (length := local_shape(name, model, plan, context)[tensor_dim]) % size:
            what = f"parameter {name} of shape {shape} cannot be sharded by FSDP on tensor dim {tensor_dim}"
            yield undivided(what if length == shape[tensor_dim] else f"{what} after TP", length, shards, context, name)


def _tied_across_units(model: nn.Module, fsdp: FsdpPlan) -> Iterator[str]:
    units = sorted(matching_modules(fsdp.wrap, model), key=len, reverse=True)
    for owners in owners_of(model).values():
        homes = {
            next((unit for unit in units if unit == "" or f"{name}.".startswith(f"{unit}.")), "")
            for name, _, _ in owners
        }
        if len(homes) > 1:
            names = [f"{name}.{attribute}" for name, _, attribute in owners]
            wrapped = ", ".join(sorted(home or "the root" for home in homes))
            yield (
                f"parameter {names[0]} is shared with {', '.join(names[1:])}, which belong to different FSDP units "
                f"({wrapped}); wrap neither, or a module that holds both"
            )


def _scalars(model: nn.Module, fsdp: FsdpPlan) -> Iterator[str]:
    named = {name: parameter for name, parameter in model.named_parameters() if not parameter.ndim}
    left = {name for pattern in (*fsdp.whole, *fsdp.ignored) for name in matching(pattern, named)}
    for name in named:
        if name not in left:
            yield f"parameter {name} is a scalar, which fully_shard does not take; name it in FsdpPlan(whole=...)"


def _small_parameters(fsdp: FsdpPlan) -> Iterator[str]:
    is_small = isinstance(fsdp.shard_placement, LargestDim) and fsdp.shard_placement.min_numel > 0
    if not is_small and not fsdp.whole:
        return
    kept = "parameters that LargestDim(min_numel=...) keeps whole" if is_small else "parameters in FSDP's whole"
    instead = "use min_numel=0" if is_small else "name none"
    if fsdp.gradient_divide_factor is not None:
        yield f"gradient_divide_factor does not reach {kept}; {instead}"
    if fsdp.offload is not None:
        yield f"CPU offload does not reach {kept}; {instead}"
    if any(policy.param_dtype is not None for policy in policies_of(fsdp)):
        yield f"mixed precision does not cast {kept}; {instead}"


def _prefetch(fsdp: FsdpPlan) -> Iterator[str]:
    for name in ("prefetch_forward", "prefetch_backward"):
        ahead = getattr(fsdp, name)
        if ahead is not None and ahead < 0:
            yield f"{name}={ahead} is no number of units; use 0 or more"
        if ahead is not None and not fsdp.wrap:
            yield f"{name}={ahead} has no units to gather ahead; name modules in wrap"


def _communication(model: nn.Module, fsdp: FsdpPlan) -> Iterator[str]:
    if fsdp.unshard_ahead < 0 or (fsdp.unshard_ahead and not fsdp.wrap):
        yield f"unshard_ahead={fsdp.unshard_ahead} is no number of units; name modules in wrap, and 0 or more of them"
    units = [*matching_modules(fsdp.wrap, model), ""]
    for pattern in fsdp.not_in_backward:
        if not matching(pattern, units):
            yield f"not_in_backward pattern {pattern!r} matches no FSDP unit ({nearest(pattern, units)})"
    if not fsdp.replicate_dims:
        if not fsdp.all_reduce_each_microbatch:
            yield "all_reduce_each_microbatch=False has no all-reduce to leave out; name replicate_dims"
        if fsdp.all_reduce_hook is not None:
            yield "all_reduce_hook has no replicas to reduce over; name replicate_dims"
    elif fsdp.all_reduce_hook is not None and not fsdp.all_reduce_each_microbatch:
        yield "all_reduce_each_microbatch=False does not keep an all_reduce_hook from running; leave one of them out"
    for name in ("all_gather", "reduce_scatter"):
        make = getattr(fsdp, name)
        if make is not None and not (callable(made := make()) and hasattr(made, "allocate")):
            yield f"{name} makes a {type(made).__name__}; torch wants an object with allocate() and __call__()"


def _on_spmd_mesh(fsdp: FsdpPlan, plan: ParallelPlan) -> Iterator[str]:
    if plan.tp is not None and not callable(plan.tp):
        instead = "annotate parameters in shard_params, or lay the model out in Scenario.parallelize"
        yield f"spmd_mesh wants DTensors on the whole mesh, and tp's styles make them on that of tp alone; {instead}"
    if parts := [name for name in ("ep", "cp", "pipeline") if getattr(plan, name)]:
        yield f"spmd_mesh does not go with {', '.join(parts)}; leave one of them out"
    plain = FsdpPlan()
    if given := [name for name in NOT_ON_SPMD_MESH if getattr(fsdp, name) != getattr(plain, name)]:
        yield f"spmd_mesh does not go with {', '.join(given)} of FSDP; leave one of them out"
    if isinstance(fsdp.shard_placement, LargestDim) and fsdp.shard_placement.min_numel:
        yield "spmd_mesh shards every parameter, and LargestDim(min_numel=...) keeps some whole; use min_numel=0"
    if type(fsdp.reshard_after_forward) is int and plan.tp is None and not plan.shard_params:
        yield f"reshard_after_forward={fsdp.reshard_after_forward} does not work with spmd_mesh; use True or False"


def _extension(
    model: nn.Module, extension: Callable[[Any], Any], plan: ParallelPlan, context: RankContext, shards: list[str]
) -> Iterator[str | Undivided]:
    if annotations_by_parameter(plan, model) or any(True for _ in styles_by_module(plan, model)) or callable(plan.tp):
        yield "a gather_extension works on plain parameters only; leave tp and shard_params out"
    first = next((parameter for parameter in model.parameters() if parameter.ndim > 1), None)
    if first is not None:
        extended = extension(first.detach())
        if lacking := [hook for hook in HOOKS if not hasattr(extended, hook)]:
            yield f"gather_extension gives a {type(extended).__name__} without {' and '.join(lacking)}; define both"
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter.shape[0] % context.index(tuple(shards))[1]:
            what = f"parameter {name} of shape {list(parameter.shape)} has no equal shards for a gather_extension"
            yield undivided(what, parameter.shape[0], shards, context, name)
