"""Time and memory of `distbench report` on 100,000 cases of 20 samples: what a year of nightly runs comes to.

The floor is Python's json module: about 100 MB of text, 2 million samples. Everything after it is vectorised.

Run it with `python benchmarks/bench_report.py`; it needs about 110 MB of disk in the temp folder.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row

Record = dict[str, Any]
NUM_CASES = 100_000
NUM_SAMPLES = 20
MAX_WALL_S = 10.0
MAX_RSS_GB = 2.0

CLAIMS = (
    Claim(
        "`distbench report` on 100,000 cases x 20 samples",
        "{:.1f} s, {:.2f} GB",
        "10 s, 2 GB",
        ("report --format table*",),
    ),
)
OPS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")


def main() -> list[Row]:
    """Rows (name, measured, allowed) for each format: wall time in seconds, peak resident memory in GB (1e9 bytes)."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder) / "run.jsonl"
        write_run(run_file)
        for form in ("table", "csv", "json"):
            wall_s, rss_gb = measure(["report", str(run_file), "--full", "--format", form], Path(folder) / "output")
            rows.append((f"report --format {form}, {NUM_CASES} cases, wall_s", wall_s, MAX_WALL_S))
            rows.append((f"report --format {form}, {NUM_CASES} cases, peak_rss_gb", rss_gb, MAX_RSS_GB))
    return rows


def measure(arguments: list[str], output: Path) -> tuple[float, float]:
    """Wall seconds and peak resident GB of one distbench command.

    Raises:
        subprocess.CalledProcessError: it did not exit with 0.
    """
    command = [sys.executable, "-m", "distbench", *arguments]
    started_at = time.perf_counter()
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, cwd=Path(__file__).resolve().parents[1])
        # wait4 and not getrusage: the latter's maximum is over all children that ever ran.
        _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started_at
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return wall_s, usage.ru_maxrss * unit_bytes / 1e9


def write_run(path: Path) -> None:
    """A run file of NUM_CASES cases: collectives, redistributions and steps as 4 : 5 : 1."""
    draw = random.Random(0)
    job = {"scenario": "synthetic", "mesh": {"dp_shard": 2, "tp": 2}, "started_at": 0.0, "device": "cpu"}
    header = {"type": "run", "schema_version": 1, "run_id": "r", "invocation_id": "i", "job": job, "environment": {}}
    with path.open("w", encoding="utf-8") as file:
        for record in (header, *_cases(draw), {"type": "footer", "status": "complete", "spent_s": {"timed": 1.0}}):
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _cases(draw: random.Random) -> Iterator[Record]:
    for index in range(NUM_CASES * 4 // 10):
        op, size, mesh_dim = OPS[index % 5], 1024 * (1 + index // 10), ("dp_shard", "tp")[index // 5 % 2]
        params = {"op": op, "dtype": "f32", "mesh_dim": mesh_dim, "size_bytes": size}
        fields = {"payload_bytes": size, "wire_bytes": size, "group_size": 2, "mesh_dim": mesh_dim, "backend_op": op}
        yield _case(draw, f"collective/f32[{size // 4}]/{op}/{mesh_dim}", "collective", params, fields)
    for index in range(NUM_CASES // 4):
        source = f"S({index})R"
        for planner in ("greedy", "min_cost"):
            params = {"source": source, "target": "RR", "planner": planner, "dtype": "f32", "shape": [64, 64]}
            counters = {"path": f"{source}->{planner if index % 2 else 'S(1)R'}->RR", "num_collectives": 2}
            fields = {"payload_bytes": 16384, "wire_bytes": 8192, "group_size": 4, "counters": counters}
            yield _case(draw, f"redistribute/f32[64,64]/{source}->RR/{planner}", "redistribute", params, fields)
    for index in range(NUM_CASES // 10):
        params = {"scenario": "synthetic", "variant": f"width={index}", "shape": [4, 128]}
        fields = {
            "phases_s": {phase: _samples(draw) for phase in ("forward", "backward", "optimizer")},
            "counters": {"peak_bytes": 1 << 20, "loss_rel_error": 1e-7, "grad_rel_error": 1e-6},
        }
        yield _case(draw, f"step/f32[4,128]/synthetic/width={index}", "step", params, fields)


def _case(draw: random.Random, case_id: str, kind: str, params: Record, fields: Record) -> Record:
    return {
        "type": "case",
        "case": {"id": case_id, "kind": kind, "params": params},
        "status": "ok",
        "samples_s": _samples(draw),
        "phases_s": {},
        "rank_median_s": [draw.random() for _ in range(4)],
        "backend": "gloo",
        "stop_reason": "precise",
        "counters": {"entry_skew_s": 1e-4, "isolated_s": 1e-3},
        "error": None,
        **fields,
    }


def _samples(draw: random.Random) -> list[float]:
    return [draw.lognormvariate(-7, 0.3) for _ in range(NUM_SAMPLES)]


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:.2f} (allowed {allowed:g})")
