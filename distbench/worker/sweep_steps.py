"""One import of torch for all questions that a sweep has.

The first line of its input says {"file", "scenario", "num_at_once"}. Each further line is a question: `id`, `ask`,
`mesh`, and `variants` with as many `files`. Answers are lines {"id", "answers": one a variant}, as they are found:

- "facts": what the plan and the model are, see `_facts`
- "record": {}, once the recording of a step was saved in its file, by each rank that the others may wait for
- "check": {}, where the plan can work
- "code": the plan as Python, and its difference from the first variant's, see `_code`

or {"id", "left_out": why there is no answer, "lasts": whether asking again would be answered likewise}.

A process that a signal ends is started once more; the answer then says in "again" how the first one ended.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from distbench.plans.batch import batch_of
from distbench.plans.changed_plan import changed_plan, checkpointable, mesh_dims_of, sharding_dims_of
from distbench.plans.model import blueprint, tensors_of
from distbench.plans.plan_check import problems
from distbench.plans.plan_code import change_code, plan_code
from distbench.plans.training_step import state_of
from distbench.processes.child import ended_text, last_words
from distbench.ranks.context import RankContext
from distbench.ranks.failure import one_line
from distbench.simulate.recorded_step import SEED, recorded, recorded_ranks
from distbench.simulate.recording import save_recordings
from distbench.spec import Scenario, UserError
from distbench.spec.mesh import MESH_DIMS
from distbench.spec.plan_changes import split_variant
from distbench.torch_private import ShapesOnly, Unsupported, fake_ranks
from distbench.worker.session import declared, load_scenario

STATE_ELEMENTS = 1 << 14  # optimizers of 8 bit keep smaller tensors whole


def _answer(head: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    answer_of = {"facts": _facts, "record": _record, "check": _check, "code": _code}[question["ask"]]
    try:
        function = load_scenario(Path(head["file"]), head["scenario"])
        found: list[dict[str, Any]] = []
        for variant, file in zip(question["variants"], question["files"], strict=True):
            scenario = declared(function, variant)
            if scenario.build_model is None or scenario.make_batch is None:
                raise UserError("it has no step; give it build_model and make_batch")
            if scenario.inference:
                raise UserError(
                    "it runs forward alone, and a sweep changes what training has; try plans with run --set"
                )
            asked = {**question, "scenario": head["scenario"], "file": file, "variant": variant, "function": function}
            found.append(answer_of(scenario, asked))
        return {"answers": found}
    except (UserError, Unsupported) as error:
        return {"left_out": str(error), "lasts": True}
    except (Exception, SystemExit) as error:
        return {"left_out": f"it raises {one_line(error)}", "lasts": not isinstance(error, OSError | MemoryError)}


def _record(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's step; where other ranks have more to do in theirs, those too; of a pipeline every position's."""
    what = scenario, question["scenario"], question["label"], question["mesh"]
    if scenario.plan.pipeline is not None:
        found = recorded_ranks(*what, None)
    else:
        first = recorded(*what)
        found = [first.recording, *(recorded(*what, rank).recording for rank in first.busier)]
    save_recordings(found, Path(question["file"]))
    return {}


