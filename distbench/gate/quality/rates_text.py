"""The gate's rates as Markdown."""

from collections.abc import Mapping

from distbench.gate.quality.trial import CHANGES, QualityTrial, Rates, Rule, rates

OURS = "distbench gate"


def table(trial: QualityTrial, num_pairs: int, num_comparisons: int, seed: int, rules: Mapping[str, Rule]) -> str:
    """A row a rule, a column a change, in percent of comparisons.

    Args:
        num_pairs: of launches in each comparison.
        num_comparisons: for each change, and without one.
        seed: of orders and of which case is slowed down.
        rules: by name; the gate's is OURS, and only it has passes.
    """
    found = [name for name, change in CHANGES.items() if change.factor != 1.0]
    lines = [
        f"{trial.series.name}: {num_pairs} pairs, {len(trial.series.case_ids)} cases, {trial.series.num_launches} "
        f"launches: {num_comparisons} comparisons a column, in windows from {trial.num_starts(num_pairs)} starts",
        "",
        "| rule | any false alarm | "
        + " | ".join(f"{change} found" for change in found)
        + " | +20 % called a pass | +20 % headed PASS |",
        "|:---|---:|" + "---:|" * (len(found) + 2),
    ]
    for name, rule in rules.items():
        of = {change: rates(trial, num_pairs, change, num_comparisons, seed, rule) for change in ("none", *found)}
        none = of["none"]
        cells = [percent(none.false_jobs, none), *(percent(of[change].found, of[change]) for change in found)]
        slower = of["+20 %"]
        cells += [percent(each, slower) if name == OURS else "-" for each in (slower.passed, slower.headed_pass)]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def percent(count: int, of: Rates) -> str:
    """So many of all comparisons, `12.5`; a dash where there were none."""
    return f"{100 * count / of.num_comparisons:.1f}" if of.num_comparisons else "-"
