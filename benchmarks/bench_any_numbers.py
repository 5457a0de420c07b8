"""Rates of `distbench gate` on numbers that other tools measured, and its time on a million rows.

Six data sets of unchanged code. Two were measured here by another tool: numpy and zlib calls by pytest-benchmark, and
the same calls by timeit as CSV; 44 launches each, which stay in `build/any_numbers`. One is distbench's own runs (gloo)
as JSON lines. Three have the format of nccl-tests, torchtitan and vLLM, which cannot run here: their numbers are gloo
collectives of recorded launches (nccl-tests), or drawn from the samples of each pytest-benchmark launch.

Run it with `python -m benchmarks any_numbers`; the launches take 4 minutes, the comparisons 3.
"""

import datetime
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from benchmarks.bench_report import measure
from benchmarks.claims import Claim, Row
from benchmarks.gate_series import quiet_here, recorded_here
from distbench.judge.gate_self_test import CHANGES, Rates, RecordedSeries, Window, gate_rule, rates, recorded
from distbench.records.foreign_numbers import NumberColumns

FOLDER = Path("build/any_numbers")
NUM_LAUNCHES, NUM_PAIRS, NUM_COMPARISONS, SEED = 44, 10, 500, 20260101
STARTS = (0, 12)  # of windows of 20 launches, in which all 1024 orders of the pairs are compared
MAX_FALSE, MAX_HEADED_PASS = 0.05, 0.02
NUM_ROWS_PER_SIDE, MAX_WALL_S, MAX_RSS_GB = 500_000, 20.0, 1.0
IS_LONG = True

CLAIMS = (
    Claim(
        "false verdicts of `distbench gate` without a change, 10 pairs in all orders: pytest-benchmark, timeit (CSV), "
        "distbench (JSON lines); launches here in the formats of nccl-tests, torchtitan, vLLM",
        "{:.1%}, {:.1%}, {:.1%}; {:.1%}, {:.1%}, {:.1%}",
        "at most 5 %",
        ("*false verdicts",),
    ),
    Claim(
        "the same data, one case 20 % slower, 500 random splits each: headline PASS",
        "{:.1%}, {:.1%}, {:.1%}; {:.1%}, {:.1%}, {:.1%}",
        "at most 2 %",
        ("*headed PASS",),
    ),
    Claim("`distbench gate` on two CSV tables of 500,000 rows", "{:.1f} s, {:.2f} GB", "20 s, 1 GB", ("tables*",)),
)

CALLS = """
import zlib
import numpy as np
draw = np.random.default_rng(0)
square, line, text = draw.random((192, 192)), draw.random(200_000), draw.bytes(100_000)
CALLS = {
    "matmul": lambda: square @ square,
    "sort": lambda: np.sort(line[:50_000]),
    "fft": lambda: np.fft.rfft(line),
    "solve": lambda: np.linalg.solve(square, square[0]),
    "compress": lambda: zlib.compress(text, 1),
}
"""
PYTEST_FILE = f"""{CALLS}
import pytest
@pytest.mark.parametrize("name", CALLS)
def test_call(benchmark, name):
    benchmark.pedantic(CALLS[name], rounds=25, iterations=4, warmup_rounds=2)
"""
TIMEIT_FILE = f"""{CALLS}
import sys, timeit
for name, call in CALLS.items():
    for seconds in timeit.repeat(call, number=10, repeat=5):
        print(f"{{sys.argv[1]}},{{name}},{{seconds / 10 * 1e6:.3f}}")
"""
OF_TIMEIT = NumberColumns(launch="launch", case="call", value="usec")