def _check(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    assert scenario.build_model and scenario.make_batch
    with fake_ranks(question["mesh"]) as mesh:
        assert torch.distributed.group.WORLD is not None
        context = RankContext(0, torch.device("cpu"), mesh, "gloo", torch.distributed.group.WORLD, SEED)
        model = blueprint(scenario.build_model, SEED, with_values=False).model
        if found := problems(model, batch_of(scenario), scenario.step_plan, context):
            raise UserError("; ".join(found))
    return {}


def _code(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    """`plan`: lines that make the variant's plan. `change`: lines that make it of the same scenario's plan with the
    changes of the first variant alone. Each is None where some value has no text."""
    own, changes = split_variant(question["variant"])
    _, first_changes = split_variant(question["variants"][0])
    # Of one call: objects without an equality of their own are equal to themselves alone.
    plan = question["function"](**own).plan
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
    trained = [] if is_own else [one for one in model.parameters() if one.requires_grad]
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
    return sum(one.numel() * one.element_size() for one in tensors)


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
    known = (parameter, parameter.grad)
    state = [one for _, one in tensors_of(state_of(optimizer)) if not any(one is other for other in known)]
    return _num_bytes(one for one in state if one.numel() >= parameter.numel()) / _num_bytes([parameter])


def answer_lines() -> None:
    """Answer until the input ends: each question in a process of its own, which has torch imported and nothing else
    done. DTensor keeps what it planned for a mesh, in backward's thread too, and serves it to an equal one later."""
    torch.set_num_threads(1)
    # Standard output is for answers; whatever else writes to it, a library in C++ too, writes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = _InputLines()
    while not (lines := given.read()) and not given.ended:
        pass
    if not lines:
        return
    head, *waiting = map(json.loads, lines)
    running: dict[Connection, _PendingQuestion] = {}
    while running or waiting or not given.ended:
        while waiting and len(running) < head["num_at_once"]:
            asked = _started(head, waiting.pop(0))
            running[asked.connection] = asked
        for ready in wait([*running, *([] if given.ended else [given.fileno()])]):
            if isinstance(ready, Connection):
                asked = running.pop(ready)
                answer, modules = _received(asked)
                if ended := answer.pop("ended", None):
                    if "again" not in asked.question:
                        waiting.insert(0, {**asked.question, "again": ended})
                        continue
                    answer = {"left_out": f"its process was {ended}, the second time", "lasts": False}
                again = {"again": asked.question["again"]} if "again" in asked.question else {}
                print(json.dumps({"id": asked.question["id"], **answer, **again}), file=answers, flush=True)
                _import(modules)
            else:
                waiting += map(json.loads, given.read())


class _InputLines:
    """Lines of standard input, as they come."""

    def __init__(self) -> None:
        self.ended, self._rest = False, b""

    def fileno(self) -> int:
        """Of standard input."""
        return 0

    def read(self) -> list[bytes]:
        """Those that are whole by now; this waits only where there is nothing to read."""
        data = os.read(self.fileno(), 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class _PendingQuestion(NamedTuple):
    """A process that answers a question; `complaints` is its standard error."""

    question: dict[str, Any]
    connection: Connection
    process: BaseProcess
    complaints: BinaryIO


def _started(head: dict[str, Any], question: dict[str, Any]) -> _PendingQuestion:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - `_received` closes it
    process = context.Process(target=_tell, args=(head, question, sender, complaints.fileno()))
    process.start()
    # While this process holds the sending end too, a child that dies would never be noticed.
    sender.close()
    return _PendingQuestion(question, receiver, process, complaints)


def _received(asked: _PendingQuestion) -> tuple[dict[str, Any], list[str]]:
    """(answer, modules that torch imported for it); {"ended": how} where a signal ended the process without one."""
    answer: dict[str, Any]
    with asked.connection, asked.complaints:
        try:
            answer, modules = asked.connection.recv()
            asked.process.join()
        except EOFError:
            asked.process.join()
            code, modules = asked.process.exitcode or 0, []
            asked.complaints.seek(0)
            said = asked.complaints.read().decode("utf-8", "replace").splitlines()
            words = f" (its last words: {last_words(said)})" if last_words(said) else ""
            answer = {"left_out": f"its process ended with exit code {code} and without an answer{words}"}
            answer = {"ended": ended_text(code, said)} if code < 0 else {**answer, "lasts": False}
    return answer, modules


def _import(modules: Sequence[str]) -> None:
    """What torch imports once it is used, a fifth of what an answer takes: the next processes have it already."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # processes that are forked from here on need not look through it for garbage


def _tell(head: dict[str, Any], question: dict[str, Any], sender: Connection, complaints: int) -> None:
    os.dup2(complaints, 2)
    warnings.simplefilter("ignore")
    known = {*sys.modules}
    answer = _answer(head, question)
    sender.send((answer, [name for name in [*sys.modules] if name.startswith("torch.") and name not in known]))
