"""`distbench compare`: compare two sides, measured or simulated, case by case.

If both sides have several launches, the gate's engine gives verdicts without a tolerance. Two single launches get no
verdict, because times differ between launches and an interval covers only the passes within a launch.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distbench.judge.gate import OF_LATENCIES, CaseVerdict, Gated, gate, load_conflict
from distbench.judge.paired_launches import MAX_LISTED, NOT_ALTERNATING, Pairing
from distbench.records.dataframe import Row, frame_of, new_frame, records_of
from distbench.records.launches import launch_of
from distbench.records.run_file import SIMULATED, Run, basis_text
from distbench.show.blocks import (
    Block,
    Heading,
    Lines,
    Notes,
    Table,
    TableColumn,
    TableColumns,
    capped,
    changes_in,
    table_of,
)
from distbench.show.units import decimal_text, spread_of, time_text, times_text
from distbench.spec.discovery import argument_of
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text, listed
from distbench.statistics.intervals import median
from distbench.statistics.verdicts import (
    FASTER,
    IMPROVEMENT,
    INCOMPARABLE,
    INCONCLUSIVE,
    METRICS,
    MISSING,
    NEW,
    PASS,
    REGRESSION,
    SLOWER,
    WITHIN_NOISE,
    Options,
)

if TYPE_CHECKING:
    import pandas as pd

# The gate's verdicts, without a tolerance: b compared with a.
WORDS = {REGRESSION: SLOWER, IMPROVEMENT: FASTER, PASS: WITHIN_NOISE, INCONCLUSIVE: WITHIN_NOISE}
NOT_DECIDED, UNDECIDED = "not told", "undecided"  # in data; in text
ALONE = {MISSING: "only in A", NEW: "only in B"}
PREDICTED = "predicted"
LAUNCH_COLUMNS = ("median_s", "q1_s", "q3_s", "ci_low_s", "ci_high_s")
Key = tuple[str, str]  # scenario, case id


@dataclass(frozen=True)
class ComparedCase:
    """The comparison of one case.

    Args:
        verdict: "slower", "faster" (b than a), "within noise" or NOT_DECIDED; without a ratio "only in A", "only in B",
            "invalid", "missing" or "incomparable".
        why: one sentence, for a verdict that does not depend on times.
        of: the compared statistic: "median" for one launch per side, "predicted" for a simulated side, else the gate's
            metric.
        a, b: column of LAUNCH_COLUMNS to seconds; None with several launches per side.
        a_s, b_s: time of the side in seconds, nan without a time.
        ratio: b over a. Its 95 % interval is `ratio_low` to `ratio_high`, or nan for one launch per side.
        num_launches: number of pairs, or of launches on the smaller side.
    """

    scenario: str
    case_id: str
    verdict: str
    why: str = ""
    of: str = ""
    a: Row | None = None
    b: Row | None = None
    a_s: float = math.nan
    b_s: float = math.nan
    ratio: float = math.nan
    ratio_low: float = math.nan
    ratio_high: float = math.nan
    num_launches: int = 0


@dataclass(frozen=True)
class SideBySide:
    """The comparison of two sides.

    Args:
        names: the user's names of the sides.
        cases: in the order in which they were measured.
        gated: the outcome of the gate's engine, with designs, differences of the environment and warnings.
        load: a sentence if other processes used more CPU time on one side, or "".
    """

    names: tuple[str, str]
    cases: list[ComparedCase]
    gated: Gated
    load: str = ""

    @property
    def single(self) -> list[ComparedCase]:
        """Cases measured by one launch per side."""
        return [case for case in self.cases if case.a is not None]

    @property
    def repeated(self) -> list[ComparedCase]:
        """Cases measured by several launches per side."""
        return [case for case in self.cases if case.a is None and case.num_launches]

    @property
    def uncompared(self) -> list[ComparedCase]:
        """Cases without a ratio."""
        return [case for case in self.cases if not case.num_launches]

    @property
    def frame(self) -> "pd.DataFrame":
        """A frame with FRAME_COLUMNS and one row per case; times in seconds."""
        rows = []
        for case in self.cases:
            row: dict[str, Any] = {**vars(case), "case": case.case_id}
            for side, launch in (("a", case.a), ("b", case.b)):
                row |= {f"{side}_{end}_s": (launch or {}).get(f"ci_{end}_s", math.nan) for end in ("low", "high")}
            rows.append(row)
        return new_frame(rows, FRAME_COLUMNS)


# docs/run-file.md describes each column.
FRAME_COLUMNS = (
    *("scenario", "case", "verdict", "why", "of", "num_launches", "a_s", "b_s"),
    *("a_low_s", "a_high_s", "b_low_s", "b_high_s", "ratio", "ratio_low", "ratio_high"),
)


def side_by_side(
    a: Sequence[Run], b: Sequence[Run], names: tuple[str, str], options: Options, warnings: Sequence[str] = ()
) -> SideBySide:
    """Compare two sides.

    Args:
        a, b: the runs of each side, one per launch and scenario.
        names: the sides' names in messages.
        options: options of the gate; tolerances are ignored.

    Raises:
        UserError: the sides have no comparable case, or a run is on both sides.
    """
    left, right = ([launch_of(run) for run in side] for side in (a, b))
    gated = gate(left, right, replace(options, tolerances=dict.fromkeys(METRICS, 0.0)), warnings)
    frames = frame_of(a), frame_of(b)
    sides, computes = [_measured_once(frame) for frame in frames], [_computes_of(frame) for frame in frames]
    differing = {
        key: (computes[0][key], text) for key, text in computes[1].items() if computes[0].get(key, text) != text
    }
    order = {case["case"]["id"]: number for number, case in enumerate(case for run in (*a, *b) for case in run.cases)}
    cases = [_compared(case, sides, differing.get(_key_of(case)), gated.options) for case in gated.cases]
    cases.sort(key=lambda case: (case.scenario, order.get(case.case_id, 0)))
    if not any(case.num_launches for case in cases):
        raise UserError(_nothing_to_compare(cases, names))
    unpaired = Pairing(tuple(range(len(left))), tuple(range(len(right))), refusal=NOT_ALTERNATING)
    return SideBySide(names, cases, gated, load_conflict(left, right, unpaired))


def _measured_once(frame: "pd.DataFrame") -> dict[Key, Row]:
    """LAUNCH_COLUMNS of each case that only one launch of this side measured."""
    frame = frame[frame["status"] == "ok"]
    keys = list(zip(frame["scenario"], frame["id"], strict=True))
    counts = Counter(keys)
    rows = records_of(frame[list(LAUNCH_COLUMNS)])
    return {key: row for key, row in zip(keys, rows, strict=True) if counts[key] == 1}


def _computes_of(frame: "pd.DataFrame") -> dict[Key, str]:
    rows = frame[frame["computes"].notna()]
    return dict(zip(zip(rows["scenario"], rows["id"], strict=True), rows["computes"], strict=True))


def _key_of(case: CaseVerdict) -> Key:
    # The scenario's name precedes the fields in which groups of its launches differ.
    return case.scenario.partition(" (")[0], case.case_id


def _compared(
    case: CaseVerdict, sides: Sequence[dict[Key, Row]], differing: tuple[str, str] | None, options: Options
) -> ComparedCase:
    if not case.metrics:
        return ComparedCase(case.scenario, case.case_id, ALONE.get(case.verdict, case.verdict), case.reason)
    if differing:
        why = f"the two steps compute differently ({differing[0]} in the baseline, {differing[1]} in the candidate)"
        return ComparedCase(case.scenario, case.case_id, INCOMPARABLE, why)
    first = case.metrics[0]
    a, b = (side.get(_key_of(case)) for side in sides)
    if a and b:
        times = a["median_s"], b["median_s"], b["median_s"] / a["median_s"]
        verdict = NOT_DECIDED, "one launch per side", "median"
        return ComparedCase(case.scenario, case.case_id, *verdict, a, b, *times, num_launches=1)
    # An inconclusive case is within noise if it had enough launches and no doubt prevented a verdict.
    enough = any(metric.num_launches >= options.least_launches(case.paired) for metric in case.metrics)
    is_shown = case.verdict != INCONCLUSIVE or (enough and not case.suspected)
    return ComparedCase(
        case.scenario,
        case.case_id,
        WORDS[case.verdict] if is_shown else NOT_DECIDED,
        "" if is_shown else case.reason,
        first.metric,
        a_s=first.baseline_s,
        b_s=first.candidate_s,
        ratio=1 + first.change,
        ratio_low=math.nan if first.low is None else 1 + first.low,
        ratio_high=math.nan if first.high is None else 1 + first.high,
        num_launches=first.num_launches,
    )


def _nothing_to_compare(cases: Sequence[ComparedCase], names: tuple[str, str]) -> str:
    a, b = names
    alone = [{case.scenario for case in cases if case.verdict == word} for word in ALONE.values()]
    if cases and alone[0] | alone[1] == {case.scenario for case in cases} and not alone[0] & alone[1]:
        of_a, of_b = (", ".join(sorted(scenarios)) or "no scenario" for scenarios in alone)
        return f"{a} and {b} are not comparable: {a} has {of_a}, but {b} has {of_b}; give runs of one scenario"
    reasons = list(dict.fromkeys(case.why for case in cases if case.verdict == INCOMPARABLE))
    reasons = reasons or list(dict.fromkeys(case.why for case in cases)) or ["neither has a case"]
    reason = listed(reasons, 1, rest=" (and {} more such reasons)")
    allow = "; --allow-different FIELD permits a difference" if "in the candidate" in reasons[0] else ""
    return f"{a} (the baseline) and {b} (the candidate) have no comparable case: {reason}{allow}"


def predicted_side_by_side(
    a: Sequence[Run], b: Sequence[Run], names: tuple[str, str], options: Options, warnings: Sequence[str] = ()
) -> SideBySide:
    """Compare predicted times, and medians of measured sides, with the parameters of `side_by_side`.

    Raises:
        UserError: no case is on both sides.
    """
    sides = [_times(runs) for runs in (a, b)]
    if not sides[0].keys() & sides[1].keys():
        step_texts = [listed([name for _, name in times], MAX_LISTED) or "no step" for times in sides]
        why = f"the sides share no step: the first has {step_texts[0]}, but the second has {step_texts[1]}"
        raise UserError(f"{names[0]} and {names[1]} are not comparable: {why}; simulate both with the same inputs")
    cases = [_predicted_case(key, *sides) for key in dict.fromkeys((*sides[0], *sides[1]))]
    gated = Gated([], options, len(a), len(b), warnings=[*warnings, *_origins(a, b)])
    return SideBySide(names, cases, gated)


def _times(runs: Sequence[Run]) -> dict[Key, float]:
    """The time of each step in seconds: predicted for a simulated step, else the median of all samples."""
    times_by_step: dict[Key, list[float]] = {}
    for run in runs:
        for case in run.cases:
            times = case.get("samples_s") or ()
            if case.get(SIMULATED):
                times = [*filter(None, [(case.get("counters") or {}).get("predicted_s")])]
            if case["status"] == "ok" and times:
                times_by_step.setdefault((run.scenario, case["case"]["id"]), []).append(median(times))
    return {key: median(values) for key, values in times_by_step.items()}


def _predicted_case(key: Key, a: dict[Key, float], b: dict[Key, float]) -> ComparedCase:
    if key not in a or key not in b:
        return ComparedCase(*key, ALONE[MISSING if key in a else NEW], "the other side lacks the case")
    why = "a simulation predicts a time without an interval"
    return ComparedCase(*key, PREDICTED, why, PREDICTED, a_s=a[key], b_s=b[key], ratio=b[key] / a[key], num_launches=1)


def _origins(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """The hardware of each side, simulated or measured, and the source of the predictions."""
    lines = []
    for letter, runs in (("A", a), ("B", b)):
        devices = {str(run.about.environment.device_name) for run in runs if run.is_simulated}
        machines = {str(run.about.environment.machine) for run in runs if not run.is_simulated}
        where = [f"simulated on {', '.join(sorted(devices))}"] if devices else []
        where += [f"measured on {', '.join(sorted(machines))}"] if machines else []
        lines.append(f"{letter} is {' and '.join(where)}")
        lines += dict.fromkeys(f"{letter}: {basis_text(run.about.simulated)}" for run in runs if run.is_simulated)
    return lines


MAX_ROWS = 60
MORE = "more cases: --format csv"
ONE_LAUNCH = (
    "One launch per side does not show which side is faster: launches of unchanged code differ by 5 to 17 % (standard "
    "deviation, docs/statistics.md), more on a busy machine. Each interval covers the passes of one launch, not "
    "the next launch.",
)

TAIL = "Times are latencies of a forward pass. Tails (p90, p99) are not compared; distbench report prints them."


def blocks_of(comparison: SideBySide) -> list[Block]:
    """The comparison as blocks; the answer is last."""
    if any(case.of == PREDICTED for case in comparison.cases):
        return _predicted_blocks(comparison)
    gated, (a, b) = comparison.gated, comparison.names
    lines = (
        f"A, the baseline: {a} ({count_text(gated.num_baseline, 'run file')})",
        f"B, the candidate: {b} ({count_text(gated.num_candidate, 'run file')})",
    )
    blocks: list[Block] = [Heading(f"compare: {_span(comparison)}", 1), Lines(lines)]
    blocks += [_uncompared(comparison.uncompared)] if comparison.uncompared else []
    notes = [f"warning: {sentence}" for sentence in gated.warnings]
    differing = filter(None, [*gated.stamps, *gated.shown, comparison.load])
    notes += [f"differs: {sentence}" for sentence in differing] or ["the environments agree"]
    if comparison.single:
        blocks.append(_single(comparison.single))
        notes += ONE_LAUNCH
        notes += [TAIL] if any(sentence.endswith(OF_LATENCIES) for sentence in gated.designs) else []
    if comparison.repeated:
        reasons = Counter(case.why for case in comparison.repeated if case.verdict == NOT_DECIDED and case.why)
        untold = [f"{UNDECIDED} ({count}): {reason}" for reason, count in reasons.items()]
        blocks += [_repeated(comparison), *([Lines(tuple(untold))] if untold else [])]
        notes += gated.designs
    return [*blocks, Notes(tuple(notes)), Lines(answer(comparison))]


def _predicted_blocks(comparison: SideBySide) -> list[Block]:
    cases = [case for case in comparison.cases if case.num_launches]
    notes = ("A simulation predicts times without intervals; docs/simulation.md shows the accuracy.",)
    title = "predicted times, and medians where a side is measured:"
    lines = [f"{letter}: {name}" for letter, name in zip("AB", comparison.names, strict=True)]
    return [
        Heading(f"compare: {_span(comparison)}", 1),
        Lines((*lines, *comparison.gated.warnings)),
        *([_uncompared(comparison.uncompared)] if comparison.uncompared else []),
        _table(title, (CASE, A, B, RATIO), cases),
        Notes(notes),
        Lines(answer(comparison)),
    ]


CASE: TableColumn = ("<case", lambda case: case.case_id)
A: TableColumn = ("A", lambda case: time_text(case.a_s))
B: TableColumn = ("B", lambda case: time_text(case.b_s))
RATIO: TableColumn = ("B/A", lambda case: decimal_text(case.ratio))


def _table(
    title: str, columns: TableColumns, cases: Sequence[ComparedCase], notes: Sequence[str] = (), *optional: str
) -> Table:
    breaks = changes_in([case.scenario for case in cases])
    return capped(table_of(title, columns, cases, notes, breaks, optional), MAX_ROWS, MORE)


def _span(comparison: SideBySide) -> str:
    """`30 cases on both sides, B/A 0.81 to 1.20`."""
    cases = [case for case in comparison.cases if case.num_launches]
    ratios = [case.ratio for case in cases if math.isfinite(case.ratio)]
    span = f", B/A {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    return f"{count_text(len(cases), 'case')} on both sides{span}"


def answer(comparison: SideBySide) -> tuple[str, str]:
    """The finding, with its severity first, and the next command."""
    cases = [case for case in comparison.cases if case.num_launches]
    counts = Counter(case.verdict for case in cases)
    worst = max(cases, key=lambda case: (case.verdict == SLOWER, abs(case.ratio - 1)))
    ratio = f"{worst.case_id}: B {times_text(worst.ratio, 'A', worst.ratio_low, worst.ratio_high)}"
    scenario = argument_of(worst.scenario)
    launch_both = f"Next: distbench ab REF_A REF_B -- {scenario}   (alternates launches of both sides)"
    if counts[PREDICTED]:
        finding = f"UNKNOWN: {count_text(len(cases), 'case')} predicted, without intervals. Largest difference: {ratio}"
        return finding, f"Next: distbench run {scenario}   (measures on the real hardware)"
    if not comparison.repeated:
        finding = f"INCONCLUSIVE: one launch per side gives no verdict on {count_text(len(cases), 'case')}."
        return f"{finding} Largest difference: {ratio}", launch_both
    words = {SLOWER: SLOWER, FASTER: FASTER, WITHIN_NOISE: WITHIN_NOISE, NOT_DECIDED: UNDECIDED}
    summary = ", ".join(f"{counts[verdict]} {word}" for verdict, word in words.items() if counts[verdict])
    if counts[SLOWER]:
        return f"FAIL: {summary}. Worst: {ratio}", launch_both
    if counts[NOT_DECIDED]:
        return f"INCONCLUSIVE: {summary}. Largest difference: {ratio}", launch_both
    least_sure = max(cases, key=lambda case: case.ratio_high)
    finding = (
        f"PASS: {summary}. B is at most {least_sure.ratio_high:.3g}x as slow as A (upper end of the widest 95 % CI)"
    )
    return finding, f"Next: distbench history {worst.scenario.partition(' (')[0]}   (shows earlier launches)"


def _uncompared(cases: Sequence[ComparedCase]) -> Table:
    groups: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        groups.setdefault((case.verdict, case.why), []).append(case.case_id)
    rows = [(*reason, listed(ids, 1, rest="\nand {} more")) for reason, ids in groups.items()]
    table = Table(f"without a comparison: {count_text(len(cases), 'case')}", ("<verdict", "<why", "<case"), rows)
    return capped(table, MAX_ROWS, "more reasons: --format csv")


def _single(cases: Sequence[ComparedCase]) -> Table:
    spread, text_of = spread_of([launch for case in cases for launch in (case.a, case.b) if launch])
    spread_a, spread_b = (spread, lambda case: text_of(case.a)), (spread, lambda case: text_of(case.b))
    return _table("one launch per side, median of each:", (CASE, A, spread_a, B, spread_b, RATIO), cases, (), spread)


def _repeated(comparison: SideBySide) -> Table:
    def interval(case: ComparedCase) -> str:
        is_known = math.isfinite(case.ratio_low + case.ratio_high)
        return f"[{case.ratio_low:.2f}, {case.ratio_high:.2f}]" if is_known else "-"

    of, verdict = (
        ("<of", lambda case: case.of),
        ("<verdict", lambda case: UNDECIDED if case.verdict == NOT_DECIDED else case.verdict),
    )
    columns: TableColumns = (CASE, of, A, B, RATIO, ("95 % interval", interval), verdict)
    notes = ["B compared with A; the chance of any false verdict in the table is 5 %"]
    optional = "of", "A", "B", "95 % interval"
    return _table("several launches per side:", columns, comparison.repeated, notes, *optional)
