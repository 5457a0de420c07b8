"""A comparison and a stored baseline as text, Markdown, JSON, JUnit and annotations; the worst case first.

Text ends with the answer: severity, finding, next command.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import geometric_mean, stdev

from distbench.judge.gate import CaseVerdict, Gated, MetricVerdict
from distbench.records.baselines import launches_of, load_baseline
from distbench.records.launches import SECONDS, Unit, Value
from distbench.records.run_file import MUST_AGREE
from distbench.show.blocks import Block, Heading, Lines, Notes, Rows, Table, capped, markdown_of
from distbench.show.ci_formats import TOOL, CiOutcome, annotation, badge, junit_xml
from distbench.show.ci_formats import annotations as annotation_lines
from distbench.show.terminal import text_of
from distbench.show.units import NOTHING, rate_text, time_text, times_text
from distbench.spec.discovery import argument_of
from distbench.spec.printable_text import capped_lines, clean, count_text
from distbench.statistics.verdicts import (
    BROKEN,
    INCOMPARABLE,
    INCONCLUSIVE,
    JUDGED,
    METRICS,
    MISSING,
    NEW,
    PASS,
    REGRESSION,
)

PROVENANCE = ("git_commit", "torch", "nccl", "python")


def baseline_page(path: Path) -> str:
    """A stored baseline: provenance, and the mean and 10th percentile of each case, with the spread over launches."""
    baseline = load_baseline(path)
    launches, facts = launches_of(baseline, str(path)), baseline.facts
    facts_text = [f"{name} {facts[name]}" for name in (*PROVENANCE, *MUST_AGREE) if facts.get(name) is not None]
    lines = (f"{count_text(len(launches), 'launch', 'launches')}, saved at {baseline.saved_at}", ", ".join(facts_text))
    values: dict[str, list[Value]] = {}
    for launch in launches:
        for case_id, value in launch.cases.items():
            values.setdefault(case_id, []).append(value)
    rows = [(case_id, *_baseline_cells(of_case)) for case_id, of_case in values.items()]
    note = "mean, p10 (10th percentile): geometric mean over launches, and standard deviation of the logarithms"
    title, columns = f"{count_text(len(rows), 'case')}:", ("<case", "launches", "mean", "p10")
    table = Table(title, columns, rows, [note], optional=("launches",))
    return text_of([Heading(f"baseline {baseline.scenario}", 1), Lines(lines), table])


def _baseline_cells(values: Sequence[Value]) -> tuple[str, ...]:
    good = [value for value in values if value.status == "ok"]
    if not good:
        return "0", values[0].status, NOTHING
    return str(len(good)), *(_over_launches(times) for times in zip(*((v.mean_s, v.p10_s) for v in good), strict=True))


def _over_launches(times: Sequence[float]) -> str:
    """`1.00 ms, 1.9 %`: geometric mean, and the standard deviation of the logarithms."""
    spread = f"{100 * stdev(map(math.log, times)):.1f} %" if len(times) > 1 else NOTHING
    return f"{time_text(geometric_mean(times))}, {spread}"


MAX_ROWS = 40
MAX_PASSES = 10  # number of rows if every case passed
MAX_NAMED = 20
MANY_PAIRS = 40  # of more pairs, longer launches are the better advice
MAX_MARKDOWN_BYTES = 1 << 20  # of a GitHub step summary
MORE, MORE_LINES = "more: --format json", "... {} more such lines: --format json"
SCENARIO = ("<scenario",)  # column for several scenarios
OPTIONAL = ("pairs needed", "scenario", "metric", "detectable", "baseline")
COLUMNS = (
    *("<verdict", "<case", "<metric", "baseline", "candidate", "change", "95 % interval", "detectable"),
    "pairs needed",
)
NOTES = (
    "baseline, candidate: geometric mean over launches",
    "detectable: the smallest slowdown that these launches detect four times in five",
    "pairs needed: further pairs of launches (or launches per side) that would decide the case, if the true change "
    "equals the measured change",
)
OF_RECIPROCALS = (
    "if higher numbers are better, their reciprocals are judged: mean is the harmonic mean, p10 the 90th percentile, "
    "and the tolerance applies to the reciprocal"
)


def text(gated: Gated, strict: bool = False) -> str:
    """The comparison as text, with the answer at the end."""
    title = Heading(f"gate: {_sides(gated)}", 1)
    table_notes = [f"note: {note}" for note in NOTES] if any(case.metrics for case in gated.cases) else []
    notes = Notes((*_notes(gated), *table_notes))
    return text_of([title, *_tables(gated), *_bottom(gated), notes, Lines(answer(gated, strict))])


def answer(gated: Gated, strict: bool = False) -> tuple[str, str]:
    """The finding, with its severity first, and the next command."""
    summary = ", ".join(f"{count} {verdict}" for verdict, count in gated.counts.items()) or "no case"
    scenario = argument_of(gated.cases[0].scenario) if gated.cases else "SCENARIO"
    code = gated.exit_code(strict)
    if code == 1:
        severity, (finding, command) = "FAIL", _of_regression(gated.cases[0], scenario)
    elif code == 4:
        severity, (finding, command) = "UNKNOWN", _of_unknown(gated, scenario)
    elif code == 3 or gated.is_open:
        severity, (finding, command) = "INCONCLUSIVE", _of_undecided(gated, scenario)
    else:
        severity, (finding, command) = "PASS", _of_pass(gated)
    if gated.more and not gated.counts.get(INCOMPARABLE):
        more = "" if any(case.paired for case in gated.cases) else gated.more
        command = collect_text(more, 2 * max(gated.num_baseline, gated.options.least_launches(paired=True)))
    return f"{severity}: {summary}. {finding}", f"Next: {command}"


def collect_text(more: str, num_launches: int) -> str:
    """Return a sentence on how to collect launches for a verdict; `more` is the advice of a launch, or "" for pairs."""
    return f"alternate launches of both versions, in random order, {num_launches} times each   ({more})".removesuffix(
        "   ()"
    )


def number_text(stored: float, unit: Unit) -> str:
    """A number of a case, as the user gave it: `641 us`, `1,250 tokens/s`, `12.5`."""
    if unit.name == SECONDS.name:
        return time_text(unit.given(stored))
    return f"{rate_text(unit.given(stored))} {unit.name}".rstrip()


def _of_regression(worst: CaseVerdict, scenario: str) -> tuple[str, str]:
    command = f"distbench ab REF_A REF_B -- {scenario}   (measures both revisions again)"
    if worst.case_id.startswith("step/"):
        command = f"distbench run {scenario} --trace-paths   (shows where a step communicates)"
    return f"Worst: {_ratio(worst)}", command


def _of_unknown(gated: Gated, scenario: str) -> tuple[str, str]:
    broken = next((case for case in gated.cases if case.verdict in BROKEN), None)
    if broken is None:
        why = gated.why_nothing
        return (
            f"{why[:1].upper()}{why[1:]}",
            f"distbench ab REF_A REF_B -- {scenario}   (alternates launches of both sides)",
        )
    command = "distbench report CANDIDATE   (shows the failed cases)"
    if broken.verdict == MISSING:
        command = f"distbench run {scenario} --results CANDIDATE   (measures the missing cases)"
    if broken.verdict == INCOMPARABLE:
        field_name = broken.reason.partition(":")[0]
        command = f"distbench gate --allow-different {field_name} ...   (if the difference is intended)"
    return f"{broken.case_id}: {broken.reason}", command


def _of_undecided(gated: Gated, scenario: str) -> tuple[str, str]:
    undecided = [case for case in gated.cases if case.verdict == INCONCLUSIVE]
    needed = [metric.num_launches + metric.num_more for case in undecided for metric in case.metrics if metric.num_more]
    pairs = max(needed, default=0)
    command = f"distbench ab REF_A REF_B --pairs {pairs} -- {scenario}"
    if pairs > MANY_PAIRS:
        why = f"longer launches, on a quiet machine: {pairs:,} pairs of these would be needed"
        command = f"distbench ab REF_A REF_B -- {scenario} --passes 24 --budget 12   ({why})"
    if not needed or any(case.suspected for case in undecided):
        command = f"distbench ab REF_A REF_B -- {scenario}   (alternates launches of both sides)"
    if slower := gated.look_slower:
        return f"{len(slower)} measured {gated.worse} than the tolerance. Worst: {_ratio(slower[0])}", command
    return f"Undecided: {_ratio(max(undecided, key=lambda case: case.is_loose))}", command


def _of_pass(gated: Gated) -> tuple[str, str]:
    finding = f"No case is {gated.worse} than the baseline by more than the tolerance"
    metrics = [metric for case in gated.cases for metric in case.metrics]
    if detectable := max((metric.detectable or 0.0 for metric in metrics), default=0.0):
        changes = "slowdowns" if gated.worse == SECONDS.words[0] else "changes for the worse"
        finding += f". Detectable: {changes} of {100 * detectable:.0f} % or more in every case"
    return finding, "distbench baseline save CANDIDATE   (to compare later runs)"


def _ratio(case: CaseVerdict) -> str:
    """`step/x: mean 1.7x slower than the baseline (95 % CI 1.5-1.9x)`."""
    metric = max(case.metrics, key=lambda metric: metric.change) if case.verdict == INCONCLUSIVE else case.metrics[0]
    low, high = (None if end is None else 1 + end for end in (metric.low, metric.high))
    ratio = times_text(1 + metric.change, "the baseline", low, high, case.unit.words)
    return f"{case.case_id}: {metric.metric} {ratio}"


def markdown(gated: Gated, strict: bool = False) -> str:
    """The comparison as GitHub Markdown of at most 1 MiB: the worst cases first, the full list folded."""
    finding, next_command = answer(gated, strict)
    blocks: list[Block] = [Heading(f"gate: {finding}", 1), Lines((next_command, _sides(gated), *_notes(gated)))]
    page = markdown_of([*blocks, *_tables(gated), *_bottom(gated), Lines(NOTES)])
    head, tail = "\n\n<details><summary>Every case and metric</summary>\n\n```\n", "\n```\n\n</details>\n"
    room = MAX_MARKDOWN_BYTES - len((page + head + tail).encode()) - 100
    folded = [_all_cases(case) for case in gated.cases]
    num_kept = sum(size <= room for size in accumulate(len(lines.encode()) + 1 for lines in folded))
    kept = capped_lines(folded, num_kept, "... {} more cases: distbench gate --format json")
    return page + head + "\n".join(kept) + tail


def _sides(gated: Gated) -> str:
    sides = (gated.num_baseline, "baseline"), (gated.num_candidate, "candidate")
    return ", ".join(f"{count} {side} launch{'es' * (count != 1)}" for count, side in sides)


def _notes(gated: Gated) -> list[str]:
    lines = [f"warning: {sentence}" for sentence in gated.warnings]
    lines += gated.designs
    if any(case.unit.is_reciprocal for case in gated.cases):
        lines.append(OF_RECIPROCALS)
    lines += [f"allowed to differ: {stamp}" for stamp in gated.stamps]
    lines += [f"differs: {sentence}" for sentence in gated.shown]
    return capped_lines([*lines, _terms(gated)], MAX_NAMED, MORE_LINES)


def _terms(gated: Gated) -> str:
    options = gated.options
    shares = {metric: f"{100 * options.tolerances[metric]:g} %" for metric in METRICS}
    is_common = len(set(shares.values())) == 1
    tolerance = shares[METRICS[0]] if is_common else ", ".join(f"{metric} {share}" for metric, share in shares.items())
    floor = f" and {options.floor_s * 1e6:g} us" if options.floor_s else ""
    return f"tolerance {tolerance}{floor}, alpha {options.alpha:g} over {count_text(gated.num_tests, 'test')}"


def _tables(gated: Gated) -> list[Block]:
    blocks: list[Block] = []
    several = len({case.scenario for case in gated.cases}) > 1
    untimed = [case for case in gated.cases if case.verdict not in JUDGED]
    if untimed:
        reasons = [(case.verdict, case.case_id, *(case.scenario,) * several, case.reason) for case in untimed]
        columns = ("<verdict", "<case", *SCENARIO[:several], "<why")
        blocks.append(capped(Table("cases without a comparison:", columns, reasons, prose="why"), MAX_ROWS, MORE))
    timed = [case for case in gated.cases if case.metrics]
    worth = [case for case in timed if case.verdict != PASS] or timed
    if worth:
        cap = MAX_PASSES if worth[0].verdict == PASS else MAX_ROWS
        rows = Rows(worth, lambda case: _row(case, several))
        title = f"{len(worth)} of {len(timed)} compared cases:"
        columns = (*COLUMNS[:2], *SCENARIO[:several], *COLUMNS[2:])
        blocks.append(capped(Table(title, columns, rows, optional=OPTIONAL), cap, MORE))
    return blocks


def _row(case: CaseVerdict, several: bool) -> tuple[str, ...]:
    first = case.metrics[0]
    verdict = f"{case.verdict} ({case.suspected}?)" if case.suspected else case.verdict
    times = number_text(first.baseline_s, case.unit), number_text(first.candidate_s, case.unit)
    detectable = NOTHING if first.detectable is None else f"{100 * first.detectable:.0f} %"
    names = (case.case_id, case.scenario) if several else (case.case_id,)
    change = f"{100 * case.unit.change(first.change):+.1f} %", _interval_text(first, case.unit)
    more = "> 1000" if first.num_more is None else f"+{first.num_more}"
    if first.verdict != INCONCLUSIVE or first.suspected:
        more = NOTHING if first.verdict == INCONCLUSIVE else ""  # more launches cannot decide a suspected change
    return verdict, *names, first.metric, *times, *change, detectable, more


def _interval_text(metric: MetricVerdict, unit: Unit) -> str:
    """A change's interval as `[+3.1, +22.0]`, in percent."""
    if metric.low is None or metric.high is None:
        return NOTHING
    low, high = sorted(map(unit.change, (metric.low, metric.high)))
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]"


