"""What a child process answers of some jobs, or of a pair of layouts, on a fake process group; verbs of `child.py`."""

import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distbench.observe.attribution import communications_of
from distbench.observe.memory import predicted_peak_bytes
from distbench.planning.placement_states import State, parse_state
from distbench.plans.training_step import TrainingStep
from distbench.ranks.case import OpenedCase
from distbench.ranks.context import TORCH_DTYPES, RankContext, profile_of
from distbench.ranks.failure import one_line
from distbench.ranks.measure import no_stamp
from distbench.simulate.recorded_step import recorded_ranks
from distbench.simulate.recording import save_recordings
from distbench.spec import Job, ParallelPlan, UserError
from distbench.spec.case_filter import MAX_NAMED, none_chosen
from distbench.spec.placements import TORCH_PLANNERS
from distbench.spec.plan_changes import mesh_of
from distbench.torch_private import (
    ZERO_FILLS,
    Skipped,
    Unsupported,
    fake_mesh,
    fake_ranks,
    lacks,
    path_between,
    planner,
    remembered_steps,
)
from distbench.worker.session import all_cases, chosen_cases, declared, load_scenario, variant_label


def jobs_in(records: Sequence[Mapping[str, Any]]) -> list[Job]:
    """The jobs that a question is about."""
    return [Job.from_record(record) for record in records]


def rank_of(mesh: DeviceMesh, job: Job, device: str = "cpu") -> RankContext:
    """This rank of a fake process group, rank 0 unless that was told otherwise, whose mesh it is."""
    assert dist.group.WORLD is not None
    return RankContext(dist.get_rank(), torch.device(device), mesh, "gloo", dist.group.WORLD, job.settings.seed)


# The same question for several jobs, each in a process of its own that has torch imported and nothing else done.
#
# Importing torch takes longer than most answers, and a second job in the same process would find what the first left
# behind: DTensor keeps what it planned for a mesh and serves it to an equal mesh, whatever groups that one has.

Answer = dict[str, Any]


def answers_of(function: Callable[[Job], Answer], jobs: Sequence[Job], num_at_once: int) -> list[Answer]:
    """What the function answers for each job, in the jobs' order; where it raises, {"user_error": one sentence}.

    At most `num_at_once` processes run at the same time. This process must have done no work in torch before.
    """
    answers: list[Answer] = [{} for _ in jobs]
    waiting = list(enumerate(jobs))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < num_at_once:
            index, job = waiting.pop(0)
            connection, process = _started(function, job)
            running[connection] = index, process
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            index, process = running.pop(ready)
            answers[index] = _received(ready, process)
    return answers


def _started(function: Callable[[Job], Answer], job: Job) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_answer, args=(function, job, sender))
    process.start()
    # While this process holds the sending end too, a child that dies would never be noticed.
    sender.close()
    return receiver, process


def _received(connection: Connection, process: BaseProcess) -> Answer:
    with connection:
        try:
            answer: Answer = connection.recv()
            process.join()
        except EOFError:
            process.join()
            answer = {"user_error": f"its process ended with exit code {process.exitcode} and without an answer"}
    return answer


def _send_answer(function: Callable[[Job], Answer], job: Job, sender: Connection) -> None:
    try:
        answer = function(job)
    except (UserError, Unsupported) as error:
        answer = {"user_error": str(error)}
    except (Exception, SystemExit) as error:
        reason = f"it raises {one_line(error)}, on a fake process group; see whether distbench run runs it"
        answer = {"user_error": reason}
    sender.send(answer)


# `python -m distbench.worker.child_answers`: the cases of some jobs, on a fake process group in one process.
#
# For each job it answers {"ids": [case id, ...]} in their order, as the job chooses them, or {"user_error": sentence}.


def case_ids(job: Job) -> dict[str, Any]:
    """The ids of a job's cases. `UserError` where the scenario is declared wrongly."""
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        found = all_cases(job, function, replace(rank_of(mesh, job), profile=profile_of(job)))
    ids = [case_spec.case.id for case_spec in chosen_cases(job, found)]
    if not ids:
        raise UserError(none_chosen(job.chosen, len(found), [one.case.id for one in found[:MAX_NAMED]]))
    return {"ids": ids}


