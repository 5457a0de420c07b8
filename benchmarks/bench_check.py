"""Time and memory of `distbench check llama_2d` on 4,096 ranks, which are not there."""

import tempfile
from pathlib import Path

from benchmarks.bench_report import measure
from benchmarks.claims import Claim, Row

MESH = "dp_shard=512,tp=8"
MAX_WALL_S, MAX_RSS_GB = 10.0, 1.0

CLAIMS = (Claim("`distbench check llama_2d` on 4,096 ranks", "{:.1f} s, {:.2f} GB", "10 s, 1 GB"),)


def main() -> list[Row]:
    """Rows for the benchmark table: wall time in seconds, peak resident memory in GB (1e9 bytes)."""
    command = ["check", "llama_2d", "--mesh", MESH, "--set", "batch=512"]
    with tempfile.TemporaryDirectory() as folder:
        wall_s, rss_gb = measure(command, Path(folder) / "output")
    return [
        (f"check llama_2d --mesh {MESH}, wall_s", wall_s, MAX_WALL_S),
        (f"check llama_2d --mesh {MESH}, peak_rss_gb", rss_gb, MAX_RSS_GB),
    ]
