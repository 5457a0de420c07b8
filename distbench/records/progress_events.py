"""The ranks' progress as JSON lines, one per event, in a file of the log folder. The parent reads the file during the
run.

Events: meeting (before the ranks meet), connected, caution (text: differences between hosts), none_chosen (num_cases,
ids: a few), plan (num_cases), case (index, id, kind, params, number of the pass), samples (count), tracing, done (id,
status, spent_s, measuring_s; of the first pass), pass (number, num_passes, num_cases), turn (as done; of a further
pass), end (spent_s, measuring_s). The launcher adds the event left after the end of this job's ranks, if another job
follows.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import defstruct

from distbench.spec.errors import StorageFailed
from distbench.spec.file_io import parse_json
from distbench.spec.json_decoder import Amount, Count, is_of_type, optional

FILE_NAME = "progress.jsonl"
SAMPLES_EVERY_S = 0.25
Event = defstruct(
    "Event",
    [
        ("event", str),
        *optional(str, "id", "kind", "status", "text"),
        *optional(dict[str, Any], "params"),
        *optional(Count, "index", "number", "count", "num_cases", "num_passes"),
        *optional(list[str], "ids"),
        *optional(dict[str, Amount], "spent_s"),
        *optional(Amount, "measuring_s"),
    ],
)
NEEDED = {
    "none_chosen": ("num_cases", "ids"),
    "caution": ("text",),
    "plan": ("num_cases",),
    "case": ("id", "kind", "params"),
    "samples": ("count",),
    "pass": ("number", "num_passes", "num_cases"),
    **dict.fromkeys(("done", "turn"), ("id", "status")),
}


class ProgressWriter:
    """Writer of progress events on the reporting rank. Without a path, nothing is written.

    Raises:
        StorageFailed: the file cannot be written. Each method may also raise this.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last_samples = 0.0
        self._file: BinaryIO | None = None
        try:
            self._file = path.open("ab", buffering=0) if path else None
        except OSError as error:
            raise self._failed(error) from error

    def tell(self, event: str, **facts: Any) -> None:
        """Write one event."""
        if self._file is None:
            return
        line = (json.dumps({"event": event, **facts}) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error

    def tell_samples(self, count: int) -> None:
        """Write a case's number of samples, at most every SAMPLES_EVERY_S seconds, to avoid disturbing the samples."""
        now = time.monotonic()
        if self._file is not None and now - self._last_samples >= SAMPLES_EVERY_S:
            self._last_samples = now
            self.tell("samples", count=count)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _failed(self, error: OSError) -> StorageFailed:
        self.close()
        return StorageFailed(f"{self._path} cannot be written: {error.strerror}")


class ProgressReader:
    """Reader of progress events in the parent, which also works after the file was deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._begun = b""

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the last call, in order, without incomplete lines from a full disk."""
        try:
            self._file = self._file or self._path.open("rb", buffering=0)
            text = self._begun + self._file.read()
        except OSError:
            return
        complete, _, self._begun = text.rpartition(b"\n")
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):
                event = parse_json(line)
                if is_of_type(event, Event) and all(
                    event.get(key) is not None for key in NEEDED.get(event["event"], ())
                ):
                    yield event

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
