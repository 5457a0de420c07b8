"""What a trace says, as headings, sentences and tables."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distbench.records.dataframe import Row, records_of
from distbench.records.run_file import basis_text
from distbench.report.section_protocol import ReportedRun, Section
from distbench.report.trace_rows import NOBODY, PATH, Trace, bubbles_text, busy_share, costs, doubts, step_of, traces_of
from distbench.show.blocks import Block, Heading, Lines, Table, TableColumns, capped, key_columns, table_of
from distbench.show.units import NOTHING, brief_time_text, known, percent_text, size_text, time_text
from distbench.spec.printable_text import capped_lines, count_text

if TYPE_CHECKING:
    import pandas as pd


MAX_PATHS = 40
MAX_OWNERS = 10
MAX_DIFFERENCES = 5
# More of a step than this twice in collectives is overlap, and not the difference of two medians.
OVERLAP = 0.02
ASKED_FOR: dict[Any, str] = {True: "explicit", False: "implicit"}
IMPLICIT = "implicit: an operator needed other placements than it was given, so DTensor moved the tensor by itself"


def whole_bytes(mean: float) -> float:
    """A mean over ranks as whole bytes."""
    return float(round(mean)) if known(mean) else mean


def share_text(share: float, otherwise: str = NOTHING) -> str:
    """`12 %`, below ten with a decimal, `otherwise` where it is not known."""
    if not known(share):
        return otherwise
    return percent_text(share) if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def number_text(count: float) -> str:
    """A count that is whole where ranks do the same: `12`, else `12.5`."""
    return f"{count:.1f}".removesuffix(".0") if known(count) else NOTHING


COST_COLUMNS: TableColumns = (
    ("count", lambda row: number_text(row["count"])),
    ("payload", lambda row: size_text(whole_bytes(row["payload_bytes"]))),
    ("wire", lambda row: size_text(whole_bytes(row["wire_bytes"]))),
    ("time", lambda row: time_text(row["time_s"])),
    ("of step", lambda row: share_text(row["share_of_step"])),
    ("straggler", lambda row: share_text(row["straggler_share"])),
    ("exposed", lambda row: share_text(row["exposed_share"], "n/a")),
)
COUNT, PAYLOAD, _, TIME, SHARE, STRAGGLER, _ = COST_COLUMNS
LEAST_OF_COSTS = ("wire", "straggler", "payload", "of step")


def trace_blocks(trace: Trace) -> list[Block]:
    """One trace: what a step spends in short, by path, by owner, by redistribution, and what to think of it."""
    simulated = ", simulated" if trace.is_simulated else ""
    blocks: list[Block] = [Heading(f"{trace.name}: which path costs what{simulated}"), Lines(_opening(trace))]
    if not trace.rows.empty:
        blocks += [_paths_table(trace), _owners_table(trace), *_redistributions_table(trace)]
    record = trace.record
    # How far to trust the tables.
    trust = () if trace.is_simulated else (*_agreement(record), *_memory(record), *doubts(trace))
    return [*blocks, Lines((*method_lines(trace), *trust))]


def grouped_table(trace: Trace, by: Sequence[str]) -> Table:
    """What a step spends on each combination of some columns of the rows."""
    keys = tuple(dict.fromkeys(by))
    title = f"{trace.name} by {', '.join(keys)}, {_per_step(trace, keys)}"
    rows = records_of(costs(trace, keys))
    return capped(table_of(title, (*key_columns(keys), *COST_COLUMNS), rows, (), (), LEAST_OF_COSTS), MAX_PATHS)


def _opening(trace: Trace) -> tuple[str, ...]:
    case = f"case {trace.case_id}"
    if trace.rows.empty:
        return (case, "this step communicates nothing")
    (totals,) = records_of(costs(trace, ()))
    sentence = f"a traced step takes {brief_time_text(step_of(trace))} on {count_text(len(trace.ranks), 'rank')}"
    if trace.is_simulated:
        sentence = f"a simulated step takes {brief_time_text(step_of(trace))}, {_ranks_text(trace)}"
    if known(busy := busy_share(trace)):
        sentence += f"; a collective is under way on a rank in {percent_text(busy)} of it"
    if known(waited := totals["straggler_share"]):
        sentence += f"; {percent_text(waited)} of collectives' time is waiting for the group's slowest rank"
    return case, sentence, *([bubbles] if (bubbles := bubbles_text(trace)) else [])


def _ranks_text(trace: Trace) -> str:
    listed = ", ".join(map(str, trace.ranks))
    return f"as rank{'s' if len(trace.ranks) > 1 else ''} {listed} of {trace.run.about.environment.world_size or '?'}"


def _per_step(trace: Trace, keys: Sequence[str] = ()) -> str:
    if trace.is_simulated:
        mean = "" if len(trace.ranks) == 1 or "rank" in keys else f", the mean over {len(trace.ranks)} simulated ranks"
        return f"simulated, a rank and step{mean}"
    median = f"a rank and step: the median of {len(trace.steps)} traced steps"
    return median if "rank" in keys else f"{median}, the mean over {len(trace.ranks)} ranks"


def _paths_table(trace: Trace) -> Table:
    executed = _executed(trace)
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
    notes = [f"^ {kind} runs as {ran} on {backend}" for (kind, ran), backend in executed.items()]
    if trace.record.get("exposed_reason"):
        notes.append(f"no exposed share: {trace.record['exposed_reason']}")
    if trace.is_simulated:
        waits = "waiting for the other end of a message is left out" if trace.record.get("pipeline") else ""
        waits = waits or "no collective waits for another rank, so none has stragglers"
        notes.append(f"time is what the hardware file gives; {waits}")
    else:
        notes.append("time is from issue to completion, waiting for the slowest rank (the straggler share) included")
    if totals["share_of_step"] > busy_share(trace) + OVERLAP:
        notes.append("some collectives are under way at the same time: each counts whole, so shares add up to more")
    columns = (
        ("<phase, source", lambda row: str(row["source"])),
        ("<kind", lambda row: str(row["kind"])),
        ("<mesh dim", lambda row: str(row["mesh_dim"])),
        *COST_COLUMNS,
    )
    title = f"by path{seen_of(trace)}, {_per_step(trace)}"
    table = table_of(title, columns, rows, notes, [*breaks[1:], len(rows) - 1], LEAST_OF_COSTS)
    return replace(table, together=True)


def seen_of(trace: Trace) -> str:
    """Where a second method saw more collectives than these: ` (12 of 39 collectives)`; empty where it did not."""
    agreement = trace.record.get("agreement")
    all_of_them = agreement.get("num_rows") if isinstance(agreement, dict) else None
    if not isinstance(all_of_them, int) or trace.rows.empty or not trace.steps:
        return ""
    first = trace.rows[(trace.rows["rank"] == trace.ranks[0]) & (trace.rows["step"] == trace.steps[0])]
    return f" ({len(first)} of {count_text(all_of_them, 'collective')})" if len(first) < all_of_them else ""


def _executed(trace: Trace) -> dict[tuple[str, str], str]:
    """(kind, what the backend runs for it) where the two differ, to the backend's name."""
    backend = str((trace.case or {}).get("backend") or "this backend")
    differing = trace.rows[trace.rows["backend_op"].notna() & (trace.rows["backend_op"] != trace.rows["kind"])]
    pairs = differing[["kind", "backend_op"]].drop_duplicates().itertuples(index=False)
    return {(str(kind), str(ran)): backend for kind, ran in pairs}


