"""The command `distbench compare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distbench.cli.gate import sides_of
from distbench.cli.options import (
    VerdictOptions,
    cases_option,
    format_option,
    options_of,
    results_option,
    say,
    verbose_option,
    width_option,
)

if TYPE_CHECKING:
    from distbench.judge.compare_runs import SideBySide


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="A... [vs] B...")
@options_of(VerdictOptions, "verdict", "min_launches", "allow_different")
@cases_option
@results_option()
@format_option("table", "markdown", "csv", "json")
@width_option
@verbose_option
def compare(paths: tuple[str, ...], verdict: VerdictOptions, chosen: str, out: Path, form: str) -> None:
    """Show two runs side by side, case by case. A is the baseline, B the candidate.

    Each side is a run file or a folder of run files. With several paths per side, write the word vs between the sides.
    With one launch per side, the comparison shows the intervals of its passes and has no verdict. Several launches per
    side are compared by the statistics of distbench gate, without a tolerance. Use distbench ab to measure several
    launches per side.

    If a side is simulated, the predicted times are shown next to the times of the other side, with a ratio but no
    interval.

    -v lists the differences between the environments. Runs of different machines, meshes or devices are not compared.

    \b
    Examples:
      distbench compare before.jsonl after.jsonl
      distbench compare last~1 last
      distbench compare old/ new/
      distbench compare 'old/*.jsonl' vs 'new/*.jsonl' --format csv
    """
    sides = sides_of(paths, "distbench compare A... vs B...", out)
    say(text_of(compared(*sides, verdict, chosen), form))


def compared(a: Sequence[Path], b: Sequence[Path], verdict: VerdictOptions, cases: str = "") -> "SideBySide":
    """Return the comparison of two sides. Raise UserError if a path cannot be read or no case can be compared."""
    from distbench.judge.compare_runs import predicted_side_by_side, side_by_side
    from distbench.records.results_folder import collect, with_cases
    from distbench.spec.file_io import no_garbage_collection

    options = verdict.terms()
    with no_garbage_collection():
        (left, left_warnings), (right, right_warnings) = (collect(tuple(paths), None) for paths in (a, b))
        left, right = (with_cases(runs, cases) for runs in (left, right))
        name_a, name_b = (", ".join(map(str, paths[:2])) + (", ..." if len(paths) > 2 else "") for paths in (a, b))
        is_predicted = any(run.is_simulated for run in (*left, *right))
        compare_them = predicted_side_by_side if is_predicted else side_by_side
        return compare_them(left, right, (name_a, name_b), options, [*left_warnings, *right_warnings])


def text_of(comparison: "SideBySide", form: str) -> str:
    """Return the text of a comparison in one format of --format."""
    from distbench.judge.compare_runs import blocks_of
    from distbench.report import DATA_FORMS, data_text
    from distbench.show.terminal import shown

    return data_text(comparison.frame, form) if form in DATA_FORMS else shown(blocks_of(comparison), form)
