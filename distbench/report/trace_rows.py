"""Trace records as frames with one row per collective, traced step and rank; sums by path, gaps, and pipeline
bubbles."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.judge.communication_signature import ROOT, UNKNOWN_OWNER
from distbench.records.dataframe import PHASES, new_frame, records_of
from distbench.records.run_file import COMPUTING_COLUMNS, PHASE_COLUMNS, SIMULATED, TRACE_COLUMNS, Record, Run
from distbench.show.units import percent_text
from distbench.spec.errors import UserError, nearest
from distbench.spec.plan import folded
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import median

if TYPE_CHECKING:
    import pandas as pd


TIMES, ENDS = ("issued_s", "completed_s", "exposed_s"), ["start_s", "end_s"]


@dataclass(frozen=True, eq=False)
class Trace:
    """The collectives of one traced case."""

    run: Run
    record: Record  # the trace's line of the run file
    case: Record | None  # the measured case, None if missing
    rows: "pd.DataFrame"  # one row per collective, traced step and rank, with the columns of `rows_of`
    phases: "pd.DataFrame"  # one row per phase, traced step and rank: `start_s`, `end_s`
    ranks: tuple[int, ...]  # all ranks; for a simulated step, the simulated ranks
    steps: tuple[int, ...]
    computing: "pd.DataFrame | None" = None  # spans of operators, None if unknown
    summed: "dict[tuple[str, ...], pd.DataFrame]" = field(default_factory=dict, init=False)  # `costs` by keys

    @property
    def case_id(self) -> str:
        """The id of the traced case."""
        return str(self.record["case_id"])

    @property
    def name(self) -> str:
        """The case's id without kind and shape, which is the scenario and the variant, if the scenario has variants."""
        return self.case_id.split("/", 2)[-1]

    @property
    def is_simulated(self) -> bool:
        """Whether the step was simulated rather than measured."""
        return self.record.get(SIMULATED) is True or self.run.is_simulated

    @property
    def is_timed(self) -> bool:
        """Whether the trace has begin and end of each phase, which a timeline needs."""
        return not self.phases.empty and bool(self.phases[ENDS].notna().all(axis=None))


def traces_of(runs: Sequence[Run]) -> tuple[list[Trace], list[str]]:
    """The traces of some runs in file order, and one sentence per trace that failed or cannot be read."""
    traces, failed = [], []
    for run in runs:
        for record in run.traces:
            problem = _problem(record)
            try:
                traces += [] if problem else [_trace(run, record)]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"the record is inconsistent ({error}); trace the step again"
            if problem:
                failed.append(f"{record['case_id']} has no trace: {problem}")
    return traces, failed


def _problem(record: Record) -> str | None:
    if record.get("error"):
        return str(record["error"])
    tables = [(TRACE_COLUMNS, record), (PHASE_COLUMNS, record["phases"])]
    tables += [(COMPUTING_COLUMNS, computing)] if (computing := record.get("computing")) else []
    if lacking := {name for columns, table in tables for name in columns if name not in table["columns"]}:
        return f"the record has no {', '.join(sorted(lacking))}; trace the step again with this distbench"
    return None


def _trace(run: Run, record: Record) -> Trace:
    phases = _frame(record["phases"], ENDS)
    rows = rows_of(record, phases)
    case = next((case for case in run.cases if case["case"]["id"] == record["case_id"]), None)
    ranks, steps = ({*rows[name].tolist(), *phases[name].tolist()} for name in ("rank", "step"))
    if not (record.get(SIMULATED) is True or run.is_simulated):
        ranks |= {int(rank) for group in rows["group"].unique() for rank in str(group).split(",") if rank.isdigit()}
    computing = _frame(table, ENDS) if (table := record.get("computing")) else None
    return Trace(run, record, case, rows, phases, tuple(sorted(ranks)), tuple(sorted(steps)), computing)


