"""What `distbench run` says around a launch: a question before very many ranks, and the first screen of its results."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from distbench.commands.say import say
from distbench.spec import Job, UserError, format_mesh
from distbench.spec.errors import PLAN_PROBLEMS
from distbench.spec.mesh import mesh_size

# More ranks on a CPU measure little but each other, and a typing error in --mesh can bring a machine down.
RANKS_PER_CPU = 4


def confirm_ranks(jobs: Sequence[Job], yes: bool) -> None:
    """Ask before more than RANKS_PER_CPU ranks a CPU are started here; a UserError where there is nobody to ask.

    Without a known number of CPUs nothing is asked.
    """
    largest = max((job for job in jobs if job.device == "cpu"), key=lambda job: mesh_size(job.mesh), default=None)
    if yes or largest is None:
        return
    num_cpus, num_ranks = largest.environment.get("num_cpus"), mesh_size(largest.mesh)
    if not isinstance(num_cpus, int) or num_ranks <= RANKS_PER_CPU * num_cpus:
        return
    what = f"{largest.scenario} on {format_mesh(largest.mesh)} starts {num_ranks} ranks on {num_cpus} CPUs"
    if not is_terminal():
        limit = f"over {RANKS_PER_CPU} a CPU they measure waiting, and may exhaust this machine"
        raise UserError(f"{what}; {limit}; give a smaller --mesh, or --yes to start them all the same")
    if not click.confirm(f"{what}. Start them?", err=True):
        raise UserError("nothing was started; give a smaller --mesh")


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin is not None and sys.stderr is not None and sys.stdin.isatty() and sys.stderr.isatty()


def told(job: Job, message: str) -> str:
    """Why a launch failed; problems of a plan as `distbench check` tells them, which looks for a mesh that works."""
    if PLAN_PROBLEMS not in message:
        return message
    from distbench.check_plans import check_jobs
    from distbench.render.screen import width_here
    from distbench.render.terminal import wrap

    try:
        found = check_jobs([job])
    except UserError:
        return message
    if not found.num_problems:
        return message
    lines = [line for text in found.lines for line in wrap(text, width_here(), "    ")]
    return "\n".join([f"{PLAN_PROBLEMS}, so nothing was measured", *lines])


def show_summary(jobs: Sequence[Job], is_resumed: bool = False) -> None:
    """The first screen on what was measured, if anything was; what was resumed is not the latest run, and so named."""
    run_files = [Path(job.run_file) for job in jobs if Path(job.run_file).exists()]
    if run_files:
        from distbench.report import summary_of

        out = run_files[0].parents[1]
        elsewhere = [] if out == Path("results").resolve() else ["--runs", str(shown_path(out))]
        words = [str(shown_path(path)) for path in run_files] if is_resumed else elsewhere
        if is_terminal():
            say("", err=True)  # what ranks did stands above
        say(summary_of(run_files, shlex.join(["distbench", "report", *words])))


def shown_path(path: Path) -> Path:
    """Relative to the working folder, where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
