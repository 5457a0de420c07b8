"""A plan onto a model: TP, then activation checkpointing, compile and FSDP; CP wraps each step (see training_step)."""

from typing import Any

import torch
from torch import nn

from distbench.spec import ParallelPlan
from distbench.worker.plans.checkpoint_compile import compile_modules, recompute_modules
from distbench.worker.plans.fully_sharded import Sharded, shard_fully
from distbench.worker.plans.materialise import owners_of
from distbench.worker.plans.patterns import annotations_by_parameter, styles_by_module
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import own_shard
from distbench.worker.torch_internals import flatten_mesh


def parallelize(model: nn.Module, plan: ParallelPlan, context: RankContext) -> tuple[nn.Module, Sharded]:
    """Apply a checked plan to a model on the meta device; parameters become DTensors, still without memory.

    Skipped where a part of the plan has nothing to do on this machine.
    """
    annotate_parameters(model, plan, context)
    tp_dims = [name for name in plan.tp_dims if name in context.mesh_dims]
    if plan.tp is not None and tp_dims:
        model = _tensor_parallel(model, plan, context, tp_dims)
    recompute_modules(model, plan.checkpoint, plan.checkpoint_context)
    if plan.compile is not None:
        compile_modules(model, plan.compile, context.device)
    return model, shard_fully(model, plan.fsdp, context) if plan.fsdp is not None else Sharded()


def _tensor_parallel(model: nn.Module, plan: ParallelPlan, context: RankContext, tp_dims: list[str]) -> nn.Module:
    if callable(plan.tp):
        changed: nn.Module = plan.tp(model, context.mesh[tuple(tp_dims)])
        return changed
    from torch.distributed.tensor.parallel import parallelize_module

    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    styles = {name: style for _, name, _, style in styles_by_module(plan, model)}
    model = parallelize_module(model, flatten_mesh(context.mesh, tp_dims), styles)
    # SequenceParallel makes new parameters of a module's own, and they would learn again.
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def annotate_parameters(model: nn.Module, plan: ParallelPlan, context: RankContext) -> None:
    """Turn the parameters that `shard_params` names into DTensors over the plan's `tp_dim`, in the mesh's order."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh_dims = [name for name in context.mesh_dims if name in plan.tp_dims]
    if not mesh_dims:
        return
    mesh = context.mesh[tuple(mesh_dims)]
    owners = owners_of(model)
    parameters: dict[str, Any] = dict(model.named_parameters())
    for parameter_name, annotations in annotations_by_parameter(plan, model).items():
        tensor_dims = {mesh_dim: one.tensor_dim for one in annotations for mesh_dim in one.mesh_dims}
        placements = [Shard(tensor_dims[name]) if name in tensor_dims else Replicate() for name in mesh_dims]
        full = parameters[parameter_name]
        with torch.no_grad():
            local = own_shard(full, placements, mesh).contiguous()
        sharded = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=tuple(full.stride())
        )
        parameter = nn.Parameter(sharded, requires_grad=full.requires_grad)
        for _, module, attribute in owners[id(full)]:
            module.register_parameter(attribute, parameter)
