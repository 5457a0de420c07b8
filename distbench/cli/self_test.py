"""The command `distbench self-test`."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from distbench.cli.gate import VerdictOptions
from distbench.cli.options import (
    MAX_LAUNCHES,
    ColumnOptions,
    format_option,
    new_folder,
    options_of,
    progress_lines,
    quiet_option,
    say,
    width_option,
)
from distbench.spec.errors import UserError

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
