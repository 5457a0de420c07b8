"""What a test gets to see of a case."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from distbench.compare.medians import median, median_ci
from distbench.compare.verdicts import FASTER, SLOWER
from distbench.runs.run_file import Record
from distbench.spec.errors import UserError
from distbench.spec.printable import count_text


@dataclass(frozen=True)
class CaseRatio:
    """A case's time over another's.

    Args:
        ratio: geometric mean over the passes that both have.
        low: lower bound of its 95 % interval; nan under 8 passes.
        high: upper bound.
        verdict: "faster", "slower", "within noise" or "too few passes", as in every table of a report.
    """

    ratio: float
    low: float
    high: float
    verdict: str

    def inverse(self) -> "CaseRatio":
        """Return the other case's time over this one's."""
        verdict = {FASTER: SLOWER, SLOWER: FASTER}.get(self.verdict, self.verdict)
        return CaseRatio(1 / self.ratio, 1 / self.high, 1 / self.low, verdict)


class Sweep:
    """The cases of one launch, which took turns."""

    def __init__(self) -> None:
        self.cases: list[MeasuredCase] = []

    @cached_property
    def ratios(self) -> dict[tuple[str, str], CaseRatio]:
        """Return the ratio of every two cases by their ids, tested as one family."""
        import numpy as np

        from distbench.compare.passes import as_table, compare_pairs

        pairs, found = compare_pairs(as_table([np.array(case.pass_medians_s) for case in self.cases]))
        rows = zip(found.ratio.tolist(), found.low.tolist(), found.high.tolist(), found.verdict, strict=True)
        ids = [(self.cases[one].id, self.cases[other].id) for one, other in pairs]
        return {both: CaseRatio(*row) for both, row in zip(ids, rows, strict=True)}


@dataclass(frozen=True)
class MeasuredCase:
    """One measured case; the run file has all of it.

    Args:
        id: `call/<function>/<arguments>/<mesh>`.
        status: "ok"; the fixture fails the test for any other.
        samples_s: seconds of each sample on its slowest rank.
        params: the case's call, variant and mesh, as text.
        counters: other numbers of the case; `checked` says whether its result was.
        stop_reason: what ended sampling: "passes" of a sweep, else "steady", "max_samples" or "max_case_s".
        error: one sentence, when status is not "ok".
        passes: (number of a pass, its samples), in the order of `samples_s`.
        sweep: all cases of its launch.
    """

    id: str
    status: str
    samples_s: tuple[float, ...]
    rank_median_s: tuple[float, ...]
    params: dict[str, Any]
    counters: dict[str, Any]
    stop_reason: str | None
    error: str | None
    run_file: Path
    passes: tuple[tuple[int, int], ...] = ()
    sweep: Sweep = field(default_factory=Sweep, repr=False, compare=False)

    @classmethod
    def all_of(cls, records: Sequence[Record], run_file: Path) -> "list[MeasuredCase]":
        """Return the cases of a run file's records."""
        sweep = Sweep()
        sweep.cases += [cls._of(record, run_file, sweep) for record in records]
        return sweep.cases

    @classmethod
    def _of(cls, record: Record, run_file: Path, sweep: Sweep) -> "MeasuredCase":
        return cls(
            id=record["case"]["id"],
            status=record["status"],
            samples_s=tuple(record.get("samples_s") or ()),
            rank_median_s=tuple(record.get("rank_median_s") or ()),
            params=dict(record["case"].get("params") or {}),
            counters=dict(record.get("counters") or {}),
            stop_reason=record.get("stop_reason"),
            error=record.get("error"),
            run_file=run_file,
            passes=tuple((number, count) for number, count in record.get("passes") or ()),
            sweep=sweep,
        )

    @property
    def median_s(self) -> float:
        """Median of the passes where there are several, of the samples otherwise; seconds."""
        return median(self.pass_medians_s) if len(self.passes) > 1 else median(self.samples_s)

    def versus(self, other: "MeasuredCase") -> CaseRatio:
        """Return this case's time over that of another case of the same sweep.

        The interval and the verdict hold for all pairs of the sweep's cases together.

        Raises:
            UserError: the other case is of another launch, so the two did not take turns; or it is this very case.
        """
        if self.run_file != other.run_file:
            raise UserError(f"{self.id} and {other.id} are of two launches; compare cases of one distbench.sweep(...)")
        if self.id == other.id:
            raise UserError(f"{self.id} is compared with itself; give another case of its sweep")
        found = self.sweep.ratios
        return found.get((self.id, other.id)) or found[other.id, self.id].inverse()

    @property
    def pass_medians_s(self) -> list[float]:
        """The median sample of each pass, seconds; nan for one that it had no turn in."""
        from distbench.compare.passes import pass_medians

        num_passes = 1 + max((number for number, _ in self.passes), default=-1)
        return pass_medians(self.samples_s, self.passes, num_passes).tolist()

    @property
    def ci_s(self) -> tuple[float, float]:
        """The median pass's 95 % confidence interval, seconds; (nan, nan) where there are under 8 passes."""
        from distbench.compare.passes import MIN_PASSES

        return median_ci(self.pass_medians_s) if len(self.passes) >= MIN_PASSES else (math.nan, math.nan)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """How the samples spread, seconds, which is not how well the median is known; (nan, nan) below 4 of them."""
        if len(self.samples_s) < 4:
            return (math.nan, math.nan)
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return low, high

    def line(self) -> str:
        """For a terminal."""
        is_known = not math.isnan(self.ci_s[0])
        (low, high), name = (self.ci_s, "95 % CI") if is_known else (self.quartiles_s, "quartiles")
        spread = "" if math.isnan(low) else f", {name} [{1e3 * low:.3g}, {1e3 * high:.3g}]"
        return f"{self.id}: median {1e3 * self.median_s:.3g} ms{spread}, {count_text(len(self.samples_s), 'sample')}"
