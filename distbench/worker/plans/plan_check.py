"""Everything wrong with a plan, found on the meta device before anything is measured, all of it at once."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from distbench.spec import ParallelPlan, UserError
from distbench.spec.errors import nearest
from distbench.spec.mesh import MESH_DIMS
from distbench.spec.parallel import ATTENTION_KERNELS, ROTATIONS, matching
from distbench.worker.models.trees import tensors_of
from distbench.worker.pipelines.pipeline_check import pipeline_problems
from distbench.worker.plans.batch import Batch
from distbench.worker.plans.checkpoint_compile import known_backends
from distbench.worker.plans.divisibility import Undivided, grouped, undivided
from distbench.worker.plans.fsdp_check import ddp_problems, expert_problems, fsdp_problems
from distbench.worker.plans.patterns import AUTO, tp_patterns
from distbench.worker.plans.tp_check import tp_problems
from distbench.worker.rank.rank_context import BATCH_DIMS, RankContext


def problems(model: nn.Module, batch: Any, plan: ParallelPlan, context: RankContext) -> list[str]:
    """One sentence for each thing that keeps the plan from working on a model on the meta device and this mesh.

    `batch` is the global one: a `Batch`, or what it is made of.
    """
    batch = batch if isinstance(batch, Batch) else Batch(batch)
    try:
        return _all_problems(model, batch, plan, context)
    except UserError as error:  # a name that stands for nothing keeps the rest from being looked at
        return [str(error)]


def _all_problems(model: nn.Module, batch: Batch, plan: ParallelPlan, context: RankContext) -> list[str]:
    return grouped(
        [
            *_unused_mesh_dims(plan, context),
            *_unmatched_patterns(model, plan),
            *tp_problems(model, plan, context),
            *fsdp_problems(model, plan, context),
            *ddp_problems(model, plan, context),
            *expert_problems(model, plan, context),
            *_undividable_batch(batch, plan, context),
            *_context_parallel(model, batch, plan, context),
            *_unknown_backend(plan),
            *_sparse_gradients(model),
            *pipeline_problems(model, plan, context),
        ]
    )


def _unused_mesh_dims(plan: ParallelPlan, context: RankContext) -> Iterator[str]:
    used = {*plan.fsdp.mesh_dims, *plan.fsdp.replicate_dims} if plan.fsdp else set()
    used |= set(plan.tp_dims) if plan.tp is not None or plan.shard_params else set()
    used |= {plan.cp.mesh_dim} if plan.cp else set()
    used |= set(plan.ddp.mesh_dims) if plan.ddp else set()
    used |= {*plan.ep_dims, *([plan.ep_tp_dim] if plan.ep_tp_dim else [])} if plan.ep else set()
    used |= {plan.pipeline.mesh_dim} if plan.pipeline else set()
    if callable(plan.tp) and plan.tp_dim == "tp":
        yield from _unknown_mesh_dims(context)
        return
    for name in context.mesh_dims:
        if name not in used and context.size(name) > 1:
            known = ", ".join(sorted(used)) or "none"
            yield f"mesh dim {name!r} (size {context.size(name)}) is not used by the plan, which uses {known}"


def _unknown_mesh_dims(context: RankContext) -> Iterator[str]:
    """A function of the user's own may use any mesh dim; its name says what of a batch the ranks along it have."""
    for name in context.mesh_dims:
        if name not in MESH_DIMS:
            known = ", ".join(MESH_DIMS)
            yield (
                f"mesh dim {name!r} does not say whether its ranks have different data; name it one of {known}: those "
                f"along {' and '.join(BATCH_DIMS)} get different parts of the batch"
            )


def _unmatched_patterns(model: nn.Module, plan: ParallelPlan) -> Iterator[str]:
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    styled = tp_patterns(plan, model)
    for pattern in styled if plan.tp != AUTO else ():
        known = [*modules, "", *(parameters if isinstance(styled[pattern], str) else ())]
        if not matching(pattern, known):
            yield f"TP pattern {pattern!r} matches no module ({nearest(pattern, modules)})"
    groups: tuple[tuple[str, Iterable[str]], ...] = (
        ("checkpoint", plan.checkpoint),
        ("compile", plan.compile.modules if plan.compile else ()),
        ("FSDP", plan.fsdp.wrap if plan.fsdp and plan.fsdp.wrap != AUTO else ()),
        ("unit_mesh_dims", plan.fsdp.unit_mesh_dims if plan.fsdp else ()),
        ("DDP's ignored", plan.ddp.ignored if plan.ddp else ()),
        ("EP", plan.ep),
    )
    for kind, patterns in groups:
        for pattern in patterns:
            if not matching(pattern, [*modules, ""]):
                yield f"{kind} pattern {pattern!r} matches no module ({nearest(pattern, modules)})"
    of_parameters: tuple[tuple[str, Iterable[str]], ...] = (
        ("shard_params", plan.shard_params),
        ("FSDP's whole", plan.fsdp.whole if plan.fsdp else ()),
        ("FSDP's ignored", plan.fsdp.ignored if plan.fsdp else ()),
    )
    for kind, patterns in of_parameters:
        for pattern in patterns:
            if not matching(pattern, parameters):
                yield f"{kind} pattern {pattern!r} matches no parameter ({nearest(pattern, parameters)})"


