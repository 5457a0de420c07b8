"""The record of published steps (distbench/simulate/accuracy) next to their simulation; `python -m
benchmarks.bench_accuracy`.

Only held-out rows, of sources that nothing was fitted to. Each row's error bar is from the held-out rows of all other
sources. Recordings stay in results/recordings, named by their content, so that a second run only replays.
"""

import math
import sys
from pathlib import Path

from benchmarks.claims import Claim, Row
from distbench.search.published_comparison import blocks_of, compared, median_error, orders_of, residuals_of, worst_of
from distbench.show.terminal import shown
from distbench.simulate.error_bars import bar_rows, coverage, difference_errors
from distbench.simulate.published import SHIPPED, published_rows
from distbench.statistics.intervals import median

FOLDER = Path(__file__).parent.parent / "results" / "recordings"
CLAIMS = (
    Claim(
        "published training steps of sources that nothing was fitted to: rows; median error of the step time; worst "
        "without a stated cause",
        "{:.0f}; {:.1%}; {:.0%}",
        "at least 40; at most 6 %; 20 %",
        ("held-out: rows", "held-out: median", "held-out: worst"),
    ),
    Claim(
        "the same rows within their 90 % error bar, which is from all other sources",
        "{:.0%}",
        "85 to 95 %",
        ("held-out: within the bar",),
    ),
    Claim(
        "reserved memory of the same rows: rows; median error; worst",
        "{:.0f}; {:.1%}; {:.0%}",
        "at most 4 %; 15 %",
        ("held-out: rows with memory", "held-out: median of memory", "held-out: worst of memory"),
    ),
    Claim(
        "pairs of rows of one source and model, over 5 % apart, in the right order; error of a ratio of two plans",
        "{:.0%} of {:.0f}; {:.1%}",
        "at least 98 %; at most 10 %",
        ("pairs: in order", "pairs: number", "pairs: error"),
    ),
    Claim(
        "held-out rows of the record that no scenario expresses",
        "{:.0f}",
        "each with its reason",
        ("rows not simulated",),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """Rows for the benchmark table; the comparison goes to stderr."""
    rows = [row for row in published_rows(SHIPPED) if row.split == "held-out"]
    results = compared(rows, FOLDER, lambda *_: None)
    print(shown(blocks_of(results), "table"), file=sys.stderr)
    simulated = [result for result in results if result.step_s is not None]
    held_out = [result for result in simulated if result.row.split == "held-out"]
    usable = [result for result in held_out if not result.row.stated_cause]
    residuals = bar_rows(residuals_of(held_out, "").rows)
    inside, count = coverage(residuals)
    memory = [abs(math.expm1(error)) for result in held_out if (error := result.memory_log_error) is not None]
    right, num_pairs = orders_of(residuals, held_out)
    errors = difference_errors(residuals)
    return [
        ("held-out: rows", float(len(held_out)), -40.0),
        ("held-out: median", median_error(held_out), math.inf),
        ("held-out: worst", abs(math.expm1(worst_of(usable).log_error)), math.inf),
        ("held-out: within the bar", inside / count, -0.85),
        ("held-out: rows with memory", float(len(memory)), math.inf),
        ("held-out: median of memory", median(memory), math.inf),
        ("held-out: worst of memory", max(memory), math.inf),
        ("pairs: in order", right / num_pairs, math.inf),
        ("pairs: number", float(num_pairs), math.inf),
        ("pairs: error", errors.same_kind if errors is not None else math.nan, math.inf),
        ("rows not simulated", float(len(results) - len(simulated)), math.inf),
    ]


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:g} (allowed {allowed:g})")
