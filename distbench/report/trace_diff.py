"""Two traces path by path: what one communicates more or less than the other, and how much longer its step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

from distbench.records.dataframe import Row, records_of
from distbench.records.run_file import Record
from distbench.report.trace_rows import PATH, Trace, costs, largest_first
from distbench.report.trace_tables import method_lines, number_text, whole_bytes
from distbench.show.blocks import Block, Heading, Lines, Table, TableColumn, capped, changes_in, key_columns, table_of
from distbench.show.units import NOTHING, brief_time_text, known, size_text, time_text
from distbench.spec.mesh import format_mesh
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import median
from distbench.statistics.pass_comparison import as_table, compare_passes, pass_medians
from distbench.statistics.verdicts import WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd


# As plans are spoken of, the innermost mesh dim first.
PLAN_WORDS = {"tp": "TP", "cp": "CP", "dp_shard": "FSDP", "dp_replicate": "DP", "ep": "EP", "pp": "PP"}
COMPARED = ("count", "payload_bytes", "time_s")


@dataclass(frozen=True)
class StepChange:
    """One case's timed step over another's.

    Args:
        one_s: median of its samples, seconds; `other_s` likewise.
        ratio: of the two: over the passes of one launch that both have, else of the medians.
        low: bounds of the ratio's 95 % interval, from those passes; nan where these are too few.
        verdict: as `compare_passes` has it; "one launch a side" for cases of two launches, which tells nothing of what
            differs between launches.
    """

    one_s: float
    other_s: float
    ratio: float
    low: float
    high: float
    verdict: str


ONE_LAUNCH = "one launch a side"
PREDICTED = "predicted, not measured"


def names_of(trace_a: Trace, trace_b: Trace) -> tuple[str, str]:
    """Short names that tell two traces apart: the plan, else the variant, the scenario, or the run file."""
    for name in NAMES:
        names = name(trace_a), name(trace_b)
        if all(names) and names[0] != names[1]:
            return names
    return f"{trace_a.case_id} of {trace_a.run.path.name}", f"{trace_b.case_id} of {trace_b.run.path.name}"


def _plan(trace: Trace) -> str:
    mesh = {name: size for name, size in (trace.run.about.mesh or {}).items() if size > 1}
    parts = [f"{word}{mesh[name]}" for name, word in PLAN_WORDS.items() if name in mesh]
    return "x".join([*parts, *(f"{name}{size}" for name, size in mesh.items() if name not in PLAN_WORDS)])


def _params(trace: Trace) -> Record:
    return (trace.case or {}).get("case", {}).get("params") or {}


def step_change(trace_a: Trace, trace_b: Trace) -> StepChange | None:
    """From the cases' own timed samples, never the traced steps; None where a case has none that is right.

    A simulated step has its predicted time, and a ratio without an interval.
    """
    cases = [trace.case or {} for trace in (trace_a, trace_b)]
    samples = [_times_of(trace, case) for trace, case in zip((trace_a, trace_b), cases, strict=True)]
    if not all(samples):
        return None
    one_s, other_s = map(median, samples)
    if trace_a.is_simulated or trace_b.is_simulated:
        return StepChange(one_s, other_s, one_s / other_s, nan, nan, PREDICTED)
    if trace_a.run.path != trace_b.run.path:
        return StepChange(one_s, other_s, one_s / other_s, nan, nan, ONE_LAUNCH)
    counts = [case.get("passes") or () for case in cases]
    num_passes = 1 + max((number for passes in counts for number, _ in passes), default=-1)
    values = [
        pass_medians(sample_times, passes, num_passes) for sample_times, passes in zip(samples, counts, strict=True)
    ]
    comparison = compare_passes(as_table(values), (1, -1))
    center, low, high = (float(part[0]) for part in (comparison.ratio, comparison.low, comparison.high))
    return StepChange(one_s, other_s, center, low, high, comparison.verdict[0])


def _times_of(trace: Trace, case: Record) -> Sequence[float]:
    if case.get("status") != "ok":
        return ()
    predicted_s = (case.get("counters") or {}).get("predicted_s")
    return [predicted_s] if trace.is_simulated and predicted_s else case.get("samples_s") or ()


NAMES: tuple[Callable[[Trace], str], ...] = (
    _plan,
    lambda trace: str(_params(trace).get("variant") or ""),
    lambda trace: trace.run.scenario,
    lambda trace: f"simulated on {trace.run.about.environment.device_name}" if trace.is_simulated else "measured",
    lambda trace: trace.case_id,
)


def difference(trace_a: Trace, trace_b: Trace, keys: Sequence[str] = PATH) -> "pd.DataFrame":
    """What a step of either spends on each combination of keys, side by side; 0 where a side has none of it.

    Columns: the keys, then of each of COMPARED `<name>_a` (one), `<name>_b` (other) and `<name>_more`, a minus b. In
    order of phase, then the largest change of time first.
    """
    sides = []
    for trace, side in ((trace_a, "a"), (trace_b, "b")):
        side_costs = costs(trace, keys).set_index(list(keys))[list(COMPARED)]
        sides.append(side_costs.rename(columns={column: f"{column}_{side}" for column in COMPARED}))
    joined = sides[0].join(sides[1], how="outer").reset_index()
    for side in ("a", "b"):
        # A path that a side does not take costs it nothing; a time that is not known stays so.
        joined.loc[joined[f"count_{side}"].isna(), [f"{column}_{side}" for column in COMPARED]] = 0.0
    for column in COMPARED:
        joined[f"{column}_more"] = joined[f"{column}_a"] - joined[f"{column}_b"]
    return largest_first(joined, "time_s_more", "payload_bytes_more")


def cautions(trace_a: Trace, trace_b: Trace) -> list[str]:
    """What makes two traces hard to compare, as sentences."""
    ranks, other_ranks = (_num_ranks(trace) for trace in (trace_a, trace_b))
    (machine, other_machine), (batch, other_batch), (run_id, other_id) = zip(
        *map(_facts, (trace_a, trace_b)), strict=True
    )
    same_machine = machine == other_machine
    sentences = {
        f"{_simulated_sides(trace_a, trace_b)} simulated: times there are predictions": (
            trace_a.is_simulated or trace_b.is_simulated
        ),
        f"measured on different machines, {machine} and {other_machine}: compare no times": (
            not same_machine and not (trace_a.is_simulated or trace_b.is_simulated)
        ),
        "one launch a side: what differs between launches is not known, so times have no verdict; `distbench ab` or "
        "`distbench gate` over launches in turn gives one": (
            same_machine and run_id != other_id and not trace_a.is_simulated
        ),
        f"a step's inputs are {batch} on one side and {other_batch} on the other": batch != other_batch,
        f"{count_text(ranks, 'rank')} against {other_ranks}; counts and bytes are of one rank": ranks != other_ranks,
    }
    return [f"caution: {sentence}" for sentence, is_so in sentences.items() if is_so]


def _simulated_sides(trace_a: Trace, trace_b: Trace) -> str:
    letters = [letter for letter, trace in zip("AB", (trace_a, trace_b), strict=True) if trace.is_simulated]
    return f"{' and '.join(letters)} {'are' if len(letters) > 1 else 'is'}"


def _num_ranks(trace: Trace) -> int:
    """Of the whole mesh, also where a few were simulated."""
    world_size = trace.run.about.environment.world_size
    return int(world_size) if trace.is_simulated and world_size else len(trace.ranks)


def _facts(trace: Trace) -> tuple[str, str, str | None]:
    """Machine, shape of a step's inputs, and the run's id."""
    about, shape = trace.run.about, _params(trace).get("shape")
    inputs = "x".join(map(str, shape)) if isinstance(shape, list) else "of unknown shape"
    return about.environment.machine or "unknown machine", inputs, about.run_id


MAX_ROWS = 40
MAX_OWNERS = 10
WHOLE = ("mesh_dim", "kind")
LEAST = ("payload A", "payload B", "time A", "time B")


def comparison_blocks(trace_a: Trace, trace_b: Trace) -> list[Block]:
    """A against B: the sentence, the sides, what changed path by path, the tables."""
    sides = list(zip("AB", names_of(trace_a, trace_b), (trace_a, trace_b), strict=True))
    changes = path_changes(trace_a, trace_b)
    return [
        Heading("what a step communicates, A against B", 1),
        Lines((headline(trace_a, trace_b),)),
        Lines((*(f"{letter}: {name}: {_side(trace)}" for letter, name, trace in sides), *cautions(trace_a, trace_b))),
        Lines(tuple(changes) or ("every path is taken as often and moves as many bytes on both sides",)),
        _paths_table(trace_a, trace_b),
        _owners_table(trace_a, trace_b),
        Lines(tuple(f"{letter} {line}" for letter, _, trace in sides for line in method_lines(trace))),
    ]


def headline(trace_a: Trace, trace_b: Trace) -> str:
    """`TP2xFSDP2 against FSDP4: +19 tp all_gather of 512 KiB, ..., step +12 % [+9 %, +15 %]`; + is what A has more."""
    name, other_name = names_of(trace_a, trace_b)
    rows = records_of(difference(trace_a, trace_b, WHOLE))
    # What one side has more of, then what it has less of, the most first.
    rows.sort(key=lambda row: (row["count_more"] < 0, -abs(row["count_more"])))
    parts = [text for row in rows if (text := change_text(row, _payloads(trace_a, trace_b, row, WHOLE)))]
    return f"{name} against {other_name}: " + ", ".join(
        [*(parts or ["the same communication"]), step_text(trace_a, trace_b)]
    )


def path_changes(trace_a: Trace, trace_b: Trace) -> list[str]:
    """A sentence for each path that is taken more or less often, or moves other bytes."""
    sentences = []
    for row in records_of(difference(trace_a, trace_b)):
        if text := change_text(row, _payloads(trace_a, trace_b, row, PATH)):
            seconds = row["time_s_more"]
            more = f", {_signed(seconds, brief_time_text)}" if known(seconds) and seconds else ""
            sentences.append(f"{row['phase']}, {row['source']}: {text}{more}")
    return sentences


def change_text(row: Row, payloads: Sequence[int]) -> str:
    """`+19 tp all_gather of 512 KiB`; empty where count and bytes are the same.

    `row` is of `difference`; `payloads` are the sizes of the collectives of a path that one side lacks.
    """
    path_text = f"{row['mesh_dim']} {row['kind']}"
    more, more_bytes = row["count_more"], whole_bytes(row["payload_bytes_more"])
    if more:
        size = f" of {size_text(payloads[0])}" if len(payloads) == 1 else f" ({_signed(more_bytes, size_text)})"
        return f"{_signed(more, number_text)} {path_text}{size}"
    if more_bytes:
        now, before = (size_text(whole_bytes(row[f"payload_bytes_{side}"])) for side in ("a", "b"))
        return f"{number_text(row['count_a'])} {path_text} of {now} in all instead of {before}"
    return ""


def step_text(trace_a: Trace, trace_b: Trace) -> str:
    """`step +12 % [+9 %, +15 %]`, or why that cannot be said: `step +12 % (one launch a side: no verdict)`."""
    change = step_change(trace_a, trace_b)
    if change is None:
        return "step: not compared (a side has no right samples)"
    text = f"step {_percent(change.ratio)}"
    if not known(change.low):
        return f"{text} ({change.verdict}: no verdict)"
    text = f"{text} [{_percent(change.low)}, {_percent(change.high)}]"
    return f"{text}, {WITHIN_NOISE}" if change.verdict == WITHIN_NOISE else text


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %"


def _signed(value: float, text: Callable[[float], str]) -> str:
    return f"{'-' if value < 0 else '+'}{text(abs(value))}"


def _payloads(trace_a: Trace, trace_b: Trace, row: Row, keys: Sequence[str]) -> list[int]:
    """The sizes of a path's collectives where one side lacks it, bytes, ascending, each once."""
    if row["count_a"] and row["count_b"]:
        return []
    rows = (trace_a if row["count_a"] else trace_b).rows
    for key in keys:
        rows = rows[rows[key] == row[key]]
    return sorted({int(size) for size in rows["payload_bytes"]})


