"""What a run found, in a line or two for each kind of case. The verdicts are those of the report's tables."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distbench.compare.passes import BASELINE as HELD_AGAINST
from distbench.compare.passes import TOO_FEW
from distbench.compare.verdicts import FASTER, SLOWER, WITHIN_NOISE
from distbench.laboratory import redistributions
from distbench.laboratory.comparisons import Ratios
from distbench.laboratory.redistributions import Comparison
from distbench.render.columns import without_shared
from distbench.render.units import (
    bandwidth_text,
    brief_time_text,
    known,
    percent_text,
    ratio_text,
    size_text,
    whole_text,
)
from distbench.report.collectives import collectives_of
from distbench.report.steps import FORWARD_ONLY, steps_of
from distbench.runs.frame import Row, measured_of, records_of
from distbench.runs.run_file import AGAIN, Run
from distbench.spec.planner_names import BASELINE
from distbench.spec.printable import count_text
from distbench.traces.costs import PATH, costs, step_of
from distbench.traces.records import Trace, traces_of

if TYPE_CHECKING:
    import pandas as pd

MAX_NAMED = 4
NO_VERDICT = f"{TOO_FEW} for a verdict"


def step_lines(frame: "pd.DataFrame") -> list[str]:
    """The best and the worst variant beyond noise, how many are within it, and how sure that is."""
    measured = steps_of(frame)
    rows = records_of(measured)
    if not rows:
        return []
    names, _ = without_shared([str(row["variant"]) for row in rows])
    called = dict(zip((row["variant"] for row in rows), names, strict=True))
    first = rows[0]
    is_forward = first["mode"] == FORWARD_ONLY
    what = "forward pass" if is_forward else "step"
    took = f"{brief_time_text(first['median_s'])} a {what}"
    others = [row for row in rows if row["verdict"] != HELD_AGAINST]
    if not others and is_forward:
        return []  # a line of latencies says it all
    if not others:
        listed = [f"{name} {brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
        return [took] if len(rows) == 1 else [f"a {what} takes {_first_of(listed)}"]
    again = [row for row in others if str(row["variant"]).endswith(AGAIN)]
    variants = [row for row in others if row not in again]
    faster, slower, same, too_few = (
        [row for row in variants if row["verdict"] == verdict] for verdict in (FASTER, SLOWER, WITHIN_NOISE, TOO_FEW)
    )
    parts = []
    if faster:
        parts.append(f"best: {_speed_text(max(faster, key=lambda row: row['speedup']), called)}")
    if slower:
        parts.append(f"worst: {_speed_text(min(slower, key=lambda row: row['speedup']), called)}")
    if same:
        baselines = list(dict.fromkeys(called[row["held_against"]] for row in same))
        of = baselines[0] if len(baselines) == 1 else f"their {len(baselines)} baselines"
        parts.append(f"{len(same)} {WITHIN_NOISE} of {of}" + f" ({took})" * (not parts))
    if too_few:
        parts.append(f"{took} as {called[first['variant']]}; {NO_VERDICT} on {len(too_few)} more")
    differing = [row for row in again if row["verdict"] in (FASTER, SLOWER)]
    doubts = [f"caution: the baseline, measured again, came out {row['verdict']}" for row in differing]
    return ["; ".join(parts), *_how_sure(measured.attrs["detectable"], measured.attrs["num_passes"]), *doubts]


def _speed_text(row: Row, called: dict[object, str]) -> str:
    speed = ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"])
    return f"{called[row['variant']]} at {speed} times the speed of {called[row['held_against']]}"


def _how_sure(detectable: float, num_passes: int) -> list[str]:
    if not math.isfinite(detectable):
        return []
    return [
        f"{count_text(num_passes, 'pass', 'passes')}: what takes {percent_text(detectable)} "
        "longer would have been found"
    ]


def collective_lines(frame: "pd.DataFrame") -> Iterator[str]:
    """For each mesh dim of several ranks each collective's bus bandwidth at the largest size."""
    found = collectives_of(frame)
    for mesh_dim, of_dim in found[found["group_size"] != 1].groupby("mesh_dim", sort=False):
        largest = of_dim[of_dim["payload_bytes"] == of_dim["payload_bytes"].max()].drop_duplicates("op")
        rows = [row for row in records_of(largest) if known(row["busbw_gb_per_s"])]
        if rows:
            listed = ", ".join(f"{_op_text(row)} {bandwidth_text(row['busbw_gb_per_s']).strip()}" for row in rows)
            where = f"{mesh_dim} ({whole_text(rows[0]['group_size'])} ranks), {size_text(rows[0]['payload_bytes'])}"
            yield f"{where}, busbw GB/s: {listed}"


