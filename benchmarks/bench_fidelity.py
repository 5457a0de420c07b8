"""distbench's median over a bare loop's, of the same collective in the same processes, interleaved; 4 gloo ranks.

Beside each ratio stands the bare loop's to itself: no harness can be seen to be closer than that.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.claims import Claim, Row

RANKS = 4
LARGE_BYTES, LARGE_APART, SMALL_APART = 2**20, 0.03, 0.1
# gloo copies the buffer at each call. Whether glibc gives those pages back after it changes from block to block, for
# either side alike, and costs about 5 % at 16 MB; with pages kept, both sides see the same memory all the time.
KEEP_PAGES = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}

CLAIMS = (
    Claim(
        "largest difference of a collective's median from a bare loop's (4 ranks, 1 KB)",
        "{most:.1%}",
        "at most 10 %",
        ("|ratio - 1|, *, 1024 B*",),
    ),
    Claim(
        "the same at 1 MB and 16 MB; difference of two bare loops",
        "{:.1%}; {:.1%}",
        "at most 3 %",
        ("largest, ours", "largest, bare"),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """Rows for the benchmark table: how far the ratio is from 1."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run(
            [*command, "-m", "benchmarks.fidelity_ranks", str(out)],
            check=True,
            capture_output=True,
            env={**os.environ, **KEEP_PAGES},
        )
        rows = json.loads(out.read_text())
    measured: list[Row] = [
        (
            f"|ratio - 1|, {op}, {size} B ({ratio:.3f}; the bare loop against itself {control:.3f})",
            abs(ratio - 1),
            LARGE_APART if size >= LARGE_BYTES else SMALL_APART,
        )
        for op, size, ratio, control in rows
    ]
    large = [(abs(ratio - 1), abs(control - 1)) for _, size, ratio, control in rows if size >= LARGE_BYTES]
    for name, values in zip(("ours", "bare"), zip(*large, strict=True), strict=True):
        measured.append((f"largest, {name}", max(values), LARGE_APART if name == "ours" else math.inf))
    return measured
