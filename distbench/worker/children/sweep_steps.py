"""`python -m distbench.worker.children.sweep_steps`: one import of torch for all questions that a sweep has.

The first line of its input says {"file", "scenario", "num_at_once"}. Each further line is a question: `id`, `ask`,
`mesh`, and `variants` with as many `files`. Answers are lines {"id", "answers": one a variant}, as they are found:

- "facts": what the plan and the model are, see `_facts`
- "record": {}, once the recording of a step was saved in its file
- "check": {}, where the plan can work

or {"id", "left_out": why there is no answer}.
"""

import json
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from distbench.simulate.recording_file import save_recordings
from distbench.spec import Scenario, UserError
from distbench.worker.changed_plan import checkpointable
from distbench.worker.models.blueprint import blueprint
from distbench.worker.plans.batch import batch_of
from distbench.worker.plans.plan_check import problems
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.parent_death import die_with_parent
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.session import declared, load_scenario
from distbench.worker.simulated.recorded_step import SEED, recorded
from distbench.worker.torch_internals import Unsupported, fake_ranks

MAX_LINE = 90
# What torch's own objects say of themselves, and need not be told.
DEFAULTS = {
    "MixedPrecisionPolicy": ("cast_forward_inputs=True", "output_dtype=None"),
    "ColwiseParallel": ("use_local_output=True",),
    "RowwiseParallel": ("use_local_output=True",),
    "SequenceParallel": ("use_local_output=False",),
    "PrepareModuleInput": (
        "input_kwarg_layouts={}", "desired_input_kwarg_layouts={}", "use_local_output=False",
    ),
}  # fmt: skip


