"""Traced steps as tables and sentences: one trace, and the difference of two, path by path."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

from distbench.records.dataframe import Row, records_of
from distbench.records.run_file import Record, basis_text
from distbench.report.section_protocol import ReportedRun, Section
from distbench.report.trace_rows import (
    PATH,
    UNKNOWN_OWNER,
    Trace,
    bubbles_text,
    busy_share,
    costs,
    doubts,
    largest_first,
    step_of,
    traces_of,
)
from distbench.show.blocks import (
    Block,
    Heading,
    Lines,
    Table,
    TableColumn,
    TableColumns,
    capped,
    changes_in,
    key_columns,
    table_of,
)
from distbench.show.units import NOTHING, brief_time_text, known, percent_text, size_text, source_text, time_text
from distbench.spec.mesh import format_mesh
from distbench.spec.printable_text import capped_lines, count_text
from distbench.statistics.intervals import median
from distbench.statistics.pass_comparison import as_table, compare_passes, pass_medians
from distbench.statistics.verdicts import WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd

MAX_PATHS = 40
MAX_OWNERS = 10
MAX_DIFFERENCES = 5
# A larger share of a step in two collectives at once is overlap, rather than a difference of medians.
OVERLAP = 0.02
IS_EXPLICIT: dict[Any, str] = {True: "explicit", False: "implicit"}
IMPLICIT = "implicit: DTensor moved a tensor because an operator needed other placements"


def _bytes_text(mean: float) -> str:
    """A mean over ranks in whole bytes."""
    return size_text(round(mean)) if known(mean) else NOTHING


def _share_text(share: float) -> str:
    """A text such as `12 %`, with a decimal below 10 %."""
    if not known(share):
        return NOTHING
    return percent_text(share) if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def _number_text(count: float) -> str:
    """A count such as `12`, or `12.5` if ranks differ."""
    return f"{count:.1f}".removesuffix(".0") if known(count) else NOTHING


COST_COLUMNS: TableColumns = (
    ("count", lambda row: _number_text(row["count"])),
    ("payload", lambda row: _bytes_text(row["payload_bytes"])),
    ("wire", lambda row: _bytes_text(row["wire_bytes"])),
    ("time", lambda row: time_text(row["time_s"])),
    ("of step", lambda row: _share_text(row["share_of_step"])),
    ("straggler", lambda row: _share_text(row["straggler_share"])),
    ("exposed", lambda row: _share_text(row["exposed_share"]) if known(row["exposed_share"]) else "n/a"),
)
COUNT, PAYLOAD, _, TIME, SHARE, STRAGGLER, _ = COST_COLUMNS
OWNER: TableColumn = ("<owner", lambda row: str(row["path_owner"]))
LEAST_OF_COSTS = ("wire", "straggler", "payload", "of step")


def trace_blocks(trace: Trace) -> list[Block]:
    """The blocks of one trace: summary, costs by path, owner and redistribution, method and checks."""
    simulated = ", simulated" if trace.is_simulated else ""
    blocks: list[Block] = [Heading(f"{trace.name}: communication by path{simulated}"), Lines(_opening(trace))]
    if not trace.rows.empty:
        blocks += [_paths_table(trace), _owners_table(trace), *_redistributions_table(trace)]
    trust = () if trace.is_simulated else (*_agreement(trace.record), *_memory(trace.record), *doubts(trace))
    return [*blocks, Lines((*_method_lines(trace), *trust))]


def grouped_table(trace: Trace, by: Sequence[str]) -> Table:
    """A table of a step's costs per combination of columns."""
    keys = tuple(dict.fromkeys(by))
    title = f"{trace.name} by {', '.join(keys)}, {_per_step(trace, keys)}"
    rows = records_of(costs(trace, keys))
    return capped(table_of(title, (*key_columns(keys), *COST_COLUMNS), rows, (), (), LEAST_OF_COSTS), MAX_PATHS)


