"""A scenario with the plan changes of its variant: names that begin with `plan.`, listed in spec/job.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from distbench.spec import CompilePlan, ParallelPlan, Scenario, UserError
from distbench.spec.job import KNOBS, MESH, split_variant
from distbench.spec.plan import ULYSSES

# Changes of FSDP2's reductions to torch's setter and its argument; the first value is torch's default.
REDUCE_SCATTERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "reduce_scatter_group": ("set_separate_reduce_scatter_group", lambda value: value == "own"),
    "reduce_scatter_buffers": ("set_reduce_scatter_max_input_buffers", int),
}


def scenario_of(function: Callable[..., Any], variant: Mapping[str, Any]) -> Any:
    """Return the scenario of a variant with the changed plan; other results than a Scenario are returned unchanged.

    Raises:
        UserError: the plan lacks the part that a change applies to.
    """
    own_params, knobs = split_variant(variant)
    scenario = function(**own_params)
    if not isinstance(scenario, Scenario) or not set(knobs) - {MESH}:
        return scenario
    return replace(scenario, plan=changed_plan(scenario.plan, knobs))


def changed_plan(plan: ParallelPlan, knobs: Mapping[str, Any]) -> ParallelPlan:
    """Return the plan with every change applied; changes to the mesh do not change the plan."""
    for name, value in knobs.items():
        needs = KNOBS[name].needs
        if needs and getattr(plan, needs) is None:
            raise UserError(f"{name} changes a plan's {needs}, which this plan lacks; leave {name} out")
        plan = _changed(plan, name.rpartition(".")[2], value)
    return plan


def _changed(plan: ParallelPlan, name: str, value: Any) -> ParallelPlan:
    if name == "mesh":
        return plan
    if name in ("microbatches", "loss"):
        change: dict[str, Any] = {name: None if value == "none" else value}
        return replace(plan, **change)
    if name == "checkpoint":
        # "full" checkpoints all activations of the modules that the plan checkpoints, or else of the modules that FSDP
        # wraps.
        modules = () if value == "none" else checkpointable(plan)
        if not modules and value != "none":
            raise UserError(
                "plan.checkpoint=full needs modules that the plan checkpoints or FSDP wraps; leave plan.checkpoint out"
            )
        return replace(plan, checkpoint=modules, checkpoint_context=None)
    if name == "compile":
        # The modules that the plan compiles, or else the modules that it checkpoints or that FSDP wraps, or else the
        # whole model.
        compiled = plan.compile or CompilePlan(checkpointable(plan) or ("",))
        return replace(plan, compile=None if value == "none" else replace(compiled, backend=value))
    if name in ("rotate", "load_balance"):
        assert plan.cp is not None
        without: dict[str, Any] = {"load_balance": None} if value == ULYSSES else {}  # Ulysses has no load balancing
        return replace(plan, cp=replace(plan.cp, **without, **{name: value}))
    assert plan.fsdp is not None
    fields = {name: value}
    if name == "prefetch":
        fields = {"prefetch_forward": value, "prefetch_backward": value}
    elif name in REDUCE_SCATTERS:
        setter, argument = REDUCE_SCATTERS[name]
        without = {key: given for key, given in plan.fsdp.configure.items() if key != setter}
        default = value in ("shared", 1)
        fields = {"configure": without if default else {**without, setter: argument(value)}}
    elif name == "mixed_precision":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fields = {name: bf16 if value == "bf16" else None}
    return replace(plan, fsdp=replace(plan.fsdp, **fields))


def checkpointable(plan: ParallelPlan) -> tuple[str, ...]:
    """Return patterns of the modules that `plan.checkpoint=full` checkpoints."""
    wrapped = plan.fsdp.wrap if plan.fsdp is not None else ()
    return plan.checkpoint or (() if isinstance(wrapped, str) else wrapped)


def without_idle_tp(plan: ParallelPlan, mesh: Mapping[str, int]) -> ParallelPlan:
    """Return the plan, without tensor parallel if the mesh has one rank along the mesh dims of tensor parallel."""
    if any(mesh.get(name, 1) > 1 for name in plan.tp_dims):
        return plan
    return replace(plan, tp=None, shard_params={}, loss_parallel=False)


def mesh_dims_of(plan: ParallelPlan) -> list[str]:
    """Return the mesh dims that a plan uses, without duplicates."""
    mesh_dims = [part.mesh_dim for part in (plan.pipeline, plan.cp) if part is not None]
    mesh_dims += [*(plan.fsdp.replicate_dims if plan.fsdp else ()), *(plan.ddp.mesh_dims if plan.ddp else ())]
    return list(dict.fromkeys(mesh_dims + sharding_dims_of(plan)))


def sharding_dims_of(plan: ParallelPlan) -> list[str]:
    """Return the mesh dims over which a plan shards parameters or gives ranks different parameters."""
    mesh_dims = [plan.pipeline.mesh_dim] if plan.pipeline else []
    if plan.fsdp:
        mesh_dims += [*plan.fsdp.mesh_dims, *(name for dims in plan.fsdp.unit_mesh_dims.values() for name in dims)]
    if plan.ep:
        mesh_dims += [*plan.ep_dims, *([plan.ep_tp_dim] if plan.ep_tp_dim else [])]
    if plan.tp is not None or plan.shard_params:
        mesh_dims += plan.tp_dims
    return list(dict.fromkeys(mesh_dims))
