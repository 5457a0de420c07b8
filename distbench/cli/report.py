"""The commands `distbench report` and `distbench export`."""

import shlex
from contextlib import nullcontext
from pathlib import Path

import click

from distbench.cli.options import (
    PATH,
    PluginChoice,
    cases_option,
    expanded,
    format_option,
    given,
    refuse_with,
    refuse_without,
    results_option,
    say,
    verbose_option,
    width_option,
    write,
)
from distbench.records.exports import EXPORTS
from distbench.spec.errors import UserError
from distbench.spec.plugins import load_plugin
from distbench.spec.printable_text import count_text

MAX_NAMED = 3


@click.command()
@click.argument("runs", nargs=-1, type=PATH, metavar="[RUN...]")
@format_option("table", "markdown", "csv", "json")
@click.option("--page", type=PATH, metavar="FILE", help="Write all of it as one HTML page.")
@click.option("--plots", type=PATH, metavar="DIR", help="Draw plots into this folder. As PNG and SVG.")
@click.option(
    "--reproducers",
    type=PATH,
    metavar="DIR",
    help="Also write a stand-alone script into this folder per cause of wrong or broken redistributions.",
)
@click.option("--paths", is_flag=True, help="Show the cost of each path in the steps of run --trace-paths.")
@click.option("--chrome", type=PATH, metavar="FILE", help="With --paths: also write one trace for Perfetto.")
@click.option(
    "--diff", nargs=2, type=PATH, metavar="A B", help="Show what traced step A communicates more or less than B."
)
@click.option("--group-by", metavar="COLUMN,...", help="Summarise by these columns instead of listing.")
@click.option(
    "--label", default="", metavar="TEXT", help="Label of the runs. Shows all runs of run --label TEXT, as @TEXT does."
)
@cases_option
@click.option("--full", is_flag=True, help="Show every table of every scenario instead of the summary.")
@click.option(
    "--results",
    "out",
    type=PATH,
    metavar="DIR",
    default=Path("results"),
    help="Results folder. The latest run and names of runs are looked up there. [results]",
)
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
    """Show measured runs: a summary first; without RUN, of every scenario of the latest `distbench run`.

    A RUN is a run file, a folder of run files, last, last~1, @LABEL or a commit. It may also be the name of a scenario:
    then its own tables are shown; --full shows those of all. Runs with more than torch's two planners, such as those of
    redistribute_lab, get a summary of the time that greedy wastes, the predictions of min_cost that fail, and better
    choices.

    With --paths a RUN may be RUN::PART, with a part of the id of one case, such as the variant's name. A and B of
    --diff may be RUN::PART too: two runs, or two variants of one run. A + in the result is more in A than in B.

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
        refuse_with("--paths, where RUN::PART chooses cases", "chosen")
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
        from distbench.records.run_file import no_garbage_collection
        from distbench.report import render

        # Looking for garbage among all records again and again is a sixth of a long report. Figures do leave some.
        with nullcontext() if plots or page else no_garbage_collection():
            result = render(runs, out, form, plots, by, page, reproducers, full, again, chosen)
    for sentence in result.warnings:
        say(f"distbench: {sentence}", err=True)
    say(result.text)


def _reads_folder(runs: tuple[Path, ...]) -> bool:
    """Whether run files are looked for in the results folder: where no RUN is a file or folder."""
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
    "-o", "--output", type=PATH, metavar="FILE", help="Output file, or a new folder. Default: standard output."
)
@results_option
def export(form: str, paths: tuple[str, ...], output: Path | None, out: Path) -> None:
    """Write runs in another tool's FORMAT, one value per launch, never raw samples.

    \b
    FORMAT                  read by
    pytest-benchmark        pytest-benchmark compare
    customSmallerIsBetter,  github-action-benchmark: times or rates
      customBiggerIsBetter
    pytorch                 PyTorch's benchmark database, schema v3
    openmetrics             node_exporter's textfile collector
    parquet                 pandas, DuckDB: a row per case and launch
    nccl-tests              readers of nccl-tests' -J (folder)
    tensorboard             tensorboard --logdir (folder)
    wandb                   wandb sync (folder)
    mlflow                  mlflow ui (SQLite file)
    run                     distbench report: a file of nccl-tests (-J) as
                            a run file

    \b
    Examples:
      distbench export pytest-benchmark runs/ -o 0001_new.json
      distbench export run all_reduce.json -o results/all_reduce.jsonl
    """
    from distbench.records.results_folder import named_runs

    exporter = EXPORTS.get(form) or load_plugin("exporters", form)
    exported = exporter(named_runs(expanded(paths), out))
    if isinstance(exported, dict):
        write_folder(output, form, exported)
    elif output:
        write(output, exported)
    elif isinstance(exported, bytes):
        raise UserError(f"export {form} writes a binary file; give its name with -o")
    else:
        say(exported, nl=False)


def write_folder(folder: Path | None, form: str, files: dict[str, bytes]) -> None:
    """Write the files of an export to a new folder. Raise UserError if there is no folder, or it is not new."""
    if folder is None:
        raise UserError(f"export {form} writes {count_text(len(files), 'file')}; give a new folder with -o")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} is not a new folder; give another with -o")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, content)
