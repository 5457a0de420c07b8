"""What a child process answers of some jobs, or of a pair of layouts, on a fake process group; verbs of `child.py`."""

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distbench.observe.memory import predicted_peak_bytes
from distbench.observe.module_attribution import communications_of
from distbench.planning.placement_states import State, parse_state
from distbench.plans.training_step import TrainingStep
from distbench.ranks.case_protocol import OpenedCase
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
from distbench.worker.fork_pool import ForkPool
from distbench.worker.rank_session import all_cases, chosen_cases, declared, load_scenario, variant_label


def jobs_in(records: Sequence[Mapping[str, Any]]) -> list[Job]:
    """The jobs that a question is about."""
    return [Job.from_record(record) for record in records]


def rank_of(mesh: DeviceMesh, seed: int, device: str = "cpu") -> RankContext:
    """This rank of a fake process group on its mesh."""
    assert dist.group.WORLD is not None
    return RankContext(dist.get_rank(), torch.device(device), mesh, "gloo", dist.group.WORLD, seed)


Answer = dict[str, Any]


def answers_of(function: Callable[[Job], Answer], records: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """What a function answers for each job, in the jobs' order; {"user_error": one sentence} where it raises."""
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
        reason = f"it raises {one_line(error)}, on a fake process group; see whether distbench run runs it"
        return {"user_error": reason}


def case_ids(job: Job) -> dict[str, Any]:
    """The ids of a job's cases. `UserError` where the scenario is declared wrongly."""
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        all_specs = all_cases(job, function, replace(rank_of(mesh, job.settings.seed), profile=profile_of(job)))
    ids = [case_spec.case.id for case_spec in chosen_cases(job, all_specs)]
    if not ids:
        raise UserError(none_chosen(job.chosen, len(all_specs), [spec.case.id for spec in all_specs[:MAX_NAMED]]))
    return {"ids": ids}


def all_case_ids(records: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """For each job {"ids": [case id, ...]} in their order, as the job chooses them, or {"user_error": sentence}."""
    return answers_of(case_ids, records)


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
    shape, dtype = request["shape"], TORCH_DTYPES[request["dtype"]]
    pairs = [tuple(parse_state(text, len(shape)) for text in pair) for pair in request["pairs"]]
    # In random order, so that a timeout omits a random part.
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    deadline = time.monotonic() + request["budget_s"]
    answers: dict[str, list[PathAnswer]] = {}
    try:
        with fake_mesh(request["mesh_shape"], request["devices_per_host"]) as mesh:
            # The quick planner goes first, so that a slow one never takes its time.
            for name in TORCH_PLANNERS:
                answers[name] = [None] * len(pairs)
                with planner(name), remembered_steps():
                    for number in order:
                        if time.monotonic() > deadline:
                            break
                        answers[name][number] = _answer(mesh, shape, dtype, *pairs[number])
    except Unsupported as reason:
        return {"torch": torch.__version__, "unsupported": str(reason)}
    return {"torch": torch.__version__, "no_zero_fill": lacks(ZERO_FILLS), "paths": answers}


def _answer(mesh: DeviceMesh, shape: list[int], dtype: torch.dtype, source: State, target: State) -> PathAnswer:
    try:
        return {"path": path_between(mesh, shape, dtype, source, target)}
    # Whatever torch raises for this pair it would raise in a training job too: that is the answer.
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, KeyError, IndexError) as error:
        return {"error": f"torch raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def signature(job: Job) -> dict[str, Any]:
    """What rank 0 communicates and holds in one call of each case, after one that sets things up.

    Returns:
        {"torch": version, "cases": {case id: {"paths": [communication, ...], "peak_bytes": predicted or None}},
        "left_out": {case id: what it raises}}

    Raises:
        UserError: the plan is declared wrongly, or every case raises.
    """
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        context = rank_of(mesh, job.settings.seed)
        by_case: dict[str, dict[str, Any]] = {}
        left_out: dict[str, str] = {}
        for case_spec in all_cases(job, function, context):
            try:
                # A case with nothing to measure here communicates nothing either.
                with contextlib.suppress(Skipped), case_spec.open() as opened_case:
                    by_case[case_spec.case.id] = _of_case(opened_case, context)
            except UserError:
                raise
            except Exception as error:
                left_out[case_spec.case.id] = one_line(error)
    if left_out and not by_case:
        first, reason = next(iter(left_out.items()))
        raise UserError(f"no case runs on a fake process group: {first} raises {reason}; see if distbench run runs it")
    return {"torch": torch.__version__, "cases": by_case, "left_out": left_out}


def all_signatures(records: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """What `signature` answers for each job, or {"user_error": sentence}."""
    return answers_of(signature, records)


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
            rank_recordings = recorded_ranks(scenario, job.scenario, label.partition("/")[2], mesh, ranks)
        except (UserError, Unsupported) as error:
            yield {"label": label, "left_out": str(error)}
            continue
        file = prefix.with_name(f"{prefix.name}-{number}.jsonl")
        save_recordings(rank_recordings, file)
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
