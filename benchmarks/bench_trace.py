"""What tracing costs a step, and of how many collectives it knows the owner: `llama_2d` on 4 ranks, `llama_3d` on 8.

The cost is the trace's own: CPU seconds of traced and bare steps in turn, summed over ranks, and the median of ratios.
It takes five and a half minutes of CPU time, most of it `llama_3d` on 8 ranks: three minutes on two quiet cores.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row
from distbench.records.results_folder import run_files_in
from distbench.records.run_file import read_run

IS_LONG = True
MAX_RATIO, LEAST_OWNED = 1.10, 0.97
TRACED = {"llama_2d": "dp_shard=2,tp=2", "llama_3d": "dp_shard=2,cp=2,tp=2"}
# What is looked at comes after the timed iterations, so that these are few and nothing holds them against one device.
FEW = ("--budget", "1", "--check", "none")

CLAIMS = (
    Claim(
        "CPU time of a traced step relative to a bare step: `llama_2d`, `llama_3d`",
        "{:.2f}x, {:.2f}x",
        "at most 1.10x",
        ("*a traced step*",),
    ),
    Claim("collectives of these steps with a known owner", "{least:.0%}", "at least 97 %", ("*owner is known",)),
)


def main() -> list[Row]:
    """Rows for the benchmark table."""
    rows = []
    for name, mesh in TRACED.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "distbench", "run", name, "--mesh", mesh, "--trace-paths"]
            # Its progress is told on standard error.
            subprocess.run([*command, *FEW, "--results", folder], check=True, stdout=subprocess.DEVNULL)
            [run_file] = run_files_in(Path(folder))
            traces = read_run(run_file).traces
        ratio = max(trace["overhead"]["ratio"] for trace in traces)
        rows.append((f"{name} {mesh}: CPU time of a traced step / a bare one", ratio, MAX_RATIO))
        rows.append((f"{name} {mesh}: collectives whose owner is known", min(map(_owned, traces)), -LEAST_OWNED))
    return rows


def _owned(trace: dict[str, Any]) -> float:
    column = trace["columns"].index("owner_known")
    return sum(row[column] for row in trace["rows"]) / len(trace["rows"])
