"""CPU time, memory and false alarms of `distbench site` on 100,000 cases and 200 commits.

The run files are made up: noise of 3 % per case and launch with an upper tail, 5 % per launch for all cases together,
and 100 cases that become 20 % slower at a random commit. Run it with `python -m benchmarks site`; it needs 3 GB of disk
below `build/`, and 6 minutes on an idle machine.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench_report import measure
from benchmarks.claims import Claim, Row

FOLDER = Path("build/site")
NUM_CASES, NUM_COMMITS, NUM_SLOWER, FACTOR, SEED = 100_000, 200, 100, 1.2, 20260101
NOISE, TAIL, DRIFT = 0.03, 0.01, 0.05
MAX_CPU_S, MAX_RSS_GB, MAX_PAGE_MB = 60.0, 1.0, 2.0
IS_LONG = True

CLAIMS = (
    Claim(
        "`distbench site`, 100,000 cases, 200 commits of which one is new in the index: CPU time, memory, largest page",
        "{:.0f} s, {:.2f} GB, {:.2f} MB",
        "60 s, 1 GB, 2 MB",
        ("one new run, *", "largest page, MB"),
    ),
    Claim(
        "unchanged cases that it reports as changed, of 99,900; of 100 cases 20 % slower, found",
        "{:.0f}; {:.0f}",
        "no case in 95 % of sites; 95",
        ("unchanged cases reported", "slower cases found"),
    ),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed): time of one core in seconds, peak memory in GB (1e9 bytes), cases."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        results, site = FOLDER / "results", FOLDER / "site"
        results.mkdir(parents=True)
        newest = list(write_runs(results))[-1]
        away = FOLDER / newest.name
        newest.rename(away)
        command = ["site", "--results", str(results), "--output-dir", str(site), "--run-pages", "0", "--json"]
        before_s = children_s()
        _, first_gb = measure(command, FOLDER / "output")
        first_s = children_s() - before_s
        away.rename(newest)
        _, rss_gb = measure(command, FOLDER / "output")
        cpu_s = children_s() - before_s - first_s
        changed = {case["case_id"] for case in json.loads((FOLDER / "output").read_text())["changed"]}
        slower = {case_id(case) for case in range(NUM_SLOWER)}
        largest_mb = max(path.stat().st_size for path in site.rglob("*.html")) / 1e6
        return [
            ("no index, CPU s", first_s, float("inf")),
            ("no index, peak GB", first_gb, MAX_RSS_GB),
            ("one new run, CPU s", cpu_s, MAX_CPU_S),
            ("one new run, peak GB", rss_gb, MAX_RSS_GB),
            ("largest page, MB", largest_mb, MAX_PAGE_MB),
            ("unchanged cases reported", len(changed - slower), 0),
            ("slower cases found", len(changed & slower), -0.95 * NUM_SLOWER),
        ]
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def children_s() -> float:
    """CPU time of ended child processes, in seconds. Other programs on the machine hardly change it."""
    times = os.times()
    return times.children_user + times.children_system


def case_id(case: int) -> str:
    """The id of a case; the first NUM_SLOWER become slower."""
    return f"op/f32[{1024 + case}]/matmul/tp"


def write_runs(folder: Path) -> Iterator[Path]:
    """A run file per commit, oldest first."""
    draw = np.random.default_rng(SEED)
    since = draw.integers(5, NUM_COMMITS - 5, size=NUM_SLOWER)
    base_s = draw.lognormal(-7, 1, NUM_CASES)
    ending = '","kind":"operator","params":{}},"status":"ok","samples_s":['
    starts = [f'{{"type":"case","case":{{"id":"{case_id(case)}{ending}' for case in range(NUM_CASES)]
    environment = {"machine": "box-1", "num_cpus": 4, "device": "cpu", "backend": "gloo", "world_size": 4}
    for number in range(NUM_COMMITS):
        seconds = base_s * np.exp(noise(draw) + DRIFT * draw.standard_normal())
        seconds[:NUM_SLOWER] *= np.where(number >= since, FACTOR, 1.0)
        job = {"scenario": "operators", "mesh": {"tp": 4}, "started_at": 1.8e9 + 86_400.0 * number, "device": "cpu"}
        about = {"git_commit": f"{number:08x}" * 5, "git_dirty": False, "torch": "2.13.0"}
        header = {"type": "run", "schema_version": 2, "run_id": f"run-{number}", "job": job}
        header["environment"] = environment | about
        lines = [f"{start}{value:.6g}]}}\n" for start, value in zip(starts, seconds.tolist(), strict=True)]
        path = folder / f"{number:03}.jsonl"
        with path.open("w") as file:
            file.write(json.dumps(header) + "\n")
            file.writelines(lines)
            file.write('{"type":"footer","status":"complete"}\n')
        yield path


def noise(draw: np.random.Generator) -> NDArray[np.float64]:
    """Noise of one launch's cases, as logarithms: normal, with an upper tail in one case of ten."""
    tail = np.where(draw.random(NUM_CASES) < 0.1, draw.exponential(TAIL, NUM_CASES), 0.0)
    return np.asarray(NOISE * draw.standard_normal(NUM_CASES) + tail)


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:.3f} (allowed {allowed:g})")