def _bottom(gated: Gated) -> list[Block]:
    """The reasons for inconclusive verdicts, and the numbers of passed and skipped cases."""
    counts = Counter(case.reason for case in gated.cases if case.verdict == INCONCLUSIVE)
    lines = [f"inconclusive ({count}): {reason}" for reason, count in counts.items()]
    passed = [case for case in gated.cases if case.verdict == PASS]
    if passed:
        worst = max(metric.high or 0.0 for case in passed for metric in case.metrics)
        lines.append(
            f"pass ({len(passed)}): at most {100 * worst:.1f} % {gated.worse} (upper end of the widest interval)"
        )
    if gated.num_not_run:
        lines.append(f"{count_text(gated.num_not_run, 'case')} skipped or unsupported on both sides")
    return [Lines(tuple(capped_lines(lines, MAX_NAMED, MORE_LINES)))] if lines else []


def _all_cases(case: CaseVerdict) -> str:
    """One case for the folded part, one line per metric."""
    head = f"{case.verdict}: {case.scenario}: {case.case_id}"
    parts = [head if not case.reason else f"{head}: {case.reason}"]
    for metric in case.metrics:
        p = "" if metric.p is None else f", adjusted p {metric.p:.2g}"
        change = f"{_change_text(metric, case.unit)} {_interval_text(metric, case.unit)}"
        parts.append(f"    {metric.metric}: {metric.verdict}: {change}{p}")
    parts += [f"    note: {note}" for note in case.notes]
    return "\n".join(map(clean, parts)).replace("```", "'''")