def _side(trace: Trace) -> str:
    mesh = format_mesh(trace.run.about.mesh or {})
    simulated = f", simulated on {trace.run.about.environment.device_name}" if trace.is_simulated else ""
    return (
        f"{trace.run.scenario} on {mesh or 'an unknown mesh'}{simulated}, case {trace.case_id}, {trace.run.path.name}"
    )


def _side_column(heading: str, column: str, side: str, text: Callable[[float], str]) -> TableColumn:
    """One side's figure; a dash where that side has none of it."""
    name = f"{heading} {side.upper()}"
    return name, lambda row: text(row[f"{column}_{side}"]) if row[f"count_{side}"] else NOTHING


SIDES = tuple(
    _side_column(heading, column, side, text)
    for heading, column, text in (
        ("count", "count", number_text),
        ("payload", "payload_bytes", lambda size: size_text(whole_bytes(size))),
        ("time", "time_s", time_text),
    )
    for side in ("a", "b")
)


def _paths_table(trace_a: Trace, trace_b: Trace) -> Table:
    rows = records_of(difference(trace_a, trace_b))
    kinds = {"simulated" if trace.is_simulated else "traced" for trace in (trace_a, trace_b)}
    notes = [f"times here are of {' and '.join(sorted(kinds))} steps, the median of them and the mean over ranks"]
    if kinds != {"simulated"} and (change := step_change(trace_a, trace_b)):
        time_a, other_taken = (brief_time_text(seconds) for seconds in (change.one_s, change.other_s))
        of = "predicted where simulated" if change.verdict == PREDICTED else "the medians of the cases' samples"
        notes.append(f"a step without tracing takes {time_a} (A) against {other_taken} (B), {of}")
    columns = (*((heading.replace("_", " "), text) for heading, text in key_columns(PATH)), *SIDES)
    breaks = changes_in([row["phase"] for row in rows])
    return capped(table_of("by path, a rank and step", columns, rows, notes, breaks, LEAST), MAX_ROWS)


def _owners_table(trace_a: Trace, trace_b: Trace) -> Table:
    frame = difference(trace_a, trace_b, ("path_owner",))
    rows = records_of(frame.head(MAX_OWNERS))
    title = "by owner, those whose time changed most first"
    if len(frame) > len(rows):
        title = f"the {len(rows)} of {len(frame)} owners whose time changed most"
    return table_of(title, (("<owner", lambda row: str(row["path_owner"])), *SIDES), rows, (), (), LEAST)
