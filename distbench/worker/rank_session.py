"""The session of one rank: process group, mesh, cases, teardown."""

import contextlib
import datetime
import gc
import importlib.util
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distbench.cases import cases_of
from distbench.cases.user_call import scenario_of_call
from distbench.plans.plan_changes import scenario_of
from distbench.ranks.agreement import Agreement, Store
from distbench.ranks.case_protocol import CaseSpec
from distbench.ranks.context import RankContext, gather_objects, profile_here, profile_of
from distbench.ranks.device import backend_of, device_facts, identity, policy_name, select_device
from distbench.ranks.failure import blamed, one_line, place_of, raised_at
from distbench.ranks.hosts import (
    digest,
    host_cautions,
    join_logs,
    require_own_devices,
    require_same,
    require_same_device,
    require_same_job,
)
from distbench.ranks.lost_ranks import presence_of
from distbench.ranks.measure import Stopwatch
from distbench.records.progress_events import FILE_NAME, ProgressWriter
from distbench.records.run_file import AGAIN, SCHEMA_VERSION, Case
from distbench.spec import Job, Scenario, UserError
from distbench.spec.devices import backend_for, is_accelerator
from distbench.spec.job import MAX_NAMED, CaseChoice, Variant, mesh_of, variant_text
from distbench.spec.placements import BASELINE, NATIVE
from distbench.torch_private import backend_class
from distbench.worker.case_runner import RowWriter, Runner
from distbench.worker.pass_schedule import groups_of

PAIRS_PER_CONTROL, MAX_CONTROLS = 8, 8


@dataclass(frozen=True)
class ConnectedRanks:
    """A connected rank: its context, the job's key-value store, and sentences on differences between hosts."""

    context: RankContext
    store: Store
    cautions: tuple[str, ...]


def run_session(job: Job, stopwatch: Stopwatch) -> None:
    """Measure every case of the job that has no row yet.

    Raises:
        UserError: the scenario or plan is not valid, or differs between ranks.
        RankFailed: only this rank failed.
        StorageFailed: a result could not be written.
    """
    with stopwatch.on("set-up"):
        function = load_scenario(Path(job.file), job.scenario)
    reports = int(os.environ["RANK"]) == job.reporting_rank
    progress = ProgressWriter(Path(job.log_dir) / FILE_NAME if reports else None)
    progress.tell("meeting")
    with connected_ranks(job) as ranks:
        context = ranks.context
        progress.tell("connected")
        for caution in (*join_logs(job, context.hosts, context.gather), *ranks.cautions):
            progress.tell("caution", text=caution)
        with stopwatch.on("set-up"):
            agreement = Agreement(ranks.store, context.rank, context.hosts)
            try:
                all_specs = all_cases(job, function, context)
            except UserError as error:
                raise agreement.user_error(error) from error
            case_specs = chosen_cases(job, all_specs)
            facts: dict[str, Any] = {"the list of cases": [spec.case.id for spec in case_specs]}
            facts["the model or batch"] = [spec.case.params for spec in case_specs]
            require_same(context.gather({name: digest(repr(fact)) for name, fact in facts.items()}), context.hosts)
            settings = replace(job.settings, max_case_s=job.settings.case_limit_s(len(case_specs)))
            groups = groups_of(case_specs, settings, set(job.done_ids), context.gather(job.run_id)[0])
            rows = RowWriter(context, Path(job.run_file))
            runner = Runner(context, agreement, settings, rows, progress, stopwatch, job.trace_paths)
            if not (case_specs or job.done_ids):
                named_ids = [spec.case.id for spec in all_specs[:MAX_NAMED]]
                progress.tell("none_chosen", num_cases=len(all_specs), ids=named_ids)
            elif not job.done_ids:
                # The header has 0 passes only if the plan chose the number, so that launches of one pass are comparable
                # with earlier launches.
                passes = 0 if any(plan.is_automatic for plan, _ in groups) else max(settings.passes, 1)
                rows.save(header_of(replace(job, settings=replace(job.settings, passes=passes)), ranks))
        progress.tell("plan", num_cases=len(case_specs))
        gc.freeze()  # A search of all imported objects for garbage would take 0.2 s per case.
        stopwatch.begin_measuring()
        for plan, group in groups:
            waiting = [case_spec for case_spec in group if case_spec.case.id not in job.ended_ids]
            try:
                runner.run(waiting, plan, job.passes_done)
            except UserError as error:
                raise agreement.user_error(error) from error
            except RuntimeError as error:
                # Ranks also communicate between cases, so report a lost rank there too.
                agreement.require_all_failed("between cases", one_line(error))
                raise
        progress.tell("end", spent_s=stopwatch.spent_s, measuring_s=stopwatch.measuring_s)


