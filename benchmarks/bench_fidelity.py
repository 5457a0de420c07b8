"""distbench's median over a bare loop's, of the same collective in the same processes, interleaved; 4 gloo ranks.

Beside each ratio stands the bare loop's to itself: no harness can be seen to be closer than that.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 4
# gloo copies the buffer at each call. Whether glibc gives those pages back after it changes from block to block, for
# either side alike, and costs about 5 % at 16 MB; with pages kept, both sides see the same memory all the time.
KEEP_PAGES = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


def main() -> list[tuple[str, float, float]]:
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
    return [
        (
            f"|ratio - 1|, {op}, {size} B ({ratio:.3f}; the bare loop against itself {control:.3f})",
            abs(ratio - 1),
            0.03 if size >= 2**20 else 0.1,
        )
        for op, size, ratio, control in rows
    ]
