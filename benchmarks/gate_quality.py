"""How often the timing gate cries wolf and how often it finds a slowdown, beside other tools on the same series.

    python -m benchmarks.gate_quality quiet=runs/quiet loaded=runs/loaded     (recorded launches of unchanged code)
    python -m benchmarks.gate_quality --synthetic                             (checks the arithmetic, not the claim)
    python -m benchmarks.gate_quality --ab 20 quiet=runs/quiet                (as `distbench ab` looks at them)

How comparisons are cut out of a series stands in distbench/judge/gate_self_test.py; `distbench self-test` makes
the same table of launches of its own, without the other tools.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gate_looks import looks_table
from benchmarks.gate_peers import RULES
from benchmarks.gate_series import NOISES, synthetic
from distbench.judge.gate_self_test import OURS, RecordedSeries, gate_rule, recorded, table
from distbench.spec import UserError


def main(arguments: Sequence[str]) -> int:
    """Print a table for each series and number of pairs; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", nargs="*", metavar="NAME=FOLDER", help="recorded launches of unchanged code")
    parser.add_argument("--synthetic", action="store_true", help="synthetic series instead")
    parser.add_argument("--pairs", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--ab", type=int, metavar="PAIRS", help="ab of so many pairs at most, with its looks, instead")
    parser.add_argument("--comparisons", type=int, default=400)
    parser.add_argument("--seed", type=int, default=20260101)
    given = parser.parse_args(arguments)
    if not given.series and not given.synthetic:
        parser.error("give recorded series as NAME=FOLDER, or --synthetic")
    try:
        series = [synthetic(name) for name in NOISES] if given.synthetic else [_named(text) for text in given.series]
    except UserError as error:
        parser.error(str(error))
    counts = given.pairs if given.ab is None else [given.ab]
    most = max(counts)
    if min(*counts, given.comparisons) < 1:
        parser.error("--pairs, --ab and --comparisons are 1 or more")
    for one in series:
        if 2 * most > one.num_launches:
            parser.error(
                f"{one.name} has {one.num_launches} launches; {most} pairs take {2 * most}: ask for fewer pairs"
            )
        print(f"{one.name}: {one.origin}\n")
        if given.ab is not None:
            print(looks_table(one, given.ab, given.comparisons, given.seed) + "\n", flush=True)
            continue
        for num_pairs in given.pairs:
            print(table(one, num_pairs, given.comparisons, given.seed, {OURS: gate_rule, **RULES}) + "\n", flush=True)
    return 0


def _named(text: str) -> RecordedSeries:
    name, _, folder = text.rpartition("=")
    series = recorded(Path(folder))
    return RecordedSeries(name or series.name, series.case_ids, series.samples_s, series.origin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
