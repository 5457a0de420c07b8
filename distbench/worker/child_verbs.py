"""Verbs of a child process about jobs, pairs of layouts and sweeps, on a fake process group.

For each query, this process forks another process. This process has imported torch, but has not used torch. A second
query in one process would use the caches of the first query: DTensor caches its plans for a mesh, also in backward's
thread, and uses them later for an equal mesh, even with other groups.
"""

import contextlib
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.device_mesh import DeviceMesh

from distbench.observe.memory import predicted_peak_bytes
from distbench.observe.module_attribution import communications_of
from distbench.planning.placement_states import State, parse_state
from distbench.plans.batch import batch_of
from distbench.plans.model import blueprint, tensors_of
from distbench.plans.plan_changes import changed_plan, checkpointable, mesh_dims_of, sharding_dims_of, without_idle_tp
from distbench.plans.plan_check import problems
from distbench.plans.plan_code import change_code, plan_code
from distbench.plans.training_step import TrainingStep, state_of
from distbench.plans.user_step import made_optimizers, steppable, torch_optimizers
from distbench.processes import ended_text, last_words
from distbench.ranks.case_protocol import OpenedCase
from distbench.ranks.context import RankContext, profile_of
from distbench.ranks.device import Accelerator
from distbench.ranks.dtypes import TORCH_DTYPES
from distbench.ranks.failure import one_line
from distbench.ranks.measure import no_stamp
from distbench.simulate.recorded_step import SEED, recorded, recorded_ranks
from distbench.simulate.recording import save_recordings
from distbench.simulate.repeated_layers import FEW, LAYERS
from distbench.spec import Job, ParallelPlan, Scenario, UserError
from distbench.spec.assumptions import Assumption
from distbench.spec.job import MAX_NAMED, mesh_of, none_chosen, split_variant
from distbench.spec.mesh import MESH_DIMS
from distbench.spec.placements import TORCH_PLANNERS
from distbench.torch_private import (
    ZERO_FILLS,
    KnownValues,
    ShapesOnly,
    Skipped,
    Unsupported,
    fake_mesh,
    fake_ranks,
    lacks,
    path_between,
    planner,
    remembered_steps,
)
from distbench.worker.plan_rehearsal import rank_of, rehearse
from distbench.worker.rank_session import all_cases, chosen_cases, declared, load_scenario, variant_label
from distbench.worker.recipe_memory import recipe_fit

Answer = dict[str, Any]
INHERITED = "torch.", "transformers.", "torchtitan."  # prefixes of modules
REDUCE_SCATTERS_AT_ONCE = "set_reduce_scatter_max_input_buffers"
STATE_ELEMENTS = 1 << 14  # 8-bit optimizers do not quantize smaller tensors


@dataclass
class Question:
    """A query and its answer."""

    data: Any
    answer: Any = None  # None before the answer, and if the process ended without an answer.
    why: str = ""  # a description of the process's end without an answer
    again: str = ""  # a description of the signal that ended the first process, if a second process was started
    seconds: float = 0.0  # of the process; while it runs, its monotonic start


