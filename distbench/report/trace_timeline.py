"""Timelines of traced steps, as plots and as Chrome trace events for Perfetto.

The format is the JSON array form of "Trace Event Format" (Chromium project): complete events ("ph": "X", `ts` and `dur`
in microseconds) and metadata events ("ph": "M") that name and order processes and threads. Each rank is a process. The
first thread has nested steps and phases. Each mesh dim has a thread, and more threads for concurrent collectives,
because events of one thread must not overlap.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.records.dataframe import PHASES, Row, records_of
from distbench.report.trace_rows import ROOT, SCHEDULE, UNKNOWN_OWNER, Stretch, Trace, lanes_of, left_of, step_of
from distbench.show import plots as style
from distbench.show.plots import Spot, hover
from distbench.show.units import brief_time_text, known, size_text, time_scale
from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole, writing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RANKS = 8
HEIGHT = 0.8  # of a bar, in a lane of height one
COMPUTE = "compute"
PHASE_COLORS = dict(zip((*PHASES, SCHEDULE), (style.BLUE, style.SKY, style.ORANGE, style.BLUE), strict=True))
KIND_COLORS = {
    "all_gather": style.GREEN,
    "reduce_scatter": style.RED,
    "all_reduce": style.PURPLE,
    "all_to_all": style.BLACK,
    "broadcast": "#F0E442",
    "send": "#8C564B",
    "recv": "#C49C94",
}


def median_step(trace: Trace) -> int:
    """The traced step with the median time, or with the lower middle time of an even number of steps."""
    times = trace.record.get("steps_s") or ()
    in_order = sorted(trace.steps, key=lambda step: times[step] if step < len(times) else 0.0)
    return in_order[(len(in_order) - 1) // 2]


def lanes(trace: Trace) -> list[str]:
    """The lanes of a rank from top to bottom: compute, then each mesh dim in the order of the mesh."""
    mesh = list(trace.run.about.mesh or {})
    mesh_dims = dict.fromkeys(trace.rows["mesh_dim"].astype(str))
    return [
        COMPUTE,
        *sorted(mesh_dims, key=lambda name: (name not in mesh, mesh.index(name) if name in mesh else 0, name)),
    ]


def timeline_figures(traces: Sequence[Trace]) -> Iterator[tuple[str, "Figure"]]:
    """(name, figure) of every trace with times. Names are unique."""
    timed = [trace for trace in traces if trace.is_timed]
    names = [trace.name for trace in timed]
    for trace, name in zip(timed, names, strict=True):
        stem = name if names.count(name) == 1 else f"{name}-{trace.run.path.stem}"
        yield f"timeline-{stem}", timeline(trace)


def timeline(trace: Trace) -> "Figure":
    """A figure of the median step, with a panel per rank, which has a lane for compute and a lane per mesh dim."""
    step, ranks, names = median_step(trace), trace.ranks[:MAX_RANKS], lanes(trace)
    height = 1.5 + len(ranks) * (0.24 * len(names) + 0.2)
    figure, axes = style.new_figure(1, 11, height, share=True, num_rows=len(ranks))
    rows = trace.rows[trace.rows["step"] == step]
    phases = trace.phases[trace.phases["step"] == step]
    scale, unit = time_scale(float(phases["end_s"].max() - phases["start_s"].min()))
    for panel, rank in zip(axes, ranks, strict=True):
        computing = trace.computing
        if computing is not None:
            computing = computing[(computing["rank"] == rank) & (computing["step"] == step)]
        _panel(panel, rows[rows["rank"] == rank], phases[phases["rank"] == rank], names, scale, computing)
        panel.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", labelpad=8, fontweight="bold")
        panel.set_xlim(float(phases["start_s"].min()) / scale, float(phases["end_s"].max()) / scale)
        panel.tick_params(labelbottom=panel is axes[-1], bottom=panel is axes[-1])
    axes[-1].set_xlabel(f"time since the step began ({unit})")
    style.zoomable(figure, axes[-1])
    times = trace.record.get("steps_s") or ()
    step_text = brief_time_text(times[step] if step < len(times) else step_of(trace))
    simulated = "simulated, " if trace.is_simulated else ""
    style.title(figure, f"{trace.name}: time of each rank in one step ({simulated}{step_text})")
    _legend(axes[0], rows, phases["phase"])
    _caption(figure, trace)
    return figure


def _panel(
    axes: "Axes",
    rows: "pd.DataFrame",
    phases: "pd.DataFrame",
    names: Sequence[str],
    scale: float,
    computing: "pd.DataFrame | None",
) -> None:
    """Draw one rank's step. `computing` are the times of operators, None if unknown."""
    timed = rows[rows["duration_s"].notna()]
    stretches = list(zip(timed["issued_s"].tolist(), timed["completed_s"].tolist(), strict=True))
    for phase in records_of(phases):
        span = phase["start_s"], phase["end_s"]
        if computing is None:
            free = left_of(span, stretches)  # spans without a collective
        else:
            idle = left_of(span, zip(computing["start_s"].tolist(), computing["end_s"].tolist(), strict=True))
            free = left_of(span, idle)
        _bars(axes, 0, free, PHASE_COLORS.get(str(phase["phase"]), style.GREY), scale)
        label = f"{COMPUTE} in {phase['phase']}"
        hover(axes, [_spot(0, stretch, f"{label}\n{_span_text(stretch, scale)}", scale) for stretch in free])
    for (mesh_dim, kind), kind_rows in timed.groupby(["mesh_dim", "kind"], sort=False):
        place = names.index(str(mesh_dim))
        waiting, transfers = waiting_and_own(kind_rows)
        _bars(axes, place, waiting, style.WAITING, scale)
        _bars(axes, place, transfers, KIND_COLORS.get(str(kind), style.GREY), scale)
        hover(axes, [_collective_spot(place, row, scale) for row in records_of(kind_rows)])
    axes.set_yticks(range(len(names)), list(names), fontsize=8.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")


def _collective_spot(place: int, row: Row, scale: float) -> Spot:
    stretch = row["issued_s"], row["completed_s"]
    owner = str(row["owner"] or ROOT) if row["owner_known"] else UNKNOWN_OWNER
    collective = f"{row['kind']} over {row['mesh_dim']}, {size_text(row['payload_bytes'])}"
    lines = [collective, f"{row['phase']}, {row['source']}: {owner}"]
    if row["redistribution"]:
        lines.append(f"redistributes {row['redistribution']}")
    lines.append(_span_text(stretch, scale))
    if row["straggler_s"] > 0:
        lines.append(f"waiting for the group's slowest rank: {brief_time_text(row['straggler_s'])}")
    return _spot(place, stretch, "\n".join(lines), scale)


def _spot(place: int, stretch: Stretch, text: str, scale: float) -> Spot:
    start, end = stretch
    return Spot(start / scale, place - HEIGHT / 2, text, (end - start) / scale, HEIGHT)


def _span_text(stretch: Stretch, scale: float) -> str:
    start, end = stretch
    return f"{brief_time_text(end - start)}, from {start / scale:.2f} to {end / scale:.2f} {time_scale(scale)[1]}"


def waiting_and_own(rows: "pd.DataFrame") -> tuple[list[Stretch], list[Stretch]]:
    """Each collective as two spans in seconds: this rank's waiting for the slowest rank of the group, and the rest."""
    begun, ended = rows["issued_s"].to_numpy(float), rows["completed_s"].to_numpy(float)
    cut = np.minimum(begun + rows["straggler_s"].fillna(0.0).to_numpy(float), ended)
    return list(zip(begun, cut, strict=True)), list(zip(cut, ended, strict=True))


def _bars(axes: "Axes", place: int, stretches: Sequence[Stretch], color: str, scale: float) -> None:
    bars = [(start / scale, (end - start) / scale) for start, end in stretches if end > start]
    # An edge of the same colour makes bars visible that are narrower than a pixel.
    axes.broken_barh(bars, (place - HEIGHT / 2, HEIGHT), facecolor=color, edgecolor=color, linewidth=0.3)


def _legend(axes: "Axes", rows: "pd.DataFrame", phases: Iterable[str]) -> None:
    """Draw a legend above the first panel, with a row for compute and a row for collectives."""
    from matplotlib.patches import Patch

    shown_kinds = set(rows["kind"].astype(str))
    phase_colors = {f"{COMPUTE}: {phase}": PHASE_COLORS[phase] for phase in PHASE_COLORS if phase in set(phases)}
    if (rows["straggler_s"] > 0).any():
        phase_colors["waiting for the group's slowest rank"] = style.WAITING
    kinds = {kind: color for kind, color in KIND_COLORS.items() if kind in shown_kinds}
    kinds |= dict.fromkeys(sorted(shown_kinds - set(KIND_COLORS)), style.GREY)
    # A legend is filled by column.
    pairs = [pair for column in zip_longest(phase_colors.items(), kinds.items()) for pair in column]
    patches = [Patch(facecolor=pair[1], label=pair[0]) if pair else Patch(alpha=0.0, label=" ") for pair in pairs]
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=len(pairs) // 2, borderaxespad=0.2,
        handlelength=1, columnspacing=1.4, fontsize=9,
    )  # fmt: skip


def _caption(figure: "Figure", trace: Trace) -> None:
    compute = "no collective runs" if trace.computing is None else "a stage's forward or backward runs"
    sentences = [f"the median of {len(trace.steps)} traced steps; compute: {compute}"]
    if trace.is_simulated:
        sentences = [f"{trace.record.get('method')}, nothing is measured; compute: an operator runs"]
    if len(trace.ranks) > MAX_RANKS:
        sentences.append(f"ranks {trace.ranks[0]} to {trace.ranks[MAX_RANKS - 1]} of {len(trace.ranks)}")
    if not trace.record.get("clock_shared"):
        sentences.append("ranks have no common clock, so times count from each rank's start")
    style.caption(figure, "; ".join(sentences))


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
    with writing(f"--chrome {path}"):
        write_whole(path, chrome_text(trace))
    return f"trace file written: {path} (open it at ui.perfetto.dev or chrome://tracing)"