def rows_of(record: Record, phases: "pd.DataFrame") -> "pd.DataFrame":
    """The record's rows with derived columns. Times are in seconds, nan if unknown.

    Added:
        duration_s: time from issue to completion on this rank, including waiting for the slowest rank.
        straggler_s: waiting time of this rank, which is the duration minus the shortest duration of the group's ranks,
        matched by (step, group, seq). nan if simulated, or not timed on every rank of the group.
        rank_step_s: the step's time on this rank, from the start of the first phase to the end of the last phase.
        share_of_step: duration_s / rank_step_s.
        path_owner: the owner with layers folded, "(root)" for the model, "(unknown)" without a known owner.
    """
    rows = _frame(record, TIMES)
    rows["duration_s"] = rows["completed_s"] - rows["issued_s"]
    of_collective = rows.groupby(["step", "group", "seq"], sort=False)["duration_s"]
    is_whole = (of_collective.transform("count") == rows["group_size"]) & (record.get(SIMULATED) is not True)
    rows["straggler_s"] = (rows["duration_s"] - of_collective.transform("min")).where(is_whole)
    spans = phases.groupby(["rank", "step"]).agg(start_s=("start_s", "min"), end_s=("end_s", "max"))
    lengths = (spans["end_s"] - spans["start_s"]).rename("length")
    rank_step_s = rows[["rank", "step"]].join(lengths, on=["rank", "step"])["length"]
    rows["rank_step_s"] = rank_step_s.where(rank_step_s > 0)
    rows["share_of_step"] = rows["duration_s"] / rows["rank_step_s"]
    owners = zip(rows["owner"], rows["owner_known"], strict=True)
    rows["path_owner"] = [(folded(str(owner)) or ROOT) if is_known else UNKNOWN_OWNER for owner, is_known in owners]
    return rows


def _frame(table: dict[str, Any], times: Sequence[str]) -> "pd.DataFrame":
    import pandas as pd

    frame = new_frame(table["rows"], table["columns"])
    for name in times:
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype("float64")
    return frame


# Time spans on one rank: gaps between spans, and lanes without overlapping spans.

Stretch = tuple[float, float]


def left_of(whole: Stretch, stretches: Iterable[Stretch]) -> list[Stretch]:
    """The parts of `whole` that are not covered by `stretches`, in order."""
    free, at = [], whole[0]
    for start, end in sorted(stretches):
        if start > at:
            free.append((at, min(start, whole[1])))
        at = max(at, end)
        if at >= whole[1]:
            break
    if at < whole[1]:
        free.append((at, whole[1]))
    return [(start, end) for start, end in free if end > start]


