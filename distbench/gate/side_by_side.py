"""Two sides of ordinary runs, case by case: what was measured, how far apart it is, and what may be said of that.

Where both sides have several launches, the gate's engine says it, with no tolerance. One launch a side is another
matter: a launch has a level of its own, so two of them are shown, each with its own passes' interval, and not judged.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distbench.compare.options import METRICS, Options
from distbench.compare.pairing import TURNS, Pairing
from distbench.compare.verdicts import (
    FASTER,
    IMPROVEMENT,
    INCOMPARABLE,
    INCONCLUSIVE,
    MISSING,
    NEW,
    PASS,
    REGRESSION,
    SLOWER,
    WITHIN_NOISE,
)
from distbench.gate.compare_sides import gate
from distbench.gate.judge import load_conflict
from distbench.gate.outcome import CaseVerdict, Gated
from distbench.runs.frame import frame_of
from distbench.runs.launches import launch_of
from distbench.runs.run_file import Run
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

# Of the gate's verdicts, without a tolerance: b against a.
WORDS = {REGRESSION: SLOWER, IMPROVEMENT: FASTER, PASS: WITHIN_NOISE, INCONCLUSIVE: WITHIN_NOISE}
NOT_TOLD = "not told"
# Of cases that stand on one side.
ALONE = {MISSING: "only in A", NEW: "only in B"}
LAUNCH_COLUMNS = ("median_s", "q1_s", "q3_s", "ci_low_s", "ci_high_s")
Key = tuple[str, str]  # scenario, case id


@dataclass(frozen=True)
class ComparedCase:
    """One case.

    Args:
        verdict: "slower", "faster" (b against a), "within noise" or "not told"; or why there is no ratio: "only in A",
            "only in B", "invalid", "missing", "incomparable".
        why: of a verdict that is no verdict on times, one sentence.
        of: what the times are: "median" of one launch a side, else the mean or 10th percentile over launches; or
            "predicted", where a side is simulated.
        a: column of LAUNCH_COLUMNS to seconds, of one launch a side; likewise `b`. None where there are several.
        a_s: seconds, nan where there is none; likewise `b_s`.
        ratio: b over a; between `ratio_low` and `ratio_high` (95 %), which one launch a side cannot give.
        num_launches: pairs, or launches of the smaller side.
    """

    scenario: str
    case_id: str
    verdict: str
    why: str = ""
    of: str = ""
    a: dict[str, float] | None = None
    b: dict[str, float] | None = None
    a_s: float = math.nan
    b_s: float = math.nan
    ratio: float = math.nan
    ratio_low: float = math.nan
    ratio_high: float = math.nan
    num_launches: int = 0


@dataclass(frozen=True)
class SideBySide:
    """Two sides.

    Args:
        names: what the user called them.
        cases: in the order in which they were measured.
        gated: what the gate's engine says, with designs, differences of the environment and warnings.
        load: that others kept the machine busy on one side more than on the other, or "".
    """

    names: tuple[str, str]
    cases: list[ComparedCase]
    gated: Gated
    load: str = ""

    @property
    def single(self) -> list[ComparedCase]:
        """Cases that one launch a side measured."""
        return [case for case in self.cases if case.a is not None]

    @property
    def repeated(self) -> list[ComparedCase]:
        """Cases with more launches than that."""
        return [case for case in self.cases if case.a is None and case.num_launches]

    @property
    def uncompared(self) -> list[ComparedCase]:
        """Cases without a ratio."""
        return [case for case in self.cases if not case.num_launches]

    @property
    def frame(self) -> "pd.DataFrame":
        """One row a case: FRAME_COLUMNS, times in seconds."""
        import pandas as pd

        return pd.DataFrame([_row(case) for case in self.cases], columns=FRAME_COLUMNS)


# docs/run-file.md says what each is.
FRAME_COLUMNS = (
    *("scenario", "case", "verdict", "why", "of", "num_launches", "a_s", "b_s"),
    *("a_low_s", "a_high_s", "b_low_s", "b_high_s", "ratio", "ratio_low", "ratio_high"),
)


def _row(case: ComparedCase) -> dict[str, Any]:
    row = {name: getattr(case, name) for name in FRAME_COLUMNS if hasattr(case, name)} | {"case": case.case_id}
    for side, launch in (("a", case.a), ("b", case.b)):
        bounds = {} if launch is None else launch
        row |= {f"{side}_{end}_s": bounds.get(f"ci_{end}_s", math.nan) for end in ("low", "high")}
    return row


def side_by_side(
    a: Sequence[Run], b: Sequence[Run], names: tuple[str, str], options: Options, warnings: Sequence[str] = ()
) -> SideBySide:
    """Compare two sides.

    Args:
        a: the runs of the first side, one a launch and scenario; likewise `b`.
        names: what messages call the sides.
        options: what may differ, and how sure a verdict must be; its tolerances are not used.

    Raises:
        UserError: nothing of one side can be compared with anything of the other; or a run stands on both.
    """
    left, right = ([launch_of(run) for run in side] for side in (a, b))
    told = gate(left, right, replace(options, tolerances=dict.fromkeys(METRICS, 0.0)), warnings)
    frames = frame_of(a), frame_of(b)
    sides, computes = [_measured_once(frame) for frame in frames], [_computes_of(frame) for frame in frames]
    differing = {
        key: (computes[0][key], text) for key, text in computes[1].items() if computes[0].get(key, text) != text
    }
    order = {case["case"]["id"]: number for number, case in enumerate(case for run in (*a, *b) for case in run.cases)}
    cases = [_compared(case, sides, differing.get(_key_of(case)), told.options) for case in told.cases]
    cases.sort(key=lambda case: (case.scenario, order.get(case.case_id, 0)))
    if not any(case.num_launches for case in cases):
        raise UserError(_nothing_to_compare(cases, names))
    unpaired = Pairing(tuple(range(len(left))), tuple(range(len(right))), refusal=TURNS)
    return SideBySide(names, cases, told, load_conflict(left, right, unpaired, options.load_share) or "")


def _measured_once(frame: "pd.DataFrame") -> dict[Key, dict[str, float]]:
    """LAUNCH_COLUMNS of each case that only one launch of this side measured."""
    frame = frame[frame["status"] == "ok"]
    keys = list(zip(frame["scenario"], frame["id"], strict=True))
    counts = Counter(keys)
    rows = zip(*(frame[name].tolist() for name in LAUNCH_COLUMNS), strict=True)
    return {
        key: dict(zip(LAUNCH_COLUMNS, row, strict=True))
        for key, row in zip(keys, rows, strict=True)
        if counts[key] == 1
    }


def _computes_of(frame: "pd.DataFrame") -> dict[Key, str]:
    """What each step computes, where its run file says."""
    known = frame[frame["computes"].notna()]
    return {
        (name, case_id): text
        for name, case_id, text in zip(known["scenario"], known["id"], known["computes"], strict=True)
    }


def _key_of(case: CaseVerdict) -> Key:
    # What stands behind the name tells apart groups of launches of one scenario.
    return case.scenario.partition(" (")[0], case.case_id


def _compared(
    case: CaseVerdict, sides: Sequence[dict[Key, dict[str, float]]], differing: tuple[str, str] | None, options: Options
) -> ComparedCase:
    if not case.metrics:
        return ComparedCase(case.scenario, case.case_id, ALONE.get(case.verdict, case.verdict), case.reason)
    if differing:
        why = f"the two steps compute differently ({differing[0]} in the baseline, {differing[1]} in the candidate)"
        return ComparedCase(case.scenario, case.case_id, INCOMPARABLE, why)
    first = case.metrics[0]
    a, b = (side.get(_key_of(case)) for side in sides)
    if a and b:
        found = ComparedCase(case.scenario, case.case_id, NOT_TOLD, "one launch a side", "median", a, b)
        return replace(found, a_s=a["median_s"], b_s=b["median_s"], ratio=b["median_s"] / a["median_s"], num_launches=1)
    is_told = case.verdict != INCONCLUSIVE or _is_enough(case, options)
    return ComparedCase(
        case.scenario,
        case.case_id,
        WORDS[case.verdict] if is_told else NOT_TOLD,
        "" if is_told else case.reason,
        first.metric,
        a_s=first.baseline_s,
        b_s=first.candidate_s,
        ratio=1 + first.change,
        ratio_low=math.nan if first.low is None else 1 + first.low,
        ratio_high=math.nan if first.high is None else 1 + first.high,
        num_launches=first.num_launches,
    )


def _is_enough(case: CaseVerdict, options: Options) -> bool:
    """Whether an inconclusive case had the launches that a verdict takes, and nothing else stood against one."""
    enough = any(metric.num_launches >= options.least_launches(case.paired) for metric in case.metrics)
    return enough and not case.suspected


def _nothing_to_compare(cases: Sequence[ComparedCase], names: tuple[str, str]) -> str:
    a, b = names
    alone = [{case.scenario for case in cases if case.verdict == word} for word in ALONE.values()]
    if cases and alone[0] | alone[1] == {case.scenario for case in cases} and not alone[0] & alone[1]:
        held = [", ".join(sorted(some)) or "no scenario" for some in alone]
        return f"{a} and {b} cannot be compared: {a} holds {held[0]}, {b} holds {held[1]}; give runs of one scenario"
    reasons = list(dict.fromkeys(case.why for case in cases if case.verdict == INCOMPARABLE))
    reasons = reasons or list(dict.fromkeys(case.why for case in cases)) or ["neither holds a case"]
    more = f" (and {len(reasons) - 1} more such reasons)" if len(reasons) > 1 else ""
    allow = "; what may differ is named by --allow-different FIELD" if "in the candidate" in reasons[0] else ""
    return f"nothing of {a} (the baseline) can be compared with {b} (the candidate): {reasons[0]}{more}{allow}"
