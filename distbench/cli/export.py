"""The command `export`: runs to other tools' formats."""

from pathlib import Path

import click

from distbench.cli.options import PATH, expanded, write
from distbench.cli.output import say
from distbench.records.exports import EXPORTS


@click.command()
@click.argument("form", metavar="FORMAT", type=click.Choice(EXPORTS))
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Default: standard output.")
def export(form: str, paths: tuple[str, ...], output: Path | None) -> None:
    """Write runs in another tool's FORMAT, one value a launch, never raw samples.

    FORMAT is pytest-benchmark, customSmallerIsBetter (github-action-benchmark), or run: distbench's own run file, of an
    nccl-tests JSON file (-J), for distbench report.

    \b
    Examples:
      distbench export pytest-benchmark runs/ -o 0001_new.json
      distbench export run all_reduce.json -o results/all_reduce.jsonl
    """
    text = EXPORTS[form](expanded(paths))
    if output is None:
        say(text, nl=False)
    else:
        write(output, text)
