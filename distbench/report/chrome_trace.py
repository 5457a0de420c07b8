"""A traced step as Chrome's trace events, for Perfetto."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.records.dataframe import records_of
from distbench.report.trace_rows import Trace, lanes_of
from distbench.report.trace_timeline import COMPUTE, lanes
from distbench.show.units import known
from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole

if TYPE_CHECKING:
    import pandas as pd

Event = dict[str, Any]
MICRO = 1e6
NANO = 1e3  # nanoseconds per microsecond
# In Perfetto, thread 0 is the idle thread.
FIRST_THREAD = 1
STEPS = "steps and phases"
# Gap between two traced steps, because the real time between the steps is unknown.
PAUSE_S = 1e-3


def chrome_events(trace: Trace) -> list[Event]:
    """Events of all steps of all ranks of a trace with times, metadata first. Steps follow each other, and times begin
    at 0."""
    starts = _starts(trace)
    events: list[Event] = []
    for rank in trace.ranks:
        events += _named(rank, "process", 0, f"rank {rank}{', simulated' if trace.is_simulated else ''}", rank)
        events += _named(rank, "thread", FIRST_THREAD, STEPS, FIRST_THREAD)
        phases = trace.phases[trace.phases["rank"] == rank]
        events += _phase_events(rank, phases, starts)
        rows = trace.rows[(trace.rows["rank"] == rank) & trace.rows["duration_s"].notna()]
        thread = FIRST_THREAD + 1
        if trace.computing is not None:
            events += _named(rank, "thread", thread, COMPUTE, thread)
            for stretch in records_of(trace.computing[trace.computing["rank"] == rank]):
                begun, ended = (stretch[name] + starts[int(stretch["step"])] for name in ("start_s", "end_s"))
                events.append({**_complete(rank, COMPUTE, COMPUTE, begun, ended, {}), "tid": thread})
            thread += 1
        for mesh_dim in lanes(trace)[1:]:
            collective_events = list(_collective_events(rank, rows[rows["mesh_dim"].astype(str) == mesh_dim], starts))
            # In whole nanoseconds, because rounding errors would put neighbours on different lanes.
            spans = [(event["ts"], event["ts"] + event["dur"]) for event in collective_events]
            used = lanes_of([(round(start * NANO), round(end * NANO)) for start, end in spans])
            for lane in range(max(used, default=0) + 1):
                name = mesh_dim if lane == 0 else f"{mesh_dim}, concurrent"
                events += _named(rank, "thread", thread + lane, name, thread + lane)
            events += [{**event, "tid": thread + lane} for event, lane in zip(collective_events, used, strict=True)]
            thread += max(used, default=0) + 1
    return sorted(events, key=lambda event: event["ph"] != "M")


def _starts(trace: Trace) -> dict[int, float]:
    """Start of each step in seconds, so that no time is below 0 and steps do not overlap."""
    import pandas as pd

    names = ["step", "start_s", "end_s"]
    collectives = trace.rows[["step", "issued_s", "completed_s"]].set_axis(names, axis=1)
    spans = pd.concat([trace.phases[names], collectives]).groupby("step").agg({"start_s": "min", "end_s": "max"})
    lengths = (spans["end_s"] - spans["start_s"]).fillna(0.0) + PAUSE_S
    starts = lengths.cumsum() - lengths - spans["start_s"].fillna(0.0)
    return dict(zip(starts.index.tolist(), starts.tolist(), strict=True))


def _named(rank: int, kind: str, thread: int, name: str, place: int) -> list[Event]:
    common = {"ph": "M", "pid": rank, "tid": thread, "ts": 0}
    return [
        {**common, "name": f"{kind}_name", "args": {"name": name}},
        {**common, "name": f"{kind}_sort_index", "args": {"sort_index": place}},
    ]


def _complete(rank: int, name: str, category: str, start_s: float, end_s: float, args: Event) -> Event:
    # Whole nanoseconds, so that the end of one phase is exactly the start of the next phase.
    start, end = round(start_s * MICRO, 3), round(end_s * MICRO, 3)
    event = {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": FIRST_THREAD, "ts": start}
    return {**event, "dur": round(end - start, 3), "args": args}


def _phase_events(rank: int, phases: "pd.DataFrame", starts: dict[int, float]) -> Iterator[Event]:
    for step, step_phases in phases.groupby("step"):
        at = starts[int(str(step))]
        span = float(step_phases["start_s"].min()) + at, float(step_phases["end_s"].max()) + at
        yield _complete(rank, f"step {step}", "step", *span, {"step": int(str(step))})
        for phase in records_of(step_phases):
            yield _complete(rank, str(phase["phase"]), "phase", phase["start_s"] + at, phase["end_s"] + at, {})


def _collective_events(rank: int, rows: "pd.DataFrame", starts: dict[int, float]) -> Iterator[Event]:
    for row in records_of(rows):
        at = starts[int(row["step"])]
        args = {
            "owner": str(row["owner"]) if row["owner_known"] else None,
            **{name: str(row[name]) for name in ("phase", "source", "backend_op", "mesh_dim", "group", "dtype")},
            "payload_bytes": int(row["payload_bytes"]),
            "wire_bytes": int(row["wire_bytes"]) if known(row["wire_bytes"]) else None,
            "redistribution": str(row["redistribution"] or ""),
            "explicit": bool(row["explicit"]) if isinstance(row["explicit"], bool) else None,
            "waiting_us": round(row["straggler_s"] * MICRO, 3) if known(row["straggler_s"]) else None,
        }
        yield _complete(rank, str(row["kind"]), str(row["source"]), row["issued_s"] + at, row["completed_s"] + at, args)


def chrome_text(trace: Trace) -> str:
    """The text of the trace file for a trace with times."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in chrome_events(trace))
    return f"[\n{lines}\n]\n"


def write_chrome(path: Path, trace: Trace) -> str:
    """Write the trace file, and return a sentence with the path."""
    if not trace.is_timed:
        raise UserError(
            f"--chrome {path} cannot be written, because the trace of {trace.case_id} has no times; give another trace"
        )
    try:
        write_whole(path, chrome_text(trace))
    except OSError as error:
        raise UserError(f"--chrome {path} cannot be written ({error.strerror}); give another file") from error
    return f"trace file written: {path} (open it at ui.perfetto.dev or chrome://tracing)"