def _opening(trace: Trace) -> tuple[str, ...]:
    case = f"case {trace.case_id}"
    if trace.rows.empty:
        return (case, "this step has no communication")
    (totals,) = records_of(costs(trace, ()))
    sentence = f"a traced step takes {brief_time_text(step_of(trace))} on {count_text(len(trace.ranks), 'rank')}"
    if trace.is_simulated:
        ranks = f"rank{'s' if len(trace.ranks) > 1 else ''} {', '.join(map(str, trace.ranks))}"
        of = trace.run.about.environment.world_size or "?"
        sentence = f"a simulated step takes {brief_time_text(step_of(trace))} on {ranks} of {of}"
    if known(busy := busy_share(trace)):
        sentence += f"; a collective is in progress in {percent_text(busy)} of a rank's step"
    if known(waited := totals["straggler_share"]):
        sentence += f"; ranks wait for the group's slowest rank in {percent_text(waited)} of the time of collectives"
    return case, sentence, *([bubbles] if (bubbles := bubbles_text(trace)) else [])


def _per_step(trace: Trace, keys: Sequence[str] = ()) -> str:
    if trace.is_simulated:
        mean = "" if len(trace.ranks) == 1 or "rank" in keys else f", mean over {len(trace.ranks)} simulated ranks"
        return f"simulated, per rank and step{mean}"
    median = f"per rank and step, median of {len(trace.steps)} traced steps"
    return median if "rank" in keys else f"{median}, mean over {len(trace.ranks)} ranks"


def _paths_table(trace: Trace) -> Table:
    differing = trace.rows[trace.rows["backend_op"].notna() & (trace.rows["backend_op"] != trace.rows["kind"])]
    executed = list(differing[["kind", "backend_op"]].drop_duplicates().itertuples(index=False))
    marks = {kind: f"{kind}^" for kind, _ in executed}
    path_costs = costs(trace, PATH)
    rows: list[Row] = []
    breaks: list[int] = []
    for phase in records_of(costs(trace, ("phase",))):
        breaks.append(len(rows))
        rows.append({**phase, "source": phase["phase"], "kind": "", "mesh_dim": ""})
        for path in records_of(path_costs[path_costs["phase"] == phase["phase"]].head(MAX_PATHS)):
            rows.append({**path, "source": f" {path['source']}", "kind": marks.get(path["kind"], path["kind"])})
    (totals,) = records_of(costs(trace, ()))
    rows.append({**totals, "source": "whole step", "kind": "", "mesh_dim": ""})
    backend = (trace.case or {}).get("backend") or "this backend"
    notes = [f"^ {kind} runs as {ran} on {backend}" for kind, ran in executed]
    if trace.record.get("exposed_reason"):
        notes.append(f"exposed share unknown: {trace.record['exposed_reason']}")
    if trace.is_simulated:
        waits = "collectives do not wait for other ranks, so there are no stragglers"
        if trace.record.get("pipeline"):
            waits = "waiting for the other end of a message is not included"
        notes.append(f"times are from the hardware file; {waits}")
    else:
        notes.append("time is from issue to completion, including waiting for the slowest rank (the straggler share)")
    if totals["share_of_step"] > busy_share(trace) + OVERLAP:
        notes.append("some collectives overlap, and each counts in full, so shares add up to more")
    columns = (
        ("<phase, source", lambda row: str(row["source"])),
        ("<kind", lambda row: str(row["kind"])),
        ("<mesh dim", lambda row: str(row["mesh_dim"])),
        *COST_COLUMNS,
    )
    title = f"by path, {_per_step(trace)}"
    table = table_of(title, columns, rows, notes, [*breaks[1:], len(rows) - 1], LEAST_OF_COSTS)
    return replace(table, together=True)


def _owners_table(trace: Trace) -> Table:
    owners, parts = costs(trace, ("path_owner",)), costs(trace, ("path_owner", *PATH))

    def most(row: Row) -> str:
        of_owner = _costliest_first(parts[parts["path_owner"] == row["path_owner"]])
        return _first_of([f"{part['phase']} {part['mesh_dim']} {part['kind']}" for part in of_owner])

    columns = (OWNER, COUNT, PAYLOAD, TIME, SHARE, STRAGGLER, ("<most of it", most))
    rows = records_of(owners.head(MAX_OWNERS))
    title = f"the {len(rows)} most expensive of {len(owners)} owners" if len(owners) > len(rows) else "by owner"
    owned = trace.rows["owner_known"].astype(bool)
    collectives = count_text(len(owned), "collective")
    notes = [f"the owner is known for {int(owned.sum())} of {collectives} ({percent_text(owned.mean())})"]
    if not owned.all():
        notes.append(f"{UNKNOWN_OWNER}: no running module was recorded")
    optional = ("straggler", "payload", "of step", "count")
    return table_of(title, columns, rows, notes, (), optional)


