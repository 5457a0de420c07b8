"""An export format: one line per case with the mean of its samples."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path


def means(paths: Sequence[Path]) -> str:
    """Return `CASE SECONDS` for each case of the run files."""
    lines = []
    for path in paths:
        for record in map(json.loads, path.read_text().splitlines()):
            if record["type"] == "case" and record["samples_s"]:
                lines.append(f"{record['case']['id']} {statistics.fmean(record['samples_s']):.3g}\n")
    return "".join(lines)
