"""Two traces path by path: what one communicates more or less than the other, and how much longer its step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

from distbench.compare.medians import median
from distbench.compare.passes import as_table, compare_passes, pass_medians
from distbench.runs.run_file import Record
from distbench.spec.printable import count_text
from distbench.traces.costs import PATH, costs, largest_first
from distbench.traces.records import Trace

if TYPE_CHECKING:
    import pandas as pd

# As plans are spoken of, the innermost mesh dim first.
PLAN_WORDS = {"tp": "TP", "cp": "CP", "dp_shard": "FSDP", "dp_replicate": "DP", "ep": "EP", "pp": "PP"}
COMPARED = ("count", "payload_bytes", "time_s")


@dataclass(frozen=True)
class StepChange:
    """One case's timed step over another's.

    Args:
        one_s: median of its samples, seconds; `other_s` likewise.
        ratio: of the two: over the passes of one launch that both have, else of the medians.
        low: bounds of the ratio's 95 % interval, from those passes; nan where these are too few.
        verdict: as `compare_passes` has it; "one launch a side" for cases of two launches, which tells nothing of what
            differs between launches.
    """

    one_s: float
    other_s: float
    ratio: float
    low: float
    high: float
    verdict: str


ONE_LAUNCH = "one launch a side"
PREDICTED = "predicted, not measured"


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
    """From the cases' own timed samples, never the traced steps; None where a case has none that is right.

    A simulated step has its predicted time, and a ratio without an interval.
    """
    cases = [trace.case or {} for trace in (one, other)]
    samples = [_times_of(trace, case) for trace, case in zip((one, other), cases, strict=True)]
    if not all(samples):
        return None
    one_s, other_s = map(median, samples)
    if one.is_simulated or other.is_simulated:
        return StepChange(one_s, other_s, one_s / other_s, nan, nan, PREDICTED)
    if one.run.path != other.run.path:
        return StepChange(one_s, other_s, one_s / other_s, nan, nan, ONE_LAUNCH)
    counts = [case.get("passes") or () for case in cases]
    num_passes = 1 + max((number for passes in counts for number, _ in passes), default=-1)
    values = [pass_medians(taken, passes, num_passes) for taken, passes in zip(samples, counts, strict=True)]
    found = compare_passes(as_table(values), (1, -1))
    center, low, high = (float(part[0]) for part in (found.ratio, found.low, found.high))
    return StepChange(one_s, other_s, center, low, high, found.verdict[0])


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
    ranks, other_ranks = (_num_ranks(trace) for trace in (one, other))
    (machine, other_machine), (batch, other_batch), (run_id, other_id) = zip(*map(_facts, (one, other)), strict=True)
    same_machine = machine == other_machine
    said = {
        f"{_simulated_sides(one, other)} simulated: times there are predictions": (
            one.is_simulated or other.is_simulated
        ),
        f"measured on different machines, {machine} and {other_machine}: compare no times": (
            not same_machine and not (one.is_simulated or other.is_simulated)
        ),
        "one launch a side: what differs between launches is not known, so times have no verdict; `distbench ab` or "
        "`distbench gate` over launches in turn gives one": (
            same_machine and run_id != other_id and not one.is_simulated
        ),
        f"a step's inputs are {batch} on one side and {other_batch} on the other": batch != other_batch,
        f"{count_text(ranks, 'rank')} against {other_ranks}; counts and bytes are of one rank": ranks != other_ranks,
    }
    return [f"caution: {sentence}" for sentence, is_so in said.items() if is_so]


def _simulated_sides(one: Trace, other: Trace) -> str:
    found = [letter for letter, trace in zip("AB", (one, other), strict=True) if trace.is_simulated]
    return f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'}"


def _num_ranks(trace: Trace) -> int:
    """Of the whole mesh, also where a few were simulated."""
    world_size = trace.run.about.environment.world_size
    return int(world_size) if trace.is_simulated and world_size else len(trace.ranks)


def _shape(trace: Trace) -> str:
    shape = _params(trace).get("shape")
    return "x".join(map(str, shape)) if isinstance(shape, list) else "of unknown shape"


def _facts(trace: Trace) -> tuple[str, Any, str | None]:
    about = trace.run.about
    return about.environment.machine or "unknown machine", _shape(trace), about.run_id