def _costliest_first(frame: "pd.DataFrame") -> list[Row]:
    return records_of(frame.sort_values(["time_s", "payload_bytes"], ascending=False, kind="stable"))


def _first_of(names: Sequence[str]) -> str:
    """A text such as `a +2` for three names."""
    return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "")


def _redistributions_table(trace: Trace) -> list[Table]:
    moved = trace.rows["redistribution"].fillna("").astype(str) != ""
    if not moved.any():
        return []
    keys = ("redistribution", "explicit", "mesh_dim", "kind")
    owners = costs(trace, (*keys, "path_owner"), moved)

    def mostly_of(row: Row) -> str:
        is_same = (owners[list(keys)] == [row[name] for name in keys]).all(axis=1)
        return _first_of([str(owner["path_owner"]) for owner in _costliest_first(owners[is_same])])

    columns: TableColumns = (
        ("<redistribution", lambda row: str(row["redistribution"])),
        ("<requested", lambda row: IS_EXPLICIT.get(row["explicit"], NOTHING)),
        ("<collective", lambda row: f"{row['mesh_dim']} {row['kind']}"),
        *(COUNT, PAYLOAD, TIME),
        ("<mostly of", mostly_of),
    )
    rows = _costliest_first(costs(trace, keys, moved))
    notes = [IMPLICIT] if any(row["explicit"] is False for row in rows[:MAX_OWNERS]) else []
    title, optional = "by redistribution of DTensor", ("count", "payload", "requested")
    return [capped(table_of(title, columns, rows, notes, (), optional), MAX_OWNERS)]


def _method_lines(trace: Trace) -> list[str]:
    """The method of the trace, and its overhead or basis."""
    method, overhead = trace.record.get("method"), trace.record.get("overhead") or {}
    if trace.is_simulated:
        how = f"predicted by {method or 'a simulation'}, not measured; docs/simulation.md has the errors"
        return [how, basis_text(trace.run.about.simulated)]
    method = method or "unknown"
    if not known(overhead.get("ratio")):
        return [f"traced by {method}; the tracing overhead was not measured"]
    sentence = f"traced by {method}; a traced step takes {overhead['ratio']:.2f}x the CPU time of an untraced step"
    bare, traced = overhead.get("bare_cpu_s") or (), overhead.get("traced_cpu_s") or ()
    ratios = [with_trace / without for without, with_trace in zip(bare, traced, strict=False) if without]
    if ratios:
        sentence += f" (median of {len(ratios)} interleaved rounds, {min(ratios):.2f} to {max(ratios):.2f})"
    return [f"{sentence}. Times of cases come from untraced steps"]


def _agreement(record: dict[str, Any]) -> tuple[str, ...]:
    agreement = record.get("agreement")
    if not isinstance(agreement, dict) or not agreement.get("method"):
        return ()
    sentences = [str(sentence) for sentence in agreement.get("differences") or ()]
    if not sentences:
        rows = f"all {agreement.get('num_rows')} collectives of a rank's step"
        return (f"{agreement['method']}, a second method, recorded the same kind, group and bytes for {rows}",)
    head = f"warning: {agreement['method']}, a second method, differs in the same step:"
    return (head, *capped_lines(sentences, MAX_DIFFERENCES, "... {} more differences"))


def _memory(record: dict[str, Any]) -> tuple[str, ...]:
    memory = record.get("memory")
    if not isinstance(memory, dict):
        return ()
    measured, predicted, reason = (
        memory.get(name) for name in ("measured_peak_bytes", "predicted_peak_bytes", "reason")
    )
    text = (
        f"peak memory per rank: {size_text(measured)} measured"
        if known(measured)
        else "peak memory per rank: not measured"
    )
    text += f" ({memory['measured_by']})" if known(measured) and memory.get("measured_by") else ""
    if not known(predicted):
        return (f"{text}, not predicted ({reason or 'unknown reason'})",)
    return (f"{text}, {size_text(predicted)} predicted" + (f"; {reason}" if reason else ""),)


