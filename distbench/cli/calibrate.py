"""`distbench calibrate`: what collectives, operators and whole steps take here; a profile and a hardware file of it."""

import os
import sys
import time
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    PATH,
    check_writable,
    make_folder,
    mesh_option,
    refuse_with,
    say,
    say_lines,
    width_option,
)
from distbench.cli.run import (
    confirm_ranks,
    device_option,
    dry_run_lines,
    out_option,
    run_all,
    timeout_option,
    yes_option,
)
from distbench.spec.errors import UserError
from distbench.spec.mesh import mesh_size

if TYPE_CHECKING:
    from distbench.launch import Request
    from distbench.launch.rendezvous import Joined
    from distbench.spec import Job

HARDWARE = "hardware.json"
# Passes and timed seconds of what a hardware file is made of: several of the operators, for one stretch may be slow.
PASSES, OPERATORS_S, STEPS_S = 4, 12.0, 10.0
SHORT = 10.0  # how many times less with --quick


@click.command()
@mesh_option("Mesh to measure, e.g. dp_shard=2,tp=2, which is the default.")
@device_option
@click.option("--quick", is_flag=True, help="Fewer sizes and samples: a look, not a profile to plan by.")
@out_option
@click.option("-o", "--output", type=PATH, metavar="FILE", default=Path("profile.json"), help="The profile's file.")
@click.option(
    "--hardware-out",
    type=PATH,
    metavar="FILE",
    help="The hardware file, for `simulate`; CPUs only. [hardware.json beside the profile; with --quick none]",
)
@click.option("--only", type=click.Choice(("profile", "hardware")), help="Measure what this one file needs.")
@click.option("--plots", type=PATH, metavar="DIR", help="Draw points on lines there.")
@timeout_option
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--dry-run", is_flag=True, help="Start nothing: list what would be measured.")
@yes_option
@width_option
def calibrate(
    mesh: dict[str, int] | None,
    output: Path,
    hardware_out: Path | None,
    only: str | None,
    plots: Path | None,
    quiet: bool,
    dry_run: bool,
    yes: bool,
    **of_request: Any,
) -> None:
    """Measure what this machine takes: a profile to plan by, and a hardware file to simulate on.

    Every collective over every mesh dim, all groups of a mesh dim at once, as DTensor runs it, by size. On CPUs also
    operators on all ranks at once, and small steps: `simulate --hardware FILE` then predicts steps of any plan here.
    On several hosts (torchrun, srun) also groups that other meshes have there: a line for each shape of group.

    \b
    Examples:
      distbench calibrate --mesh dp_shard=2,tp=4 -o profile.json --plots plots
      distbench run redistribute --mesh dp_shard=2,tp=4 --profile profile.json
      distbench simulate llama_2d --hardware hardware.json
    """
    from distbench.launch import Request, jobs_of
    from distbench.launch.job_request import hosts_of_ranks
    from distbench.launch.rendezvous import joined_ranks

    if only == "profile":
        refuse_with("--only profile", "hardware_out")
    elif only == "hardware":
        refuse_with("--only hardware", "plots", *(["output"] if hardware_out else []))
    check_writable(output, "-o")
    if plots:
        make_folder(plots, "--plots")
    joined = joined_ranks(os.environ)
    hosts = hosts_of_ranks(joined.world_size, joined) if joined else ()
    if mesh is None and 1 < (num_hosts := len(set(hosts))) < len(hosts):
        mesh = {"dp_shard": num_hosts, "tp": len(hosts) // num_hosts}
    request = Request(targets=("calibrate",), mesh=mesh, started_at=STARTED_AT, **of_request)
    jobs = jobs_of(request, joined)
    hardware = _hardware_file(jobs[0], hardware_out, output, only or ("profile" if request.quick else None))
    if hardware is not None:
        check_writable(hardware, "--hardware-out")
        calibration = jobs if only != "hardware" else []
        jobs = [*calibration, *_jobs_of_hardware(request, mesh_size(jobs[0].mesh), joined)]
    is_first = joined is None or joined.rank == 0
    if dry_run:
        if is_first:
            say_lines(dry_run_lines(jobs, request.out))
        return
    if joined is None:
        confirm_ranks(jobs, yes)
    exit_code = run_all(jobs, joined, quiet or not is_first)
    if exit_code == 0 and is_first:
        if only != "hardware":
            _write_profile(Path(jobs[0].run_file), output, plots)
        if hardware is not None:
            _write_hardware(jobs[-2], jobs[-1], hardware)
        say(f"calibrated in {time.time() - STARTED_AT:.0f} s", err=True)
    sys.exit(exit_code)


def _hardware_file(job: "Job", hardware_out: Path | None, output: Path, only: str | None) -> Path | None:
    """The hardware file's path; None for none."""
    if only == "profile" and hardware_out is None:
        return None
    if job.device != "cpu" and (hardware_out is not None or only == "hardware"):
        raise UserError(
            f"of {job.device} devices calibrate measures collectives only, for a profile; leave --hardware-out and "
            "--only hardware out, and simulate on a shipped hardware file"
        )
    if mesh_size(job.mesh) == 1:
        return None  # the profile's own complaint says what to do
    return hardware_out or (output.with_name(HARDWARE) if job.device == "cpu" else None)


def _jobs_of_hardware(request: "Request", num_ranks: int, joined: "Joined | None") -> "list[Job]":
    """Operators, and steps."""
    from distbench.launch import jobs_of

    short = SHORT if request.quick else 1.0
    passes = 1 if request.quick else PASSES
    request = replace(request, mesh={"tp": num_ranks}, check="none", passes=passes)
    operators = replace(request, targets=("calibrate_operators",), budget_s=OPERATORS_S / short)
    # Heads and all other sizes of the steps that TP shards are multiples of the ranks.
    heads = (f"num_heads={lcm(8, num_ranks)}",)
    steps = replace(request, targets=("calibrate_steps",), choices=heads, budget_s=STEPS_S / short)
    return [*jobs_of(operators, joined), *jobs_of(steps, joined)]


def _write_profile(run_file: Path, output: Path, plots: Path | None) -> None:
    from distbench.planning.cost_profile import measured_in, profile_of
    from distbench.records.run_file import read_run
    from distbench.report.calibrations import calibration_figures, profile_text
    from distbench.show.plots import draw

    run = read_run(run_file)
    profile = profile_of(run)
    try:
        profile.save(output)
    except OSError as error:
        raise UserError(f"-o {output} cannot be written: {error.strerror}; give another file") from error
    say(profile_text(profile))
    say(f"profile: {output}", err=True)
    if plots:
        for path in draw(calibration_figures(profile, measured_in(run)), plots):
            say(f"drawn: {path}", err=True)


def _write_hardware(operators: "Job", steps: "Job", hardware: Path) -> None:
    """Fit the hardware file; its steps are recorded now, in a child process."""
    from distbench.records.run_file import read_run
    from distbench.simulate.measured_hardware import hardware_text, write_hardware
    from distbench.simulate.recording import record_steps

    ((recordings, _),) = record_steps([steps])
    measured, whole_steps = read_run(Path(operators.run_file)), read_run(Path(steps.run_file))
    say(hardware_text(write_hardware(hardware, measured, whole_steps, recordings)))
    say(f"hardware file: {hardware}; predict a step here: distbench simulate SCENARIO --hardware {hardware}", err=True)
