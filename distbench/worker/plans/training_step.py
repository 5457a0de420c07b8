"""A training step of a parallel model with its batch on this rank, context parallel round forward and backward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from distbench.spec import CpPlan, Scenario, UserError
from distbench.worker.plans.fully_sharded import average_whole_gradients, data_parallel_size
from distbench.worker.plans.materialise import Blueprint, blueprint, load_initial_values, materialise
from distbench.worker.plans.parallelize import parallelize
from distbench.worker.rank.rank_context import BATCH_DIMS, RankContext
from distbench.worker.redistribute.expected_shards import chunk_of
from distbench.worker.torch_internals import context_parallel, whole_sequence

Stamp = Callable[[], None]


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


class TrainingStep:
    """The parallel model with its batch on this rank; `built` is the model on the meta device, if it exists already."""

    def __init__(
        self,
        scenario: Scenario,
        context: RankContext,
        built: Blueprint | None = None,
        give_memory: Callable[..., None] = materialise,
    ) -> None:
        assert scenario.build_model and scenario.make_batch and scenario.loss
        self.plan = scenario.plan
        self._context = context
        self._loss = scenario.loss
        built = built or blueprint(scenario.build_model, context.seed)
        self._buffers = built.buffers
        self.model, self.sharded = parallelize(built.model, scenario.plan, context)
        offloaded = scenario.plan.fsdp is not None and scenario.plan.fsdp.offload is not None
        give_memory(self.model, context, self._buffers, torch.device("cpu") if offloaded else None)
        average_whole_gradients(self.model, self.sharded, scenario.plan.fsdp, context)
        # Where the output is made whole, it can be compared with one device's: kept while the check asks for it.
        self.unshards_output = unshard_outputs(self.model, scenario.plan.cp, context)
        self.kept_outputs: list[torch.Tensor] | None = None
        self.microbatches = list(self._split(scenario.make_batch()))
        self._make_optimizer = scenario.optimizer
        self.optimizer = scenario.optimizer(self.model.parameters()) if scenario.optimizer else None
        turns = ("forward", "backward") * len(self.microbatches)
        self.phases: tuple[str, ...] = (*turns, "optimizer") if self.optimizer else turns

    def _split(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        index, count = self._context.index(BATCH_DIMS)
        parts = self.plan.microbatches
        for part in range(parts):
            yield tuple(
                chunk_of(tensor, 0, count * parts, index * parts + part).to(self._context.device).contiguous()
                for tensor in batch
            )

    def forward_backward(self, stamp: Stamp = lambda: None) -> torch.Tensor:
        """Forward and backward on this rank's part of the batch; its loss, a mean over that part."""
        losses = []
        for turn, (inputs, targets) in enumerate(self.microbatches, start=1):
            self._sync_gradients(turn == len(self.microbatches))
            losses.append(self._one_microbatch(inputs, targets, stamp))
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def _one_microbatch(self, inputs: torch.Tensor, targets: torch.Tensor, stamp: Stamp) -> torch.Tensor:
        with contextlib.ExitStack() as entered:
            if self.plan.cp is not None and shards_sequence(self.plan.cp, self._context):
                inputs, targets = inputs.clone(), targets.clone()
                entered.enter_context(sequence_sharded(self.model, self.plan.cp, self._context, inputs, targets))
            if self.plan.loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                entered.enter_context(loss_parallel())
            output = self.model(inputs)
            if self.kept_outputs is not None:
                self.kept_outputs.append(output.detach())
            loss: Any = self._loss(output, targets)
            # Held through backward, it would raise the step's peak of memory.
            del output
            stamp()
            (loss / len(self.microbatches) if len(self.microbatches) > 1 else loss).backward()
            stamp()
        loss = loss.detach()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    def _sync_gradients(self, is_last: bool) -> None:
        fsdp = self.plan.fsdp
        if fsdp is not None and not fsdp.sync_each_microbatch:
            for root in self.sharded.roots:
                root.set_requires_gradient_sync(is_last)

    @property
    def gradient_scale(self) -> float:
        """What the plan multiplies gradients by: not 1 only where it sets its own divide factor."""
        fsdp = self.plan.fsdp
        if fsdp is None or fsdp.gradient_divide_factor is None:
            return 1.0
        return data_parallel_size(fsdp, self._context) / fsdp.gradient_divide_factor

    def __call__(self, stamp: Stamp) -> None:
        """One whole step, gradients cleared at its end."""
        self.forward_backward(stamp)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            stamp()
        else:
            self.model.zero_grad(set_to_none=True)

    def restart(self) -> None:
        """Back to the initial parameters, no gradients."""
        self.model.zero_grad(set_to_none=True)
        load_initial_values(self.model, self._context, self._buffers)

    def start_anew(self) -> None:
        """The same, and an optimizer that has seen nothing."""
        self.restart()
        if self._make_optimizer is not None:
            self.optimizer = self._make_optimizer(self.model.parameters())