def largest_communication(reported: ReportedRun) -> tuple[float, str] | None:
    """(seconds, sentence) on the path with the most exposed communication of all traced steps, or on the longest path
    if exposed times are unknown. None without a trace."""
    paths = []
    for trace in traces_of([reported.run])[0]:
        rows = [] if trace.rows.empty else records_of(costs(trace, PATH))
        timed = [row for row in rows if known(row["time_s"])]
        paths += [({**row, "exposed_s": row["exposed_share"] * row["time_s"]}, trace) for row in timed]
    if not paths:
        return None
    exposed = [path for path in paths if known(path[0]["exposed_s"])]
    name = "exposed_s" if exposed else "time_s"
    row, trace = max(exposed or paths, key=lambda path: path[0][name])
    path = f"{source_text(row['source'])} {row['kind']} ({row['mesh_dim']}) in {row['phase']}"
    of_step = f"{brief_time_text(row[name])} of {brief_time_text(step_of(trace))} per step of {trace.name}"
    if exposed:
        return row[name], f"Largest exposed communication: {path}, {of_step}"
    device = reported.run.about.environment.device
    overlap = "Overlap is not measurable on CPU" if device == "cpu" else "Overlap is unknown"
    return row[name], f"Largest communication: {path}, {of_step}. {overlap}"


def _headline(reported: ReportedRun) -> list[str]:
    return [largest[1]] if (largest := largest_communication(reported)) else []


SECTION = Section(_headline)


# The difference of two traces by path, and the ratio of step times.

# Names of parallelism in the usual order, innermost mesh dim first.
PLAN_WORDS = {"tp": "TP", "cp": "CP", "dp_shard": "FSDP", "dp_replicate": "DP", "ep": "EP", "pp": "PP"}
COMPARED = ("count", "payload_bytes", "time_s")


@dataclass(frozen=True)
class StepChange:
    """The time of one case's step relative to another case's step.

    Args:
        one_s: median of the first case's samples in seconds; `other_s` of the other case.
        verdict: verdict of `compare_passes`, or ONE_LAUNCH for cases of two launches, or PREDICTED for simulated cases.
        ratio: ratio of times over common passes of one launch, else of the medians.
        low: lower bound of the ratio's 95 % interval from passes, nan for too few passes; `high` is the upper bound.
    """

    one_s: float
    other_s: float
    verdict: str
    ratio: float
    low: float = nan
    high: float = nan


ONE_LAUNCH = "one launch per side"
PREDICTED = "predicted, not measured"


def names_of(trace_a: Trace, trace_b: Trace) -> tuple[str, str]:
    """Different short names of two traces, from the plan, the variant, the scenario, or the run file."""
    for name in NAMES:
        names = name(trace_a), name(trace_b)
        if all(names) and names[0] != names[1]:
            return names
    return f"{trace_a.case_id} of {trace_a.run.path.name}", f"{trace_b.case_id} of {trace_b.run.path.name}"


def _plan(trace: Trace) -> str:
    mesh = {name: size for name, size in (trace.run.about.mesh or {}).items() if size > 1}
    in_order = sorted(mesh, key=lambda name: [*PLAN_WORDS, name].index(name))
    return "x".join(f"{PLAN_WORDS.get(name, name)}{mesh[name]}" for name in in_order)


def _params(trace: Trace) -> Record:
    return (trace.case or {}).get("case", {}).get("params") or {}


def step_change(trace_a: Trace, trace_b: Trace) -> StepChange | None:
    """The change by the cases' timed samples, not by traced steps. None if a case has no correct samples.

    A simulated step has a predicted time, and a ratio without an interval.
    """
    cases = [trace.case or {} for trace in (trace_a, trace_b)]
    samples = [_times_of(trace, case) for trace, case in zip((trace_a, trace_b), cases, strict=True)]
    if not all(samples):
        return None
    one_s, other_s = map(median, samples)
    if trace_a.is_simulated or trace_b.is_simulated:
        return StepChange(one_s, other_s, PREDICTED, one_s / other_s)
    if trace_a.run.path != trace_b.run.path:
        return StepChange(one_s, other_s, ONE_LAUNCH, one_s / other_s)
    counts = [case.get("passes") or () for case in cases]
    num_passes = 1 + max((number for passes in counts for number, _ in passes), default=-1)
    values = [pass_medians(of_case, passes, num_passes) for of_case, passes in zip(samples, counts, strict=True)]
    comparison = compare_passes(as_table(values), (1, -1))
    interval = (float(part[0]) for part in (comparison.ratio, comparison.low, comparison.high))
    return StepChange(one_s, other_s, comparison.verdict[0], *interval)


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
    """The costs of both steps per combination of keys, side by side, and 0 if a side has no such row.

    Columns are the keys, and for each name of COMPARED `<name>_a`, `<name>_b` and `<name>_more` (a minus b). Rows are
    ordered by phase, then by largest change of time.
    """
    sides = []
    for trace, side in ((trace_a, "a"), (trace_b, "b")):
        side_costs = costs(trace, keys).set_index(list(keys))[list(COMPARED)]
        sides.append(side_costs.rename(columns={column: f"{column}_{side}" for column in COMPARED}))
    joined = sides[0].join(sides[1], how="outer").reset_index()
    for side in ("a", "b"):
        # A path that a side does not have costs 0. Unknown times remain unknown.
        joined.loc[joined[f"count_{side}"].isna(), [f"{column}_{side}" for column in COMPARED]] = 0.0
    for column in COMPARED:
        joined[f"{column}_more"] = joined[f"{column}_a"] - joined[f"{column}_b"]
    return largest_first(joined, "time_s_more", "payload_bytes_more")


