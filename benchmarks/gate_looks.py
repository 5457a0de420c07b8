"""The rates of `distbench ab`: launches in turn, a few looks at the verdict, an end as soon as it is settled."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from distbench.judge.ab import looks_of, settled_by
from distbench.judge.gate import gate
from distbench.judge.gate_self_test import CHANGES, RecordedSeries, TrialVerdicts, Window, percent, rates
from distbench.statistics.verdicts import Options


def looks_table(series: RecordedSeries, max_pairs: int, num_comparisons: int, seed: int) -> str:
    """A row a change, in percent of comparisons, as Markdown.

    Args:
        series: the launches.
        max_pairs: pairs at most, as `distbench ab --pairs`.
        num_comparisons: for each change, and without one.
        seed: of orders and of which case is slowed down.
    """
    options = Options()
    looks = looks_of(max_pairs, options)
    rule = partial(_until_settled, looks=looks, share=replace(options, alpha=options.alpha / len(looks)))
    lines = [
        f"{series.name}: up to {max_pairs} pairs (looks after {', '.join(map(str, looks))}), "
        f"{len(series.case_ids)} cases, {series.num_launches} launches: {num_comparisons} comparisons "
        f"a row, in windows from {series.num_starts(max_pairs)} starts",
        "",
        "| change | any false alarm | detected | verdict pass | pairs launched, mean |",
        "|:---|---:|---:|---:|---:|",
    ]
    for change in (name for name, put_in in CHANGES.items() if not put_in.spoils):
        seen = rates(series, max_pairs, change, num_comparisons, seed, rule)
        of_changed = ["-", "-"] if change == "none" else [percent(each, seen) for each in (seen.detected, seen.passed)]
        pairs = f"{seen.num_pairs / seen.num_comparisons:.1f}"
        lines.append(f"| {' | '.join([change, percent(seen.false_jobs, seen), *of_changed, pairs])} |")
    return "\n".join(lines)


def _until_settled(series: RecordedSeries, window: Window, looks: Sequence[int], share: Options) -> TrialVerdicts:
    """The verdicts of the look that settles it, or of the last."""
    baseline, candidate = series.sides(window)
    for num_pairs in looks:
        gated = gate(baseline[:num_pairs], candidate[:num_pairs], share)
        if settled_by(gated, looks[-1] - num_pairs):
            break
    return series.judged(gated)
