"""The command `baseline`: saved, listed and shown."""

from pathlib import Path

import click

from distbench.cli.main import WholeSentences
from distbench.cli.options import PATH, expanded, width_option
from distbench.cli.output import say, say_lines


@click.group(cls=WholeSentences)
def baseline() -> None:
    """Save, list and show stored baselines: one value a launch, small enough for git.

    \b
    Example:
      distbench baseline save runs/
    """


@baseline.command("save")
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", type=PATH, default=Path("results"), help="Results folder. [results]")
def save(paths: tuple[str, ...], out: Path) -> None:
    """Store run files as baselines under OUT/baselines/MACHINE/, replacing those of the same scenario and mesh.

    \b
    Example:
      distbench baseline save runs/ && git add results/baselines
    """
    from distbench.records.launches import read_side, save_baselines

    warnings: list[str] = []
    launches = read_side(expanded(paths), "baseline", warnings)
    for path in save_baselines(launches, out):
        say(f"baseline: {path}")
    for warning in warnings:
        say(f"distbench: {warning}", err=True)


@baseline.command("list")
@click.option(
    "--runs",
    "out",
    type=PATH,
    default=Path("results"),
    help="Results folder to look in. [results]",
)
@width_option
def list_baselines(out: Path) -> None:
    """List stored baselines.

    \b
    Example:
      distbench baseline list
    """
    from distbench.records.launches import describe
    from distbench.records.results_folder import BASELINES
    from distbench.show.blocks import Table
    from distbench.show.terminal import text_of

    rows = describe(out)
    if not rows:
        say_lines([f"no baseline is under {out / BASELINES}; store one with distbench baseline save"])
        return
    columns = ("<file", "<scenario", "<mesh", "launches", "cases", "<commit", "<saved at")
    say(
        text_of([Table(f"baselines under {out / BASELINES}:", columns, rows, optional=("saved at", "commit", "cases"))])
    )


@baseline.command()
@click.argument("file", type=PATH)
@width_option
def show(file: Path) -> None:
    """Show one stored baseline: where it comes from, and each case's spread between launches.

    \b
    Example:
      distbench baseline show results/baselines/ci-runner/llama_2d-dp_shard-2-tp-2-cpu.json
    """
    from distbench.judge.gate_text import baseline_page

    say(baseline_page(file))
