"""The commands `distbench report`, `distbench export` and `distbench site`."""

import json
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import click

from distbench.cli.options import (
    PATH,
    ColumnOptions,
    PluginChoice,
    cases_option,
    expanded,
    format_option,
    given,
    options_of,
    progress_lines,
    quiet_option,
    refuse_with,
    refuse_without,
    results_option,
    say,
    verbose_option,
    width_option,
    write,
    write_folder,
)
from distbench.records.exports import EXPORTS
from distbench.spec.errors import UserError
from distbench.spec.plugins import load_plugin
from distbench.spec.printable_text import count_text

MAX_NAMED = 3


@click.command()
@click.argument("runs", nargs=-1, type=PATH, metavar="[RUN...]")
@format_option("table", "markdown", "csv", "json")
@click.option("--page", type=PATH, metavar="FILE", help="Write the whole result as one HTML page.")
@click.option("--plots", type=PATH, metavar="DIR", help="Draw plots into this folder. The formats are PNG and SVG.")
@click.option(
    "--reproducers",
    type=PATH,
    metavar="DIR",
    help="Also write a stand-alone script per cause of wrong or broken redistributions into this folder.",
)
@click.option("--paths", is_flag=True, help="Show the cost of each path in the steps of run --trace-paths.")
@click.option("--chrome", type=PATH, metavar="FILE", help="With --paths: also write one trace for Perfetto.")
@click.option(
    "--diff", nargs=2, type=PATH, metavar="A B", help="Show the differences in communication between two traced steps."
)
@click.option("--group-by", metavar="COLUMN,...", help="Summarise cases by these columns instead of listing cases.")
@click.option(
    "--label", default="", metavar="TEXT", help="Label of the runs. Show all runs with this label, as @TEXT does."
)
@cases_option
@click.option("--full", is_flag=True, help="Show every table of every scenario instead of the summary.")
@results_option("RUN names and the latest run refer to this folder.")
@verbose_option
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
    chosen: str,
    full: bool,
    out: Path,
) -> None:
    """Show the summary of measured runs. The default RUN is last, with every scenario of the latest `distbench run`.

    A RUN is a run file, a folder of run files, last, last~1, @LABEL or a commit. The name of a scenario shows the
    tables of the scenario. --full shows all tables. For runs with more than torch's two planners, such as runs of
    redistribute_lab, the summary shows the time that greedy wastes, wrong predictions of min_cost, and better choices.

    With --paths or --diff, RUN::PART selects the case whose id contains PART, such as the name of a variant. --diff
    compares two runs, or two variants of one run. In the result, + marks communication that is larger in A than in B.

    \b
    Examples:
      distbench report
      distbench report llama_2d
      distbench report last~1
      distbench report --full --page report.html
      distbench report results --format csv
      distbench report --group-by kind,status
      distbench report --reproducers upstream
      distbench report --paths --plots plots --chrome trace.json
      distbench report --diff tp.jsonl fsdp.jsonl
      distbench report --diff run.jsonl::hidden=1024 run.jsonl::hidden=4096
    """
    from distbench.records.results_folder import labelled, named_run, named_runs

    if diff:
        refuse_with("--diff", *(given().keys() - {"diff", "page", "form", "out"}))
    elif paths:
        refuse_with("--paths, for which RUN::PART selects cases", "chosen")
        refuse_with("--paths", "reproducers", "full")
    else:
        refuse_without("--paths", "chrome")
    if group_by:
        refuse_with("--group-by", "full")
    if not _reads_folder(diff or runs):
        refuse_with("a RUN that is a file or folder", "out")
    again = _command(runs, out, label, chosen)
    runs = named_runs(runs, out)
    runs = labelled(runs, out, label) if label else runs
    by = tuple(name.strip() for name in group_by.split(",")) if group_by else ()
    if diff:
        from distbench.report import render_difference

        a, b = (named_run(target, out) for target in diff)
        result = render_difference(a, b, form, page)
    elif paths:
        from distbench.report import render_paths

        result = render_paths(runs, out, form, plots, page, chrome, by)
    else:
        from distbench.report import render
        from distbench.spec.file_io import no_garbage_collection

        # Garbage collection over all records takes a sixth of the time of a long report. Figures need collection.
        with nullcontext() if plots or page else no_garbage_collection():
            result = render(runs, out, form, plots, by, page, reproducers, full, again, chosen)
    for sentence in result.warnings:
        say(f"distbench: {sentence}", err=True)
    say(result.text)


def _reads_folder(runs: tuple[Path, ...]) -> bool:
    """Whether run files are searched in the results folder, because no RUN is a file or folder."""
    from distbench.records.results_folder import is_run_name, is_scenario_name

    return all(is_run_name(run) or is_scenario_name(run) for run in runs)


def _command(runs: tuple[Path, ...], out: Path, label: str, chosen: str = "") -> str:
    """The command that shows these runs again."""
    words = ["--results", str(out)] if out != Path("results") and _reads_folder(runs) else []
    words += ["--label", label] if label else []
    words += ["-k", chosen] if chosen else []
    command = shlex.join(["distbench", "report", *words, *map(str, runs[:MAX_NAMED])])
    return command + (" ..." if len(runs) > MAX_NAMED else "")


@click.command()
@click.argument("form", metavar="FORMAT", type=PluginChoice("exporters", EXPORTS))
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="Output file. Formats that write a folder need a new folder. Default: standard output.",
)
@results_option()
def export(form: str, paths: tuple[str, ...], output: Path | None, out: Path) -> None:
    """Write runs in another tool's FORMAT, one value per case and launch, never raw samples.

    \b
    FORMAT                  read by
    pytest-benchmark        pytest-benchmark compare
    customSmallerIsBetter,  github-action-benchmark
      customBiggerIsBetter
    pytorch                 PyTorch's benchmark database v3
    openmetrics             node_exporter's textfile collector
    parquet                 pandas: row per case and launch
    nccl-tests              readers of nccl-tests' -J (folder)
    tensorboard             tensorboard --logdir (folder)
    wandb                   wandb sync (folder)
    mlflow                  mlflow ui (SQLite file)
    run                     distbench (from nccl-tests -J)

    For Chakra traces of a simulated step, use simulate --chakra.

    \b
    Examples:
      distbench export pytest-benchmark runs/ -o 0001_new.json
      distbench export run all_reduce.json -o results/all_reduce.jsonl
    """
    from distbench.records.results_folder import named_runs

    exporter = EXPORTS.get(form) or load_plugin("exporters", form)
    exported = exporter(named_runs(expanded(paths), out))
    if isinstance(exported, dict):
        if output is None:
            raise UserError(f"export {form} writes {count_text(len(exported), 'file')}; give a new folder with -o")
        write_folder(output, "-o", exported.items())
    elif output:
        write(output, exported)
    elif isinstance(exported, bytes):
        raise UserError(f"export {form} writes a binary file; give its name with -o")
    else:
        say(exported, nl=False)


@click.command()
@results_option("DIR may be a file of another tool.")
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
    out: Path, folder: Path, num_run_pages: int, numbers: ColumnOptions, chosen: str, form: str, quiet: bool
) -> None:
    """Write static pages over all runs: trends per case, changes, regressions first.

    index.html has the changed cases with plots, filters, and links to a page per scenario and machine. distbench
    history reports the same changes. The pages need no server and no network.

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

    require_own(folder)
    index = open_index(out, numbers.columns(), progress_lines(quiet))
    if not index.launches:
        why = f" ({index.warnings[0]})" if index.warnings else ""
        raise UserError(f"--results {out} has no run file{why}; give a folder that distbench run wrote to")
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