def load_scenario(file: Path, name: str) -> Callable[..., Scenario]:
    """Import the file as a script, with its folder first on the import path, and return the function.

    A file in a package may use relative imports. Raise UserError if the import fails, or the module has no such
    function.
    """
    packages = list(itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), file.parents))
    sys.path[:0] = [str(file.parent), *(str(outermost.parent) for outermost in packages[-1:])]
    module_name = ".".join([*(folder.name for folder in reversed(packages)), f"distbench_scenario_{file.stem}"])
    module_spec = importlib.util.spec_from_file_location(module_name, file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:  # a file may raise anything, including KeyboardInterrupt
        where = f", {place}" if (place := raised_at(error)) else ""
        raise UserError(f"scenario file {file} cannot be imported: {one_line(error)}{where}; fix the file") from error
    function: Callable[..., Scenario] | None = getattr(module, name, None)
    if function is None:
        raise UserError(f"scenario file {file} declares {name!r}, but the imported module lacks {name}; define {name}")
    return function


def declared(function: Callable[..., Scenario], variant: Variant) -> Scenario:
    """Return the scenario of a variant. Raise UserError if the function raised or returned another type."""
    with blamed("the scenario", function):
        scenario = scenario_of(function, variant)
    if not isinstance(scenario, Scenario):
        kind = type(scenario).__name__
        raise UserError(f"the scenario ({place_of(function)}) returns {kind}; return a Scenario")
    return scenario


@contextlib.contextmanager
def connected_ranks(job: Job) -> Iterator[ConnectedRanks]:
    """Join the other ranks and make the mesh; at the end, leave together with the other ranks (a failed rank leaves
    alone).

    Raises:
        UserError: the ranks have different jobs, or cannot connect.
    """
    profile = profile_of(job)
    device = select_device(job.device)
    timeout = datetime.timedelta(seconds=max(job.timeout_s, 1) * 4 + 60)
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
    except (dist.DistNetworkError, ValueError) as error:
        where = ":".join(os.environ.get(name, "(not set)") for name in ("MASTER_ADDR", "MASTER_PORT"))
        problem = f"the ranks cannot meet at MASTER_ADDR:MASTER_PORT = {where}: {one_line(error)}"
        raise UserError(f"{problem}; set both to a host's name and a free port of this host") from error
    # torchrun's store exists longer than a job; the next job of the launch must not read this job's keys.
    store = dist.PrefixStore(f"distbench/{store.add(f'distbench/jobs/{rank}', 1)}", store)
    store.set_timeout(timeout)
    require_same_device(store, rank, world_size, job.device)
    backend = backend_of(job.device)
    moves = backend_for(job.device, backend)
    dist.init_process_group(moves, store=store, rank=rank, world_size=world_size, timeout=timeout)
    control = control_group(job.device, timeout)
    gather = partial(gather_objects, control)
    hosts = require_same_job(job, gather)
    presence = presence_of(Path(job.log_dir), store, rank, hosts)
    profile = profile_here(profile, job, hosts)
    if is_accelerator(device.type):
        require_own_devices(identity(device), gather)
    mesh = init_device_mesh(device.type, tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
    settings = job.settings
    context = RankContext(rank, device, mesh, backend, control, settings.seed, profile, settings.check, hosts)
    yield ConnectedRanks(context, store, tuple(host_cautions(hosts, device, gather)))
    if presence is not None:
        presence.leave()
    # Without the barrier, a rank that leaves early can abort another rank that still communicates (SIGABRT).
    dist.barrier(control)
    dist.destroy_process_group()


def control_group(device: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Return the gloo group of all ranks for barriers and gathers.

    On CPUs, this is the default group: after a barrier on a separate group, the timed group's threads are cold, which
    made the next all_gather 1.3x slower (4 ranks on 2 cores, 1 KB and 1 MB, alternating).
    """
    if not is_accelerator(device):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=timeout)


def all_cases(job: Job, function: Callable[..., Scenario], context: RankContext) -> list[CaseSpec]:
    """Return the cases of all variants, each id once.

    Raise UserError if the scenario raised or returned another type, or if its plan cannot work.
    """
    case_specs: dict[str, CaseSpec] = {}
    contexts = {tuple(job.mesh.items()): context}
    for variant in job.variants:
        scenario = scenario_of_call(job.scenario, function, variant) if job.is_call else declared(function, variant)
        mesh = mesh_of(variant, job.mesh)
        if tuple(mesh.items()) not in contexts:
            variant_mesh = init_device_mesh(context.mesh.device_type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            contexts[tuple(mesh.items())] = replace(context, mesh=variant_mesh)
        for case_spec in cases_of(scenario, variant_label(job, variant), contexts[tuple(mesh.items())]):
            case_specs.setdefault(case_spec.case.id, case_spec)
    if not case_specs:
        raise UserError(f"scenario {job.scenario!r} declares nothing to measure; add a model or sweeps")
    return list(case_specs.values())


def chosen_cases(job: Job, case_specs: Sequence[CaseSpec]) -> list[CaseSpec]:
    """Return the cases that the job selects, with the controls that several passes need."""
    choice = CaseChoice(job.chosen) if job.chosen else None
    chosen = [case_spec for case_spec in case_specs if choice is None or choice.matches(case_spec.case.id)]
    return with_baselines_again(chosen, job.settings.seed) if job.settings.passes != 1 else chosen


def with_baselines_again(case_specs: Sequence[CaseSpec], seed: int) -> list[CaseSpec]:
    """Return the cases, followed by repeated cases as the run's controls.

    The controls are the baseline of each group of steps or collectives that a report compares, and greedy for 1 in
    PAIRS_PER_CONTROL redistributions with compared planners (MAX_CONTROLS at most).
    """
    steps: dict[str, list[CaseSpec]] = {}
    pairs: dict[str, list[CaseSpec]] = {}
    for case_spec in case_specs:
        if case_spec.case.kind == "step":
            steps.setdefault(case_spec.case.params["computes"], []).append(case_spec)
        elif case_spec.case.kind == "collective" and case_spec.group:
            steps.setdefault(case_spec.group, []).append(case_spec)
        elif case_spec.case.kind == "redistribute":
            pairs.setdefault(case_spec.group, []).append(case_spec)
    baselines = [group[0] for group in steps.values() if len(group) > 1]
    greedy = [
        case_spec
        for group in pairs.values()
        if len(group) > 1
        for case_spec in group
        if str(case_spec.case.params["planner"]).removesuffix(NATIVE) == BASELINE
    ]
    count = min(-(-len(greedy) // PAIRS_PER_CONTROL), MAX_CONTROLS)
    sampled = random.Random(f"{seed} again").sample(greedy, count)
    return [*case_specs, *map(_again, baselines), *map(_again, sampled)]


def _again(case_spec: CaseSpec) -> CaseSpec:
    case, params = case_spec.case, dict(case_spec.case.params)
    if "variant" in params:
        params["variant"] = f"{params['variant']} {AGAIN}"
    return replace(case_spec, case=Case(f"{case.id} {AGAIN}", case.kind, params))


def variant_label(job: Job, variant: Variant) -> str:
    """Return `"cp_attention/rotate=alltoall,load_balance=True"`, or the scenario's name if it has no axes."""
    axes = variant_text(variant, job.axes)
    return f"{job.scenario}/{axes}" if axes else job.scenario


def header_of(job: Job, ranks: ConnectedRanks) -> dict[str, Any]:
    """Return the run file's header, as the record of the first line."""
    record, context = job.to_record(), ranks.context
    environment = {
        **record.pop("environment"),
        "torch": torch.__version__,
        **device_facts(context.device),
        "backend": context.backend,
        "backend_class": backend_class(context.device),
        "world_size": dist.get_world_size(),
        "num_hosts": len(set(context.hosts)),
        "hosts": list(context.hosts),
        "num_threads": torch.get_num_threads(),
        "scheduler": policy_name(),
    }
    if ranks.cautions:
        environment["cautions"] = list(ranks.cautions)
    return {
        "type": "run",
        "schema_version": SCHEMA_VERSION,
        "run_id": job.run_id,
        "invocation_id": job.invocation_id,
        "job": record,
        "environment": environment,
    }
