"""Checks of a request, and its conversion to one job per scenario. This module starts no process."""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distbench.launch.rendezvous import Joined
from distbench.records.machine import accelerator_here, device_count, host_facts, slug
from distbench.spec import Entry, Job, Settings, UserError, find, fit_mesh, format_mesh
from distbench.spec.devices import ANY_ACCELERATOR, DEVICES, is_accelerator
from distbench.spec.file_io import unique_stem
from distbench.spec.job import CaseChoice, axis_names, digest_of, mesh_of, parse_choices, variants_of
from distbench.spec.mesh import mesh_size
from distbench.spec.printable_text import count_text
from distbench.spec.recipes import INSTALLS
from distbench.spec.versions import installed_torch

# The profile of `distbench calibrate`; without --profile, scenarios with the tag use this file if it is valid.
OWN_PROFILE, PROFILE_TAG = Path("profile.json"), "profile"
# Scenarios that measure the mesh, without a model.
MESH_TAGS = {"calibrate", "laboratory"}
# Scenarios with a model too large for CPUs.
REAL_SIZE_TAG = "real-size"


@dataclass(frozen=True)
class Request:
    """One `distbench run` command.

    Args:
        targets: scenarios by name, file, or file::name.
        choices: values of --set.
        mesh: mesh dim name to size, or None for the scenario's mesh.
        device: a name from DEVICES, or None for an accelerator if available, else the CPU.
        quick: whether quick sizes and settings are used.
        pipelined: iterations timed back to back per sample, or 1.
        passes, budget_s, check: fields of Settings; budget_s is None for the default.
        log_dir: folder for ranks' logs, or None for a folder next to each run file.
        timeout_s, started_at, trace_paths, label, chosen: fields of Job.
        profile: file of a cost profile, for predictions and for planners that need it. With None, scenarios tagged
            "profile" use the current folder's profile.json if it is valid; other scenarios use no profile.
        full_mesh: whether to use the scenario's mesh also with quick sizes, for commands that start no ranks.
        shapes_only: whether tensors have no values, so that models of any size fit into memory.
    """

    targets: tuple[str, ...]
    choices: tuple[str, ...] = ()
    mesh: Mapping[str, int] | None = None
    device: str | None = None
    quick: bool = False
    pipelined: int = 1
    passes: int = 0
    budget_s: float | None = None
    check: str = "full"
    out: Path = Path("results")
    log_dir: Path | None = None
    timeout_s: float = 300.0
    started_at: float = 0.0
    profile: Path | None = None
    trace_paths: bool = False
    full_mesh: bool = False
    label: str = ""
    chosen: str = ""
    shapes_only: bool = False


def jobs_of(request: Request, joined: Joined | None) -> list[Job]:
    """Return one job per scenario. All jobs are checked before the first job starts.

    Raises:
        UserError: an unknown scenario, axis or value, or an unsuitable mesh, profile or torch.
    """
    if request.chosen:
        CaseChoice(request.chosen)
    matches = (entry for target in request.targets for entry in find(target))
    entries = {(entry.file, entry.name, str(entry.axes)): entry for entry in matches}
    return jobs_of_entries(request, [*entries.values()], joined)


def _target(entry: Entry) -> str:
    """Return the target that selects an entry; for a recipe, its name with the configuration."""
    configs = entry.axes.get("config", ())
    return f"{entry.name}:{configs[0]}" if entry.name in INSTALLS and len(configs) == 1 else entry.name


def jobs_of_entries(request: Request, entries: list[Entry], joined: Joined | None) -> list[Job]:
    """Return one job per entry; the targets of the request are ignored."""
    installed_torch()
    facts, device = host_facts(), request.device or accelerator_here()[0]
    if is_accelerator(device) and not device_count(device):
        problem = f"--device {device}: no {device.upper()} device"
        raise UserError(f"{problem} is visible here; use --device cpu, or `distbench doctor`")
    large = [_target(entry) for entry in entries if REAL_SIZE_TAG in entry.tags]
    if large and not is_accelerator(device) and not request.shapes_only:
        problem = f"{large[0]} is a model at its real size, too large for CPUs"
        raise UserError(f"{problem}; use distbench simulate {large[0]}, or give --device {ANY_ACCELERATOR}")
    invocation_id, jobs = unique_stem(request.started_at), []
    for entry in entries:
        # A parameter of --set may exist in only some of the scenarios.
        other_params = {name for other_entry in entries for name in other_entry.params} - set(entry.params)
        choices = tuple(text for text in request.choices if text.partition("=")[0] not in other_params)
        jobs.append(_job(replace(request, device=device, choices=choices), entry, joined, invocation_id, facts))
    return jobs


