"""The commands `distbench gate`, `distbench baseline` and `distbench self-test`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from distbench.cli.main import WholeSentences
from distbench.cli.options import (
    MAX_LAUNCHES,
    PATH,
    ColumnOptions,
    OutputOptions,
    VerdictOptions,
    cases_option,
    expanded,
    format_option,
    new_folder,
    options_of,
    progress_lines,
    quiet_option,
    results_option,
    say,
    say_files,
    say_lines,
    verbose_option,
    width_option,
)
from distbench.spec.errors import UserError

USAGE = "distbench gate BASELINE... vs CANDIDATE..."


@click.command()
@click.argument("paths", nargs=-1, metavar="BASELINE... [vs] CANDIDATE...")
@options_of(VerdictOptions, "verdict")
@options_of(ColumnOptions, "numbers")
@options_of(OutputOptions, "output")
@cases_option
@results_option()
@width_option
@verbose_option
@click.pass_context
def gate(
    ctx: click.Context,
    paths: tuple[str, ...],
    verdict: VerdictOptions,
    numbers: ColumnOptions,
    output: OutputOptions,
    chosen: str,
    out: Path,
) -> None:
    """Fail if CANDIDATE is slower than BASELINE. One run file is one launch. Give several launches per side.

    Each side is folders, run files, quoted patterns, or stored baselines. With more than two paths, write the word vs
    between the sides. Launches of alternating sides are compared in pairs. Without alternation a slowdown is only a
    warning, unless --dedicated is given.

    Files of other tools are judged too: tables with a row per number (CSV, JSON lines, Parquet; --case and --value name
    the columns), nccl-tests -J, pytest-benchmark's JSON, vLLM's JSON, and torchtitan's log.

    The last lines are the answer (FAIL, UNKNOWN, INCONCLUSIVE or PASS) and the next command. The answer is INCONCLUSIVE
    if an undecided case was measured slower than the tolerance, or may be slower than three times the tolerance.

    Exit code: 0 pass or inconclusive, 1 regression, 2 usage error, 3 inconclusive under --strict,
    4 not comparable, missing, failed, or nothing measured, 70 internal error of distbench.

    \b
    Examples:
      distbench gate base/ new/
      distbench gate base/*.jsonl vs new/*.jsonl --tolerance 10%
      distbench gate baselines/ci-runner new/ --github --write junit=gate.xml
      distbench gate base.csv new.csv --case op,size --value time_us --pair run
    """
    if not paths:
        raise UserError(f"gate compares two sides: {USAGE}")
    output.files()  # rejected before anything is read
    from distbench.judge import gate_text
    from distbench.judge.gate import gate as judge
    from distbench.records.baselines import read_side
    from distbench.records.launches import with_cases

    options, warnings = verdict.terms(), list[str]()
    named = zip(("baseline", "candidate"), sides_of(paths, results=out), strict=True)
    columns = numbers.columns()
    left, right = with_cases([read_side(side, name, warnings, columns) for name, side in named], chosen)
    gated = judge(left, right, options, warnings)
    output.show(lambda form: gate_text.FORMS[form](gated, verdict.strict))
    ctx.exit(gated.exit_code(verdict.strict))


def sides_of(
    paths: Sequence[str], usage: str = USAGE, results: Path = Path("results")
) -> tuple[list[Path], list[Path]]:
    """Return the baseline's and the candidate's paths. Raise UserError if the sides are ambiguous or match no file."""
    from distbench.records.results_folder import named_runs

    has_word = "vs" in paths
    if not has_word and len(paths) > 2:
        unclear = f"{len(paths)} paths do not show where the candidate's begin"
        raise UserError(f"{unclear}; write the word vs between the two sides: {usage}")
    end = paths.index("vs") if has_word else 1
    left, right = paths[:end], paths[end + has_word :]
    if not left or not right or "vs" in right:
        raise UserError(f"{usage.split()[1]} compares two sides: {usage}")
    return [*named_runs(expanded(left), results)], [*named_runs(expanded(right), results)]


@click.group(cls=WholeSentences)
def baseline() -> None:
    """Save, list and show stored baselines: one value per launch, small enough for git.

    \b
    Example:
      distbench baseline save runs/
    """


@baseline.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@results_option("")
@format_option("table", "json")
def save(paths: tuple[str, ...], out: Path, form: str) -> None:
    """Store run files as baselines under baselines/MACHINE/ of the results folder.

    Baselines of the same scenario and mesh are replaced.

    \b
    Example:
      distbench baseline save runs/ && git add results/baselines
    """
    from distbench.records.baselines import read_side, save_baselines
    from distbench.records.results_folder import named_runs

    warnings: list[str] = []
    launches = read_side(named_runs(expanded(paths), out), "baseline", warnings)
    say_files(save_baselines(launches, out), form)
    for warning in warnings:
        say(f"distbench: {warning}", err=True)


@baseline.command("list")
@results_option("")
@format_option("table", "json")
@width_option
def list_baselines(out: Path, form: str) -> None:
    """List stored baselines.

    \b
    Example:
      distbench baseline list
    """
    from distbench.records.baselines import describe
    from distbench.records.results_folder import BASELINES
    from distbench.show import terminal
    from distbench.show.blocks import Table

    columns = ("<file", "<scenario", "<mesh", "launches", "cases", "<commit", "<saved at")
    rows = describe(out)
    if form == "json":
        names = [column.lstrip("<").replace(" ", "_") for column in columns]
        click.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1))
    elif rows:
        optional = ("saved at", "commit", "cases")
        say(terminal.text_of([Table(f"baselines under {out / BASELINES}:", columns, rows, optional=optional)]))
    else:
        say_lines([f"No baselines under {out / BASELINES}. Next: distbench baseline save RUN"])


@baseline.command()
@click.argument("file", type=PATH)
@format_option("table", "json")
@width_option
def show(file: Path, form: str) -> None:
    """Show one stored baseline: its origin, and each case's spread between launches.

    \b
    Example:
      distbench baseline show results/baselines/ci-runner/llama_2d.json
    """
    from distbench.judge.gate_text import baseline_page

    text = baseline_page(file)
    click.echo(json.dumps(json.loads(file.read_text(encoding="utf-8")), indent=1)) if form == "json" else say(text)


DEFAULT_RUN = ("collectives", "--quick", "--passes", "8")
NUM_PAIRS = (5, 10)
NUM_COMPARISONS = 200
SEED = 20260101


@click.command("self-test")
@click.argument("paths", nargs=-1, metavar="[FOLDER | FILE | -- SCENARIO... [RUN OPTIONS]]")
@click.option("--launches", type=click.IntRange(2, MAX_LAUNCHES), default=24, show_default=True, help="Launches made.")
@options_of(VerdictOptions, "verdict", "tolerance", "floor_us", "alpha", "min_launches")
@options_of(ColumnOptions, "numbers")
@format_option("table", "json")
@quiet_option
@width_option
def self_test(
    paths: tuple[str, ...], launches: int, verdict: VerdictOptions, numbers: ColumnOptions, form: str, quiet: bool
) -> None:
    """Measure the error rates of distbench gate on this machine, with launches of unchanged code.

    FOLDER contains run files of one revision, or files of another tool that gate reads. FILE is one such file. Without
    FOLDER or FILE, new launches are made with the arguments of distbench run after -- (default: collectives --quick
    --passes 8). The table shows how often the gate reports a slowdown of unchanged code, and how often the gate detects
    slowdowns that are added to one case.

    \b
    Examples:
      distbench self-test --launches 30 -- llama_2d --quick
      distbench self-test results/self-test/20260101T120000Z
    """
    from distbench.judge.ab import check_run_arguments, launch_unchanged
    from distbench.judge.gate_self_test import OURS, gate_rule, rates, recorded, table
    from distbench.records.foreign_numbers import NumberColumns

    options = verdict.terms()
    least, most = NUM_PAIRS
    if launches < 2 * least:
        raise UserError(f"--launches {launches} is too small; give at least {2 * least} for {least} pairs")
    columns, is_given = numbers.columns(), len(paths) == 1 and Path(paths[0]).exists()
    if is_given and not paths[0].endswith(".py"):
        folder = Path(paths[0])
    elif columns != NumberColumns():
        raise UserError("--launch, --case, --value, --better, --pair and --unit need one file or folder of numbers")
    else:
        check_run_arguments(paths)
        out = new_folder("self-test")
        folder = launch_unchanged(paths or DEFAULT_RUN, launches, out, progress_lines(quiet))
    series, rules = recorded(folder, columns), {OURS: partial(gate_rule, options=options)}
    num_pairs_here = [num_pairs for num_pairs in NUM_PAIRS if series.num_starts(num_pairs)]
    if form == "json":
        records = [
            {
                "num_pairs": num_pairs,
                "num_cases": len(series.case_ids),
                "num_launches": series.num_launches,
                "changes": {
                    change: asdict(rates(series, num_pairs, change, NUM_COMPARISONS, SEED, rules[OURS]))
                    for change in series.changes
                },
            }
            for num_pairs in num_pairs_here
        ]
        click.echo(json.dumps(records, indent=1))
        return
    if quiet:
        return
    say(
        f"Launches of unchanged code in {folder}, compared as ab does, in random order within each pair.\n"
        "A slowdown is added to the samples of one case at a time. The slowdown tail makes one sample in ten 3x "
        "slower.\n"
        "Figures are percentages of comparisons."
    )
    for num_pairs in num_pairs_here:
        say("\n" + table(series, num_pairs, NUM_COMPARISONS, SEED, rules))
    if series.num_launches < 2 * most:
        say(f"\nRates for {most} pairs need {2 * most} launches, not {series.num_launches}.")