def cautions(trace_a: Trace, trace_b: Trace) -> list[str]:
    """Warnings on differences that limit the comparison of two traces."""
    (machine, batch, ranks, run_id), (other_machine, other_batch, other_ranks, other_id) = map(
        _facts, (trace_a, trace_b)
    )
    same_machine = machine == other_machine
    simulated = [letter for letter, trace in zip("AB", (trace_a, trace_b), strict=True) if trace.is_simulated]
    sides = f"{' and '.join(simulated)} {'are' if len(simulated) > 1 else 'is'}"
    sentences = {
        f"{sides} simulated, with predicted times": bool(simulated),
        f"measured on different machines, {machine} and {other_machine}; do not compare times": (
            not same_machine and not simulated
        ),
        "one launch per side, so times have no verdict; use `distbench ab`": (
            same_machine and run_id != other_id and not trace_a.is_simulated
        ),
        f"inputs of a step are {batch} in A and {other_batch} in B": batch != other_batch,
        f"{count_text(ranks, 'rank')} in A and {other_ranks} in B; counts and bytes are per rank": ranks != other_ranks,
    }
    return [f"warning: {sentence}" for sentence, is_so in sentences.items() if is_so]


def _facts(trace: Trace) -> tuple[str, str, int, str | None]:
    """Machine, shape of a step's inputs, number of ranks (of the whole mesh, even if a few are simulated), and run
    id."""
    about, shape, world_size = trace.run.about, _params(trace).get("shape"), trace.run.about.environment.world_size
    inputs = "x".join(map(str, shape)) if isinstance(shape, list) else "of unknown shape"
    num_ranks = int(world_size) if trace.is_simulated and world_size else len(trace.ranks)
    return about.environment.machine or "unknown machine", inputs, num_ranks, about.run_id


WHOLE = ("mesh_dim", "kind")
LEAST = ("payload A", "payload B", "time A", "time B")


def comparison_blocks(trace_a: Trace, trace_b: Trace) -> list[Block]:
    """The blocks of a comparison: summary, sides, changes by path, and tables."""
    sides = list(zip("AB", names_of(trace_a, trace_b), (trace_a, trace_b), strict=True))
    changes = path_changes(trace_a, trace_b)
    return [
        Heading("communication of a step, A compared with B", 1),
        Lines((difference_text(trace_a, trace_b),)),
        Lines((*(f"{letter}: {name}: {_side(trace)}" for letter, name, trace in sides), *cautions(trace_a, trace_b))),
        Lines(tuple(changes) or ("every path has the same count and bytes on both sides",)),
        _path_changes_table(trace_a, trace_b),
        _owner_changes_table(trace_a, trace_b),
        Lines(tuple(f"{letter} {line}" for letter, _, trace in sides for line in _method_lines(trace))),
    ]


def difference_text(trace_a: Trace, trace_b: Trace) -> str:
    """A text such as `TP2xFSDP2 compared with FSDP4: +19 tp all_gather of 512 KiB, ..., step +12 % [+9 %, +15 %]`."""
    name, other_name = names_of(trace_a, trace_b)
    rows = records_of(difference(trace_a, trace_b, WHOLE))
    # First increases of A, then decreases, largest first.
    rows.sort(key=lambda row: (row["count_more"] < 0, -abs(row["count_more"])))
    parts = [text for row in rows if (text := _change_text(trace_a, trace_b, row, WHOLE))] or ["the same communication"]
    return f"{name} compared with {other_name}: {', '.join([*parts, _step_text(trace_a, trace_b)])}"


