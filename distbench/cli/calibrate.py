"""`distbench calibrate`: a profile and a hardware file from measured collectives, operators and whole steps."""

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    PATH,
    cases_option,
    check_writable,
    dry_run_option,
    format_option,
    make_folder,
    mesh_option,
    option,
    options_of,
    quick_option,
    quiet_option,
    refuse_with,
    refuse_without,
    results_option,
    say,
    width_option,
)
from distbench.cli.run import (
    confirm_ranks,
    device_option,
    run_all,
    say_dry_run,
    timeout_option,
    yes_option,
)
from distbench.spec import format_mesh
from distbench.spec.errors import UserError
from distbench.spec.file_io import writing
from distbench.spec.mesh import mesh_size

if TYPE_CHECKING:
    from distbench.launch import Request
    from distbench.launch.rendezvous import Joined
    from distbench.planning.cost_profile import Profile
    from distbench.spec import Job

HARDWARE = "hardware.json"
# Passes and timed seconds for a hardware file: several passes over the operators, because one period may be slow.
PASSES, OPERATORS_S, STEPS_S = 4, 12.0, 10.0
NAME_S = 120.0  # the longest time in which torch may name the device
SHORT = 10.0  # the factor by which --quick is shorter
NO_BASE = (
    "no hardware file was written and the profile has free copies, because the files have no device rates; give --base "
    "NAME, such as --base h100"
)


# Options of measurements, which are not valid with --from.
OF_MEASUREMENT = ("mesh", "device", "quick", "plots", "timeout_s", "dry_run", "yes")


@dataclass(frozen=True)
class FromOptions:
    """Files to fit instead of measuring."""

    sources: tuple[Path, ...] = option(
        "--from",
        default=(),
        multiple=True,
        type=PATH,
        metavar="FILE...",
        help="Measure nothing; fit to files of nccl-tests (-J), run files, folders, or runs such as last.",
    )
    base: str | None = option(
        "--base",
        metavar="NAME|FILE",
        help="Hardware file whose figures are replaced: of links with --from, also of operators on accelerators.",
    )
    devices_per_node: int | None = option(
        "--devices-per-node",
        type=click.IntRange(1, 1024),
        metavar="N",
        help="--from: devices per node. [of the host names in the files, and of --base]",
    )


