"""How much of a run is timed iterations, as its own footer counts it: `collectives` in full, and the quick start."""

import json
import re
import subprocess
import sys
import tempfile
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
NOT_IN_QUICK_START = {"calibrate", "further", "laboratory", "links", "real-size"}  # tags, as run.sh leaves them out
IS_LONG = True
DISTBENCH = [sys.executable, "-m", "distbench"]


def knobs_of_quick_start() -> str:
    """The FSDP2 knobs that run.sh measures."""
    found = re.search(r"^ +local knobs=(\S+)$", Path("run.sh").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def main() -> list[Row]:
    """Rows for the benchmark table; the minus sign marks a floor."""
    (alone,) = footers("collectives")
    listed = subprocess.run([*DISTBENCH, "list", "--format", "json"], check=True, capture_output=True)
    names = [row["name"] for row in json.loads(listed.stdout) if not NOT_IN_QUICK_START & set(row["tags"])]
    settings = ("--set", f"knob={knobs_of_quick_start()}", "--set", "compile_backend=none")
    quick = footers(*names, "--quick", *settings, "-k", "not rotate=ulysses")
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


def footers(*arguments: str) -> list[dict[str, Any]]:
    """The footer of each scenario of one command, which also prints what its time was spent on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *DISTBENCH,
            "run",
            *arguments,
            "--quiet",
            "--results",
            f"{folder}/runs",
            "--log-dir",
            f"{folder}/logs",
        ]
        subprocess.run(command, check=True, capture_output=True)
        found = [
            json.loads(file.read_text().splitlines()[-1]) for file in sorted(Path(folder, "runs").rglob("*.jsonl"))
        ]
    for footer in found:
        print("  " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in footer["spent_s"].items()))
    return found
