"""Two traces path by path: what one communicates more or less than the other, and how much longer its step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.compare.intervals import MIN_SAMPLES_FOR_CI, Interval, median_intervals, ratio_of, side_of_one
from distbench.runs.run_file import Record
from distbench.traces.costs import PATH, costs, largest_first
from distbench.traces.records import Trace

if TYPE_CHECKING:
    import pandas as pd

# As plans are spoken of, the innermost mesh dim first.
PLAN_WORDS = {"tp": "TP", "cp": "CP", "dp_shard": "FSDP", "dp_replicate": "DP", "pp": "PP"}
COMPARED = ("count", "payload_bytes", "time_s")


@dataclass(frozen=True)
class StepChange:
    """One case's timed step over another's: medians in seconds, the ratio with its 95 % interval, its side of one."""

    one_s: float
    other_s: float
    ratio: float
    low: float
    high: float
    side: int


def names_of(one: Trace, other: Trace) -> tuple[str, str]:
    """Short names that tell two traces apart: the plan, else the variant, the scenario, or the run file."""
    for name in NAMES:
        names = name(one), name(other)
        if all(names) and names[0] != names[1]:
            return names
    return f"{one.case_id} of {one.run.path.name}", f"{other.case_id} of {other.run.path.name}"


def _plan(trace: Trace) -> str:
    mesh = {name: size for name, size in (trace.run.about.mesh or {}).items() if size > 1}
    known = [f"{word}{mesh[name]}" for name, word in PLAN_WORDS.items() if name in mesh]
    return "x".join([*known, *(f"{name}{size}" for name, size in mesh.items() if name not in PLAN_WORDS)])


def _params(trace: Trace) -> Record:
    return (trace.case or {}).get("case", {}).get("params") or {}


def step_change(one: Trace, other: Trace) -> StepChange | None:
    """From the cases' own timed samples, never the traced steps; None where a case has too few right ones."""
    cases = [trace.case or {} for trace in (one, other)]
    samples = [case.get("samples_s") or () if case.get("status") == "ok" else () for case in cases]
    if min(map(len, samples)) < MIN_SAMPLES_FOR_CI:
        return None
    medians = median_intervals(samples)
    ratio = ratio_of(*(Interval(*(part[[at]] for part in medians)) for at in (0, 1)))
    side = int(side_of_one(ratio, np.array([True]))[0])
    (one_s, other_s), (center, low, high) = medians.center.tolist(), (float(part[0]) for part in ratio)
    return StepChange(one_s, other_s, center, low, high, side)


NAMES: tuple[Callable[[Trace], str], ...] = (
    _plan,
    lambda trace: str(_params(trace).get("variant") or ""),
    lambda trace: trace.run.scenario,
    lambda trace: trace.case_id,
)


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
    return largest_first(joined, "time_s_more", "payload_bytes_more")


def sizes(trace: Trace, record: dict[Any, Any], keys: Sequence[str]) -> list[int]:
    """The payloads that one path's collectives have, bytes, ascending, each once."""
    rows = trace.rows
    for key in keys:
        rows = rows[rows[key] == record[key]]
    return sorted({int(size) for size in rows["payload_bytes"]})


def cautions(one: Trace, other: Trace) -> list[str]:
    """What makes two traces hard to compare, as sentences."""
    (machine, other_machine), (batch, other_batch), (run_id, other_id) = zip(*map(_facts, (one, other)), strict=True)
    same_machine = machine == other_machine
    said = {
        f"measured on different machines, {machine} and {other_machine}: compare no times": not same_machine,
        "one launch a side; the interval knows the noise within a launch, not between launches: launch both again, in "
        "turn, before you believe a small difference of times": same_machine and run_id != other_id,
        f"a step's inputs are {batch} on one side and {other_batch} on the other": batch != other_batch,
        f"{len(one.ranks)} ranks against {len(other.ranks)}; counts and bytes are of one rank": (
            len(one.ranks) != len(other.ranks)
        ),
    }
    return [f"caution: {sentence}" for sentence, is_so in said.items() if is_so]


def _shape(trace: Trace) -> str:
    shape = _params(trace).get("shape")
    return "x".join(map(str, shape)) if isinstance(shape, list) else "of unknown shape"


def _facts(trace: Trace) -> tuple[str, Any, str | None]:
    about = trace.run.about
    return about.environment.machine or "unknown machine", _shape(trace), about.run_id