def _owners_table(trace: Trace) -> Table:
    owners, parts = costs(trace, ("path_owner",)), costs(trace, ("path_owner", *PATH))

    def most(row: Row) -> str:
        of_owner = _costliest_first(parts[parts["path_owner"] == row["path_owner"]])
        return _first_of([f"{part['phase']} {part['mesh_dim']} {part['kind']}" for part in of_owner])

    owner: TableColumns = (("<owner", lambda row: str(row["path_owner"])),)
    columns = (*owner, COUNT, PAYLOAD, TIME, SHARE, STRAGGLER, ("<most of it", most))
    rows = records_of(owners.head(MAX_OWNERS))
    title = f"the {len(rows)} most expensive of {len(owners)} owners" if len(owners) > len(rows) else "by owner"
    title += seen_of(trace)
    owned = trace.rows["owner_known"].astype(bool)
    notes = [
        f"owner known for {int(owned.sum())} of {count_text(len(owned), 'collective')} ({percent_text(owned.mean())})"
    ]
    if not owned.all():
        notes.append(f"{NOBODY}: no module was at work that we know of")
    return table_of(title, columns, rows, notes, (), ("straggler", "payload", "of step", "count"))


def _costliest_first(frame: "pd.DataFrame") -> list[Row]:
    return records_of(frame.sort_values(["time_s", "payload_bytes"], ascending=False, kind="stable"))