def all_case_ids(records: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """For each job {"ids": [case id, ...]} in their order, as the job chooses them, or {"user_error": sentence}."""
    return answers_of(case_ids, jobs_in(records), len(os.sched_getaffinity(0)))


# `python -m distbench.worker.child_answers`: which paths torch's own planners take, for `distbench plan`.
#
# It reads one JSON object from stdin: mesh_shape, shape, dtype, devices_per_host, pairs (of placements, as `S(0)R`) and
# budget_s. Prints one as the last line: torch's version, why it makes no partial of a shard (null where it does), and
# for
# each planner one answer a pair. An answer is {"path": torch's own notation} or {"error": why there is none}; null
# where
# the time was up.

PathAnswer = dict[str, str] | None


def plan_paths(request: dict[str, Any]) -> dict[str, Any]:
    """Which paths torch's own planners take, for `distbench plan`.

    Args:
        request: mesh_shape, shape, dtype, devices_per_host, pairs (of placements, as `S(0)R`) and budget_s.

    Returns:
        torch's version; why it makes no partial of a shard (None where it does); for each planner one answer a pair:
        {"path": torch's own notation}, {"error": why there is none}, or None where the time was up. {"torch",
        "unsupported"} where this torch cannot be asked.
    """
    try:
        return _paths(request)
    except Unsupported as reason:
        return {"torch": torch.__version__, "unsupported": str(reason)}


def _paths(request: dict[str, Any]) -> dict[str, Any]:
    """Pairs are asked in random order, so that a timeout omits a random part."""
    shape, dtype = request["shape"], TORCH_DTYPES[request["dtype"]]
    pairs = [tuple(parse_state(text, len(shape)) for text in pair) for pair in request["pairs"]]
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    deadline = time.monotonic() + request["budget_s"]
    answers: dict[str, list[PathAnswer]] = {}
    with fake_mesh(request["mesh_shape"], request["devices_per_host"]) as mesh:
        # The quick planner goes first, so that a slow one never takes its time.
        for name in TORCH_PLANNERS:
            answers[name] = [None] * len(pairs)
            with planner(name), remembered_steps():
                for number in order:
                    if time.monotonic() > deadline:
                        break
                    answers[name][number] = _answer(mesh, shape, dtype, *pairs[number])
    return {"torch": torch.__version__, "no_zero_fill": lacks(ZERO_FILLS), "paths": answers}


def _answer(mesh: DeviceMesh, shape: list[int], dtype: torch.dtype, source: State, target: State) -> PathAnswer:
    try:
        return {"path": path_between(mesh, shape, dtype, source, target)}
    # Whatever torch raises for this pair it would raise in a training job too: that is the answer.
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, KeyError, IndexError) as error:
        return {"error": f"torch raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


# `python -m distbench.worker.child_answers`: what each case of some jobs communicates, on a fake process group.
#
# For each job it answers {"torch": version, "cases": {case id: {"paths": [communication, ...], "peak_bytes":
# predicted or
# null}}, "left_out": {case id: what it raises}}, or {"user_error": sentence}.


def signature(job: Job) -> dict[str, Any]:
    """What rank 0 communicates and holds in one call of each case, after one that sets things up; `UserError` where
    the plan is declared wrongly, or every case raises."""
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        context = rank_of(mesh, job)
        found: dict[str, dict[str, Any]] = {}
        left_out: dict[str, str] = {}
        for case_spec in all_cases(job, function, context):
            try:
                # A case with nothing to measure here communicates nothing either.
                with contextlib.suppress(Skipped), case_spec.open() as opened_case:
                    found[case_spec.case.id] = _of_case(opened_case, context)
            except UserError:
                raise
            except Exception as error:
                left_out[case_spec.case.id] = one_line(error)
    if left_out and not found:
        first, reason = next(iter(left_out.items()))
        raise UserError(f"no case runs on a fake process group: {first} raises {reason}; see if distbench run runs it")
    return {"torch": torch.__version__, "cases": found, "left_out": left_out}


def all_signatures(records: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """For each job {"torch": version, "cases": {case id: {"paths": [communication, ...], "peak_bytes":
    predicted or None}}, "left_out": {case id: what it raises}}, or {"user_error": sentence}."""
    return answers_of(signature, jobs_in(records), len(os.sched_getaffinity(0)))


def _of_case(opened_case: OpenedCase, context: RankContext) -> dict[str, Any]:
    call = opened_case.call
    for _ in range(call.num_setup_steps if isinstance(call, TrainingStep) else 1):
        call(no_stamp)
    if isinstance(call, TrainingStep):
        rows = communications_of(call, call.phases, call.plan, context, call.model)
        peak = predicted_peak_bytes(call)
    else:
        rows, peak = communications_of(call, opened_case.phases, ParallelPlan(), context), None
    return {"paths": [asdict(row) for row in rows], "peak_bytes": peak}


def recordings(job: Job, prefix: Path, ranks: Sequence[int] | None = (0,)) -> Iterator[dict[str, str]]:
    """Record a step of each variant, as some ranks run it, into a file, whose name begins with the prefix."""
    function = load_scenario(Path(job.file), job.scenario)
    for number, variant in enumerate(job.variants):
        label = variant_label(job, variant)
        try:
            scenario = declared(function, variant)
            mesh = mesh_of(variant, job.mesh)
            found = recorded_ranks(scenario, job.scenario, label.partition("/")[2], mesh, ranks)
        except (UserError, Unsupported) as error:
            yield {"label": label, "left_out": str(error)}
            continue
        file = prefix.with_name(f"{prefix.name}-{number}.jsonl")
        save_recordings(found, file)
        yield {"label": label, "file": str(file)}


def all_recordings(records: Sequence[Mapping[str, Any]], folder: str, ranks: str = "[0]") -> list[list[dict[str, str]]]:
    """For each job one entry a variant: {"label": its name, "file": the recordings in the folder}, or {"label",
    "left_out": why there is none}.

    Args:
        ranks: as JSON; null for rank 0 and those that differ from it.
    """
    return [
        [*recordings(job, Path(folder) / str(number), json.loads(ranks))] for number, job in enumerate(jobs_in(records))
    ]
