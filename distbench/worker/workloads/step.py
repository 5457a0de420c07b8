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
from distbench.worker.memory import PeakMemory
from distbench.worker.parallelize import load_initial_values, materialise, parallelize
from distbench.worker.place import Place
from distbench.worker.plan_check import BATCH_DIMS, problems
from distbench.worker.reference import compare, reference_of, tolerance_of, verdict
from distbench.worker.sharding import chunk_of
from distbench.worker.torch_internals import context_parallel

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
    with torch.device("meta"):
        model = scenario.build_model()
    inputs, _ = scenario.make_batch()
    if found := problems(model, inputs, scenario.plan, place):
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
    """The parallel model with its batch on this rank."""

    phases: tuple[str, ...] = ("forward", "backward", "optimizer")

    def __init__(self, scenario: Scenario, place: Place) -> None:
        assert scenario.build_model and scenario.make_batch and scenario.loss
        self._plan = self.plan = scenario.plan
        self._place = place
        self._loss = scenario.loss
        with torch.device("meta"):
            model = scenario.build_model()
        self.model: nn.Module = parallelize(model, scenario.plan, place)
        materialise(self.model, place)
        index, count = place.index(BATCH_DIMS)
        self._inputs, self._targets = (
            chunk_of(tensor, 0, count, index).to(place.device).contiguous() for tensor in scenario.make_batch()
        )
        self._optimizer = scenario.optimizer(self.model.parameters()) if scenario.optimizer else None
        if self._optimizer is None:
            self.phases = self.phases[:2]

    def forward_backward(self, stamp: Stamp = lambda: None) -> torch.Tensor:
        """Forward and backward on this rank's part of the batch; its loss, a mean over that part."""
        inputs, targets = self._inputs, self._targets
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._plan.cp is not None:
            inputs, targets = inputs.clone(), targets.clone()
            seq_dims = [self._plan.cp.seq_dim] * 2
            mesh = self._place.mesh[self._plan.cp.mesh_dim]
            context = context_parallel(
                mesh, [inputs, targets], seq_dims, self._plan.cp.rotate, self._plan.cp.load_balance
            )
        with context:
            loss = self._loss(self.model(inputs), targets)
            stamp()
            loss.backward()
            stamp()
        return loss.detach()

    def __call__(self, stamp: Stamp) -> None:
        """One whole step, gradients cleared at its end."""
        self.forward_backward(stamp)
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            stamp()
        else:
            self.model.zero_grad(set_to_none=True)

    def restart(self) -> None:
        """Back to the initial parameters, no gradients."""
        self.model.zero_grad(set_to_none=True)
        load_initial_values(self.model, self._place)


@contextlib.contextmanager
def _open(scenario: Scenario, place: Place) -> Iterator[Prepared]:
    peak = PeakMemory(place.device)
    step = Step(scenario, place)
    counters: dict[str, Any] = {}

    def check() -> str | None:
        counters.update(_largest_of_ranks(peak.read(), place))
        step.restart()
        loss = step.forward_backward()
        found = compare(step.model, float(loss), reference_of(scenario, place), place)
        counters.update(found)
        return verdict(found, tolerance_of(_compute_dtype(scenario)))

    fields = {"group_size": place.mesh.size(), "mesh_dim": "x".join(place.mesh_dims)}
    yield Prepared(step, check, phases=step.phases, fields=fields, after=lambda: counters)


def _largest_of_ranks(own: dict[str, Any], place: Place) -> dict[str, Any]:
    ranks = place.gather(own)
    return {key: max((theirs[key] for theirs in ranks if theirs[key] is not None), default=None) for key in own}


def _compute_dtype(scenario: Scenario) -> torch.dtype:
    policy = scenario.plan.fsdp.mixed_precision if scenario.plan.fsdp else None
    dtype: torch.dtype | None = getattr(policy, "param_dtype", None)
    return dtype or torch.float32