def _first_of(names: Sequence[str]) -> str:
    """`a +2` for three names."""
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
        ("<asked for", lambda row: ASKED_FOR.get(row["explicit"], NOTHING)),
        ("<collective", lambda row: f"{row['mesh_dim']} {row['kind']}"),
        *(COUNT, PAYLOAD, TIME),
        ("<mostly of", mostly_of),
    )
    rows = _costliest_first(costs(trace, keys, moved))
    notes = [IMPLICIT] if any(row["explicit"] is False for row in rows[:MAX_OWNERS]) else []
    title, optional = "where it came from a redistribution of DTensor", ("count", "payload", "asked for")
    return [capped(table_of(title, columns, rows, notes, (), optional), MAX_OWNERS)]


def method_lines(trace: Trace) -> list[str]:
    """By what the trace was taken, and what that costs or stands on."""
    if not trace.is_simulated:
        return [_overhead(trace.record)]
    method = trace.record.get("method") or "a simulation"
    measured = f"by {method}: nothing here was measured; docs/simulation.md says how well that holds"
    return [measured, basis_text(trace.run.about.simulated)]


def _overhead(record: dict[str, Any]) -> str:
    method = str(record.get("method") or "unknown")
    overhead = record.get("overhead") or {}
    if not known(overhead.get("ratio")):
        return f"traced by {method}; what that adds to a step was not measured"
    sentence = f"traced by {method}: {overhead['ratio']:.2f} times a bare step's CPU time"
    bare, traced = overhead.get("bare_cpu_s") or (), overhead.get("traced_cpu_s") or ()
    ratios = [with_trace / without for without, with_trace in zip(bare, traced, strict=False) if without]
    if ratios:
        sentence += f" (median of {len(ratios)} interleaved rounds, {min(ratios):.2f} to {max(ratios):.2f})"
    return f"{sentence}; the case's own times are of steps without it"


def _agreement(record: dict[str, Any]) -> tuple[str, ...]:
    agreement = record.get("agreement")
    if not isinstance(agreement, dict) or not agreement.get("method"):
        return ("no second method looked at the same step",)
    sentences = [str(sentence) for sentence in agreement.get("differences") or ()]
    if not sentences:
        rows = f"all {agreement.get('num_rows')} collectives of a rank's step"
        return (f"{agreement['method']}, a second method, saw the same kind, group and bytes in {rows}",)
    head = f"caution: {agreement['method']}, a second method, saw something else in the same step:"
    return (head, *capped_lines(sentences, MAX_DIFFERENCES, "... {} more differences"))


def _memory(record: dict[str, Any]) -> tuple[str, ...]:
    memory = record.get("memory")
    if not isinstance(memory, dict):
        return ()
    measured, predicted = memory.get("measured_peak_bytes"), memory.get("predicted_peak_bytes")
    of_measured = f"{size_text(measured)} measured" if known(measured) else "not measured"
    by = f" ({memory['measured_by']})" if known(measured) and memory.get("measured_by") else ""
    reason = memory.get("reason") or "it could not be predicted"
    if not known(predicted):
        return (f"peak memory of a rank: {of_measured}{by}; no prediction: {reason}",)
    more = f"; {memory['reason']}" if memory.get("reason") else ""
    return (f"peak memory of a rank: {of_measured}{by}, {size_text(predicted)} predicted{more}",)


def headline(reported: ReportedRun) -> list[str]:
    """The path with the most exposed communication of all traced steps; the longest one where that is not known."""
    paths = []
    for trace in traces_of([reported.run])[0]:
        rows = [] if trace.rows.empty else records_of(costs(trace, PATH))
        paths += [
            ({**row, "exposed_s": row["exposed_share"] * row["time_s"]}, trace) for row in rows if known(row["time_s"])
        ]
    if not paths:
        return []
    exposed = [path for path in paths if known(path[0]["exposed_s"])]
    name = "exposed_s" if exposed else "time_s"
    row, trace = max(exposed or paths, key=lambda path: path[0][name])
    path = f"{row['phase']} {row['source']} {row['kind']} over {row['mesh_dim']}"
    of_step = f"{brief_time_text(row[name])} of a step's {brief_time_text(step_of(trace))}"
    label = "largest exposed path" if exposed else "longest path (what is exposed is not known)"
    return [f"{label}: {path}, {of_step} in {trace.name}"]


SECTION = Section(headline)