@click.command()
@click.argument("more_sources", nargs=-1, metavar="[FILE]...", type=PATH)
@options_of(FromOptions, "given_files")
@cases_option
@mesh_option("[dp_shard=2,tp=2]")
@device_option
@quick_option("Few samples are taken, enough for a first look but not for planning.")
@results_option("")
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    default=Path("profile.json"),
    help="Output file. The file contains the profile. [profile.json]",
)
@click.option(
    "--hardware-out",
    type=PATH,
    metavar="FILE",
    help="Hardware file for simulate, on CPUs or with --base. [hardware.json by the profile; not with --quick]",
)
@click.option("--only", type=click.Choice(("profile", "hardware")), help="Write only this file.")
@click.option(
    "--plots",
    type=PATH,
    metavar="DIR",
    help="Draw plots into this folder. The plots show measured points and fitted lines.",
)
@timeout_option
@quiet_option
@dry_run_option("List the cases.")
@yes_option
@format_option("table", "json")
@width_option
def calibrate(
    more_sources: tuple[Path, ...],
    given_files: FromOptions,
    chosen: str,
    mesh: dict[str, int] | None,
    output: Path,
    hardware_out: Path | None,
    only: str | None,
    plots: Path | None,
    quiet: bool,
    dry_run: bool,
    yes: bool,
    form: str,
    **of_request: Any,
) -> None:
    """Measure this machine, and write a profile for planning and a hardware file for simulation.

    The profile lists the time of every collective over every mesh dim by size. All groups of a mesh dim run at once, as
    in DTensor. On CPUs the hardware file lists times of operators that run on all ranks at once, and of small steps. On
    accelerators, --only hardware or --base writes a copy of a base with measured rates and links; the default base is
    the shipped file of this device. `simulate --hardware FILE` predicts steps of any plan on this machine. On several
    hosts (torchrun, srun) the profile also lists the process groups of other meshes, with one line per group shape.

    With --from no ranks are started. The profile is fitted to earlier runs or to files of nccl-tests. With --base the
    links of a hardware file are fitted too.

    \b
    Examples:
      distbench calibrate --mesh dp_shard=2,tp=4 -o profile.json --plots plots
      distbench run redistribute --mesh dp_shard=2,tp=4 --profile profile.json
      distbench simulate llama_2d --hardware hardware.json
      distbench calibrate --only hardware --hardware-out my_node.json
      distbench calibrate --from all_reduce.json alltoall.json --base h100
    """
    from distbench.launch import Request, jobs_of
    from distbench.launch.job_request import hosts_of_ranks
    from distbench.launch.rendezvous import joined_ranks

    if only == "profile":
        refuse_with("--only profile", "hardware_out")
    elif only == "hardware":
        refuse_with("--only hardware", "plots", *(["output"] if hardware_out else []))
    check_writable(output, "-o")
    if given_files.sources:
        refuse_with("--from", *OF_MEASUREMENT)
        sources = (*given_files.sources, *more_sources)
        files = replace(given_files, sources=sources)
        _calibrate_from(files, of_request["out"], chosen, output, hardware_out, only, form, quiet)
        return
    refuse_without("--from", "more_sources", "devices_per_node", "chosen")
    if plots:
        make_folder(plots, "--plots")
    joined = joined_ranks(os.environ)
    hosts = hosts_of_ranks(joined.world_size, joined) if joined else ()
    if mesh is None and 1 < (num_hosts := len(set(hosts))) < len(hosts):
        mesh = {"dp_shard": num_hosts, "tp": len(hosts) // num_hosts}
    request = Request(targets=("calibrate",), mesh=mesh, started_at=STARTED_AT, **of_request)
    jobs = jobs_of(request, joined)
    base = _base_of(jobs[0], given_files.base, hardware_out, only)
    hardware = _hardware_file(jobs[0], hardware_out, output, only or ("profile" if request.quick else None), base)
    if hardware is not None:
        calibration = jobs if only != "hardware" else []
        jobs = [*calibration, *_jobs_of_hardware(request, mesh_size(jobs[0].mesh), joined, base)]
    is_first = joined is None or joined.rank == 0
    if dry_run:
        if is_first:
            say_dry_run(jobs, request.out, form)
        return
    if joined is None:
        confirm_ranks(jobs, yes)
    exit_code = run_all(jobs, joined, quiet or not is_first)
    if exit_code == 0 and is_first:
        texts = {}
        if only != "hardware":
            texts[output] = _write_profile(Path(jobs[0].run_file), output, plots)
        if hardware is not None:
            texts[hardware] = (
                _write_device(jobs[-1], hardware, base) if base else _write_hardware(jobs[-2], jobs[-1], hardware)
            )
        use = ["run", "redistribute", "--mesh", format_mesh(jobs[0].mesh), "--profile", str(output)]
        _say_files(texts, hardware, form, quiet, use)
    sys.exit(exit_code)


def _calibrate_from(
    files: FromOptions,
    results: Path,
    chosen: str,
    output: Path,
    hardware_out: Path | None,
    only: str | None,
    form: str,
    quiet: bool,
) -> None:
    """Fit the profile and the hardware file to files, and write both only if both can be fitted."""
    from distbench.planning.measured_collectives import (
        num_ranks_of,
        problems_of,
        profile_from,
        read_sources,
        timings_in,
    )
    from distbench.records.results_folder import with_cases
    from distbench.report.calibrations import profile_text
    from distbench.show.terminal import text_of
    from distbench.simulate.measured_links import base_hardware, copies_on, write_links

    if files.base is None:
        refuse_without("--base", "hardware_out")
        if only == "hardware":
            raise UserError("--only hardware needs device rates with --from; give --base NAME, such as --base h100")
    record, base = base_hardware(files.base) if files.base else ({}, None)
    hardware = (hardware_out or output.with_name(HARDWARE)) if base and only != "profile" else None
    if hardware is not None:
        _require_other_file(hardware, files.base)
    warnings: list[str] = []
    runs = with_cases(read_sources(files.sources, results, warnings), chosen)
    timings, measured = timings_in(runs, files.devices_per_node, warnings)
    texts, use = {}, []
    if only != "hardware":
        profile = profile_from(timings, measured, files.devices_per_node, copies_on(base) if base else None)
        texts[output] = profile_text(profile)
        problems = [*problems_of(profile)]
        warnings += problems
        if not problems:
            mesh = format_mesh(profile.mesh)
            use = ["redistribute", "--all-pairs", "--shape", "4096,4096", "--mesh", mesh, "--profile", str(output)]
    if hardware is not None and base is not None:
        num_ranks = num_ranks_of(measured)
        tables = write_links(hardware, record, base, timings, files.devices_per_node, num_ranks)
        texts[hardware] = text_of(tables)
    if only != "hardware":
        _save_profile(profile, output)
    if files.base is None:
        warnings.append(NO_BASE)
    _say_files(texts, hardware, form, quiet, use)
    if not quiet:
        for warning in warnings:
            say(f"warning: {warning}", err=True)


def _say_files(texts: Mapping[Path, str], hardware: Path | None, form: str, quiet: bool, use: Sequence[str]) -> None:
    """Print the text of each file, then the files and the next command (`use` if there is no hardware file)."""
    if form == "json":
        click.echo(json.dumps([json.loads(file.read_text(encoding="utf-8")) for file in texts], indent=1))
    if form == "json" or quiet:
        return
    say("\n\n".join(texts.values()))
    say(f"Calibrated in {time.time() - STARTED_AT:.0f} s: {', '.join(map(str, texts))}.")
    use = use if hardware is None else ["simulate", "llama_2d", "--hardware", str(hardware)]
    if use:
        say(f"Next: {shlex.join(['distbench', *use])}")


def _base_of(job: "Job", given: str | None, hardware_out: Path | None, only: str | None) -> str | None:
    """The base of an accelerator's hardware file, or None without such a file.

    Raises:
        UserError: the base is not valid, is of CPUs, or no shipped file has the name of the device.
    """
    from distbench.processes import ask_child
    from distbench.simulate.hardware_file import load_hardware, shipped_for

    if job.device == "cpu":
        if given:
            raise UserError("--base has no effect on CPUs, whose figures are all measured; leave --base out")
        return None
    if only == "profile":
        if given:
            raise UserError("--base has no effect with --only profile; leave one of the two out")
        return None
    if given is None and hardware_out is None and only is None:
        return None
    if given is None:
        failure = f"torch cannot name the {job.device} device ({{why}}); give --base NAME|FILE"
        return shipped_for(ask_child("device_name", [job.device], timeout_s=NAME_S, failure=failure), "--base")
    if load_hardware(given).host is not None:
        raise UserError(f"hardware file {given} is of CPUs; give --base the file of an accelerator, such as h100")
    return given


def _hardware_file(
    job: "Job", hardware_out: Path | None, output: Path, only: str | None, base: str | None
) -> Path | None:
    """The hardware file's path, or None without a hardware file."""
    if (only == "profile" and hardware_out is None and base is None) or (base is None and job.device != "cpu"):
        return None
    if job.device == "cpu" and mesh_size(job.mesh) == 1:
        return None  # The error of the profile has the next step.
    hardware = hardware_out or output.with_name(HARDWARE)
    _require_other_file(hardware, base)
    return hardware


def _require_other_file(hardware: Path, base: str | None) -> None:
    """Raise UserError if the hardware file cannot be written, or is its base."""
    check_writable(hardware, "--hardware-out")
    if base and hardware.resolve() == Path(base).resolve():
        raise UserError(f"{hardware} is the base, which is not overwritten; give another --hardware-out")


def _jobs_of_hardware(request: "Request", num_ranks: int, joined: "Joined | None", base: str | None) -> "list[Job]":
    """The job of operators; on CPUs (without a base) also the job of steps."""
    from distbench.launch import jobs_of

    short = SHORT if request.quick else 1.0
    passes = 1 if request.quick else PASSES
    request = replace(request, mesh={"tp": num_ranks}, check="none", passes=passes)
    operators = replace(request, targets=("calibrate_operators",), budget_s=OPERATORS_S / short)
    if base:
        return jobs_of(operators, joined)
    # TP shards heads and other sizes of the steps, so these must be multiples of the number of ranks.
    heads = (f"num_heads={lcm(8, num_ranks)}",)
    steps = replace(request, targets=("calibrate_steps",), choices=heads, budget_s=STEPS_S / short)
    return [*jobs_of(operators, joined), *jobs_of(steps, joined)]


def _write_profile(run_file: Path, output: Path, plots: Path | None) -> str:
    """Write the profile and its plots, and return the profile as text."""
    from distbench.planning.profile_fit import measured_in, profile_of
    from distbench.records.run_file import read_run
    from distbench.report.calibrations import calibration_figures, profile_text
    from distbench.show.plots import draw

    run = read_run(run_file)
    profile = profile_of(run)
    _save_profile(profile, output)
    if plots:
        for path in draw(calibration_figures(profile, measured_in(run)), plots):
            say(f"drawn: {path}", err=True)
    return profile_text(profile)


def _save_profile(profile: "Profile", output: Path) -> None:
    with writing(f"-o {output}"):
        profile.save(output)


def _write_device(operators: "Job", hardware: Path, base: str) -> str:
    """Fit and write the hardware file of an accelerator, and return its tables as text."""
    from distbench.records.run_file import read_run
    from distbench.show.terminal import text_of
    from distbench.simulate.measured_device import write_device
    from distbench.simulate.measured_links import base_hardware

    return text_of(write_device(hardware, *base_hardware(base), read_run(Path(operators.run_file))))


def _write_hardware(operators: "Job", steps: "Job", hardware: Path) -> str:
    """Fit and write the hardware file, and return it as text. A child process records the steps."""
    from distbench.records.run_file import read_run
    from distbench.simulate.measured_hardware import hardware_text, write_hardware
    from distbench.simulate.recording import record_steps

    ((recordings, _),) = record_steps([steps])
    measured, whole_steps = read_run(Path(operators.run_file)), read_run(Path(steps.run_file))
    return hardware_text(write_hardware(hardware, measured, whole_steps, recordings))
