"""Two traces path by path: what one communicates more or less than the other, and how much longer its step takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.compare.intervals import MIN_SAMPLES_FOR_CI, Interval, ratio_of
from distbench.runs.frame import frame_of
from distbench.runs.header import scenario_name
from distbench.runs.run_file import Record, Run
from distbench.traces.costs import PATH, PHASES, costs
from distbench.traces.records import Trace

if TYPE_CHECKING:
    import pandas as pd

# As plans are spoken of, the innermost mesh dim first.
PLAN_WORDS = {"tp": "TP", "cp": "CP", "dp_shard": "FSDP", "dp_replicate": "DP", "pp": "PP"}
COMPARED = ("count", "payload_bytes", "time_s")


@dataclass(frozen=True)
class StepChange:
    """One case's timed step over another's: medians in seconds, the ratio with its 95 % interval (stats.ratio_of)."""

    one_s: float
    other_s: float
    ratio: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds one."""
        return self.low <= 1 <= self.high


def names_of(one: Trace, other: Trace) -> tuple[str, str]:
    """Short names that tell two traces apart: the plan, else the variant, the scenario, or the run file."""
    for name in (_plan, _variant, _scenario, _case):
        names = name(one), name(other)
        if all(names) and names[0] != names[1]:
            return names
    return f"{one.case_id} of {one.run.path.name}", f"{other.case_id} of {other.run.path.name}"


def mesh_of(run: Run) -> dict[str, int]:
    """The run's mesh dims; empty where its header does not say."""
    job: Any = run.header.get("job")
    mesh = job.get("mesh") if isinstance(job, dict) else None
    return dict(mesh) if isinstance(mesh, dict) else {}


def _plan(trace: Trace) -> str:
    mesh = {name: size for name, size in mesh_of(trace.run).items() if size > 1}
    known = [f"{word}{mesh[name]}" for name, word in PLAN_WORDS.items() if name in mesh]
    return "x".join([*known, *(f"{name}{size}" for name, size in mesh.items() if name not in PLAN_WORDS)])


def _variant(trace: Trace) -> str:
    params = (trace.case or {}).get("case", {}).get("params")
    return str((params or {}).get("variant") or "")


def _scenario(trace: Trace) -> str:
    return scenario_name(trace.run)


def _case(trace: Trace) -> str:
    return trace.case_id


def step_change(one: Trace, other: Trace) -> StepChange | None:
    """From the cases' own timed samples, never the traced steps; None where a case has too few right ones."""
    sides = [_timed(trace) for trace in (one, other)]
    if any(side is None for side in sides):
        return None
    intervals = [Interval(*(np.array([value]) for value in side)) for side in sides if side]
    ratio = ratio_of(*intervals)
    return StepChange(float(intervals[0].center[0]), float(intervals[1].center[0]), *(float(part[0]) for part in ratio))


def _timed(trace: Trace) -> tuple[float, float, float] | None:
    case: Record | None = trace.case
    if case is None or case.get("status") != "ok" or len(case.get("samples_s") or ()) < MIN_SAMPLES_FOR_CI:
        return None
    (row,) = frame_of([Run(trace.run.path, trace.run.header, [case], None, [])]).to_dict("records")
    return float(row["median_s"]), float(row["ci_low_s"]), float(row["ci_high_s"])


def difference(one: Trace, other: Trace, keys: Sequence[str] = PATH) -> "pd.DataFrame":
    """What a step of either spends on each combination of keys, side by side; 0 where a side has none of it.

    Columns: the keys, then of each of COMPARED `<name>_a` (one), `<name>_b` (other) and `<name>_more`, a minus b. In
    order of phase, then the largest change of time first.
    """
    sides = []
    for trace, side in ((one, "a"), (other, "b")):
        found = costs(trace, keys).set_index(list(keys))[list(COMPARED)]
        sides.append(found.rename(columns={column: f"{column}_{side}" for column in COMPARED}))
    joined = sides[0].join(sides[1], how="outer").reset_index()
    for side in ("a", "b"):
        # A path that a side does not take costs it nothing; a time that is not known stays so.
        joined.loc[joined[f"count_{side}"].isna(), [f"{column}_{side}" for column in COMPARED]] = 0.0
    for column in COMPARED:
        joined[f"{column}_more"] = joined[f"{column}_a"] - joined[f"{column}_b"]
    return _ordered(joined)


def _ordered(joined: "pd.DataFrame") -> "pd.DataFrame":
    places = {phase: place for place, phase in enumerate(PHASES)}
    phases = joined["phase"].map(lambda phase: places.get(phase, len(PHASES))) if "phase" in joined else 0
    by_size = joined.assign(_phase=phases, _size=joined["time_s_more"].abs(), _bytes=joined["payload_bytes_more"].abs())
    by_size = by_size.sort_values(["_phase", "_size", "_bytes"], ascending=[True, False, False], kind="stable")
    return by_size.drop(columns=["_phase", "_size", "_bytes"]).reset_index(drop=True)


def sizes(trace: Trace, record: dict[Any, Any], keys: Sequence[str]) -> list[int]:
    """The payloads that one path's collectives have, bytes, ascending, each once."""
    rows = trace.rows
    for key in keys:
        rows = rows[rows[key] == record[key]]
    return sorted({int(size) for size in rows["payload_bytes"]})


def cautions(one: Trace, other: Trace) -> list[str]:
    """What makes two traces hard to compare, as sentences."""
    said = []
    facts = [trace.run.header.get("environment") or {} for trace in (one, other)]
    machines = [str(fact.get("machine") or "unknown machine") for fact in facts]
    if machines[0] != machines[1]:
        said.append(f"caution: measured on different machines, {machines[0]} and {machines[1]}: compare no times")
    elif one.run.header.get("run_id") != other.run.header.get("run_id"):
        said.append(
            "caution: one launch a side; the interval knows the noise within a launch, not between launches: launch "
            "both again, in turn, before you believe a small difference of times"
        )
    params = [(trace.case or {}).get("case", {}).get("params") or {} for trace in (one, other)]
    tokens = [param.get("num_tokens") for param in params]
    if tokens[0] != tokens[1]:
        said.append(f"caution: a step is of {tokens[0]} tokens on one side and of {tokens[1]} on the other")
    if len(one.ranks) != len(other.ranks):
        said.append(f"caution: {len(one.ranks)} ranks against {len(other.ranks)}; counts and bytes are of one rank")
    return said
