"""Two traces against each other, as one sentence, a list by path and tables."""

from collections.abc import Callable, Sequence

from distbench.compare.verdicts import WITHIN_NOISE
from distbench.render.blocks import Block, Heading, Lines, Table, TableColumn, capped, changes_in, key_columns, table_of
from distbench.render.units import NOTHING, brief_time_text, known, size_text, time_text
from distbench.runs.frame import Row, records_of
from distbench.spec.mesh import format_mesh
from distbench.traces.costs import PATH
from distbench.traces.diff import PREDICTED, cautions, difference, names_of, sizes, step_change
from distbench.traces.path_tables import method_lines, number_text, whole_bytes
from distbench.traces.records import Trace

MAX_ROWS = 40
MAX_OWNERS = 10
WHOLE = ("mesh_dim", "kind")
LEAST = ("payload A", "payload B", "time A", "time B")


def comparison_blocks(one: Trace, other: Trace) -> list[Block]:
    """A against B: the sentence, the sides, what changed path by path, the tables."""
    sides = list(zip("AB", names_of(one, other), (one, other), strict=True))
    changes = path_changes(one, other)
    return [
        Heading("what a step communicates, A against B", 1),
        Lines((headline(one, other),)),
        Lines((*(f"{letter}: {name}: {_side(trace)}" for letter, name, trace in sides), *cautions(one, other))),
        Lines(tuple(changes) or ("every path is taken as often and moves as many bytes on both sides",)),
        _paths_table(one, other),
        _owners_table(one, other),
        Lines(tuple(f"{letter} {line}" for letter, _, trace in sides for line in method_lines(trace))),
    ]


def headline(one: Trace, other: Trace) -> str:
    """`TP2xFSDP2 against FSDP4: +19 tp all_gather of 512 KiB, ..., step +12 % [+9 %, +15 %]`; + is what A has more."""
    name, other_name = names_of(one, other)
    rows = records_of(difference(one, other, WHOLE))
    # What one side has more of, then what it has less of, the most first.
    rows.sort(key=lambda row: (row["count_more"] < 0, -abs(row["count_more"])))
    parts = [text for row in rows if (text := change_text(row, _sizes(one, other, row, WHOLE)))]
    return f"{name} against {other_name}: " + ", ".join([*(parts or ["the same communication"]), step_text(one, other)])


def path_changes(one: Trace, other: Trace) -> list[str]:
    """A sentence for each path that is taken more or less often, or moves other bytes."""
    return [
        f"{row['phase']}, {row['source']}: {text}{_time_more(row['time_s_more'])}"
        for row in records_of(difference(one, other))
        if (text := change_text(row, _sizes(one, other, row, PATH)))
    ]


def change_text(row: Row, payloads: Sequence[int]) -> str:
    """`+19 tp all_gather of 512 KiB`; empty where count and bytes are the same.

    `row` is of `difference`; `payloads` are the sizes of the collectives of a path that one side lacks.
    """
    what = f"{row['mesh_dim']} {row['kind']}"
    more, more_bytes = row["count_more"], whole_bytes(row["payload_bytes_more"])
    if more:
        size = f" of {size_text(payloads[0])}" if len(payloads) == 1 else f" ({_signed(more_bytes, size_text)})"
        return f"{_signed(more, number_text)} {what}{size}"
    if more_bytes:
        now, before = (size_text(whole_bytes(row[f"payload_bytes_{side}"])) for side in ("a", "b"))
        return f"{number_text(row['count_a'])} {what} of {now} in all instead of {before}"
    return ""


def step_text(one: Trace, other: Trace) -> str:
    """`step +12 % [+9 %, +15 %]`, or why that cannot be said: `step +12 % (one launch a side: no verdict)`."""
    change = step_change(one, other)
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


def _time_more(seconds: float) -> str:
    return f", {_signed(seconds, brief_time_text)}" if known(seconds) and seconds else ""


def _sizes(one: Trace, other: Trace, row: Row, keys: Sequence[str]) -> list[int]:
    if row["count_a"] and row["count_b"]:
        return []
    return sizes(one if row["count_a"] else other, row, keys)


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


def _paths_table(one: Trace, other: Trace) -> Table:
    rows = records_of(difference(one, other))
    kinds = {"simulated" if trace.is_simulated else "traced" for trace in (one, other)}
    notes = [f"times here are of {' and '.join(sorted(kinds))} steps, the median of them and the mean over ranks"]
    if kinds != {"simulated"} and (change := step_change(one, other)):
        taken, other_taken = (brief_time_text(seconds) for seconds in (change.one_s, change.other_s))
        of = "predicted where simulated" if change.verdict == PREDICTED else "the medians of the cases' samples"
        notes.append(f"a step without tracing takes {taken} (A) against {other_taken} (B), {of}")
    columns = (*((heading.replace("_", " "), text) for heading, text in key_columns(PATH)), *SIDES)
    breaks = changes_in([row["phase"] for row in rows])
    return capped(table_of("by path, a rank and step", columns, rows, notes, breaks, LEAST), MAX_ROWS)


def _owners_table(one: Trace, other: Trace) -> Table:
    found = difference(one, other, ("path_owner",))
    rows = records_of(found.head(MAX_OWNERS))
    title = "by owner, those whose time changed most first"
    if len(found) > len(rows):
        title = f"the {len(rows)} of {len(found)} owners whose time changed most"
    return table_of(title, (("<owner", lambda row: str(row["path_owner"])), *SIDES), rows, (), (), LEAST)
