"""What a test gets to see of a case."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.compare.medians import median, median_ci
from distbench.runs.run_file import Record


@dataclass(frozen=True)
class MeasuredCase:
    """One measured case; the run file has all of it.

    Args:
        id: `call/<function>/<arguments>/<mesh>`.
        status: "ok"; the fixture fails the test for any other.
        samples_s: seconds of each sample on its slowest rank.
        params: the case's call, variant and mesh, as text.
        counters: other numbers of the case; `checked` says whether its result was.
        stop_reason: what ended sampling: "precise", "max_samples" or "max_case_s".
        error: one sentence, when status is not "ok".
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

    @classmethod
    def of(cls, record: Record, run_file: Path) -> "MeasuredCase":
        """The case of one record of a run file."""
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
        )

    @property
    def median_s(self) -> float:
        """Median of the samples, seconds."""
        return median(self.samples_s)

    @property
    def ci_s(self) -> tuple[float, float]:
        """The median's 95 % confidence interval, seconds."""
        return median_ci(self.samples_s)

    def line(self) -> str:
        """For a terminal."""
        low, high = self.ci_s
        ms = f"{1e3 * self.median_s:.3g} ms [{1e3 * low:.3g}, {1e3 * high:.3g}]"
        return f"{self.id}: median {ms}, {len(self.samples_s)} samples"
