"""Two sides as a person reads them: what differs, the cases, and in plain words what that can and cannot tell."""

import math
from collections import Counter
from collections.abc import Sequence

from distbench.compare.verdicts import FASTER, SLOWER, WITHIN_NOISE
from distbench.gate.compare_sides import OF_LATENCIES
from distbench.gate.predicted import PREDICTED
from distbench.gate.side_by_side import NOT_TOLD, ComparedCase, SideBySide
from distbench.render.blocks import Block, Heading, Lines, Table, TableColumns, capped, table_of
from distbench.render.units import decimal_text, spread_of, time_ci_text, time_text
from distbench.spec.printable import count_text

MAX_ROWS = 60
MORE = "more cases: --format csv"
# What docs/ci.md has of neighbouring launches of unchanged code.
ONE_LAUNCH = (
    "One launch a side cannot say which is faster: a launch has a level of its own, that of its processes, memory and "
    "neighbours. Neighbouring launches of unchanged code lay 5 to 17 % apart where that was measured (standard "
    "deviation, docs/ci.md), and more on a busy machine. An interval is that of the passes within its launch, and says "
    "nothing of the next one.",
    "It does tell what failed, what is missing, what differs in the environment, and a ratio far beyond that spread. "
    "To know more, launch both in turn: distbench ab; or give distbench compare 5 launches a side and more.",
)

TAIL = "Times are latencies of a forward pass; a tail (p90, p99) is not compared: distbench report prints each run's."


def blocks_of(found: SideBySide) -> list[Block]:
    """The comparison as blocks."""
    if any(case.of == PREDICTED for case in found.cases):
        return _predicted_blocks(found)
    gated, (a, b) = found.gated, found.names
    lines = [f"A, the baseline: {a} ({count_text(gated.num_baseline, 'run file')})"]
    lines += [f"B, the candidate: {b} ({count_text(gated.num_candidate, 'run file')})"]
    differing = [*gated.stamps, *gated.shown, *([found.load] if found.load else [])]
    lines += [f"differs: {sentence}" for sentence in differing] or ["the environments agree"]
    lines += [f"warning: {sentence}" for sentence in gated.warnings]
    blocks: list[Block] = [Heading(f"compare: {_headline(found)}", 1), Lines(tuple(lines))]
    blocks += [_uncompared(found.uncompared)] if found.uncompared else []
    of_tail = [TAIL] if any(sentence.endswith(OF_LATENCIES) for sentence in gated.designs) else []
    blocks += [_single(found.single), Lines((*ONE_LAUNCH, *of_tail))] if found.single else []
    blocks += [_repeated(found), Lines(tuple(_designs(found)))] if found.repeated else []
    return blocks


def _predicted_blocks(found: SideBySide) -> list[Block]:
    both = [case for case in found.cases if case.num_launches]
    columns: TableColumns = (
        ("<case", lambda case: case.case_id),
        ("A", lambda case: time_text(case.a_s)),
        ("B", lambda case: time_text(case.b_s)),
        ("B/A", lambda case: decimal_text(case.ratio)),
    )
    notes = ["a simulation predicts a time and no interval, so there is no verdict; docs/simulation.md says how well"]
    title = "predicted times, and medians where a side is measured:"
    lines = [f"{letter}: {name}" for letter, name in zip("AB", found.names, strict=True)]
    return [
        Heading(f"compare: {_span(both)}; predicted, so none is called faster or slower", 1),
        Lines((*lines, *found.gated.warnings)),
        *([_uncompared(found.uncompared)] if found.uncompared else []),
        capped(table_of(title, columns, both, notes, _breaks(both)), MAX_ROWS, MORE),
    ]


def _headline(found: SideBySide) -> str:
    """`30 cases on both sides, B/A 0.81 to 1.20; one launch a side: nothing is called faster or slower`."""
    both = [*found.single, *found.repeated]
    cases = _span(both)
    if not found.repeated:
        return f"{cases}; one launch a side, so none is called faster or slower"
    counts = Counter(case.verdict for case in both)
    words = [f"{counts[word]} {word}" for word in (SLOWER, FASTER, WITHIN_NOISE, NOT_TOLD) if counts[word]]
    return f"{cases}: {', '.join(words)}"


def _span(both: Sequence[ComparedCase]) -> str:
    """`30 cases on both sides, B/A 0.81 to 1.20`."""
    ratios = [case.ratio for case in both if math.isfinite(case.ratio)]
    span = f", B/A {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    return f"{count_text(len(both), 'case')} on both sides{span}"


def _uncompared(cases: Sequence[ComparedCase]) -> Table:
    """One row a reason."""
    groups: dict[tuple[str, str], list[ComparedCase]] = {}
    for case in cases:
        groups.setdefault((case.verdict, case.why), []).append(case)
    rows = [
        (verdict, why, some[0].case_id + (f"\nand {len(some) - 1} more" if len(some) > 1 else ""))
        for (verdict, why), some in groups.items()
    ]
    table = Table(f"without a comparison: {count_text(len(cases), 'case')}", ("<verdict", "<why", "<case"), rows)
    return capped(table, MAX_ROWS, "more reasons: --format csv")


def _single(cases: Sequence[ComparedCase]) -> Table:
    spread, _ = spread_of([launch for case in cases for launch in (case.a, case.b) if launch])
    is_ci = spread == "95 % CI"

    def bounds(launch: dict[str, float] | None) -> str:
        found = launch or {}
        ends = [found.get(name, math.nan) for name in (("ci_low_s", "ci_high_s") if is_ci else ("q1_s", "q3_s"))]
        return time_ci_text(found.get("median_s", math.nan), *ends)

    columns: TableColumns = (
        ("<case", lambda case: case.case_id),
        ("A", lambda case: time_text(case.a_s)),
        (spread, lambda case: bounds(case.a)),
        ("B", lambda case: time_text(case.b_s)),
        (spread, lambda case: bounds(case.b)),
        ("B/A", lambda case: decimal_text(case.ratio)),
    )
    title = "one launch a side, median of each:"
    return capped(table_of(title, columns, cases, (), _breaks(cases), optional=(spread,)), MAX_ROWS, MORE)


def _repeated(found: SideBySide) -> Table:
    columns: TableColumns = (
        ("<case", lambda case: case.case_id),
        ("<of", lambda case: case.of),
        ("A", lambda case: time_text(case.a_s)),
        ("B", lambda case: time_text(case.b_s)),
        ("B/A", lambda case: decimal_text(case.ratio)),
        ("95 % interval", _interval),
        ("<verdict", lambda case: case.verdict),
    )
    cases = found.repeated
    notes = ["B against A; verdicts hold for all cases together, with 5 % chance of any false one"]
    optional = ("of", "A", "B", "95 % interval")
    table = table_of("several launches a side:", columns, cases, notes, _breaks(cases), optional)
    return capped(table, MAX_ROWS, MORE)


def _interval(case: ComparedCase) -> str:
    if not math.isfinite(case.ratio_low + case.ratio_high):
        return "-"
    return f"[{case.ratio_low:.2f}, {case.ratio_high:.2f}]"


def _breaks(cases: Sequence[ComparedCase]) -> list[int]:
    return [row for row in range(1, len(cases)) if cases[row].scenario != cases[row - 1].scenario]


def _designs(found: SideBySide) -> list[str]:
    """How launches were held against each other, and why cases were not told."""
    whys = Counter(case.why for case in found.repeated if case.verdict == NOT_TOLD and case.why)
    return [*found.gated.designs, *(f"not told ({count}): {why}" for why, count in whys.items())]
