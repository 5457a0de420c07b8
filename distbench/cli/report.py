"""`distbench report`: arguments to one call of `report.render`."""

import shlex
from contextlib import nullcontext
from pathlib import Path

import click

from distbench.cli.options import PATH, format_option, given, refuse_with, refuse_without, width_option
from distbench.cli.output import say

MAX_NAMED = 3


@click.command()
@click.argument("runs", nargs=-1, type=PATH, metavar="[RUN...]")
@format_option("table", "markdown", "csv", "json")
@click.option("--page", type=PATH, metavar="FILE", help="Also write all of it as one HTML file.")
@click.option("--plots", type=PATH, metavar="DIR", help="Also draw plots there, PNG and SVG.")
@click.option(
    "--reproducers",
    type=PATH,
    metavar="DIR",
    help="Also write a stand-alone script there for each cause of wrong or broken redistributions.",
)
@click.option("--paths", is_flag=True, help="Which path costs what in the steps that `run --trace-paths` traced.")
@click.option("--chrome", type=PATH, metavar="FILE", help="With --paths: also write one trace for Perfetto.")
@click.option(
    "--diff", nargs=2, type=PATH, metavar="A B", help="What a traced step A communicates more or less than B."
)
@click.option("--group-by", metavar="COLUMN,...", help="Summarise by these columns instead of listing.")
@click.option("--label", default="", metavar="TEXT", help="Only runs that `run --label TEXT` made, of all times.")
@click.option("--full", is_flag=True, help="Every table of every scenario instead of the summary.")
@click.option(
    "--runs", "out", type=PATH, default=Path("results"), help="Folder to look for the latest run in. [results]"
)
@width_option
def report(
    runs: tuple[Path, ...],
    form: str,
    page: Path | None,
    plots: Path | None,
    reproducers: Path | None,
    paths: bool,
    chrome: Path | None,
    diff: tuple[Path, Path] | None,
    group_by: str | None,
    label: str,
    full: bool,
    out: Path,
) -> None:
    """Show measured runs: a summary first; without RUN, of every scenario of the latest `distbench run`.

    A RUN is a run file, a folder of run files, or the name of a scenario, whose own tables are shown then; --full shows
    those of all. Redistributions by more than torch's two planners, such as redistribute_lab's, are told as a story:
    what greedy wastes, what min_cost mispredicts, what to use instead.

    With --paths a RUN may be RUN::PART, with a part of the id of one case, such as the variant's name. So may A and B
    of --diff, which are two runs or two variants of one: + is what A has more than B.

    \b
    Examples:
      distbench report
      distbench report llama_2d
      distbench report --full --page report.html
      distbench report results --format csv
      distbench report --group-by kind,status
      distbench report --reproducers upstream
      distbench report --paths --plots plots --chrome trace.json
      distbench report --diff tp.jsonl fsdp.jsonl
      distbench report --diff run.jsonl::hidden=1024 run.jsonl::hidden=4096
    """
    _refuse_unused(runs, diff is not None, paths, bool(group_by))
    command = _command(runs, out, label)
    if label:
        from distbench.records.results_folder import labelled

        runs = labelled(runs, out, label)
    by = tuple(name.strip() for name in group_by.split(",")) if group_by else ()
    if diff:
        from distbench.report import render_difference

        result = render_difference(*diff, form, page)
    elif paths:
        from distbench.report import render_paths

        result = render_paths(runs, out, form, plots, page, chrome, by)
    else:
        from distbench.records.run_file import no_garbage_collection
        from distbench.report import render

        # Looking for garbage among all records again and again is a sixth of a long report. Figures do leave some.
        with nullcontext() if plots or page else no_garbage_collection():
            result = render(runs, out, form, plots, by, page, reproducers, full, command)
    for sentence in result.warnings:
        say(f"distbench: {sentence}", err=True)
    say(result.text)


def _command(runs: tuple[Path, ...], out: Path, label: str) -> str:
    """What shows these runs again, to paste."""
    names = [str(run) for run in runs[:MAX_NAMED]]
    words = [
        *(["--runs", str(out)] if out != Path("results") and _is_looked_for(runs) else []),
        *(["--label", label] if label else []),
        *names,
    ]
    return f"distbench report {shlex.join(words)}".rstrip() + (" ..." if len(runs) > MAX_NAMED else "")


def _refuse_unused(runs: tuple[Path, ...], is_diff: bool, is_paths: bool, is_grouped: bool) -> None:
    """Options without effect are refused before anything is read."""
    if is_diff:
        refuse_with("--diff", *(given().keys() - {"diff", "page", "form"}))
    elif is_paths:
        refuse_with("--paths", "reproducers", "full")
    else:
        refuse_without("--paths", "chrome")
    if is_grouped:
        refuse_with("--group-by", "full")
    if not _is_looked_for(runs):
        refuse_with("a RUN that is a file or folder", "out")


def _is_looked_for(runs: tuple[Path, ...]) -> bool:
    """Whether run files are looked for in the results folder: where no RUN is a file or folder."""
    from distbench.records.results_folder import is_scenario_name

    return all(map(is_scenario_name, runs))