def _op_text(row: Row) -> str:
    ran = row["backend_op"]
    return f"{row['op']} (run as {ran})" if isinstance(ran, str) and ran != row["op"] else str(row["op"])


def redistribution_lines(frame: "pd.DataFrame") -> Iterator[str]:
    """Each planner against greedy, over all shapes."""
    found = redistributions.comparisons(frame)
    for planner in dict.fromkeys(comparison.planner for comparison in found):
        yield from _planner_lines(planner, [one for one in found if one.planner == planner])


def _planner_lines(planner: str, found: list[Comparison]) -> Iterator[str]:
    sides = [(one, pair) for one in found for pair in one.rows.tolist() if not one.ratios.same[pair]]
    num_pairs = sum(len(one.rows) for one in found)
    if not sides:
        yield f"{planner} takes {BASELINE}'s path on all {count_text(num_pairs, 'pair')}"
        return
    enough = [(one, pair) for one, pair in sides if one.ratios.enough[pair]]
    of_pairs = f"{len(sides)} of {count_text(num_pairs, 'pair')}"
    if not enough:
        yield f"{planner} takes another path than {BASELINE} on {of_pairs}; {NO_VERDICT}"
        return
    faster, slower = ([(one, pair) for one, pair in enough if one.ratios.side[pair] == side] for side in (-1, 1))
    counted = f"faster beyond noise on {len(faster)}, slower on {len(slower)}, neither on the rest"
    yield f"{planner} takes another path than {BASELINE} on {of_pairs}: {counted}"
    named = []
    if faster:
        named.append(f"best: {_pair_text(planner, *min(faster, key=lambda at: _center(*at)))}")
    if slower:
        named.append(f"worst: {_pair_text(planner, *max(slower, key=lambda at: _center(*at)))}")
    if named:
        yield "; ".join(named)
    yield from max(found, key=lambda one: len(one.rows)).ratios.told[:1]


def _center(comparison: Comparison, pair: int) -> float:
    return float(comparison.ratios.ratio.center[pair])


def _pair_text(planner: str, comparison: Comparison, pair: int) -> str:
    ratios: Ratios = comparison.ratios
    facts = comparison.table.pairs.iloc[pair]
    taken = ratio_text(*(float(part[pair]) for part in ratios.ratio))
    what = f"{facts['source']}->{facts['target']} of {size_text(comparison.payload_bytes)}"
    return f"{what} in {taken} of {BASELINE}'s time"


def call_lines(frame: "pd.DataFrame") -> list[str]:
    """Each call's median."""
    rows = records_of(measured_of(frame, "call"))
    names, _ = without_shared([str(row["id"]).removeprefix("call/") for row in rows])
    listed = [f"{name} {brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
    return [f"a call takes {_first_of(listed)}"] if listed else []


def _first_of(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def trace_lines(run: Run) -> list[str]:
    """The path with the most exposed communication of all traced steps; the longest one where that is not known."""
    found = [(row, trace) for trace in traces_of([run])[0] for row in _paths_of(trace)]
    if not found:
        return []
    exposed = [one for one in found if known(one[0]["exposed_s"])]
    name = "exposed_s" if exposed else "time_s"
    row, trace = max(exposed or found, key=lambda one: one[0][name])
    path = f"{row['phase']} {row['source']} {row['kind']} over {row['mesh_dim']}"
    of_step = f"{brief_time_text(row[name])} of a step's {brief_time_text(step_of(trace))}"
    what = "largest exposed path" if exposed else "longest path (what is exposed is not known)"
    return [f"{what}: {path}, {of_step} in {trace.name}"]


def _paths_of(trace: Trace) -> list[Row]:
    if trace.rows.empty:
        return []
    found = costs(trace, PATH)
    rows = records_of(found.assign(exposed_s=found["exposed_share"] * found["time_s"]))
    return [row for row in rows if known(row["time_s"])]