def _undividable_batch(batch: Batch, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    dims = [name for name in context.mesh_dims if name in BATCH_DIMS]
    _, num_parts = context.index(BATCH_DIMS)
    tensors = dict(tensors_of(batch.tree))
    lengths: dict[int, str] = {}
    for name, tensor_dim in batch.split_dims.items():
        lengths.setdefault(tensors[name].shape[tensor_dim], name)
    for length, name in lengths.items():
        which = ", ".join(filter(None, (name if len(lengths) > 1 else "", batch.place)))
        what = f"a batch of {length} ({which})" if which else f"a batch of {length}"
        if length % num_parts:
            yield f"{undivided(f'{what} cannot be split', length, dims, context)}{batch.guessed()}"
        elif plan.microbatches < 1 or length % (num_parts * plan.microbatches):
            share = length // num_parts
            into = f"{plan.microbatches} micro-batches; use a divisor of {share}"
            yield f"a batch of {share} a rank cannot be split into {into}"


def _context_parallel(model: nn.Module, batch: Batch, plan: ParallelPlan, context: RankContext) -> Iterator[str]:
    if plan.cp is None:
        return
    if plan.cp.rotate not in ROTATIONS:
        yield f"rotation {plan.cp.rotate!r} is unknown; use {', '.join(ROTATIONS)}"
    if plan.cp.kernel is not None and plan.cp.kernel not in ATTENTION_KERNELS:
        yield f"attention kernel {plan.cp.kernel!r} is unknown; use {', '.join(ATTENTION_KERNELS)} or None"
    if plan.cp.unshard_output and plan.loss_parallel:
        yield "unshard_output gathers plain tensors, and loss parallel leaves the output a DTensor; drop one of them"
    if plan.cp.unshard_output and plan.cp.seq_dim < 1:
        yield f"unshard_output takes the batch to be tensor dim 0, so seq_dim={plan.cp.seq_dim} is not the sequence"
    buffers = [name for name, _ in model.named_buffers()]
    for name in plan.cp.buffers:
        if name not in buffers:
            yield f"context parallel buffer {name!r} is no buffer of the model ({nearest(name, buffers)})"
    if plan.cp.mesh_dim not in context.mesh_dims:
        yield f"context parallel needs mesh dim {plan.cp.mesh_dim!r}, the mesh has {', '.join(context.mesh_dims)}"
        return
    size = context.size(plan.cp.mesh_dim)
    chunks = size * 2 if plan.cp.balances else size
    sequences = batch.sequence_dims_of(plan.cp)
    over = f"mesh dim {plan.cp.mesh_dim!r} of size {size}"
    if not sequences:
        yield f"no tensor of the batch has a tensor dim {plan.cp.seq_dim} to be split over {over}; say sequence_dims"
    tensors = dict(tensors_of(batch.tree))
    for length in dict.fromkeys(tensors[name].shape[tensor_dim] for name, tensor_dim in sequences.items()):
        if size > 1 and length % chunks:
            unbalanced = "" if length % size else ", or load_balance=False, as torch balances no other"
            works = f"use a multiple of {chunks}{unbalanced}" if length > 1 else "leave cp out of what has one token"
            yield f"a sequence of {length} cannot be split into {chunks} chunks over {over}; {works}"


def _unknown_backend(plan: ParallelPlan) -> Iterator[str]:
    if plan.compile is not None and plan.compile.async_tp and (plan.tp is None or plan.compile.backend != "inductor"):
        yield "async_tp is inductor's overlap of what tp communicates; give a TP plan and backend='inductor'"
    if plan.compile is not None and plan.compile.backend not in known_backends():
        yield f"compile backend {plan.compile.backend!r} is unknown; use {', '.join(known_backends())}"


def _sparse_gradients(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            kind = f"{name or 'the root'} ({type(module).__name__})"
            yield f"{kind} has sparse gradients, which FSDP2 does not reduce and no check compares; use sparse=False"
