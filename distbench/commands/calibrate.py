"""`distbench calibrate`: one run of the scenario of that name, and a profile fitted to it."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from distbench.commands import STARTED_AT
from distbench.commands.files import check_writable, make_folder
from distbench.commands.finite import MONTH_S, FiniteRange
from distbench.commands.first_screen import confirm_ranks
from distbench.commands.run import run_all
from distbench.commands.say import say
from distbench.commands.width import width_option
from distbench.spec.devices import DEVICE_HELP, DEVICES
from distbench.spec.errors import UserError


@click.command()
@click.option("--mesh", metavar="DIM=N,...", help="Mesh to measure, e.g. dp_shard=2,tp=2, which is the default.")
@click.option("--device", type=click.Choice(tuple(DEVICES)), help=DEVICE_HELP)
@click.option("--quick", is_flag=True, help="Fewer sizes and samples: a look, not a profile to plan by.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder.")
@click.option("-o", "output", type=click.Path(path_type=Path), default=Path("profile.json"), help="The profile's file.")
@click.option("--plots", type=click.Path(path_type=Path), metavar="DIR", help="Draw points on lines there.")
@click.option(
    "--timeout", type=FiniteRange(1, MONTH_S), default=300.0, metavar="S", help="Give up after S s of no progress."
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--yes", is_flag=True, help="Start more than 4 ranks a CPU without asking.")
@width_option
def calibrate(
    mesh: str | None, output: Path, plots: Path | None, timeout: float, quiet: bool, yes: bool, **asked: Any
) -> None:
    """Measure what each step of a redistribution costs on this machine, and fit a profile to plan by.

    Every collective over every mesh dim, all groups of a mesh dim at once, as DTensor runs it, by size.

    \b
    Examples:
      distbench calibrate --mesh dp_shard=2,tp=4 -o profile.json --plots plots
      distbench run redistribute --mesh dp_shard=2,tp=4 --profile profile.json
    """
    from distbench.launch import Request, jobs_of
    from distbench.launch.ranks import joined_ranks
    from distbench.spec import parse_mesh

    check_writable(output, "-o")
    if plots:
        make_folder(plots, "--plots")
    joined = joined_ranks(os.environ)
    parsed = parse_mesh(mesh) if mesh else None
    request = Request(targets=("calibrate",), mesh=parsed, timeout_s=timeout, started_at=STARTED_AT, **asked)
    jobs = jobs_of(request, joined)
    if joined is None:
        confirm_ranks(jobs, yes)
    is_first = joined is None or joined.rank == 0
    exit_code = run_all(jobs, joined, quiet or not is_first)
    if exit_code == 0 and is_first:
        _write_profile(Path(jobs[0].run_file), output, plots)
    sys.exit(exit_code)


def _write_profile(run_file: Path, output: Path, plots: Path | None) -> None:
    from distbench.costmodel.calibration_plots import draw
    from distbench.costmodel.calibration_run import measured_in, profile_of
    from distbench.costmodel.profile_text import profile_text
    from distbench.runs.run_file import read_run

    run = read_run(run_file)
    profile = profile_of(run)
    try:
        profile.save(output)
    except OSError as error:
        raise UserError(f"-o {output} cannot be written: {error.strerror}; give another file") from error
    say(profile_text(profile))
    say(f"profile: {output}", err=True)
    if plots:
        for path in draw(profile, measured_in(run), plots):
            say(f"drawn: {path}", err=True)
