"""Context parallel round a step: what is sharded over the sequence while it lasts, and the output made whole again."""

import contextlib
from typing import Any

import torch
from torch import nn

from distbench.spec import CpPlan, UserError
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import context_parallel, whole_sequence


def shards_sequence(plan: CpPlan | None, context: RankContext) -> bool:
    """Whether a plan shards the sequence on this mesh."""
    return plan is not None and context.size(plan.mesh_dim) > 1


def sequence_sharded(
    model: nn.Module, plan: CpPlan, context: RankContext, inputs: torch.Tensor, targets: torch.Tensor
) -> contextlib.AbstractContextManager[None]:
    """The context of forward, loss and backward; inputs, targets and the model's buffers are sharded in place.

    Buffers are whole again afterwards, inputs and targets (copies of this rank's part of the batch) are not. With
    `unshard_output` targets stay whole.
    """
    batch = [inputs] if plan.unshard_output else [inputs, targets]
    buffers = dict(model.named_buffers())
    return context_parallel(
        context.mesh[plan.mesh_dim],
        [*batch, *(buffers[name] for name in plan.buffers)],
        [*(plan.seq_dim for _ in batch), *plan.buffers.values()],
        plan.rotate,
        plan.load_balance,
        not_restored=batch,
        kernel=plan.kernel,
    )


def unshard_outputs(model: nn.Module, plan: CpPlan | None, context: RankContext) -> bool:
    """Have the model's output gathered along the sequence, in its original order, each time it has run.

    A hook, so that what it communicates belongs to the model's root. Returns whether the plan asks for it and the
    sequence is sharded on this mesh; else nothing is done.
    """
    if plan is None or not plan.unshard_output or not shards_sequence(plan, context):
        return False
    mesh, seq_dim = context.mesh[plan.mesh_dim], plan.seq_dim

    def unshard(_: nn.Module, given: Any, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor) or hasattr(output, "placements"):
            kind = type(output).__name__
            raise UserError(f"unshard_output gathers one plain tensor, the model's output is a {kind}; leave it out")
        return whole_sequence(output, mesh, seq_dim)

    model.register_forward_hook(unshard)
    return True
