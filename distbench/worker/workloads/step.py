"""A training step of the scenario's model under its plan: forward, backward and optimizer, each on its own clock."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from distbench.results import Case
from distbench.spec import Scenario, UserError
from distbench.worker.bench import Bench, Prepared
from distbench.worker.dtypes import dtype_name, shape_text
from distbench.worker.fully_sharded import average_whole_gradients, data_parallel_size
from distbench.worker.materialise import Blueprint, blueprint, load_initial_values, materialise
from distbench.worker.memory import PeakMemory
from distbench.worker.parallelize import parallelize
from distbench.worker.place import BATCH_DIMS, Place
from distbench.worker.plan_check import problems
from distbench.worker.reference import compare, reference_of, tolerance_of, verdict
from distbench.worker.sequence import sequence_sharded, shards_sequence, unshard_outputs
from distbench.worker.sharding import chunk_of
from distbench.worker.trace import StepTrace

Stamp = Callable[[], None]


def step_benches(scenario: Scenario, label: str, place: Place) -> Iterator[Bench]:
    """The step of a variant, if it declares a model; its plan is checked here, before anything is measured.

    Raises:
        UserError: the plan cannot work, or a part that a step needs is not declared.
    """
    if scenario.build_model is None:
        return
    name, _, axes = label.partition("/")
    if scenario.make_batch is None or scenario.loss is None:
        raise UserError(f"{label}: a scenario with build_model needs make_batch and loss as well")
    built = blueprint(scenario.build_model, place.seed)
    inputs, _ = scenario.make_batch()
    if found := problems(built.model, inputs, scenario.plan, place):
        raise UserError("; ".join(f"{axes}: {problem}" if axes else problem for problem in found))
    where = f"{dtype_name(inputs.dtype)}{shape_text(inputs.shape)}"
    params = {
        "scenario": name,
        "variant": axes,
        "num_tokens": num_tokens(inputs),
        "dtype": dtype_name(inputs.dtype),
        "shape": list(inputs.shape),
    }
    yield Bench(Case(f"step/{where}/{label}", "step", params), partial(_open, scenario, place))


def num_tokens(inputs: torch.Tensor) -> int:
    """Tokens in a global batch: batch x sequence, of tensors (batch, sequence, ...); samples of any other."""
    return inputs.shape[0] * (inputs.shape[1] if inputs.ndim > 1 else 1)


class Step:
    """The parallel model with its batch on this rank.

    Args:
        scenario: model, batch, loss and plan.
        place: this rank's place.
        built: the model on the meta device, if it has been built before.
        give_memory: what gives the sharded model its memory and values.
    """

    def __init__(
        self,
        scenario: Scenario,
        place: Place,
        built: Blueprint | None = None,
        give_memory: Callable[..., None] = materialise,
    ) -> None:
        assert scenario.build_model and scenario.make_batch and scenario.loss
        self.plan = scenario.plan
        self._place = place
        self._loss = scenario.loss
        built = built or blueprint(scenario.build_model, place.seed)
        self._buffers = built.buffers
        self.model: nn.Module
        self.model, self.sharded = parallelize(built.model, scenario.plan, place)
        offloaded = scenario.plan.fsdp is not None and scenario.plan.fsdp.offload is not None
        give_memory(self.model, place, self._buffers, torch.device("cpu") if offloaded else None)
        average_whole_gradients(self.model, self.sharded, scenario.plan.fsdp, place)
        # Where the output is made whole, it can be compared with one device's: kept while somebody asks for it.
        self.unshards_output = unshard_outputs(self.model, scenario.plan.cp, place)
        self.kept_outputs: list[torch.Tensor] | None = None
        self._microbatches = list(self._cut(scenario.make_batch()))
        self.optimizer = scenario.optimizer(self.model.parameters()) if scenario.optimizer else None
        turns = ("forward", "backward") * len(self._microbatches)
        self.phases: tuple[str, ...] = (*turns, "optimizer") if self.optimizer else turns

    def _cut(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        index, count = self._place.index(BATCH_DIMS)
        parts = self.plan.microbatches
        for part in range(parts):
            yield tuple(
                chunk_of(tensor, 0, count * parts, index * parts + part).to(self._place.device).contiguous()
                for tensor in batch
            )

    def forward_backward(self, stamp: Stamp = lambda: None) -> torch.Tensor:
        """Forward and backward on this rank's part of the batch; its loss, a mean over that part."""
        losses = []
        for turn, (inputs, targets) in enumerate(self._microbatches, start=1):
            self._sync_gradients(turn == len(self._microbatches))
            losses.append(self._one_microbatch(inputs, targets, stamp))
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def _one_microbatch(self, inputs: torch.Tensor, targets: torch.Tensor, stamp: Stamp) -> torch.Tensor:
        with contextlib.ExitStack() as entered:
            if self.plan.cp is not None and shards_sequence(self.plan.cp, self._place):
                inputs, targets = inputs.clone(), targets.clone()
                entered.enter_context(sequence_sharded(self.model, self.plan.cp, self._place, inputs, targets))
            if self.plan.loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                entered.enter_context(loss_parallel())
            output = self.model(inputs)
            if self.kept_outputs is not None:
                self.kept_outputs.append(output.detach())
            loss: Any = self._loss(output, targets)
            stamp()
            (loss / len(self._microbatches) if len(self._microbatches) > 1 else loss).backward()
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
        return data_parallel_size(fsdp, self._place) / fsdp.gradient_divide_factor

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
        load_initial_values(self.model, self._place, self._buffers)


@contextlib.contextmanager
def _open(scenario: Scenario, place: Place) -> Iterator[Prepared]:
    peak = PeakMemory(place.device)
    step = Step(scenario, place)
    counters: dict[str, Any] = dict(step.sharded.counters)

    def check() -> str | None:
        counters.update(_largest_of_ranks({**peak.read(), "parameter_bytes": parameter_bytes(step.model)}, place))
        step.restart()
        step.kept_outputs = [] if step.unshards_output else None
        loss = step.forward_backward()
        output = torch.cat(step.kept_outputs) if step.kept_outputs else None
        reference = reference_of(scenario, place, None if output is None else output.shape)
        found = compare(step.model, float(loss), reference, place, step.gradient_scale, output)
        tolerance = tolerance_of(scenario)
        counters.update(found, tolerance=tolerance)
        return verdict(found, tolerance)

    fields = {"group_size": place.mesh.size(), "mesh_dim": "x".join(place.mesh_dims)}
    try:
        trace = StepTrace(step, partial(Step, scenario, place), place)
        yield Prepared(step, check, phases=step.phases, fields=fields, after=lambda: counters, trace=trace)
    finally:
        if scenario.plan.compile is not None:
            torch.compiler.reset()


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters (or shards of them) that this rank holds between steps, padding not counted."""
    parameters: Iterator[Any] = model.parameters()
    local = (one.to_local() if hasattr(one, "to_local") else one for one in parameters)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _largest_of_ranks(own: dict[str, Any], place: Place) -> dict[str, Any]:
    ranks = place.gather(own)
    return {key: max((theirs[key] for theirs in ranks if theirs[key] is not None), default=None) for key in own}
