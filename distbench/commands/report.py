"""`distbench report`: arguments to one call of `report.render`."""

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN...]")
@click.option("--format", "form", type=click.Choice(["table", "markdown", "csv", "json"]), default="table")
@click.option("--page", type=click.Path(path_type=Path), metavar="FILE", help="Also write one HTML page with figures.")
@click.option("--plots", type=click.Path(path_type=Path), metavar="DIR", help="Also draw plots there, PNG and SVG.")
@click.option(
    "--reproducers",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write a stand-alone script there for each cause of wrong or broken redistributions.",
)
@click.option("--group-by", metavar="COLUMN,...", help="Summarise cases by these columns instead of listing them.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder to look in.")
def report(
    runs: tuple[Path, ...],
    form: str,
    page: Path | None,
    plots: Path | None,
    reproducers: Path | None,
    group_by: str | None,
    out: Path,
) -> None:
    """Show measured runs; without RUN, every scenario of the latest `distbench run`.

    A RUN is a run file or a folder of run files. Redistributions by more than torch's two planners, such as
    redistribute_lab's, are told as a story: what greedy wastes, what min_cost mispredicts, what to use instead.

    \b
    Examples:
      distbench report --page report.html
      distbench report results --format csv
      distbench report --group-by kind,status
      distbench report --reproducers upstream
    """
    from distbench.report import render

    by = tuple(name.strip() for name in group_by.split(",")) if group_by else ()
    shown = render(runs, out, form, plots, by, page, reproducers)
    for warning in shown.warnings:
        click.echo(f"distbench: {warning}", err=True)
    click.echo(shown.text)