def path_changes(trace_a: Trace, trace_b: Trace) -> list[str]:
    """A sentence per path with a different count or different bytes."""
    sentences = []
    for row in records_of(difference(trace_a, trace_b)):
        if text := _change_text(trace_a, trace_b, row, PATH):
            seconds = row["time_s_more"]
            more = f", {_signed(seconds, brief_time_text)}" if known(seconds) and seconds else ""
            sentences.append(f"{row['phase']}, {row['source']}: {text}{more}")
    return sentences


def _change_text(trace_a: Trace, trace_b: Trace, row: Row, keys: Sequence[str]) -> str:
    """A text such as `+19 tp all_gather of 512 KiB`, empty for the same count and bytes. `row` is of `difference` by
    `keys`."""
    path_text = f"{row['mesh_dim']} {row['kind']}"
    if row["count_more"]:
        payloads = _payloads(trace_a, trace_b, row, keys)
        size = size_text(payloads[0]) if len(payloads) == 1 else ""
        text = f" of {size}" if size else f" ({_signed(row['payload_bytes_more'], _bytes_text)})"
        return f"{_signed(row['count_more'], _number_text)} {path_text}{text}"
    if known(row["payload_bytes_more"]) and round(row["payload_bytes_more"]):
        now, before = (_bytes_text(row[f"payload_bytes_{side}"]) for side in ("a", "b"))
        return f"{_number_text(row['count_a'])} {path_text} of {now} in total instead of {before}"
    return ""


def _step_text(trace_a: Trace, trace_b: Trace) -> str:
    """A text such as `step +12 % [+9 %, +15 %]`, or without a verdict `step +12 % (one launch per side: no
    verdict)`."""
    change = step_change(trace_a, trace_b)
    if change is None:
        return "step: not compared (a side has no correct samples)"
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
    """The sizes of a path's collectives in bytes, ascending and unique, if one side does not have the path."""
    if row["count_a"] and row["count_b"]:
        return []
    rows = (trace_a if row["count_a"] else trace_b).rows
    for key in keys:
        rows = rows[rows[key] == row[key]]
    return sorted({int(size) for size in rows["payload_bytes"]})


def _side(trace: Trace) -> str:
    mesh = format_mesh(trace.run.about.mesh or {}) or "an unknown mesh"
    simulated = f", simulated on {trace.run.about.environment.device_name}" if trace.is_simulated else ""
    return f"{trace.run.scenario} on {mesh}{simulated}, case {trace.case_id}, {trace.run.path.name}"


def _side_text(column: str, side: str, text: Callable[[float], str], row: Row) -> str:
    """One side's figure; a dash if the row is missing."""
    return text(row[f"{column}_{side}"]) if row[f"count_{side}"] else NOTHING


SIDES: TableColumns = tuple(
    (f"{heading} {side.upper()}", partial(_side_text, column, side, text))
    for heading, column, text in (
        ("count", "count", _number_text),
        ("payload", "payload_bytes", _bytes_text),
        ("time", "time_s", time_text),
    )
    for side in ("a", "b")
)


def _path_changes_table(trace_a: Trace, trace_b: Trace) -> Table:
    rows = records_of(difference(trace_a, trace_b))
    kinds = {"simulated" if trace.is_simulated else "traced" for trace in (trace_a, trace_b)}
    notes = [f"times: {' and '.join(sorted(kinds))} steps, median over steps, mean over ranks"]
    if kinds != {"simulated"} and (change := step_change(trace_a, trace_b)):
        time_a, other_taken = (brief_time_text(seconds) for seconds in (change.one_s, change.other_s))
        of = "predicted if simulated" if change.verdict == PREDICTED else "the medians of the cases' samples"
        notes.append(f"an untraced step takes {time_a} in A and {other_taken} in B, {of}")
    columns = (*((heading.replace("_", " "), text) for heading, text in key_columns(PATH)), *SIDES)
    breaks = changes_in([row["phase"] for row in rows])
    return capped(table_of("by path, per rank and step", columns, rows, notes, breaks, LEAST), MAX_PATHS)


def _owner_changes_table(trace_a: Trace, trace_b: Trace) -> Table:
    frame = difference(trace_a, trace_b, ("path_owner",))
    rows = records_of(frame.head(MAX_OWNERS))
    title = "by owner, largest changes of time first"
    if len(frame) > len(rows):
        title = f"the {len(rows)} of {len(frame)} owners with the largest changes of time"
    return table_of(title, (OWNER, *SIDES), rows, (), (), LEAST)
