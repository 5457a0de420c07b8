"""One import of torch for all questions that a sweep has.

Each line of its input is a question: `id`, `ask`, `mesh`, `label`, and `variants` with as many `files`. Answers are
lines {"id", "answers": one a variant}, in the order in which they are ready:

- "facts": what the plan and the model are, see `_facts`
- "record": {}, once the recording of a step was saved in its file, by each rank that the others may wait for
- "check": {}, where the plan can work
- "code": the plan as Python, and its difference from the first variant's, see `_code`

or {"id", "left_out": why there is no answer, "lasts": whether asking again would be answered likewise}.

A process that a signal ends is started once more; the answer then says in "again" how the first one ended.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distbench.plans.batch import batch_of
from distbench.plans.changed_plan import changed_plan, checkpointable, mesh_dims_of, sharding_dims_of
from distbench.plans.model import blueprint, tensors_of
from distbench.plans.plan_check import problems
from distbench.plans.plan_code import change_code, plan_code
from distbench.plans.training_step import state_of
from distbench.ranks.failure import one_line
from distbench.simulate.recorded_step import SEED, recorded, recorded_ranks
from distbench.simulate.recording import save_recordings
from distbench.spec import Scenario, UserError
from distbench.spec.mesh import MESH_DIMS
from distbench.spec.plan_changes import split_variant
from distbench.torch_private import ShapesOnly, Skipped, Unsupported, fake_ranks
from distbench.worker.child_verbs import rank_of
from distbench.worker.fork_pool import ForkPool
from distbench.worker.plan_rehearsal import rehearse
from distbench.worker.rank_session import declared, load_scenario

STATE_ELEMENTS = 1 << 14  # optimizers of 8 bit keep smaller tensors whole


def _answer(file: Path, name: str, question: dict[str, Any]) -> dict[str, Any]:
    answer_for = {"facts": _facts, "record": _record, "check": _check, "code": _code}[question["ask"]]
    try:
        function = load_scenario(file, name)
        answers: list[dict[str, Any]] = []
        for variant, recording in zip(question["variants"], question["files"], strict=True):
            scenario = declared(function, variant)
            if scenario.build_model is None or scenario.make_batch is None:
                raise UserError("it has no step; give it build_model and make_batch")
            if scenario.inference:
                raise UserError(
                    "it runs forward alone, and a sweep changes what training has; try plans with run --set"
                )
            about = {"scenario": name, "file": recording, "variant": variant, "function": function}
            answers.append(answer_for(scenario, {**question, **about}))
        return {"answers": answers}
    except (UserError, Unsupported) as error:
        return {"left_out": str(error), "lasts": True}
    except (Exception, SystemExit) as error:
        return {"left_out": f"it raises {one_line(error)}", "lasts": not isinstance(error, OSError | MemoryError)}


def _record(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's step; where other ranks have more to do in theirs, those too; of a pipeline every position's."""
    step_args = scenario, question["scenario"], question["label"], question["mesh"]
    if scenario.plan.pipeline is not None:
        recordings = recorded_ranks(*step_args, None)
    else:
        first = recorded(*step_args)
        recordings = [first.recording, *(recorded(*step_args, rank).recording for rank in first.busier)]
    save_recordings(recordings, Path(question["file"]))
    return {}