def _answer(head: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    asked = {"facts": _facts, "record": _record, "check": _check}[question["ask"]]
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
            if scenario.plan.pipeline is not None:
                raise UserError(
                    "a sweep predicts plans by rank 0 alone, and a pipeline is simulated as all of its ranks; compare "
                    "schedules and meshes with simulate --set and --mesh, or run --set"
                )
            found.append(asked(scenario, {**question, "scenario": head["scenario"], "file": file}))
        return {"answers": found}
    except (UserError, Unsupported) as error:
        return {"left_out": str(error)}
    except (Exception, SystemExit) as error:
        return {"left_out": f"it raises {one_line(error)}"}


def _record(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    found = recorded(scenario, question["scenario"], question["label"], question["mesh"])
    save_recordings([found.recording], Path(question["file"]))
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


def _facts(scenario: Scenario, question: dict[str, Any]) -> dict[str, Any]:
    """Of the plan: the mesh dims that it uses, those that shard parameters, what of it can be changed, and its text.
    Of the model: its parameters, and the optimizer's bytes for each byte of them."""
    assert scenario.build_model and scenario.make_batch
    plan = scenario.plan
    model = blueprint(scenario.build_model, SEED, with_values=False).model
    fsdp, cp = plan.fsdp, plan.cp
    tp_dims = list(plan.tp_dims) if plan.tp is not None or plan.shard_params else []
    fsdp_dims = [*fsdp.mesh_dims] if fsdp else []
    facts = {
        "mesh_dims": list(
            dict.fromkeys(
                [*(fsdp.replicate_dims if fsdp else ()), *fsdp_dims, *([cp.mesh_dim] if cp else []), *tp_dims]
            )
        ),
        "shard_dims": list(dict.fromkeys([*fsdp_dims, *tp_dims])),
        "fsdp": None
        if fsdp is None
        else {
            "reshard_after_forward": fsdp.reshard_after_forward,
            "mixed_precision": fsdp.mixed_precision is not None,
            "prefetch": fsdp.prefetch_forward is not None or fsdp.prefetch_backward is not None,
        },
        "cp": None if cp is None else {"mesh_dim": cp.mesh_dim, "rotate": cp.rotate, "load_balance": cp.balances},
        "checkpoint": list(plan.checkpoint),
        "is_selective": plan.checkpoint_context is not None,
        "checkpointable": list(checkpointable(plan)),
        "microbatches": plan.microbatches,
        "parameter_bytes": sum(one.numel() * one.element_size() for one in model.parameters()),
        "num_parameters": sum(one.numel() for one in model.parameters()),
        "optimizer_share": _optimizer_share(scenario),
        "batch_size": len(scenario.make_batch()[0]),
        "num_tokens": scenario.num_tokens,
        "plan": _code(plan),
    }
    return facts


def _optimizer_share(scenario: Scenario) -> float:
    """Bytes of optimizer state for each byte of parameters, of one parameter alone; 0 where that cannot be told."""
    if scenario.optimizer is None:
        return 0.0
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros(8, 8)
    try:
        optimizer = scenario.optimizer([parameter])
        optimizer.step()
    except Exception:
        return 0.0
    state = [one for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor)]
    return sum(one.numel() * one.element_size() for one in state if one.numel() >= parameter.numel()) / 256


def _code(value: Any, indent: str = "") -> str:
    """A plan as Python, over as many lines as it takes; functions of the scenario's own by their names."""
    inner = f"{indent}    "
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("distbench."):
        plain: Any = type(value)(*(getattr(value, one.name) for one in fields(value) if one.name == "modules"))
        kept = [one.name for one in fields(value) if repr(getattr(value, one.name)) != repr(getattr(plain, one.name))]
        opening, parts, closing = f"{type(value).__name__}(", [f"{name}=" for name in kept], ")"
        values = [getattr(value, name) for name in kept]
    elif isinstance(value, Mapping):
        opening, parts, closing = "{", [f"{name!r}: " for name in value], "}"
        values = list(value.values())
    else:
        text = str(getattr(value, "__name__", None) or repr(value))
        for default in DEFAULTS.get(type(value).__name__, ()):
            text = text.replace(f", {default}", "")
        return re.sub(r"Shard\(dim=(-?\d+)\)", r"Shard(\1)", text)
    coded = [f"{part}{_code(one, inner)}" for part, one in zip(parts, values, strict=True)]
    short = opening + ", ".join(coded) + closing
    if "\n" not in short and len(short) <= MAX_LINE:
        return short
    return "\n".join([opening, *(f"{inner}{one}," for one in coded), f"{indent}{closing}"])


def main() -> None:
    """Answer until the input ends: each question in a process of its own, which has torch imported and nothing else
    done. DTensor keeps what it planned for a mesh, in backward's thread too, and serves it to an equal one later."""
    torch.set_num_threads(1)
    given = _Lines()
    while not (lines := given.read()) and not given.ended:
        pass
    if not lines:
        return
    head, *waiting = map(json.loads, lines)
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    while running or waiting or not given.ended:
        while waiting and len(running) < head["num_at_once"]:
            question = waiting.pop(0)
            connection, process = _started(head, question)
            running[connection] = question["id"], process
        for ready in wait([*running, *([] if given.ended else [given.fileno()])]):
            if isinstance(ready, Connection):
                number, process = running.pop(ready)
                print(json.dumps({"id": number, **_received(ready, process)}), flush=True)
            else:
                waiting += map(json.loads, given.read())


class _Lines:
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


def _started(head: dict[str, Any], question: dict[str, Any]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(head, question, sender, os.getpid()))
    process.start()
    # While this process holds the sending end too, a child that dies would never be noticed.
    sender.close()
    return receiver, process


def _received(connection: Connection, process: BaseProcess) -> dict[str, Any]:
    with connection:
        try:
            answer: dict[str, Any] = connection.recv()
            process.join()
        except EOFError:
            process.join()
            answer = {"left_out": f"its process ended with exit code {process.exitcode} and without an answer"}
    return answer


def _tell(head: dict[str, Any], question: dict[str, Any], sender: Connection, parent: int) -> None:
    die_with_parent(parent)
    # Scenarios print and torch warns; standard output is for answers.
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    sender.send(_answer(head, question))


if __name__ == "__main__":
    main()
