"""What the ranks report to the parent while they work: one JSON line an event in the log folder, written by rank 0.

Events: plan (num_cases), case (index, id, kind, params, number of the pass), samples (count), tracing, done (id,
status, spent_s; of the first pass), pass (number, num_passes, num_cases), turn (id, status, spent_s; of a further
pass), end (spent_s).
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distbench.spec.fields import AMOUNT, COUNT, RECORD, TEXT, Kinds, mapping_of, wrong_field
from distbench.spec.reading import parse_json

FILE_NAME = "progress.jsonl"
SAMPLES_EVERY_S = 0.25
EVENT: Kinds = {
    **dict.fromkeys(("event", "id", "kind", "status"), TEXT),
    "params": RECORD,
    **dict.fromkeys(("index", "number", "count", "num_cases", "num_passes"), COUNT),
    "spent_s": mapping_of(AMOUNT),
}
NEEDED = {
    "plan": ("num_cases",),
    "case": ("id", "kind", "params"),
    "samples": ("count",),
    "pass": ("number", "num_passes", "num_cases"),
    **dict.fromkeys(("done", "turn"), ("id", "status")),
}


class ProgressWriter:
    """Rank 0's end; with no path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1) if path else None
        self._last_samples = 0.0

    def tell(self, event: str, **facts: Any) -> None:
        """Write one event."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **facts}) + "\n")

    def tell_samples(self, count: int) -> None:
        """Write how far a case is, a few times a second at most: writing must not disturb what is being measured."""
        now = time.monotonic()
        if self._file is not None and now - self._last_samples >= SAMPLES_EVERY_S:
            self._last_samples = now
            self.tell("samples", count=count)


class ProgressReader:
    """The parent's end: every whole line since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def news(self) -> Iterator[dict[str, Any]]:
        """Events written since the last call, in order."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return
        whole = text.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            # A full disk cuts lines short; what one of them said is lost, the launch goes on.
            with contextlib.suppress(ValueError):
                event = parse_json(line)
                if _is_event(event):
                    yield event


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or wrong_field(event, EVENT, ("event",)):
        return False
    return wrong_field(event, EVENT, NEEDED.get(event["event"], ())) is None
