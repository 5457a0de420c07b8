"""The command `distbench tune`."""

import json
from pathlib import Path
from typing import Any

import click

from distbench.cli.options import (
    PATH,
    Duration,
    FiniteRange,
    check_writable,
    format_option,
    make_folder,
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
@click.option("--world", type=int, metavar="N", help="Devices (ranks) in all. Default: those of the scenario's mesh.")
@click.option("--hardware", metavar="NAME|FILE", help="Predict for this machine. Default: measure on this one.")
@click.option("--memory", metavar="AMOUNT", help="Memory of a device, such as 80GB. Default: the hardware file's.")
@click.option(
    "--budget",
    "budget_s",
    type=Duration(least_s=0.001),
    default=600.0,
    metavar="TIME",
    help="How long it may take, such as 30s or 5m. [10m]",
)
@click.option(
    "--plans", "max_plans", type=click.IntRange(1, 10_000), default=80, show_default=True, help="Tried at most."
)
@set_option
@click.option("--mesh", metavar="DIM=N,...", help="The mesh of --around-my-plan. Default: the scenario's own.")
@click.option("--around-my-plan", is_flag=True, help="Try one change at a time of the plan as written.")
@click.option(
    "--price", type=FiniteRange(0, 1e6, min_open=True), metavar="AMOUNT", help="Of a device and hour: adds costs."
)
@click.option("--float8", metavar="MODULES", help="With --hardware: their matmuls in float8, such as 'layers.*'.")
@click.option("--quick", is_flag=True, help="The scenario's quick sizes.")
@click.option("--resume", is_flag=True, help="Take what an earlier sweep left in --results.")
@click.option("--results", "out", type=PATH, metavar="DIR", help="Folder. [results/sweep/SCENARIO-WORLD]")
@click.option("--page", type=PATH, metavar="FILE", help="Write all of it as an HTML page.")
@format_option("table", "markdown", "json")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@verbose_option
@width_option
@click.pass_context
def sweep(
    ctx: click.Context, /, scenario: str, form: str, page: Path | None, out: Path | None, **of_request: Any
) -> None:
    """Say which plan to use for SCENARIO on so many devices: mesh, resharding, checkpointing, micro-batches and more.

    With --hardware, plans are predicted by recording and replaying their step, and no rank is started, unless the file
    is this machine's own: then the best of them are measured. Without, all are measured in turn on this machine. It
    ends with a recommendation, a picture of time against memory, and the plan as code. What is known is kept where it
    is interrupted, and --resume goes on.

    \b
    Examples:
      distbench tune llama3_8b --world 64 --hardware h100
      distbench tune llama3_70b --world 256 --hardware h100 --memory 80GB --price 2.50
      distbench tune llama_2d --world 4
      distbench tune bench.py::mine --hardware h200 --around-my-plan
    """
    from distbench.search.sweep import AskedSweep, run_sweep
    from distbench.search.sweep_text import blocks_of, page_of_result, pareto_figures, record_of_result
    from distbench.show import plots
    from distbench.show.terminal import shown

    request = AskedSweep.of(scenario, out, **of_request)
    make_folder(request.out, "--results")
    if page is not None:
        check_writable(page, "--page")
    result, interrupted = run_sweep(request, lambda line: say(line, err=True))
    # Printed before it is written, as by simulate.
    record = json.dumps(record_of_result(result), indent=1)
    if form == "json":
        click.echo(record)
    else:
        say(shown(blocks_of(result), form))
    write(request.out / "plans.json", record)
    figures = pareto_figures(result.title, result.plans, result.best, result.capacity_bytes)
    if files := plots.draw(figures, request.out):
        say(f"picture: {files[0]}", err=True)
    if page is not None:
        write(page, page_of_result(result))
        say(f"page: {page}", err=True)
    ctx.exit(INTERRUPTED if interrupted else 0)
