"""Everything wrong with a plan, found on the meta device before anything is measured, all of it at once."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from distbench.spec import ParallelPlan
from distbench.spec.errors import nearest
from distbench.worker.parallelize import matching, styles_by_module
from distbench.worker.place import Place

ROTATIONS = ("allgather", "alltoall")
BATCH_DIMS = ("dp_replicate", "dp_shard")


def problems(model: nn.Module, batch: Any, plan: ParallelPlan, place: Place) -> list[str]:
    """One sentence for each thing that keeps the plan from working on this mesh; empty when it will.

    Args:
        model: the model on the meta device, before the plan.
        batch: the global batch's inputs.
        plan: the plan.
        place: the mesh.
    """
    return [
        *_unused_mesh_dims(plan, place),
        *_unmatched_patterns(model, plan),
        *_undividable_parameters(model, plan, place),
        *_undividable_batch(batch, plan, place),
        *_buffers(model),
    ]


def _unused_mesh_dims(plan: ParallelPlan, place: Place) -> Iterator[str]:
    used = set(plan.fsdp.mesh_dims if plan.fsdp else ())
    used |= {plan.tp_dim} if plan.tp is not None else set()
    used |= {plan.cp.mesh_dim} if plan.cp else set()
    for name in place.mesh_dims:
        if name not in used:
            known = ", ".join(sorted(used)) or "none"
            yield f"mesh dim {name!r} (size {place.size(name)}) is not used by the plan, which uses {known}"
    if plan.fsdp and not set(plan.fsdp.mesh_dims) & set(place.mesh_dims):
        yield f"FSDP shards over {', '.join(plan.fsdp.mesh_dims)}, the mesh has only {', '.join(place.mesh_dims)}"
    if plan.cp and plan.cp.mesh_dim not in place.mesh_dims:
        yield f"context parallel needs mesh dim {plan.cp.mesh_dim!r}, the mesh has {', '.join(place.mesh_dims)}"
    if plan.cp and plan.cp.rotate not in ROTATIONS:
        yield f"rotation {plan.cp.rotate!r} is unknown; use {', '.join(ROTATIONS)}"


def _unmatched_patterns(model: nn.Module, plan: ParallelPlan) -> Iterator[str]:
    names = [name for name, _ in model.named_modules() if name]
    tp_patterns = [] if plan.tp is None or callable(plan.tp) else list(plan.tp)
    for kind, patterns in (("TP", tp_patterns), ("FSDP", list(plan.fsdp.wrap) if plan.fsdp else [])):
        for pattern in patterns:
            if not matching(pattern, [*names, ""]):
                yield f"{kind} pattern {pattern!r} matches no module ({nearest(pattern, names)})"


def _undividable_parameters(model: nn.Module, plan: ParallelPlan, place: Place) -> Iterator[str]:
    size = place.size(plan.tp_dim)
    for _, name, module, style in styles_by_module(plan, model):
        for parameter, tensor_dim in _sharded_by(style, module):
            shape = tuple(getattr(module, parameter).shape)
            if shape[tensor_dim] % size:
                yield (
                    f"parameter {name}.{parameter} of shape {list(shape)} cannot be sharded on tensor dim {tensor_dim} "
                    f"over mesh dim {plan.tp_dim!r} of size {size}: {shape[tensor_dim]} is not a multiple of {size}; "
                    f"sizes that work: {_divisors(shape[tensor_dim])}"
                )


def _sharded_by(style: Any, module: nn.Module) -> Iterator[tuple[str, int]]:
    kind = type(style).__name__
    embedding = isinstance(module, nn.Embedding)
    if kind == "ColwiseParallel":
        yield "weight", 1 if embedding else 0
        if getattr(module, "bias", None) is not None:
            yield "bias", 0
    elif kind == "RowwiseParallel":
        yield "weight", 0 if embedding else 1


def _undividable_batch(batch: Any, plan: ParallelPlan, place: Place) -> Iterator[str]:
    _, num_parts = place.index(BATCH_DIMS)
    if batch.shape[0] % num_parts:
        dims = "x".join(name for name in place.mesh_dims if name in BATCH_DIMS)
        yield (
            f"a batch of {batch.shape[0]} cannot be split over mesh dim {dims!r} of size {num_parts}; "
            f"sizes that work: {_divisors(batch.shape[0])}"
        )
    if plan.cp and plan.cp.mesh_dim in place.mesh_dims:
        size = place.size(plan.cp.mesh_dim)
        chunks = size * 2 if plan.cp.load_balance else size
        length = batch.shape[plan.cp.seq_dim]
        if length % chunks:
            over = f"mesh dim {plan.cp.mesh_dim!r} of size {size}"
            yield f"a sequence of {length} cannot be cut into {chunks} chunks over {over}"


def _buffers(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_buffers():
        yield f"buffer {name} would lose its values on the meta device; compute it in forward, or make it a parameter"


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, min(number, 64) + 1) if number % size == 0)
