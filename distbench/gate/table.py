"""Launches of one group as arrays: a row a case, a column a launch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distbench.compare.log_differences import Floats
from distbench.compare.options import METRICS
from distbench.runs.launches import FAILED, NOT_RUN, Launch, Value


@dataclass(frozen=True)
class CaseTable:
    """One side's launches.

    Args:
        launches: in time order.
        values: case id to its value in each launch; None where the launch does not hold the case.
        expected: case id to how many launches should hold it: those with parameters under which it was seen.
    """

    launches: Sequence[Launch]
    values: dict[str, list[Value | None]]
    expected: dict[str, int]

    def failed(self, case_id: str) -> list[Value]:
        """The case's values that are wrong, raised, timed out or aborted."""
        return [value for value in self._of(case_id) if value.status in FAILED]

    def num_ok(self, case_id: str) -> int:
        """Launches that measured the case."""
        return sum(value.status == "ok" for value in self._of(case_id))

    def num_not_run(self, case_id: str) -> int:
        """Launches that skipped the case or could not run it."""
        return sum(value.status in NOT_RUN for value in self._of(case_id))

    def num_absent(self, case_id: str) -> int:
        """Launches that should hold the case and do not."""
        return self.expected.get(case_id, 0) - len(self._of(case_id))

    def _of(self, case_id: str) -> list[Value]:
        return [value for value in self.values.get(case_id, ()) if value is not None]


def side_of(launches: Sequence[Launch]) -> CaseTable:
    """The launches of one side of one group."""
    values: dict[str, list[Value | None]] = {}
    seen_under: dict[str, set[str]] = {}
    for column, launch in enumerate(launches):
        for case_id, value in launch.cases.items():
            values.setdefault(case_id, [None] * len(launches))[column] = value
            seen_under.setdefault(case_id, set()).add(launch.variants)
    num_with = {
        text: sum(launch.variants == text for launch in launches) for text in {one.variants for one in launches}
    }
    expected = {case_id: sum(num_with[text] for text in texts) for case_id, texts in seen_under.items()}
    return CaseTable(launches, values, expected)


def logarithms(baseline: CaseTable, candidate: CaseTable, case_ids: Sequence[str]) -> dict[str, tuple[Floats, Floats]]:
    """Metric to the logarithms of both sides, each [cases, launches], nan where a launch did not measure the case."""
    found: dict[str, tuple[Floats, Floats]] = {}
    for metric in METRICS:
        arrays = tuple(np.full((len(case_ids), len(side.launches)), math.nan) for side in (baseline, candidate))
        for side, array in zip((baseline, candidate), arrays, strict=True):
            for row, case_id in enumerate(case_ids):
                for column, value in enumerate(side.values.get(case_id, ())):
                    if value is not None and value.status == "ok":
                        array[row, column] = getattr(value, f"{metric}_s")
        found[metric] = np.log(arrays[0]), np.log(arrays[1])
    return found
