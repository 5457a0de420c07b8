"""Time and memory of `distbench gate` on 10,000 cases and 10 launches a side that took turns, 20 samples each.

Run it with `python benchmarks/bench_gate.py`; it needs about 100 MB of disk in the temp folder.
"""

import json
import random
import tempfile
from pathlib import Path

from benchmarks.bench_report import measure
from benchmarks.claims import Claim, Row

NUM_CASES, NUM_LAUNCHES, NUM_SAMPLES = 10_000, 10, 20
MAX_WALL_S = 20.0
MAX_RSS_GB = 2.0
ENVIRONMENT = {"machine": "box", "device": "cpu", "backend": "gloo", "world_size": 4, "num_cpus": 4}

CLAIMS = (Claim("`distbench gate` on 10,000 cases x 10 launches a side", "{:.1f} s, {:.2f} GB", "20 s, 2 GB"),)


def main() -> list[Row]:
    """Rows (name, measured, allowed): wall time in seconds, peak resident memory in GB (1e9 bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [Path(folder) / name for name in ("base", "new")]
        draw = random.Random(0)
        for number, side in enumerate(sides):
            side.mkdir()
            for index in range(NUM_LAUNCHES):
                write_launch(side / f"{index:02}.jsonl", f"{side.name}-{index}", 1.0 + 2 * index + number, draw)
        wall_s, rss_gb = measure(["gate", *map(str, sides)], Path(folder) / "output")
    size = f"{NUM_CASES} cases x {NUM_LAUNCHES} launches a side"
    return [(f"gate, {size}, wall_s", wall_s, MAX_WALL_S), (f"gate, {size}, peak_rss_gb", rss_gb, MAX_RSS_GB)]


def write_launch(path: Path, run_id: str, started_at: float, draw: random.Random) -> None:
    """A run file of NUM_CASES collectives; launches differ by 2 %, samples of one launch by 20 %."""
    job = {"scenario": "synthetic", "mesh": {"tp": 4}, "started_at": started_at, "device": "cpu", "variants": []}
    header = {"type": "run", "schema_version": 1, "run_id": run_id, "job": job, "environment": ENVIRONMENT}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for number in range(NUM_CASES):
            level = draw.gauss(-7, 0.02)
            case = {"id": f"collective/f32[{number}]/all_gather/tp", "kind": "collective", "params": {}}
            samples_s = [draw.lognormvariate(level, 0.2) for _ in range(NUM_SAMPLES)]
            record = {"type": "case", "case": case, "status": "ok", "samples_s": samples_s}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
        file.write('{"type":"footer","status":"complete"}\n')


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:.2f} (allowed {allowed:g})")
