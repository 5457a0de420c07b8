"""A step of the scenario's model under its plan, or its forward pass only, with separate times of each phase."""

import contextlib
import hashlib
import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from distbench.cases.step_correctness import StepCheck
from distbench.observe.memory import memory_counters
from distbench.observe.trace import StepTrace
from distbench.plans.batch import Batch, batch_of
from distbench.plans.model import Blueprint, blueprint, local_part, tensors_of
from distbench.plans.pipeline import idle_counters
from distbench.plans.plan_check import problems
from distbench.plans.training_step import ForwardStep, round_trip, step_of
from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.device import empty_allocator
from distbench.ranks.dtypes import dtype_name
from distbench.ranks.failure import blamed
from distbench.records.run_file import Case
from distbench.spec import Scenario, UserError
from distbench.spec.devices import is_accelerator
from distbench.spec.errors import PLAN_PROBLEMS

NEEDS_A_BATCH = "a scenario with build_model also needs make_batch"


def step_cases(scenario: Scenario, label: str, context: RankContext) -> Iterator[CaseSpec]:
    """Check the plan of a variant, then yield its step; a variant without a model has no step.

    Raises:
        UserError: the plan cannot work, or the scenario lacks a part that a step needs.
    """
    if scenario.build_model is None:
        return
    _, _, axes = label.partition("/")
    if scenario.make_batch is None:
        raise UserError(f"{label}: {NEEDS_A_BATCH}")
    built = blueprint(scenario.build_model, context.seed)
    batch = batch_of(scenario)
    if sentences := problems(built.model, batch, scenario.step_plan, context):
        begin = f"{PLAN_PROBLEMS} with {axes}" if axes else PLAN_PROBLEMS
        raise UserError("\n  - ".join([f"{begin}:", *sentences]))
    case = step_case(scenario, label, built, batch)
    # Results of this launch that a second opening of a variant, such as its control, need not repeat.
    known: set[str] = set()
    yield CaseSpec(case, partial(_open, scenario, context, built, known), group="steps")


def step_case(scenario: Scenario, label: str, built: Blueprint, batch: Batch) -> Case:
    """Return the case of a variant's step with its name and parameters, which do not depend on the ranks."""
    name, _, axes = label.partition("/")
    inputs, num_tokens = batch.first, _num_tokens(scenario, batch, label)
    where = f"{dtype_name(inputs.dtype)}{shape_text(inputs.shape)}"
    params = {
        "scenario": name,
        "variant": axes,
        "batch_size": batch.length * scenario.period,
        **({} if num_tokens is None else {"num_tokens": num_tokens * scenario.period}),
        **({} if scenario.period == 1 else {"period": scenario.period}),
        "dtype": dtype_name(inputs.dtype),
        "shape": list(inputs.shape),
        "computes": _computes(built, scenario, batch),
        **({"mode": "inference"} if scenario.inference else {}),
    }
    return Case(f"step/{where}/{label}", "step", params)


def _num_tokens(scenario: Scenario, batch: Batch, label: str) -> int | None:
    num_tokens = scenario.num_tokens
    if callable(num_tokens):
        with blamed("num_tokens", num_tokens):
            num_tokens = num_tokens(batch.tree)
    if num_tokens is None:
        return None
    with contextlib.suppress(TypeError):
        if (number := operator.index(num_tokens)) >= 1:  # also accepts integers of numpy and torch
            return number
    raise UserError(f"{label}: num_tokens is {num_tokens!r}; give the number of tokens of a global batch, 1 or more")


def _computes(built: Blueprint, scenario: Scenario, batch: Batch) -> str:
    """Return a short text that is equal for comparable steps: parameters by shape, global batch and loss."""
    shapes = sorted(tuple(parameter.shape) for parameter in built.model.parameters())
    function = scenario.step or scenario.call or scenario.loss
    loss = getattr(function, "__qualname__", type(function).__qualname__)
    inputs = batch.first
    facts: tuple[Any, ...] = (shapes, tuple(inputs.shape), inputs.dtype, loss)
    if not (scenario.call is None and scenario.loss is not None and isinstance(batch.tree, tuple)):
        facts = (*facts, [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_of(batch.tree)])
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


@contextlib.contextmanager
def _open(scenario: Scenario, context: RankContext, built: Blueprint, known: set[str]) -> Iterator[OpenedCase]:
    held_before = empty_allocator(context.device)
    step = step_of(scenario, context)
    counters: dict[str, Any] = dict(step.sharded.counters)
    if is_accelerator(context.device.type):
        counters["baseline_bytes"] = held_before

    is_restarted = True

    def check() -> str | None:
        nonlocal is_restarted
        largest = max(context.gather(parameter_bytes(step.model)))
        counters.update(parameter_bytes=largest, check=context.check)
        if isinstance(step, ForwardStep):
            counters["cache_bytes"] = max(context.gather(step.cache_bytes))
        wrong, is_restarted = None, False
        if context.check != "none":
            step_check = StepCheck(step, scenario, context, built)
            wrong = step_check()
            counters.update(step_check.counters)
        if step.plan.state_dict:
            state_bytes, changed = round_trip(step.model, step.optimizer)
            counters["state_bytes"] = max(context.gather(state_bytes))
            wrong = wrong or changed
        step.kept_outputs = None
        # The trace runs after all measurements and checks, so it cannot affect the step.
        if "memory" not in known:
            counters.update(memory_counters(step, context))
            if step.pipeline is not None:
                counters.update(idle_counters(step.pipeline, step.forward_backward, context))
            known.add("memory")
        return wrong

    def pause() -> None:
        # Remove figures of the check's own steps, such as the step on one device.
        nonlocal is_restarted
        if not is_restarted:
            step.start_anew()
            is_restarted = True
        torch.set_default_dtype(step.default_dtype)  # other cases run in between and need the default

    fields = {"group_size": context.mesh.size(), "mesh_dim": "x".join(context.mesh_dims)}
    try:
        trace = StepTrace(step, context)
        stays_open = not scenario.plan.compiles  # closing a compiled step discards all compiled code
        yield OpenedCase(step, check, step.phases, fields, lambda: counters, trace, stays_open, pause=pause)
    finally:
        torch.set_default_dtype(step.default_dtype)
        if scenario.plan.compiles:
            torch.compiler.reset()


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters (or shards) that this rank holds between steps, without padding."""
    local_tensors = map(local_part, model.parameters())
    return sum(tensor.numel() * tensor.element_size() for tensor in local_tensors)