def _check(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    assert scenario.build_model and scenario.make_batch
    with fake_ranks(question["mesh"]) as mesh:
        model = blueprint(scenario.build_model, SEED, with_values=False).model
        context = rank_of(mesh, SEED)
        if sentences := problems(model, batch_of(scenario), scenario.step_plan, context):
            raise UserError("; ".join(sentences))
        with contextlib.suppress(Skipped):
            if refused := rehearse(scenario, context, with_step=False).problems:
                raise UserError("; ".join(refused))
    return {}


def _code(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    """`plan`: lines that make the variant's plan. `change`: lines that make it of the same scenario's plan with the
    changes of the first variant alone. Each is None where some value has no text."""
    params, changes = split_variant(question["variant"])
    _, first_changes = split_variant(question["variants"][0])
    # Of one call: objects without an equality of their own are equal to themselves alone.
    plan = question["function"](**params).plan
    change = change_code(changed_plan(plan, first_changes), changed_plan(plan, changes))
    return {"plan": plan_code(scenario.plan), "change": change}


def _facts(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    """Of the plan: the mesh dims that it uses, those that shard parameters, and what of it can be changed.
    Of the model: its parameters, those that are trained, and the optimizer's bytes for each byte of these."""
    assert scenario.build_model and scenario.make_batch
    plan = scenario.plan
    model = blueprint(scenario.build_model, SEED, with_values=False).model
    with ShapesOnly().on():
        batch = batch_of(scenario)
    fsdp, cp = plan.fsdp, plan.cp
    # What a function of the user's own does with parameters and gradients nobody knows beforehand.
    is_own = scenario.parallelize is not None or scenario.after_materialize is not None
    trained = [] if is_own else [parameter for parameter in model.parameters() if parameter.requires_grad]
    facts = {
        "mesh_dims": mesh_dims_of(plan),
        "shard_dims": list(MESH_DIMS) if scenario.parallelize is not None else sharding_dims_of(plan),
        "fsdp": None
        if fsdp is None
        else {
            "reshard_after_forward": fsdp.reshard_after_forward,
            "mixed_precision": fsdp.mixed_precision is not None,
            "prefetch": fsdp.prefetch_forward is not None or fsdp.prefetch_backward is not None,
        },
        "cp": None if cp is None else {"mesh_dim": cp.mesh_dim, "rotate": cp.rotate, "load_balance": cp.balances},
        "pipeline": plan.pipeline is not None,
        "checkpoint": list(plan.checkpoint),
        "is_selective": plan.checkpoint_context is not None,
        "checkpointable": list(checkpointable(plan)),
        "microbatches": plan.microbatches,
        "parameter_bytes": _num_bytes(model.parameters()),
        "trained_bytes": _num_bytes(trained),
        "optimizer_share": _optimizer_share(scenario),
        "batch_size": batch.length,
        "num_tokens": scenario.num_tokens(batch.tree) if callable(scenario.num_tokens) else scenario.num_tokens,
    }
    return facts


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_share(scenario: Scenario) -> float:
    """Bytes of optimizer state for each byte of parameters, of one parameter alone; 0 where that cannot be told."""
    if scenario.optimizer is None:
        return 0.0
    parameter = torch.nn.Parameter(torch.zeros(STATE_ELEMENTS).reshape(128, -1))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = scenario.optimizer([parameter])
        optimizer.step()
    except Exception:
        return 0.0
    known_tensors = (parameter, parameter.grad)
    state = [
        tensor
        for _, tensor in tensors_of(state_of(optimizer))
        if not any(tensor is known_tensor for known_tensor in known_tensors)
    ]
    return _num_bytes(tensor for tensor in state if tensor.numel() >= parameter.numel()) / _num_bytes([parameter])


def answer_lines(file: str, scenario: str, num_at_once: str) -> Iterator[dict[str, Any]]:
    """Answer the lines of standard input until it ends, each in a process of its own."""
    pool, is_open = ForkPool(partial(_answer, Path(file), scenario), int(num_at_once)), True
    # A buffer would take in lines that `wait` then never sees.
    with open(0, "rb", buffering=0, closefd=False) as lines:
        while is_open or pool.is_busy:
            questions, is_readable = pool.wait([lines.fileno()] if is_open else [])
            for question in questions:
                again = {"again": question.again} if question.again else {}
                answer = question.answer or {"left_out": question.why, "lasts": False}
                yield {"id": question.data["id"], **answer, **again}
            if is_readable:
                line = lines.readline()
                is_open = bool(line)
                if line:
                    pool.ask(json.loads(line))
