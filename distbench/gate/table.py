"""Launches of one group as arrays: a row a case, a column a launch."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distbench.compare.log_differences import Floats
from distbench.runs.launches import FAILED, NOT_RUN, Launch, Value


@dataclass(frozen=True)
class CaseTable:
    """One side's launches.

    Args:
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

    def num_lacking(self, case_id: str) -> int:
        """Launches that should hold the case and do not, skipped it or could not run it."""
        known = self._of(case_id)
        return self.expected.get(case_id, 0) - len(known) + sum(value.status in NOT_RUN for value in known)

    def _of(self, case_id: str) -> list[Value]:
        return [value for value in self.values.get(case_id, ()) if value is not None]


def table_of(launches: Sequence[Launch]) -> CaseTable:
    """The launches of one side of one group."""
    values: dict[str, list[Value | None]] = {}
    seen_under: dict[str, set[str]] = {}
    for column, launch in enumerate(launches):
        for case_id, value in launch.cases.items():
            values.setdefault(case_id, [None] * len(launches))[column] = value
            seen_under.setdefault(case_id, set()).add(launch.variants)
    num_with = Counter(launch.variants for launch in launches)
    expected = {case_id: sum(num_with[text] for text in texts) for case_id, texts in seen_under.items()}
    return CaseTable(launches, values, expected)


def logarithms(side: CaseTable, case_ids: Sequence[str], metric: str) -> Floats:
    """One metric's logarithms, [cases, launches], nan where a launch did not measure the case."""
    name = f"{metric}_s"
    table = [[getattr(v, name) if v and v.status == "ok" else math.nan for v in side.values[one]] for one in case_ids]
    return np.log(np.array(table).reshape(len(case_ids), len(side.launches)))