def _change_text(metric: MetricVerdict, unit: Unit) -> str:
    before, after = number_text(metric.baseline_s, unit), number_text(metric.candidate_s, unit)
    return f"{before} -> {after}, {100 * unit.change(metric.change):+.1f} %"


def _sentence(case: CaseVerdict) -> str:
    """One case in one line, for annotations and JUnit: the change, its interval, and the reason for the verdict."""
    if not case.metrics:
        return f"{case.case_id}: {case.reason}"
    first = case.metrics[0]
    interval = f", 95 % interval {_interval_text(first, case.unit)} %" if first.low is not None else ""
    return f"{case.case_id}: {first.metric} {_change_text(first, case.unit)}{interval}: {case.reason}"


JUNIT_TAGS = {REGRESSION: "failure", **dict.fromkeys(BROKEN, "error"), **dict.fromkeys((INCONCLUSIVE, NEW), "skipped")}


def json_text(gated: Gated, strict: bool = False) -> str:
    """The whole comparison as JSON; times in seconds, changes as shares, of reciprocals where higher is better."""
    record = {
        "exit_code": gated.exit_code(strict),
        "headline": gated.headline(strict),
        "counts": gated.counts,
        **{name: value for name, value in asdict(gated).items() if name != "cases"},
        "cases": [{**asdict(case), "suspected": case.suspected} for case in gated.cases],
    }
    with_nulls = json.loads(json.dumps(record), parse_constant=lambda _: None)  # for nan and infinity
    return json.dumps(with_nulls, indent=1, allow_nan=False)


