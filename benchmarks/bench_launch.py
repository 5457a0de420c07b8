"""One distbench launch against a bare torchrun that imports torch, starts gloo on the same ranks and exits.

What distbench spends on warming up, timing and checking is not launching and is taken off, as its footer counts it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.claims import Claim, Row

ROUNDS = 5
RANKS = 4
BARE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
SCENARIO = Path(__file__).parent.parent / "tests" / "data" / "tiny.py"

CLAIMS = (Claim("time of a launch relative to a bare torchrun's start of gloo on 4 ranks", "{:.2f}x", "at most 1.25x"),)


def bare_seconds(folder: Path) -> float:
    """Wall time of the bare launch."""
    script = folder / "bare.py"
    script.write_text(BARE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script)]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def distbench_seconds(folder: Path) -> float:
    """Wall time of one launch of one case, less the measuring itself."""
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "distbench", "run", str(SCENARIO), "--quick", "--quiet", "--mesh", f"tp={RANKS}"]
    start = time.perf_counter()
    subprocess.run(
        [*command, "--results", str(out), "--log-dir", str(folder / "logs")], check=True, capture_output=True
    )
    wall_s = time.perf_counter() - start
    (run_file,) = out.rglob("*.jsonl")
    spent = json.loads(run_file.read_text().splitlines()[-1])["spent_s"]
    return wall_s - spent["warm-up"] - spent["timed"] - spent["checking"]


def main() -> list[Row]:
    """Rows for the benchmark table."""
    with tempfile.TemporaryDirectory() as name:
        pairs = [(distbench_seconds(Path(name)), bare_seconds(Path(name))) for _ in range(ROUNDS)]
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    return [(f"one launch / bare torchrun, {RANKS} ranks, median of {ROUNDS} pairs", ratio, 1.25)]
