"""The gate's rates as Markdown."""

from collections.abc import Mapping
from functools import partial

from distbench.compare.options import Options
from distbench.gate.quality.trial import CHANGES, OURS, QualityTrial, Rates, Rule, judged_once, rates


def table(
    trial: QualityTrial,
    num_pairs: int,
    num_comparisons: int,
    seed: int,
    peers: "dict[str, Rule] | None" = None,
    options: Options | None = None,
) -> str:
    """A row a rule, a column a change, in percent of comparisons.

    False alarms are counted over all windows, each once: there are no more A/A comparisons in a series than that.

    Args:
        trial: the series.
        num_pairs: pairs of launches in each comparison.
        num_comparisons: comparisons for each slowdown.
        seed: of which case is slowed down.
        peers: other rules by name.
        options: the gate's terms.
    """
    num_windows, judge = trial.num_windows(num_pairs), partial(judged_once, options=options)
    by_change = {
        change: rates(
            trial, num_pairs, change, num_windows if change == "none" else num_comparisons, seed, peers, judge
        )
        for change in CHANGES
    }
    found = [change for change in CHANGES if change != "none"]
    lines = [
        f"{trial.series.name}: {num_pairs} pairs, {len(trial.series.case_ids)} cases, {trial.series.num_launches} "
        f"launches: all {num_windows} windows unchanged, {num_comparisons} comparisons a slowdown",
        "",
        "| rule | any false alarm | " + " | ".join(f"{change} found" for change in found) + " | +20 % called a pass |",
        "|:---|---:|" + "---:|" * (len(found) + 1),
    ]
    return "\n".join([*lines, *(_row(name, by_change) for name in (OURS, *(peers or {})))])


def _row(name: str, by_change: Mapping[str, Mapping[str, Rates]]) -> str:
    of = {change: by_change[change][name] for change in CHANGES}
    cells = [percent(of[change].found, of[change]) for change in CHANGES if change != "none"]
    passed = percent(of["+20 %"].passed, of["+20 %"]) if name == OURS else "-"
    return f"| {name} | {percent(of['none'].false_jobs, of['none'])} | {' | '.join(cells)} | {passed} |"


def percent(count: int, of: Rates) -> str:
    """So many of all comparisons, `12.5`; a dash where there were none."""
    return f"{100 * count / of.num_comparisons:.1f}" if of.num_comparisons else "-"
