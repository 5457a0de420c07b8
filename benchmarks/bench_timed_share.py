"""How much of `distbench run collectives` (full sizes) is timed iterations, as the run's own footer counts it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.claims import Claim, Row

CLAIMS = (Claim("timed iterations in the wall time of `distbench run collectives`", "{:.0%}", "at least 50 %"),)
IS_LONG = True


def main() -> list[Row]:
    """Rows for the benchmark table; the minus sign marks a floor."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distbench", "run", "collectives", "--out", folder]
        subprocess.run([*command, "--log-dir", f"{folder}/logs"], check=True, capture_output=True)
        (run_file,) = (path for path in Path(folder).rglob("*.jsonl") if path.name != "progress.jsonl")
        footer = json.loads(run_file.read_text().splitlines()[-1])
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in footer["spent_s"].items())
    print(f"  {spent}")
    return [
        (
            "timed iterations / wall time of `distbench run collectives`",
            footer["spent_s"]["timed"] / footer["wall_s"],
            -0.5,
        )
    ]