def main() -> list[Row]:
    """Rows (name, measured, allowed): shares of comparisons; wall time in seconds, peak memory in GB (1e9 bytes)."""
    record()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, series in data_sets(Path(folder)).items():
            none, slower = in_all_orders(series), rates(series, NUM_PAIRS, "+20 %", NUM_COMPARISONS, SEED)
            rows += [
                (f"{name}, false verdicts", none.false_verdicts / none.num_comparisons, MAX_FALSE),
                (f"{name}, +20 %, headed PASS", slower.headed_pass / slower.num_comparisons, MAX_HEADED_PASS),
                (f"{name}, +20 %, found", slower.detected / slower.num_comparisons, float("inf")),
            ]
        sides = [write_long(Path(folder) / f"{name}.csv", name) for name in ("base", "new")]
        columns = ("--launch", "launch", "--case", "case", "--value", "us", "--pair", "turn")
        wall_s, rss_gb = measure(["gate", *map(str, sides), *columns], Path(folder) / "output")
    return [*rows, ("tables, wall_s", wall_s, MAX_WALL_S), ("tables, peak_rss_gb", rss_gb, MAX_RSS_GB)]


def record() -> None:
    """Launch pytest-benchmark and timeit in turn, as often as launches are missing."""
    (FOLDER / "pytest-benchmark").mkdir(parents=True, exist_ok=True)
    (FOLDER / "test_calls.py").write_text(PYTEST_FILE)
    (FOLDER / "calls.py").write_text(TIMEIT_FILE)
    table = FOLDER / "timeit.csv"
    if not table.exists():
        table.write_text("launch,call,usec\n")
    of_pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:distbench", "--rootdir", str(FOLDER))
    for number in range(NUM_LAUNCHES):
        path = FOLDER / "pytest-benchmark" / f"{number:02}.json"
        if not path.exists():
            file = ("--benchmark-json", str(path.resolve()), str(FOLDER / "test_calls.py"))
            subprocess.run([sys.executable, *of_pytest, *file], check=True, capture_output=True)
            timeit = [sys.executable, str(FOLDER / "calls.py"), str(number)]
            printed = subprocess.run(timeit, check=True, capture_output=True, text=True).stdout
            with table.open("a") as rows:
                rows.write(printed)


def data_sets(folder: Path) -> dict[str, RecordedSeries]:
    """Each data set, read from files of its format."""
    of_launches = [json.loads(path.read_text()) for path in sorted((FOLDER / "pytest-benchmark").glob("*.json"))]
    samples = [{row["param"]: row["stats"]["data"] for row in launch["benchmarks"]} for launch in of_launches]
    return {
        "pytest-benchmark": recorded(FOLDER / "pytest-benchmark", NumberColumns()),
        "timeit": recorded(FOLDER / "timeit.csv", OF_TIMEIT),
        "distbench": recorded(as_json_lines(recorded_here(), folder / "runs.jsonl"), NumberColumns("run", "op", "ms")),
        "nccl-tests": recorded(as_nccl_tests(quiet_here(), folder / "nccl-tests"), NumberColumns()),
        "torchtitan": recorded(as_torchtitan(samples, folder / "torchtitan"), NumberColumns()),
        "vLLM": recorded(as_vllm(samples, folder / "vllm"), NumberColumns()),
    }


def in_all_orders(series: RecordedSeries) -> Rates:
    """The rates without a change, of every order within the pairs of each window."""
    totals = Rates()
    for start, order in product(STARTS, product((0, 1), repeat=NUM_PAIRS)):
        sides = [[start + 2 * pair + (second ^ is_b) for pair, second in enumerate(order)] for is_b in (0, 1)]
        window = Window(*sides, changed=0, factor=CHANGES["none"].factor, seed=0)
        totals.add(window, gate_rule(series, window))
    return totals


