"""What rank 0 appends to the run file: rows of first passes at once, lines of further passes once a second."""

import time
from pathlib import Path
from typing import Any

from distbench.runs.run_file import CaseResult, append
from distbench.spec.errors import StorageFailed
from distbench.worker.rank.measure import Samples
from distbench.worker.rank.opened_case import CaseSpec
from distbench.worker.rank.rank_context import RankContext

SAVE_EVERY_S = 1.0


class RowWriter:
    """One rank's end of the run file; ranks other than 0 write nothing.

    Raises:
        StorageFailed: in each method that writes, where the disk is full or the folder is gone.
    """

    def __init__(self, context: RankContext, run_file: Path) -> None:
        self._context, self._run_file = context, run_file
        self._passes: list[dict[str, Any]] = []
        self._saved_at = time.monotonic()

    def save(self, *records: dict[str, Any]) -> None:
        """Append records, all on the disk when it returns."""
        if self._context.rank != 0 or not records:
            return
        if records[0]["type"] != "run" and not self._run_file.exists():
            raise StorageFailed(f"{self._run_file} is gone: it was moved or deleted while it was written")
        try:
            append(self._run_file, *records)
        except OSError as error:
            raise StorageFailed(f"{self._run_file} cannot be written: {error.strerror}") from error

    def save_row(self, result: CaseResult) -> None:
        """The row of a case."""
        result.backend = self._context.backend
        self.save(result.to_record())

    def note(self, of: CaseSpec, number: int, samples: Samples) -> None:
        """A further pass of a case, written later: between short ones there is no wait for the disk."""
        taken = samples.to_record(of.keeps_ranks)
        self._passes.append({"type": "pass", "case_id": of.case.id, "number": number, **taken})

    def save_passes(self, are_due: bool = True) -> None:
        """Append the passes noted since the last time; where they are not due, only once a second."""
        if are_due or time.monotonic() - self._saved_at > SAVE_EVERY_S:
            records, self._passes, self._saved_at = self._passes, [], time.monotonic()
            self.save(*records)
