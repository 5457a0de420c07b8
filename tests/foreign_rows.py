"""Tables of numbers that another tool measured, for tests."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gate_runs import WOBBLE

OPS = {("add", 1024): 12.0, ("add", 65536): 80.0, ("softmax", 1024): 30.0}


def rows(factor: float, shift: int = 0, count: int = 10) -> list[dict[str, Any]]:
    """Two samples per launch and case; softmax takes `factor` times as long."""
    return [
        {"turn": turn, "op": op, "size": size, "us": us * (factor if op == "softmax" else 1) * wobble * more}
        for turn in range(count)
        for wobble in [math.exp(WOBBLE[(turn + shift) % len(WOBBLE)])]
        for (op, size), us in OPS.items()
        for more in (1.0, 1.01)
    ]


def as_csv(path: Path, table: Sequence[dict[str, Any]], separator: str = ",") -> Path:
    lines = [separator.join(table[0]), *(separator.join(map(str, row.values())) for row in table)]
    path.write_text("\n".join(lines) + "\n")
    return path
