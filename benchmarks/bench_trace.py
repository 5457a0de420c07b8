"""What tracing costs a step, and of how many collectives it knows the owner: `llama_2d` on 4 ranks, `llama_3d` on 8.

The cost is the trace's own: CPU seconds of traced and bare steps in turn, summed over ranks, and the median of ratios.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from distbench.report.collect import run_files_in
from distbench.results import read_run

MAX_RATIO, LEAST_OWNED = 1.10, 0.97
TRACED = {"llama_2d": "dp_shard=2,tp=2", "llama_3d": "dp_shard=2,cp=2,tp=2"}


def main() -> list[tuple[str, float, float]]:
    """Rows for the benchmark table."""
    rows = []
    for name, mesh in TRACED.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "distbench", "run", name, "--mesh", mesh, "--trace-paths", "--quiet"]
            subprocess.run([*command, "--out", folder], check=True, capture_output=True)
            [run_file] = run_files_in(Path(folder))
            [trace] = read_run(run_file).traces
        owned = trace["columns"].index("owner_known")
        share = sum(row[owned] for row in trace["rows"]) / len(trace["rows"])
        differing = len(trace["agreement"]["differences"])
        rows.append((f"{name} {mesh}: CPU time of a traced step / a bare one", trace["overhead"]["ratio"], MAX_RATIO))
        rows.append((f"{name} {mesh}: collectives whose owner is known", share, -LEAST_OWNED))
        rows.append((f"{name} {mesh}: where a second method saw something else", differing, 0))
    return rows