def _job(request: Request, entry: Entry, joined: Joined | None, invocation_id: str, facts: Mapping[str, object]) -> Job:
    variants = variants_of(entry, parse_choices(request.choices, entry.params), request.quick)
    commit = str(facts.get("git_commit") or "nogit")[:8]
    name = unique_stem(time.time(), commit, slug(entry.name))
    folder = request.out / str(facts["machine"])
    if request.quick and entry.quick_mesh and not request.full_mesh:
        entry = replace(entry, mesh=entry.quick_mesh)
    device = str(request.device)
    mesh = mesh_for(entry, request.mesh, device, joined)
    for variant in variants:
        mesh_of(variant, mesh)
    profile, note = _profile_for(request, entry, mesh, device, hosts_of_ranks(mesh_size(mesh), joined))
    settings = Settings.quick() if request.quick else Settings()
    if request.budget_s is not None:
        settings = settings.with_budget(request.budget_s)
    return Job(
        run_id=name,
        invocation_id=invocation_id,
        scenario=entry.name,
        file=str(entry.file),
        variants=variants,
        axes=axis_names(variants, entry),
        mesh=mesh,
        device=device,
        settings=replace(settings, iterations_per_sample=request.pipelined, passes=request.passes, check=request.check),
        run_file=str(_resolved(folder / f"{name}.jsonl", "--results")),
        log_dir=str(_log_folder(request, folder / "logs", name, slug(entry.name), joined)),
        timeout_s=request.timeout_s,
        started_at=request.started_at,
        environment=dict(facts),
        profile=str(profile.resolve()) if profile else None,
        note=note,
        trace_paths=request.trace_paths,
        label=request.label,
        chosen=request.chosen,
        file_digest=digest_of(entry.file),
    )


def _log_folder(request: Request, beside: Path, run_name: str, scenario: str, joined: Joined | None) -> Path:
    """Return the log folder of a run. With another launcher, each rank has a folder in the launch's folder (if hosts
    use several names for a launch, `ranks/hosts.py` joins the folders)."""
    option = "--log-dir" if request.log_dir else "--results"
    alone = _resolved((request.log_dir or beside) / run_name, option)
    if not joined:
        return alone
    launch_folder = (request.log_dir or request.out / "logs") / f"{joined.launch}-{scenario}"
    folder = _resolved(launch_folder, option) if joined.launch else alone
    rank_folder = folder / f"rank{joined.rank}"
    # One step of a Slurm job may run the command several times.
    again = (folder / f"again{number}" / rank_folder.name for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([rank_folder], again) if not candidate.exists())


def _resolved(path: Path, option: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links, before Python 3.13
        raise UserError(f"{option}: {path.parent} cannot be followed ({error}); give another folder") from error


def hosts_of_ranks(num_ranks: int, joined: Joined | None) -> tuple[str, ...]:
    """Return a name for each rank's host, known before ranks meet, because launchers number ranks host by host; () if
    unknown."""
    ranks_per_host = {**os.environ, **joined.variables}.get("LOCAL_WORLD_SIZE", "") if joined else str(num_ranks)
    if not (ranks_per_host.isascii() and ranks_per_host.isdigit() and int(ranks_per_host)):
        return ()
    return tuple(f"host {rank // int(ranks_per_host)}" for rank in range(num_ranks))


def _profile_for(
    request: Request, entry: Entry, mesh: Mapping[str, int], device: str, hosts: Sequence[str]
) -> tuple[Path | None, str]:
    """Return the file of --profile, else the current folder's profile if the scenario uses profiles, and a note for the
    user."""
    if request.profile:
        check_profile(request.profile, mesh, device, hosts)
    if request.profile or PROFILE_TAG not in entry.tags:
        return request.profile, ""
    advice = "`distbench calibrate` adds the calibrated planner and predictions"
    if not OWN_PROFILE.is_file():
        return None, f"no profile was given, and this folder has no {OWN_PROFILE}; {advice}"
    try:
        check_profile(OWN_PROFILE, mesh, device, hosts)
    except UserError as error:
        return (
            None,
            f"no profile was given, and this folder's {OWN_PROFILE} is not valid for the run ({error}); {advice}",
        )
    return OWN_PROFILE, f"plans and predictions use ./{OWN_PROFILE}"


def check_profile(path: Path, mesh: Mapping[str, int], device: str, hosts: Sequence[str]) -> None:
    """Raise UserError for a profile that cannot be read, or was measured on another backend, mesh or other hosts."""
    from distbench.planning.cost_profile import load_profile, profile_on

    profile = load_profile(path)
    backend = DEVICES[device].backend
    if profile.backend != backend:
        problem = f"profile {path} was measured on {profile.backend}, and this run uses {backend}"
        raise UserError(f"{problem}; calibrate on {backend}")
    try:
        profile_on(profile, mesh, hosts)
    except UserError as error:
        raise UserError(f"profile {path}, --mesh {format_mesh(mesh)}: {error}") from error


def mesh_for(entry: Entry, given: Mapping[str, int] | None, device: str, joined: Joined | None) -> dict[str, int]:
    """Return the mesh of a job: the given mesh, else the scenario's mesh fitted to the number of ranks or devices.

    A mesh dim that the scenario declares and --mesh omits has size 1, because a model's plan uses its name. Scenarios
    without a model omit such a mesh dim.
    """
    num_devices = device_count(device) if is_accelerator(device) else 0
    ranks = joined.world_size if joined else num_devices
    if given is None:
        return fit_mesh(entry.mesh, ranks or mesh_size(entry.mesh))
    declared = () if MESH_TAGS & set(entry.tags) else entry.mesh
    mesh = {**dict.fromkeys(declared, 1), **given}
    num_ranks = mesh_size(mesh)
    problem = f"mesh {format_mesh(mesh)} needs {num_ranks} ranks"
    if joined and num_ranks != joined.world_size:
        raise UserError(f"{problem}, and the launcher started {ranks}; give sizes that multiply to {ranks}")
    if not joined and is_accelerator(device) and num_ranks > num_devices:
        devices = count_text(num_devices, f"{device.upper()} device")
        advice = f"give sizes that multiply to at most {num_devices}, or --device cpu"
        raise UserError(f"{problem}, and this machine has {devices}; {advice}")
    return mesh