class ForkPool:
    """A pool of processes that answer queries by `function`. Each is forked from this process, which must not have used
    torch.

    If a signal ends a process, its query is repeated once.
    """

    def __init__(self, function: Callable[[Any], Any], num_at_once: int) -> None:
        self._function, self._num_at_once = function, num_at_once
        self._waiting: deque[Question] = deque()
        self._running: dict[Connection, tuple[Question, BaseProcess, BinaryIO]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a query has no answer yet."""
        return bool(self._waiting or self._running)

    def ask(self, data: Any) -> None:
        """Add a query to the queue."""
        self._waiting.append(Question(data))

    def wait(self, files: Sequence[int] = ()) -> tuple[list[Question], bool]:
        """Wait until a query has an answer or one of `files` is readable; return the answered queries, and whether a
        file is readable."""
        while self._waiting and len(self._running) < self._num_at_once:
            self._start(self._waiting.popleft())
        ready = wait([*self._running, *files])
        ended = [self._ended(connection) for connection in ready if isinstance(connection, Connection)]
        return [question for question in ended if question], len(ready) > len(ended)

    def _start(self, question: Question) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `_ended` closes it
        process = context.Process(target=self._answer, args=(question, sender, stderr.fileno()))
        question.seconds = time.monotonic()
        process.start()
        # If the sending end remained open in this process, the end of a child would not be detected.
        sender.close()
        self._running[receiver] = question, process, stderr

    def _answer(self, question: Question, sender: Connection, stderr: int) -> None:
        """Send the answer from the forked process, with the names of the imported modules of INHERITED packages."""
        os.dup2(stderr, 2)
        warnings.simplefilter("ignore")
        gc.disable()  # The process ends soon; searches for garbage would take 4 % of a recording.
        before = {*sys.modules}
        answer = self._function(question.data)
        sender.send((answer, [name for name in [*sys.modules] if name.startswith(INHERITED) and name not in before]))

    def _ended(self, connection: Connection) -> Question | None:
        """Return the query of a process that has ended; None if it is repeated."""
        question, process, stderr = self._running.pop(connection)
        modules: list[str] = []
        with stderr:
            with connection, contextlib.suppress(EOFError):
                question.answer, modules = connection.recv()
            process.join()
            question.seconds = round(time.monotonic() - question.seconds, 1)
            stderr.seek(0)
            stderr_lines = stderr.read().decode("utf-8", "replace").splitlines()
        # Lazy imports take up to half of an answer's time, so import these modules for later processes.
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        gc.freeze()  # Later processes do not search these objects for garbage.
        code = process.exitcode or 0
        if question.answer is None and code < 0:
            ended = ended_text(code, stderr_lines)
            if not question.again:
                self._waiting.appendleft(Question(question.data, again=ended))
                return None
            question.why = f"its process was {ended}, second attempt"
        elif question.answer is None:
            words = f" (its last words: {last_words(stderr_lines)})" if last_words(stderr_lines) else ""
            question.why = f"its process ended with exit code {code} and without an answer{words}"
        return question


def device_name(_: None, device_type: str) -> str:
    """Return the product name of the first device of a type."""
    return Accelerator(device_type).name_of(0)


def _answers_of(function: Callable[[Job], Answer], records: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Return a function's answer for each job, in the jobs' order; {"user_error": one sentence} if the function
    raises."""
    pool = ForkPool(partial(_answer_or_error, function), len(os.sched_getaffinity(0)))
    for number, record in enumerate(records):
        pool.ask((number, record))
    answers: dict[int, Answer] = {}
    while pool.is_busy:
        for question in pool.wait()[0]:
            answers[question.data[0]] = question.answer or {"user_error": question.why}
    return [answers[number] for number in range(len(records))]


def _answer_or_error(function: Callable[[Job], Answer], question: tuple[int, Mapping[str, Any]]) -> Answer:
    try:
        return function(Job.from_record(question[1]))
    except (UserError, Unsupported) as error:
        return {"user_error": str(error)}
    except (Exception, SystemExit) as error:
        reason = f"it raises {one_line(error)}, on a fake process group; check whether distbench run works"
        return {"user_error": reason}


def _case_ids(job: Job) -> Answer:
    """Return {"ids": ids of the job's chosen cases}. Raise UserError if the scenario is not valid."""
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        context = rank_of(mesh, job.settings.seed, job.device)  # accelerators have other cases
        all_specs = all_cases(job, function, replace(context, profile=profile_of(job)))
    ids = [case_spec.case.id for case_spec in chosen_cases(job, all_specs)]
    if not ids:
        raise UserError(none_chosen(job.chosen, len(all_specs), [spec.case.id for spec in all_specs[:MAX_NAMED]]))
    return {"ids": ids}


PathAnswer = dict[str, str] | None


def plan_paths(request: dict[str, Any]) -> dict[str, Any]:
    """Return the paths of torch's planners, for `distbench redistribute`.

    Args:
        request: mesh_shape, shape, dtype, devices_per_host, pairs (of placement texts such as `S(0)R`) and budget_s.

    Returns:
        "torch": torch's version. "no_zero_fill": the reason why torch cannot convert a shard to a partial, or None.
        "paths": for each planner one answer per pair: {"path": in torch's notation}, {"error": the reason}, or None
        after the time limit. Without support for this version of torch: {"torch", "unsupported"}.
    """
    shape, dtype = request["shape"], TORCH_DTYPES[request["dtype"]]
    pairs = [tuple(parse_state(text, len(shape)) for text in pair) for pair in request["pairs"]]
    # The order is random, so that a timeout omits random pairs.
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    deadline = time.monotonic() + request["budget_s"]
    answers: dict[str, list[PathAnswer]] = {}
    try:
        with fake_mesh(request["mesh_shape"], request["devices_per_host"]) as mesh:
            # The fast planner is first, so that it does not lose time to a slow planner.
            for name in TORCH_PLANNERS:
                answers[name] = [None] * len(pairs)
                with planner(name), remembered_steps():
                    for number in order:
                        if time.monotonic() > deadline:
                            break
                        answers[name][number] = _path_answer(mesh, shape, dtype, *pairs[number])
    except Unsupported as reason:
        return {"torch": torch.__version__, "unsupported": str(reason)}
    return {"torch": torch.__version__, "no_zero_fill": lacks(ZERO_FILLS), "paths": answers}


def _path_answer(mesh: DeviceMesh, shape: list[int], dtype: torch.dtype, source: State, target: State) -> PathAnswer:
    try:
        return {"path": path_between(mesh, shape, dtype, source, target)}
    # In a training job, torch would raise the same error for this pair, so the error is the answer.
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, KeyError, IndexError) as error:
        return {"error": f"torch raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def signature(job: Job) -> Answer:
    """Return rank 0's communication and peak memory in one call of each case, after a first call for set-up.

    Returns:
        {"torch": version, "cases": {case id: {"paths": [communication, ...], "peak_bytes": predicted or None}},
        "left_out": {case id: error}}

    Raises:
        UserError: the plan is not valid, or every case raises.
    """
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        context = rank_of(mesh, job.settings.seed)
        by_case: dict[str, dict[str, Any]] = {}
        left_out: dict[str, str] = {}
        for case_spec in all_cases(job, function, context):
            try:
                # A case without measurement on this machine has no communication.
                with contextlib.suppress(Skipped), case_spec.open() as opened_case:
                    by_case[case_spec.case.id] = _of_case(opened_case, context)
            except UserError:
                raise
            except Exception as error:
                left_out[case_spec.case.id] = one_line(error)
    if left_out and not by_case:
        first, reason = next(iter(left_out.items()))
        raise UserError(
            f"no case runs on a fake process group: {first} raises {reason}; check that distbench run works"
        )
    return {"torch": torch.__version__, "cases": by_case, "left_out": left_out}


def _of_case(opened_case: OpenedCase, context: RankContext) -> dict[str, Any]:
    call = opened_case.call
    step = call if isinstance(call, TrainingStep) else None
    for _ in range(step.num_setup_steps if step else 1):
        call(no_stamp)
    plan, model = (step.plan, step.model) if step else (ParallelPlan(), None)
    rows = communications_of(call, opened_case.phases, plan, context, model)
    return {"paths": [asdict(row) for row in rows], "peak_bytes": predicted_peak_bytes(step) if step else None}


# These return for each job the function's answer, or {"user_error": sentence}.
all_case_ids = partial(_answers_of, _case_ids)
all_signatures = partial(_answers_of, signature)


def all_recordings(
    records: Sequence[Mapping[str, Any]], folder: str, ranks: str = "[0]", assume: str = "{}"
) -> list[list[dict[str, str]]]:
    """Return one entry per job and variant: {"label": the variant's name, "file": path of the recordings}, or {"label",
    "left_out": the reason}.

    Args:
        ranks: JSON list of ranks; null for rank 0 and all ranks with a different step.
        assume: JSON object, as from `assumptions_of`.
    """
    jobs = map(Job.from_record, records)
    how = json.loads(ranks), json.loads(assume)
    return [[*_recordings(job, Path(folder) / str(number), *how)] for number, job in enumerate(jobs)]


def _recordings(
    job: Job, prefix: Path, ranks: Sequence[int] | None, assume: Mapping[str, Assumption]
) -> Iterator[dict[str, str]]:
    """Record a step of each variant for some ranks, to a file with a name that begins with the prefix."""
    function = load_scenario(Path(job.file), job.scenario)
    for number, variant in enumerate(job.variants):
        label = variant_label(job, variant)
        try:
            scenario = declared(function, variant)
            mesh = mesh_of(variant, job.mesh)
            step_args = scenario, job.scenario, label.partition("/")[2], mesh
            rank_recordings = recorded_ranks(*step_args, ranks, assume, fewer_layers(function, variant))
        except (UserError, Unsupported) as error:
            yield {"label": label, "left_out": str(error)}
            continue
        file = prefix.with_name(f"{prefix.name}-{number}.jsonl")
        save_recordings(rank_recordings, file)
        yield {"label": label, "file": str(file)}


def fewer_layers(function: Callable[..., Scenario], variant: Mapping[str, Any]) -> Scenario | None:
    """Return the variant with only the first layers of its model, if an argument sets their number."""
    names = inspect.signature(function).parameters
    if (name := next((name for name in LAYERS if name in names), None)) is None:
        return None
    try:
        few = declared(function, {**variant, name: FEW})
        if (fsdp := few.plan.fsdp) is None:
            return few
        # Communication of several layers at once changes more of the first and the last layers.
        at_once = [fsdp.prefetch_forward, fsdp.prefetch_backward, fsdp.configure.get(REDUCE_SCATTERS_AT_ONCE)]
        return declared(function, {**variant, name: FEW + 4 * (max(1, *(count or 1 for count in at_once)) - 1)})
    except UserError:  # The sizes of the variant need more layers.
        return None


def answer_lines(file: str, scenario: str, num_at_once: str, assume: str = "{}") -> Iterator[dict[str, Any]]:
    """Answer the queries of a sweep, one per line of standard input, each in a separate process, until standard input
    ends.

    A query has `id`, `ask`, `mesh`, `label`, `variants` and one file per variant in `files`. Answers are lines {"id",
    "answers": one per variant}, in the order of completion:

    - "facts": facts of the plan and the model, see `_facts`
    - "record": {}, after the step is recorded in its file, for each rank for which other ranks may wait
    - "check": {}, if the plan can work
    - "code": the plan as Python, and the difference from the first variant's plan, see `_code`
    - "fit": a row of `distbench check --all`, see `recipe_fit`

    or {"id", "left_out": the reason for a missing answer, "lasts": whether a repeated query would also fail}. If a
    signal ends a process, its query is repeated once, and "again" in the answer describes the end of the first process.
    """
    pool, is_open = ForkPool(partial(_sweep_answer, Path(file), scenario, json.loads(assume)), int(num_at_once)), True
    # The file is unbuffered, because `wait` cannot detect lines in a buffer.
    with open(0, "rb", buffering=0, closefd=False) as lines:
        while is_open or pool.is_busy:
            questions, is_readable = pool.wait([lines.fileno()] if is_open else [])
            for question in questions:
                again = {"again": question.again} if question.again else {}
                answer = question.answer or {"left_out": question.why, "lasts": False}
                yield {"id": question.data["id"], "seconds": question.seconds, **answer, **again}
            if is_readable:
                line = lines.readline()
                is_open = bool(line)
                if line:
                    data = json.loads(line)
                    if data["ask"] == "fit" and not pool.is_busy:
                        # Recipes are imported here once, and the processes of all rows inherit the import. If the
                        # import fails, each row has this failure as its reason.
                        with contextlib.suppress(UserError):
                            load_scenario(Path(file), scenario)
                    pool.ask(data)


def _sweep_answer(file: Path, name: str, assume: Mapping[str, Assumption], question: dict[str, Any]) -> Answer:
    verbs = {"facts": _facts, "record": _record, "check": _check, "code": _code, "fit": recipe_fit}
    answer_for = verbs[question["ask"]]
    try:
        function = load_scenario(file, name)
        answers: list[Answer] = []
        for variant, recording in zip(question["variants"], question["files"], strict=True):
            scenario = declared(function, variant)
            if scenario.build_model is None or scenario.make_batch is None:
                raise UserError("it has no step; add build_model and make_batch")
            about = {"scenario": name, "file": recording, "variant": variant, "function": function, "assume": assume}
            answers.append(answer_for(scenario, {**question, **about}))
        return {"answers": answers}
    except (UserError, Unsupported) as error:
        return {"left_out": str(error), "lasts": True}
    except (Exception, SystemExit) as error:
        return {"left_out": f"it raises {one_line(error)}", "lasts": not isinstance(error, OSError | MemoryError)}


def _record(scenario: Scenario, question: dict[str, Any]) -> Answer:
    """Record the steps of rank 0, of ranks with more work, and of a rank per position of a pipeline."""
    step_args = scenario, question["scenario"], question["label"], question["mesh"]
    if scenario.plan.pipeline is not None:
        recordings = recorded_ranks(*step_args, None, question["assume"])
    else:
        how = question["assume"], fewer_layers(question["function"], question["variant"])
        first = recorded(*step_args, 0, *how)
        busier = (recorded(*step_args, rank, *how) for rank in first.busier)
        recordings = [first.recording, *(of_rank.recording for of_rank in busier)]
    save_recordings(recordings, Path(question["file"]))
    return {}


def _check(scenario: Scenario, question: dict[str, Any]) -> Answer:
    assert scenario.build_model and scenario.make_batch
    with fake_ranks(question["mesh"]) as mesh:
        model = blueprint(scenario.build_model, SEED, with_values=False).model
        context = rank_of(mesh, SEED)
        sentences = problems(model, batch_of(scenario), scenario.step_plan, context)
        if not sentences:
            with contextlib.suppress(Skipped):
                sentences = list(rehearse(scenario, context, with_step=False).problems)
    if sentences:
        raise UserError("; ".join(sentences))
    return {}


def _code(scenario: Scenario, question: dict[str, Any]) -> Answer:
    """Return `plan`, the code of the variant's plan, and `change`, code that changes the first variant's plan to this
    plan. Each is None if a value cannot be written as code.
    """
    params, changes = split_variant(question["variant"])
    _, first_changes = split_variant(question["variants"][0])
    # Both plans are from one call, because objects without an `__eq__` are equal only to themselves.
    plan = question["function"](**params).plan
    change = change_code(changed_plan(plan, first_changes), changed_plan(plan, changes))
    own_mesh = mesh_of(question["variant"], question["mesh"])
    return {"plan": plan_code(without_idle_tp(scenario.plan, own_mesh)), "change": change}


def _facts(scenario: Scenario, question: dict[str, Any]) -> Answer:
    """Return facts of the plan: its mesh dims, the mesh dims that shard parameters, and possible changes of the plan.

    The facts of the model are bytes of parameters, bytes of trained parameters, and bytes of optimizer state per byte
    of trained parameters; there are no bytes of a model that FSDP offloads.
    """
    assert scenario.build_model and scenario.make_batch
    plan = scenario.plan
    model = blueprint(scenario.build_model, SEED, with_values=False).model
    with ShapesOnly().on(), KnownValues().on():
        batch = batch_of(scenario)
    fsdp, cp = plan.fsdp, plan.cp
    # A forward pass has no gradients, and a user's function may use parameters and gradients in unknown ways.
    is_unknown = scenario.inference or scenario.parallelize is not None or scenario.after_materialize is not None
    on_device = [] if fsdp is not None and fsdp.offload is not None else [*model.parameters()]
    trained = [] if is_unknown else [parameter for parameter in on_device if parameter.requires_grad]
    return {
        "mesh_dims": mesh_dims_of(plan),
        "shard_dims": list(MESH_DIMS) if scenario.parallelize is not None else sharding_dims_of(plan),
        "fsdp": fsdp
        and {
            "reshard_after_forward": fsdp.reshard_after_forward,
            "mixed_precision": fsdp.mixed_precision is not None,
            # Backward reads one of the fields.
            "prefetch": scenario.inference or {fsdp.prefetch_forward, fsdp.prefetch_backward} != {None},
        },
        "cp": cp and {"mesh_dim": cp.mesh_dim, "rotate": cp.rotate, "load_balance": cp.balances},
        "pipeline": plan.pipeline is not None,
        "checkpoint": list(plan.checkpoint),
        "is_selective": plan.checkpoint_context is not None,
        "checkpointable": [] if scenario.inference else list(checkpointable(plan)),
        "compilable": plan.compile is None and scenario.step is None,
        "loss": (plan.loss or "none") if scenario.loss is not None else None,
        "microbatches": None if scenario.inference or scenario.step is not None else plan.microbatches,
        "parameter_bytes": _num_bytes(on_device),
        "trained_bytes": _num_bytes(trained),
        "optimizer_share": _optimizer_share(scenario, model),
        "batch_size": batch.length,
        "num_tokens": scenario.num_tokens(batch.tree) if callable(scenario.num_tokens) else scenario.num_tokens,
    }


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_share(scenario: Scenario, model: torch.nn.Module) -> float:
    """Return bytes of optimizer state per byte of trained parameters; 0 if unknown, and without an optimizer.

    The share is computed for one parameter, or with `make_optimizers` for the model (on the meta device).
    """
    if scenario.make_optimizers is None:
        model = torch.nn.ParameterList([torch.zeros(STATE_ELEMENTS).reshape(128, -1)])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        made = made_optimizers(scenario, model)
        for optimizer in torch_optimizers(made) or steppable(made):
            optimizer.step()
        tensors = [tensor for _, tensor in tensors_of(state_of(made)) if tensor.numel() > 1]
    except Exception:
        return 0.0
    own_ids = {id(tensor) for parameter in parameters for tensor in (parameter, parameter.grad)}
    return _num_bytes(tensor for tensor in tensors if id(tensor) not in own_ids) / max(_num_bytes(parameters), 1)
