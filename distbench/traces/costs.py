"""Rows of a trace summed into what a step spends on each path, owner or redistribution."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distbench.runs.frame import PHASES
from distbench.spec.errors import UserError, nearest
from distbench.spec.printable import count_text
from distbench.traces.records import Trace
from distbench.traces.spans import left_of

if TYPE_CHECKING:
    import pandas as pd

PATH = ("phase", "source", "kind", "mesh_dim")
SUMMED = ("count", "payload_bytes", "wire_bytes", "time_s", "share_of_step")
COSTS = (*SUMMED, "straggler_share", "exposed_share")
# What is summed cannot be summed by, and costs are medians over steps.
GROUPABLE = (
    *("rank", "phase", "source", "kind", "op", "backend_op", "mesh_dim", "group", "group_size", "seq", "dtype"),
    *("owner", "path_owner", "owner_known", "redistribution", "explicit"),
)


def costs(trace: Trace, keys: Sequence[str], only: "pd.Series[bool] | None" = None) -> "pd.DataFrame":
    """What a step spends on each combination of some columns of the rows: the keys, then the columns of COSTS.

    SUMMED are the median over the traced steps of the mean over ranks; a rank or step without such a row counts as
    none. With "rank" among the keys they are that rank's own. The straggler share is of the time of those rows whose
    straggler time is known, over all ranks and steps, the exposed share likewise. nan where nothing is known. In order
    of phase, then the longest first. Keys are columns of `Trace.rows`, none for one row on everything.
    """
    if only is not None:
        return _costs(trace, keys, trace.rows[only])
    # A report asks for the same again and again.
    if (known := tuple(keys)) not in trace.summed:
        trace.summed[known] = _costs(trace, keys, trace.rows)
    return trace.summed[known].copy()


def _costs(trace: Trace, keys: Sequence[str], kept: "pd.DataFrame") -> "pd.DataFrame":
    rows = kept.assign(count=1.0, time_s=kept["duration_s"], everything="")
    by = list(keys) or ["everything"]
    sums = rows.groupby([*by, "step"], sort=False, dropna=False)[list(SUMMED)].sum(min_count=1)
    sums /= 1 if "rank" in keys else len(trace.ranks)
    counts = sums["count"].unstack("step").reindex(columns=trace.steps)
    found = counts.notna().sum(axis=1).to_frame("in_steps")
    for name in SUMMED:
        each = sums[name].unstack("step").reindex(columns=trace.steps)
        found[name] = each.where(counts.notna(), 0.0).median(axis=1)
    for name, part in (("straggler_share", "straggler_s"), ("exposed_share", "exposed_s")):
        known = rows.assign(whole=rows["time_s"].where(rows[part].notna())).groupby(by, sort=False, dropna=False)
        found[name] = (known[part].sum(min_count=1) / known["whole"].sum(min_count=1)).replace(
            [np.inf, -np.inf], np.nan
        )
    ordered = largest_first(found.reset_index().drop(columns="in_steps"), "time_s", "payload_bytes")
    return ordered if keys else ordered.drop(columns="everything")


def frame_of_traces(traces: Sequence[Trace], by: Sequence[str] = ()) -> "pd.DataFrame":
    """One row a collective, traced step and rank: where it is from, then the columns of `records.rows_of`.

    With `by`, columns out of GROUPABLE, one row a combination of them with the columns of `costs`.
    """
    import pandas as pd

    parts = []
    for trace in traces:
        for name in by:
            if name not in GROUPABLE:
                raise UserError(f"--group-by {name}: a trace has no such column to sum by ({nearest(name, GROUPABLE)})")
        rows = costs(trace, tuple(dict.fromkeys(by))) if by else trace.rows.copy()
        where = (("scenario", trace.run.scenario), ("run_file", trace.run.path.name), ("case_id", trace.case_id))
        for place, (name, value) in enumerate(where):
            rows.insert(place, name, value)
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def largest_first(frame: "pd.DataFrame", *columns: str) -> "pd.DataFrame":
    """By phase in the order of a step, where there is such a column; then the largest values of columns first."""
    phases = {phase: place for place, phase in enumerate(PHASES)}
    phase = frame["phase"].map(phases).fillna(len(PHASES)) if "phase" in frame else 0
    keys = {f"_{name}": -frame[name].abs() for name in columns}
    ordered = frame.assign(_phase=phase, **keys).sort_values(["_phase", *keys], kind="stable")
    return ordered[frame.columns].reset_index(drop=True)


def step_of(trace: Trace) -> float:
    """Seconds of the median traced step on its slowest rank; nan where steps were not timed."""
    taken = [value for value in trace.record.get("steps_s") or () if isinstance(value, int | float)]
    return float(np.median(taken)) if taken else float("nan")


def busy_share(trace: Trace) -> float:
    """The share of a rank's step with at least one collective under way: the median over steps of the mean over ranks.

    nan where steps or collectives were not timed.
    """
    shares: dict[Hashable, list[float]] = {}
    timed = trace.rows[trace.rows["duration_s"].notna()]
    by_rank = dict(iter(timed.groupby(["step", "rank"])))
    for (step, rank), phases in trace.phases.groupby(["step", "rank"]):
        rows, whole = by_rank.get((step, rank)), (phases["start_s"].min(), phases["end_s"].max())
        if rows is not None and whole[1] > whole[0]:
            taken = zip(rows["issued_s"], rows["completed_s"], strict=True)
            free = sum(end - start for start, end in left_of(whole, taken))
            shares.setdefault(step, []).append(1 - free / (whole[1] - whole[0]))
    of_steps = [sum(of_step) / len(trace.ranks) for of_step in shares.values()]
    return float(np.median(of_steps)) if of_steps else float("nan")


def doubts(trace: Trace) -> list[str]:
    """What does not fit together in the rows, as sentences; nothing where every collective is on all its ranks, and
    where it is simulated, as a few ranks alone."""
    if trace.is_simulated:
        return []
    # What one rank sends another one receives.
    rows = trace.rows.assign(kind_of_both=trace.rows["kind"].replace("recv", "send"))
    silent = sorted(set(trace.ranks) - set(rows["rank"].tolist())) if len(rows) else []
    same = rows.groupby(["step", "group", "seq"], sort=False)
    num_ranks, sizes, kinds = same["rank"].nunique(), same["group_size"].first(), same["kind_of_both"].nunique()
    alone, mixed = int((num_ranks != sizes).sum()), int((kinds > 1).sum())
    of = f"of {count_text(len(sizes), 'collective')}"
    said = {
        f"rank {', '.join(map(str, silent))} recorded no collective: all counts are means over it too": silent,
        f"{alone} {of} were not seen on every rank of their group: no straggler share": alone,
        f"{mixed} {of} are of another kind on another rank: ranks ran different steps": mixed,
    }
    return [sentence for sentence, is_so in said.items() if is_so]
