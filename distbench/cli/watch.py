"""The command `distbench watch`."""

import json

import click

from distbench.cli.options import expanded, format_option, quiet_option, say


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--ranks-per-host",
    type=click.IntRange(1),
    metavar="N",
    help="Consecutive ranks on one host, for Flight Recorder files without durations (gloo). Default: unknown.",
)
@quiet_option
@format_option("table", "json")
@click.pass_context
def watch(ctx: click.Context, files: tuple[str, ...], ranks_per_host: int | None, quiet: bool, form: str) -> None:
    """Show ranks that arrive last at collectives, from files of Flight Recorder or NCCL Inspector.

    A FILE is one rank's dump or a folder of dumps. Each group's collectives are divided into 20 parts. A rank is
    reported if it is last in more parts than by chance. In Python, distbench.watch() measures the same in a loop.

    Exit code: 0 no late rank, 1 a late rank, 3 unknown.

    \b
    Examples:
      distbench watch dumps/
      distbench watch /tmp/nccl_trace_rank_*
      distbench watch nccl-inspector-1234/ --json
    """
    from distbench.judge.late_ranks import arrivals_of_files, judge_arrivals
    from distbench.records.late_rank_files import read_arrivals

    groups = arrivals_of_files(read_arrivals(expanded(files)), ranks_per_host)
    more = "Give files with more collectives, one file per rank."
    verdict = judge_arrivals(groups, "parts of the files", more)
    if form == "json" or not quiet:
        say(json.dumps(verdict.to_record(), indent=2) if form == "json" else "\n".join(verdict.lines))
    ctx.exit(verdict.exit_code)
