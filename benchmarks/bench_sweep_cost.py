"""What a search costs: 80 plans of Llama 3 8B on 64 devices.

`python -m benchmarks.bench_sweep_cost`. Seconds of the command until its first plan and until its end, and of the same
command with --reuse: about 2 minutes on two quiet cores.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.claims import Claim, Row

MOST_FIRST_S, MOST_SWEEP_S, MOST_AGAIN_S, NUM_PLANS = 20.0, 120.0, 5.0, 80
IS_LONG = True
CLAIMS = (
    Claim(
        "search of 80 plans of Llama 3 8B on 64 devices: first plan; all; the finished search with `--reuse`",
        "{:.0f} s; {:.0f} s; {:.1f} s",
        "at most 20 s; at most 120 s on 2 cores; at most 5 s",
        ("first plan*", "sweep*", "reused*"),
    ),
)


def main() -> list[Row]:
    """Rows for the benchmark table."""
    with tempfile.TemporaryDirectory() as folder:
        first_s, sweep_s = _seconds(Path(folder))
        _, again_s = _seconds(Path(folder), "--reuse")
    return [
        ("first plan: seconds", first_s, MOST_FIRST_S),
        (f"sweep of {NUM_PLANS}: seconds", sweep_s, MOST_SWEEP_S),
        ("reused: seconds", again_s, MOST_AGAIN_S),
    ]


def _seconds(out: Path, *reuse: str) -> tuple[float, float]:
    """Return the seconds until the first plan and until the end."""
    command = [sys.executable, "-m", "distbench", "tune", "llama3_8b", "--world", "64", "--hardware", "h100"]
    options = ["--plans", str(NUM_PLANS), "--max-time", "30min", "--results", str(out), *reuse]
    began, first_s = time.monotonic(), 0.0
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if "best of" in line and not first_s:
                first_s = time.monotonic() - began
    if child.returncode or not first_s:
        raise RuntimeError(f"tune ended with exit code {child.returncode}")
    return first_s, time.monotonic() - began


if __name__ == "__main__":
    for name, value, allowed in main():
        print(f"{name}: {value:g} (allowed {allowed:g})")
