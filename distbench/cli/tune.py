"""The command `distbench tune`."""

import json
from pathlib import Path
from typing import Any

import click

from distbench.cli.options import (
    MESH_HELP,
    PATH,
    Duration,
    FiniteRange,
    assume_option,
    check_writable,
    format_option,
    make_folder,
    progress_lines,
    quick_option,
    quiet_option,
    say,
    scenario_names,
    set_option,
    verbose_option,
    width_option,
    write,
)
from distbench.spec.errors import INTERRUPTED


@click.command()
@click.argument("scenario", shell_complete=scenario_names)
@click.option(
    "--world",
    type=int,
    metavar="N",
    help="Number of devices (ranks). Default: size of the scenario's mesh.",
)
@click.option("--hardware", metavar="NAME|FILE", help="Predict for this machine. Default: measure on this host.")
@click.option("--memory", metavar="AMOUNT", help="Memory per device, such as 80GB. Default: from the hardware file.")
@click.option(
    "--max-time",
    "budget_s",
    type=Duration(least_s=0.001),
    default=600.0,
    metavar="TIME",
    help="Time limit, such as 30s or 5m. [10m]",
)
@click.option(
    "--plans",
    "max_plans",
    type=click.IntRange(1, 10_000),
    default=80,
    show_default=True,
    help="Maximum number of plans to try.",
)
@set_option
@click.option("--mesh", metavar="DIM=N,...", help=f"{MESH_HELP} For --around-my-plan. Default: the scenario's mesh.")
@click.option("--around-my-plan", is_flag=True, help="Try single changes to the scenario's plan.")
@click.option(
    "--price",
    type=FiniteRange(0, 1e6, min_open=True),
    metavar="AMOUNT",
    help="Price per device and hour, to show costs.",
)
@click.option(
    "--objective",
    type=click.Choice(["tokens", "memory", "cost"]),
    default="tokens",
    show_default=True,
    help="Recommend the fastest plan, the smallest plan, or the plan with the least cost per token (needs --price). "
    "At a fixed --world, the fastest plan costs least.",
)
@click.option("--max-step", "max_step_s", type=Duration(least_s=1e-6), metavar="TIME", help="Recommend no slower plan.")
@click.option(
    "--headroom",
    metavar="AMOUNT",
    help="Memory per device to leave free. Default: the hardware file's reserve, for the context, NCCL's buffers and "
    "workspaces.",
)
@click.option(
    "--float8",
    metavar="MODULES",
    help="Simulate matmuls of these modules in float8, such as 'layers.*'. Needs --hardware.",
)
@assume_option
@quick_option("")
@click.option("--reuse", "resume", is_flag=True, help="Continue the sweep in --results.")
@click.option("--results", "out", type=PATH, metavar="DIR", help="Results folder. [results/sweep/SCENARIO-WORLD]")
@click.option("--page", type=PATH, metavar="FILE", help="Write the whole result as one HTML page.")
@format_option("table", "markdown", "json")
@quiet_option
@verbose_option
@width_option
@click.pass_context
def tune(
    ctx: click.Context, /, scenario: str, form: str, page: Path | None, out: Path | None, quiet: bool, **of_request: Any
) -> None:
    """Recommend a plan for SCENARIO on N devices: mesh, resharding, checkpointing, micro-batches and more.

    With --hardware, plans are predicted by simulation of a step, and no rank is started. If the hardware file describes
    this machine, the best plans are also measured. Without --hardware, all plans are measured on this machine. The
    result is a recommendation, a plot of time and memory, and the plan as code. After an interruption, --reuse
    continues the sweep.

    \b
    Examples:
      distbench tune llama3_8b --world 64 --hardware h100
      distbench tune llama3_70b --world 256 --hardware h100 --memory 80GB
      distbench tune llama_2d --world 4
      distbench tune bench.py::mine --hardware h200 --around-my-plan
    """
    from distbench.search.sweep import SweepRequest, run_sweep
    from distbench.search.sweep_text import blocks_of, page_of_result, pareto_figures, record_of_result
    from distbench.show import plots
    from distbench.show.terminal import shown

    request = SweepRequest.of(scenario, out, quiet=quiet, **of_request)
    make_folder(request.out, "--results")
    if page is not None:
        check_writable(page, "--page")
    result, interrupted = run_sweep(request, lambda line: say(line, err=True))
    # Printed before it is written, as in simulate.
    record = json.dumps(record_of_result(result), indent=1)
    if form == "json":
        click.echo(record)
    elif not quiet:
        say(shown(blocks_of(result), form))
    write(request.out / "plans.json", record)
    figures = pareto_figures(result.title, result.plans, result.best, result.capacity_bytes)
    progress = progress_lines(quiet)
    if files := plots.draw(figures, request.out):
        progress(f"picture: {files[0]}")
    if page is not None:
        write(page, page_of_result(result))
        progress(f"page: {page}")
    ctx.exit(INTERRUPTED if interrupted else 0)