def junit_text(gated: Gated, _: bool = False) -> str:
    """JUnit XML: regressions are failures, missing, invalid and incomparable cases are errors, other cases without
    verdict are skipped."""
    outcomes = [
        CiOutcome(case.scenario, case.case_id, f"{case.verdict}: {_sentence(case)}", JUNIT_TAGS.get(case.verdict))
        for case in gated.cases
    ]
    if gated.num_judged == 0:
        outcomes.append(CiOutcome(TOOL, "something was compared", gated.why_nothing, "error"))
    elif gated.is_open:
        outcomes.append(CiOutcome(TOOL, "the comparison is decided", gated.headline(), "skipped"))
    return junit_xml(outcomes)


def annotations(gated: Gated, strict: bool = False) -> str:
    """GitHub's workflow commands, one per line, the worst first. The last line of a severity counts the omitted
    commands."""
    levels: dict[str, list[tuple[str, str]]] = {"error": [], "warning": []}
    level_of = {**dict.fromkeys((REGRESSION, *BROKEN), "error"), INCONCLUSIVE: "error" if strict else "warning"}
    if gated.is_open:
        levels[level_of[INCONCLUSIVE]].append((TOOL, gated.headline(strict)))
    for case in gated.cases:
        if level := level_of.get(case.verdict):
            levels[level].append((f"{case.verdict}: {case.scenario}", _sentence(case)))
    lines = annotation_lines(levels)
    if gated.num_judged == 0:
        lines.insert(0, annotation("error", TOOL, gated.headline(strict)))
    return "\n".join(lines)


def badge_text(gated: Gated, strict: bool = False) -> str:
    """The JSON of a badge with the answer."""
    return badge(TOOL, answer(gated, strict)[0])


# Names of `--format`; judge/communication_signature.py has the names of the exact gate.
FORMS: dict[str, Callable[[Gated, bool], str]] = {
    **{"table": text, "markdown": markdown},
    **{"json": json_text, "junit": junit_text, "github": annotations, "badge": badge_text},
}