def as_json_lines(series: RecordedSeries, path: Path) -> Path:
    """Recorded launches as a table of one row per launch and case."""
    rows = (
        {"run": launch, "op": case_id, "ms": 1e3 * series.values[row][launch].mean_s}
        for launch in range(series.num_launches)
        for row, case_id in enumerate(series.case_ids)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_nccl_tests(series: RecordedSeries, folder: Path) -> Path:
    """Recorded all-reduces of gloo as files of all_reduce_perf -J; those over dp_shard as the ones in place."""
    folder.mkdir()
    placements = {"tp": "out_of_place", "dp_shard": "in_place"}
    for launch in range(series.num_launches):
        rows: dict[int, dict[str, object]] = {}
        for row, case_id in enumerate(series.case_ids):
            _, shape, op, dim = case_id.split("/")
            if op == "all_reduce":
                count, time_us = int(shape[4:-1]), 1e6 * series.values[row][launch].mean_s
                about = {"size": 4 * count, "count": count, "type": "float", "redop": "sum", "root": "-1"}
                rows.setdefault(count, dict(about))[placements[dim]] = {"time": time_us, "bus_bw": 1.0, "nwrong": 0}
        started = moment(launch)
        data = {"version": 2, "start_time": str(started), "args": ["all_reduce_perf"], "nccl_version": 22703}
        data |= {"config": {"devices": []}, "results": list(rows.values())}
        data["end_time"] = str(started + datetime.timedelta(seconds=20))
        (folder / f"{launch:02}.json").write_text(json.dumps(data))
    return folder


def as_torchtitan(samples: Sequence[Mapping[str, Sequence[float]]], folder: Path) -> Path:
    """Logs of 30 steps; the time of a step is drawn from the launch's times of matmul, for 4,096 tokens."""
    folder.mkdir()
    draw = random.Random(SEED)
    for launch, of_launch in enumerate(samples):
        started, lines = moment(launch), ["Starting job: llama3_debug"]
        for step in range(1, 32):
            tps = 4096 / draw.choice(of_launch["matmul"])
            lines.append(f"step: {step:2}  loss:  7.1234  memory:  1.90GiB(2.00%)  tps: {round(tps):,}  tflops: 1.00")
        times = (started + datetime.timedelta(seconds=number / 2) for number in range(len(lines)))
        stamps = (f"{time:%Y-%m-%d %H:%M:%S},{time.microsecond // 1000:03}" for time in times)
        text = [f"[titan] {stamp} - root - INFO - {line}" for stamp, line in zip(stamps, lines, strict=True)]
        (folder / f"{launch:02}.log").write_text("\n".join(text) + "\n")
    return folder


def as_vllm(samples: Sequence[Mapping[str, Sequence[float]]], folder: Path) -> Path:
    """Results of `vllm bench serve`: 100 requests whose times are drawn from the launch's times of fft and sort."""
    folder.mkdir()
    draw = random.Random(SEED)
    for launch, of_launch in enumerate(samples):
        ttft_ms, tpot_ms = (sorted(1e3 * draw.choice(of_launch[name]) for _ in range(100)) for name in ("fft", "sort"))
        duration = sum(ttft_ms + tpot_ms) / 1e3
        data = {
            "date": moment(launch).strftime("%Y%m%d-%H%M%S"),
            "backend": "vllm",
            "model_id": "m",
            "num_prompts": 100,
        }
        data |= {"request_rate": "inf", "duration": duration, "completed": 100, "failed": 0}
        data |= {"request_throughput": 100 / duration, "output_throughput": 12_800 / duration}
        for name, times_ms in (("ttft", ttft_ms), ("tpot", tpot_ms)):
            data |= {f"mean_{name}_ms": statistics.fmean(times_ms), f"p99_{name}_ms": times_ms[98]}
        (folder / f"{launch:02}.json").write_text(json.dumps(data))
    return folder


def moment(launch: int) -> datetime.datetime:
    """When a launch began; one per minute."""
    return datetime.datetime(2026, 1, 1) + datetime.timedelta(minutes=launch)


def write_long(path: Path, name: str) -> Path:
    """A table of NUM_ROWS_PER_SIDE rows: 10 launches of 500 cases, 100 samples each. Launches differ by 2 %."""
    draw = random.Random(name)
    with path.open("w") as file:
        file.write("launch,turn,case,us\n")
        for launch in range(10):
            for case in range(NUM_ROWS_PER_SIDE // 1000):
                level = draw.gauss(3, 0.02)
                rows = (
                    f"{name}{launch},{launch},case{case},{draw.lognormvariate(level, 0.2):.4f}\n" for _ in range(100)
                )
                file.writelines(rows)
    return path


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:.3f} (allowed {allowed:g})")
