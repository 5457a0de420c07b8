"""Two sides of which one or both are simulated: predicted times side by side, and a ratio that nothing bounds."""

from collections.abc import Sequence

from distbench.compare.medians import median
from distbench.compare.options import Options
from distbench.gate.outcome import Gated
from distbench.gate.side_by_side import ComparedCase, Key, SideBySide
from distbench.runs.header import SIMULATED, basis_text
from distbench.runs.run_file import Record, Run
from distbench.spec.errors import UserError

PREDICTED = "predicted"
MAX_LISTED = 3


def predicted_side_by_side(
    a: Sequence[Run], b: Sequence[Run], names: tuple[str, str], options: Options, warnings: Sequence[str] = ()
) -> SideBySide:
    """Compare two sides by predicted times, and medians where a side was measured; as `side_by_side`.

    Raises:
        UserError: no case is on both sides.
    """
    sides = [_times(runs) for runs in (a, b)]
    if not sides[0].keys() & sides[1].keys():
        held = [_listed([name for _, name in times]) for times in sides]
        why = f"they have no step in common: the first holds {held[0]}, the second {held[1]}"
        raise UserError(f"{names[0]} and {names[1]} cannot be compared: {why}; simulate both with the same inputs")
    cases = [_compared(key, *sides) for key in dict.fromkeys((*sides[0], *sides[1]))]
    gated = Gated([], options, len(a), len(b), warnings=[*warnings, *_said(a, b)])
    return SideBySide(names, cases, gated)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}" if names else "no step"


def _times(runs: Sequence[Run]) -> dict[Key, float]:
    """Seconds of each step: predicted where it is simulated, else the median of all samples."""
    found: dict[Key, list[float]] = {}
    for run in runs:
        for case in run.cases:
            if case["status"] == "ok" and (times := _times_of(case)):
                found.setdefault((run.scenario, case["case"]["id"]), []).append(median(times))
    return {key: median(values) for key, values in found.items()}


def _times_of(case: Record) -> Sequence[float]:
    if not case.get(SIMULATED):
        return case.get("samples_s") or ()
    predicted_s = (case.get("counters") or {}).get("predicted_s")
    return [predicted_s] if predicted_s else ()


def _compared(key: Key, a: dict[Key, float], b: dict[Key, float]) -> ComparedCase:
    if key not in a or key not in b:
        return ComparedCase(*key, "only in A" if key in a else "only in B", "the other side lacks it")
    why = "a simulation predicts a time and no interval"
    return ComparedCase(*key, PREDICTED, why, PREDICTED, a_s=a[key], b_s=b[key], ratio=b[key] / a[key], num_launches=1)


def _said(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    said = []
    for letter, runs in (("A", a), ("B", b)):
        on = {str(run.about.environment.device_name) for run in runs if run.is_simulated}
        where = [f"simulated on {', '.join(sorted(on))}"] if on else []
        machines = {str(run.about.environment.machine) for run in runs if not run.is_simulated}
        where += [f"measured on {', '.join(sorted(machines))}"] if machines else []
        said.append(f"{letter} is {' and '.join(where)}")
        said += dict.fromkeys(f"{letter}: {basis_text(run.about.simulated)}" for run in runs if run.is_simulated)
    return said
