"""The command `distbench history`."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from distbench.cli.options import (
    PATH,
    ColumnOptions,
    cases_option,
    format_option,
    options_of,
    results_option,
    say,
    scenario_names,
    verbose_option,
    width_option,
)
from distbench.spec.errors import UserError


@click.command()
@click.argument("case", default="*", metavar="[CASE_GLOB]", shell_complete=scenario_names)
@results_option("DIR may be a file of another tool.")
@options_of(ColumnOptions, "numbers")
@click.option(
    "--plots", type=PATH, metavar="DIR", help="Draw plots into this folder. The plots show each case's times."
)
@cases_option
@format_option("table", "json")
@width_option
@verbose_option
def history(case: str, out: Path, numbers: ColumnOptions, plots: Path | None, chosen: str, form: str) -> None:
    """Show each case's times over launches and commits, and when they changed.

    CASE_GLOB is a scenario, or a pattern on case ids such as "step/*" or "collective/f32*/all_gather/tp". The default
    is every case. -k selects cases by id. Launches that are not comparable with the newest launch of their scenario are
    ignored. If commits alternated, launches of one commit are shown together.

    A change is reported if a split of a case's launches into before and after explains more variance than a split of
    shuffled launches would (5 % chance of a false alarm per scenario). -v prints the threshold. A change of all cases
    together is tested separately, because machines drift. This test, and the test of a scenario with fewer than 5
    cases, needs 18 launches. The last line is the distbench ab command that decides whether the commit or the machine
    changed.

    \b
    Example:
      distbench history "step/*llama_2d*" --results results --plots plots
    """
    from distbench.judge.history import figures_of, series_of, text
    from distbench.records.baselines import read_side
    from distbench.records.launches import with_cases
    from distbench.show.plots import draw

    warnings: list[str] = []
    launches = read_side([out], "--results", warnings, numbers.columns())
    if not launches:
        why = f" ({warnings[0]})" if warnings else ""
        raise UserError(f"--results {out} has no run file{why}; give a folder that distbench run wrote to")
    [launches] = with_cases([launches], chosen)
    series, notes = series_of(launches, case)
    if not series:
        case_ids = sorted({name for launch in launches for name in launch.cases})
        scenarios = ", ".join(sorted({launch.scenario for launch in launches}))
        cases = f"cases such as {', '.join(case_ids[:3]) or '-'}"
        raise UserError(
            f"no measured case or scenario matches {case!r}; use one of the scenarios {scenarios}, or {cases}"
        )
    if plots:
        for path in draw(figures_of(series), plots):
            say(f"drawn: {path}", err=True)
    if form == "json":
        click.echo(json.dumps([asdict(case_series) for case_series in series], indent=1))
        for warning in warnings:
            say(f"warning: {warning}", err=True)
    else:
        say(text(series, [*(f"warning: {warning}" for warning in warnings), *notes]))
