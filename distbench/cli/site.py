"""The command `distbench site`."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from distbench.cli.options import (
    PATH,
    ColumnOptions,
    cases_option,
    format_option,
    options_of,
    progress_lines,
    quiet_option,
    say,
    verbose_option,
)
from distbench.spec.errors import UserError


@click.command()
@click.option(
    "--results",
    "runs",
    type=PATH,
    metavar="DIR",
    default=Path("results"),
    help="Results folder. It may be a file of another tool. [results]",
)
@click.option("--output-dir", "folder", type=PATH, metavar="DIR", default=Path("site"), help="Folder to write. [site]")
@click.option(
    "--run-pages",
    "num_run_pages",
    type=click.IntRange(0, 1000),
    metavar="N",
    default=1,
    help="Write report pages of the N newest launches per scenario and machine. Earlier pages remain. [1]",
)
@options_of(ColumnOptions, "numbers")
@cases_option
@format_option("table", "json")
@quiet_option
@verbose_option
def site(
    runs: Path, folder: Path, num_run_pages: int, numbers: ColumnOptions, chosen: str, form: str, quiet: bool
) -> None:
    """Write static pages over all runs: trends per case, changes, regressions first.

    index.html has the changed cases with plots, filters, and links to a page per scenario and machine. Changes are
    those that distbench history reports. The pages need no server and no network.

    An index in the results folder (.distbench-index.sqlite) stores the numbers of each run file, so that only new and
    changed files are read. The folder of --output-dir is replaced as a whole. A folder with files that distbench site
    did not write is rejected.

    \b
    Example:
      distbench site --results results --output-dir site
    """
    from distbench.records.run_index import open_index
    from distbench.report.site import require_own, write_site
    from distbench.show.blocks import Notes
    from distbench.show.terminal import text_of
    from distbench.spec.printable_text import count_text

    require_own(folder)
    index = open_index(runs, numbers.columns(), progress_lines(quiet))
    if not index.launches:
        why = f" ({index.warnings[0]})" if index.warnings else ""
        raise UserError(f"--results {runs} has no run file{why}; give a folder that distbench run wrote to")
    written = write_site(index, folder, _choice(chosen), num_run_pages)
    progress_lines(quiet)(f"site written: {folder / 'index.html'} ({count_text(index.num_read, 'file')} read)")
    if form == "json":
        changed = [
            {"standing": case.standing, "page": case.page, "machine": group.machine, **asdict(case.series)}
            for group, case in written.changed
        ]
        click.echo(json.dumps({"headline": written.headline[0], "changed": changed}, indent=1))
    elif not quiet:
        if index.warnings:
            say(text_of([Notes(tuple(f"warning: {warning}" for warning in index.warnings))]))
        say("\n".join(written.headline))


def _choice(expression: str) -> Callable[[str], bool]:
    """Return whether a case id matches an expression of -k."""
    from distbench.spec.job import CaseChoice

    return CaseChoice(expression).matches if expression else lambda case_id: True