def lanes_of(stretches: Sequence[Stretch]) -> list[int]:
    """The lane of each time span (in any order): the lowest lane, counted from 0, that is free at the span's start."""
    lanes = [0] * len(stretches)
    ends: list[float] = []
    for index in sorted(range(len(stretches)), key=lambda index: stretches[index]):
        start, end = stretches[index]
        lane = next((lane for lane, free_at in enumerate(ends) if free_at <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


# The bubbles of a traced pipeline: spans in which a rank neither works on a stage nor communicates.

SCHEDULE = "schedule"  # the phase with forward and backward


def bubble_shares(trace: Trace) -> dict[int, float]:
    """The bubble share of forward and backward per rank, as the median over the traced steps.

    Forward and backward last from the first start on any rank to the last end, or if ranks have no common clock, from
    start to end on each rank. In a bubble a rank neither works on a stage (forward, loss, backward or reduction of
    gradients, with collectives of FSDP and TP) nor has a message or collective in progress. A message is in progress
    after both ends have issued the message. A simulated step's record has bubbles as shares of the step, without time
    that waits for the host.
    """
    if (simulated := _simulated(trace)) is not None:
        return simulated
    rank_shares: dict[int, list[float]] = {}
    for rank, span, busy in _ranks_of_steps(trace):
        free = sum(end - start for start, end in left_of(span, busy))
        rank_shares.setdefault(rank, []).append(free / (span[1] - span[0]))
    return {rank: median(shares) for rank, shares in sorted(rank_shares.items())}


def _simulated(trace: Trace) -> dict[int, float] | None:
    shares = (trace.record.get("pipeline") or {}).get("bubble_shares")
    return None if shares is None else dict(zip(trace.ranks, shares, strict=False))


def _ranks_of_steps(trace: Trace) -> Iterator[tuple[int, Stretch, list[Stretch]]]:
    """Yield (rank, span of forward and backward, busy spans) per step."""
    if trace.computing is None:
        return
    phases = trace.phases[trace.phases["phase"] == SCHEDULE]
    timed = trace.rows[trace.rows["duration_s"].notna()]
    begun_s = timed["issued_s"] + timed["straggler_s"].fillna(0.0)
    moved = timed.assign(start_s=begun_s, end_s=timed["completed_s"])
    for step, of_step in phases.groupby("step"):
        all_ranks = of_step["start_s"].min(), of_step["end_s"].max()
        for row in records_of(of_step):
            span = all_ranks if trace.record.get("clock_shared") else (row["start_s"], row["end_s"])
            busy: list[Stretch] = []
            for table in (trace.computing, moved):
                rank_rows = table[(table["rank"] == row["rank"]) & (table["step"] == step)]
                busy += zip(rank_rows["start_s"].tolist(), rank_rows["end_s"].tolist(), strict=True)
            if span[1] > span[0]:
                yield int(row["rank"]), span, busy


def bubbles_text(trace: Trace) -> str | None:
    """Return a sentence on the extreme bubble shares and the schedule's minimum share, or None without a pipeline."""
    pipeline, shares = trace.record.get("pipeline"), bubble_shares(trace)
    if not pipeline or not shares:
        return None
    extremes = [extreme(shares, key=lambda rank: shares[rank]) for extreme in (min, max)]
    ranks = ", ".join(f"rank {rank} {percent_text(shares[rank])}" for rank in extremes)
    of = "the step" if _simulated(trace) is not None else "forward and backward"
    text = f"bubbles are {percent_text(sum(shares.values()) / len(shares))} of {of} per rank ({ranks})"
    at_least = pipeline.get("least_idle_share")
    parts = count_text(pipeline["microbatches"], "micro-batch", "micro-batches")
    of_schedule = f"{pipeline['schedule']} of {count_text(pipeline['num_stages'], 'stage')} and {parts}"
    if at_least is None:
        return f"{text}; the minimum share of {of_schedule} depends on the model"
    return f"{text}; the minimum share of {of_schedule} is {percent_text(at_least)} for equally long stages"


PATH = ("phase", "source", "kind", "mesh_dim")
SUMMED = ("count", "payload_bytes", "wire_bytes", "time_s", "share_of_step")
COSTS = (*SUMMED, "straggler_share", "exposed_share")
# Sums are not valid keys. Steps are not valid keys either, because costs are medians over steps.
GROUPABLE = (
    *("rank", "phase", "source", "kind", "op", "backend_op", "mesh_dim", "group", "group_size", "seq", "dtype"),
    *("owner", "path_owner", "owner_known", "redistribution", "explicit"),
)


def costs(trace: Trace, keys: Sequence[str], only: "pd.Series[bool] | None" = None) -> "pd.DataFrame":
    """A step's costs per combination of `keys`, which are columns of `Trace.rows` (without keys, one row in total).

    Columns are the keys and COSTS. Rows are ordered by phase, longest first. SUMMED are medians over the traced steps
    of the mean over ranks (of the values per rank, if "rank" is a key). A rank or step without such a row counts as 0.
    The straggler share is relative to the time of rows with a known straggler time, over all ranks and steps. The
    exposed share is computed in the same way. Unknown values are nan.
    """
    if only is not None:
        return _costs(trace, keys, trace.rows[only])
    # A report needs the same costs repeatedly.
    if (key := tuple(keys)) not in trace.summed:
        trace.summed[key] = _costs(trace, keys, trace.rows)
    return trace.summed[key].copy()


def _costs(trace: Trace, keys: Sequence[str], selected: "pd.DataFrame") -> "pd.DataFrame":
    rows = selected.assign(count=1.0, time_s=selected["duration_s"], everything="")
    by = list(keys) or ["everything"]
    sums = rows.groupby([*by, "step"], sort=False, dropna=False)[list(SUMMED)].sum(min_count=1)
    sums /= 1 if "rank" in keys else len(trace.ranks)
    counts = sums["count"].unstack("step").reindex(columns=trace.steps)
    frame = counts.notna().sum(axis=1).to_frame("in_steps")
    for name in SUMMED:
        by_step = sums[name].unstack("step").reindex(columns=trace.steps)
        frame[name] = by_step.where(counts.notna(), 0.0).median(axis=1)
    for name, part in (("straggler_share", "straggler_s"), ("exposed_share", "exposed_s")):
        grouped = rows.assign(whole=rows["time_s"].where(rows[part].notna())).groupby(by, sort=False, dropna=False)
        totals = grouped[[part, "whole"]].sum(min_count=1)
        frame[name] = (totals[part] / totals["whole"]).replace([np.inf, -np.inf], np.nan)
    ordered = largest_first(frame.reset_index().drop(columns="in_steps"), "time_s", "payload_bytes")
    return ordered if keys else ordered.drop(columns="everything")


def frame_of_traces(traces: Sequence[Trace], by: Sequence[str] = ()) -> "pd.DataFrame":
    """One row per collective, traced step and rank, with scenario, run file, case, and the columns of `rows_of`.

    With `by` (columns of GROUPABLE), one row per combination of these columns, with the columns of `costs`.
    """
    import pandas as pd

    for name in by:
        if name not in GROUPABLE:
            raise UserError(f"--group-by {name} is not a column of traces for groups ({nearest(name, GROUPABLE)})")
    parts = []
    for trace in traces:
        rows = costs(trace, tuple(dict.fromkeys(by))) if by else trace.rows.copy()
        where = {"scenario": trace.run.scenario, "run_file": trace.run.path.name, "case_id": trace.case_id}
        for place, (name, value) in enumerate(where.items()):
            rows.insert(place, name, value)
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def largest_first(frame: "pd.DataFrame", *columns: str) -> "pd.DataFrame":
    """Rows sorted by phase in the order of a step, if there is such a column, then by the largest values of
    `columns`."""
    phases = {phase: place for place, phase in enumerate(PHASES)}
    phase = frame["phase"].map(phases).fillna(len(PHASES)) if "phase" in frame else 0
    keys = {f"_{name}": -frame[name].abs() for name in columns}
    ordered = frame.assign(_phase=phase, **keys).sort_values(["_phase", *keys], kind="stable")
    return ordered[frame.columns].reset_index(drop=True)


def step_of(trace: Trace) -> float:
    """Seconds of the median traced step on the slowest rank, or nan without times."""
    seconds = [value for value in trace.record.get("steps_s") or () if isinstance(value, int | float)]
    return float(np.median(seconds)) if seconds else float("nan")


def busy_share(trace: Trace) -> float:
    """The share of a step with at least one collective in progress, as the median over steps of the mean over ranks.

    nan without times of steps or collectives.
    """
    shares: dict[Hashable, list[float]] = {}
    timed = trace.rows[trace.rows["duration_s"].notna()]
    by_rank = dict(iter(timed.groupby(["step", "rank"])))
    for (step, rank), phases in trace.phases.groupby(["step", "rank"]):
        rows, span = by_rank.get((step, rank)), (phases["start_s"].min(), phases["end_s"].max())
        if rows is not None and span[1] > span[0]:
            stretches = zip(rows["issued_s"], rows["completed_s"], strict=True)
            free = sum(end - start for start, end in left_of(span, stretches))
            shares.setdefault(step, []).append(1 - free / (span[1] - span[0]))
    of_steps = [sum(of_step) / len(trace.ranks) for of_step in shares.values()]
    return float(np.median(of_steps)) if of_steps else float("nan")


def doubts(trace: Trace) -> list[str]:
    """Sentences on contradictions in the rows, which are collectives that are not on all ranks of the group. None if
    simulated."""
    if trace.is_simulated:
        return []
    # A send on one rank matches a recv on another rank.
    rows = trace.rows.assign(kind_of_both=trace.rows["kind"].replace("recv", "send"))
    silent = sorted(set(trace.ranks) - set(rows["rank"].tolist())) if len(rows) else []
    collectives = rows.groupby(["step", "group", "seq"], sort=False).agg(
        num_ranks=("rank", "nunique"), size=("group_size", "first"), num_kinds=("kind_of_both", "nunique")
    )
    alone = int((collectives["num_ranks"] != collectives["size"]).sum())
    mixed = int((collectives["num_kinds"] > 1).sum())
    of = f"of {count_text(len(collectives), 'collective')}"
    sentences = {
        f"rank {', '.join(map(str, silent))} recorded no collective, but counts are means over all ranks": silent,
        f"{alone} {of} are missing on some ranks of their group, so their straggler share is unknown": alone,
        f"{mixed} {of} have another kind on another rank, so ranks ran different steps": mixed,
    }
    return [sentence for sentence, is_so in sentences.items() if is_so]
