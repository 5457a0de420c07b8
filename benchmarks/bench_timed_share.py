"""How much of a run is timed iterations, as its own footer counts it: `collectives` in full, and the quick start."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row

CLAIMS = (
    Claim(
        "share of timed iterations in the wall time of `distbench run collectives`",
        "{:.0%}",
        "at least 50 %",
        ("*collectives*",),
    ),
    Claim(
        "share of timed iterations in the measuring time of `./run.sh`",
        "{:.0%}",
        "at least 50 %",
        ("*quick*",),
    ),
)
IS_LONG = True
ROOT = Path(__file__).parent.parent


def main() -> list[Row]:
    """Rows for the benchmark table; the minus sign marks a floor."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("collectives", "--quiet", "--results", f"{folder}/runs", "--log-dir", f"{folder}/logs")
        (alone,) = footers([sys.executable, "-m", "distbench", "run", *words], Path(folder, "runs"))
    quick = footers([str(ROOT / "run.sh")], ROOT / "results")
    timed_s = sum(footer["spent_s"]["timed"] for footer in quick)
    measuring_s = sum(footer["measuring_s"] for footer in quick)
    print(f"  quick: {timed_s:.0f} s of {measuring_s:.0f} s, {sum(footer['wall_s'] for footer in quick):.0f} s in all")
    return [
        (
            "timed iterations / wall time of `distbench run collectives`",
            alone["spent_s"]["timed"] / alone["wall_s"],
            -0.5,
        ),
        ("timed iterations / measuring time of the quick start", timed_s / measuring_s, -0.5),
    ]


def footers(command: Sequence[str], results: Path) -> list[dict[str, Any]]:
    """The footer of each scenario of one command, which also prints what its time was spent on."""
    began = time.time()
    subprocess.run(command, check=True, capture_output=True)
    files = [file for file in results.glob("*/*.jsonl") if file.stat().st_mtime >= began]
    result = [json.loads(file.read_text().splitlines()[-1]) for file in sorted(files)]
    for footer in result:
        print("  " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in footer["spent_s"].items()))
    return result
