"""The rates of `distbench ab`: launches in turn, a few looks at the verdict, an end as soon as it is settled."""

from dataclasses import dataclass, replace

from distbench.ab.turns import looks_of, settled_by
from distbench.gate.gate import gate
from distbench.gate.options import Options
from distbench.gate.quality.trial import CHANGES, Trial, Window, windows
from distbench.gate.verdict import PASS, REGRESSION, Gated


@dataclass
class Looked:
    """What many comparisons with one change came to.

    Args:
        num_comparisons: comparisons made.
        false_jobs: those in which any unchanged case was called slower.
        found: those in which the changed case was called slower.
        passed: those in which the changed case was called a pass.
        num_pairs: pairs that were launched until the end, summed.
    """

    num_comparisons: int = 0
    false_jobs: int = 0
    found: int = 0
    passed: int = 0
    num_pairs: int = 0


def looks_table(trial: Trial, max_pairs: int, num_comparisons: int, seed: int) -> str:
    """A row a change, in percent of comparisons, as Markdown.

    Args:
        trial: the series.
        max_pairs: pairs at most, as `distbench ab --pairs`.
        num_comparisons: comparisons for each slowdown; unchanged launches are compared in every window once.
        seed: of which case is slowed down.
    """
    options, num_windows = Options(), trial.num_windows(max_pairs)
    looks = looks_of(max_pairs, options.min_launches, options.alpha)
    lines = [
        f"{trial.series.name}: up to {max_pairs} pairs (looks after {', '.join(map(str, looks))}), "
        f"{len(trial.series.case_ids)} cases, {trial.series.num_launches} launches: all {num_windows} windows "
        f"unchanged, {num_comparisons} comparisons a slowdown",
        "",
        "| change | any false alarm | found | called a pass | pairs launched, mean |",
        "|:---|---:|---:|---:|---:|",
    ]
    for change in CHANGES:
        count = num_windows if change == "none" else num_comparisons
        seen = _looked(trial, change, looks, count, seed, options)
        found = "-" if change == "none" else _percent(seen.found, seen)
        passed = "-" if change == "none" else _percent(seen.passed, seen)
        pairs = f"{seen.num_pairs / max(seen.num_comparisons, 1):.1f}"
        lines.append(f"| {change} | {_percent(seen.false_jobs, seen)} | {found} | {passed} | {pairs} |")
    return "\n".join(lines)


def _looked(trial: Trial, change: str, looks: tuple[int, ...], count: int, seed: int, options: Options) -> Looked:
    share = replace(options, alpha=options.alpha / len(looks))
    seen = Looked()
    for window in windows(trial, looks[-1], change, count, seed):
        gated, num_pairs = _until_settled(trial, window, looks, share)
        changed = trial.series.case_ids[window.changed]
        slower = {case.case_id for case in gated.cases if case.verdict == REGRESSION}
        seen.num_comparisons += 1
        seen.false_jobs += bool(slower - ({changed} if window.factor != 1.0 else set()))
        seen.found += changed in slower
        seen.passed += any(case.case_id == changed and case.verdict == PASS for case in gated.cases)
        seen.num_pairs += num_pairs
    return seen


def _until_settled(trial: Trial, window: Window, looks: tuple[int, ...], share: Options) -> tuple[Gated, int]:
    baseline, candidate = trial.launches(window, False), trial.launches(window, True)
    for num_pairs in looks:
        gated = gate(baseline[:num_pairs], candidate[:num_pairs], share)
        if settled_by(gated):
            break
    return gated, num_pairs


def _percent(count: int, of: Looked) -> str:
    return f"{100 * count / of.num_comparisons:.1f}" if of.num_comparisons else "-"
