"""Runs in other tools' formats: one value a launch, never raw samples.

pytest-benchmark's storage (read by `pytest-benchmark compare`), github-action-benchmark's customSmallerIsBetter,
Bencher Metric Format (https://bencher.dev/docs/reference/bencher-metric-format/), and the CSV that Apache Otava reads.
"""

import csv
import datetime
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from distbench.records.comparison_sides import read_side
from distbench.records.launches import Launch
from distbench.records.nccl_tests import read_nccl_tests
from distbench.records.run_file_fields import Record
from distbench.spec.errors import UserError
from distbench.spec.safe_text import cell, count_text
from distbench.statistics.intervals import median

NS = 1e9
Series = dict[tuple[str, str], list[float]]


def exported(form: str, paths: Sequence[Path]) -> str:
    """Run files, baselines, nccl-tests' files, and folders of them in another format, as text.

    `form` is "pytest-benchmark", "customSmallerIsBetter", "bmf", "otava" or "run".
    """
    if form == "run":
        return run_text(paths)
    launches = read_side(paths, "run", [])
    series = series_of(launches)
    if not series:
        raise UserError("no case in these runs is ok, so there is nothing to export")
    if form == "otava":
        return otava(launches)
    written = {"pytest-benchmark": pytest_benchmark, "customSmallerIsBetter": smaller_is_better, "bmf": bencher}
    return json.dumps(written[form](series, launches[-1]), indent=1) + "\n"


def series_of(launches: Sequence[Launch]) -> Series:
    """(scenario, case id) to the mean of each launch that measured it, seconds, in time order."""
    series: Series = {}
    for launch in launches:
        for case_id, value in launch.cases.items():
            if value.status == "ok":
                series.setdefault((launch.scenario, case_id), []).append(value.mean_s)
    return series


def pytest_benchmark(series: Series, latest: Launch) -> Record:
    """A file as pytest-benchmark stores it: a round is a launch."""
    facts, moment = latest.facts, _moment(latest)
    return {
        "machine_info": {
            "node": facts["machine"],
            "python_version": facts["python"],
            "cpu": {"brand_raw": facts["cpu_model"], "count": facts["num_cpus"]},
        },
        "commit_info": {"id": facts["git_commit"], "dirty": facts["git_dirty"], "time": moment},
        "benchmarks": [
            {
                "group": None,
                "name": case_id,
                "fullname": f"{scenario}::{case_id}",
                "params": None,
                "param": None,
                "extra_info": {"scenario": scenario, "unit": "mean of one launch"},
                "options": {"timer": "time_ns"},
                "stats": _stats(values),
            }
            for (scenario, case_id), values in series.items()
        ],
        "datetime": moment,
        "version": "5.0.0",
    }


def _stats(values: Sequence[float]) -> Record:
    ordered, mean = sorted(values), statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    half = len(ordered) // 2
    low, high = (median(ordered[:half]), median(ordered[-half:])) if half else (mean, mean)
    far = 1.5 * (high - low)
    apart = sum(abs(value - mean) > deviation for value in values)
    outside = sum(value < low - far or value > high + far for value in values)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": deviation,
        "rounds": len(values),
        "iterations": 1,
        "median": median(values),
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": outside,
        "stddev_outliers": apart,
        "outliers": f"{apart};{outside}",
        "ld15iqr": ordered[0],
        "hd15iqr": ordered[-1],
        "ops": 1 / mean,
        "total": sum(values),
        "data": list(values),
    }


def smaller_is_better(series: Series, latest: Launch) -> list[Record]:
    """What github-action-benchmark reads with `tool: customSmallerIsBetter`: the mean of the median launch, in ms."""
    return [
        {
            "name": f"{scenario}: {case_id}",
            "unit": "ms",
            "value": 1e3 * median(values),
            "range": f"{1e3 * min(values):.4g} to {1e3 * max(values):.4g}",
            "extra": (
                f"{count_text(len(values), 'launch', 'launches')}, the mean of each, torch {latest.facts['torch']}"
            ),
        }
        for (scenario, case_id), values in series.items()
    ]


def bencher(series: Series, _: Launch) -> Record:
    """Bencher Metric Format: latency in nanoseconds, the mean of the median launch between those of the fastest and the
    slowest."""
    found = {}
    for (scenario, case_id), values in series.items():
        latency = {"value": median(values), "lower_value": min(values), "upper_value": max(values)}
        found[f"{scenario}: {case_id}"] = {"latency": {name: NS * value for name, value in latency.items()}}
    return found


def _moment(launch: Launch) -> str:
    return datetime.datetime.fromtimestamp(launch.started_at, datetime.UTC).isoformat()


def otava(launches: Sequence[Launch]) -> str:
    """A CSV for Apache Otava: a row a launch, a column a case, seconds; empty where a launch lacks the case."""
    names = sorted({(launch.scenario, case_id) for launch in launches for case_id in launch.cases})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time", "commit", "branch", *(cell(f"{scenario}: {case_id}") for scenario, case_id in names)])
    for launch in launches:
        row = [launch.cases.get(case_id) if scenario == launch.scenario else None for scenario, case_id in names]
        cells = [repr(value.mean_s) if value and value.status == "ok" else "" for value in row]
        writer.writerow([_moment(launch), cell(launch.facts["git_commit"] or ""), "", *cells])
    return text.getvalue()


def run_text(paths: Sequence[Path]) -> str:
    """One nccl-tests file as the lines of a run file."""
    if len(paths) != 1:
        raise UserError(f"export run takes one nccl-tests file at a time, {len(paths)} are given")
    run = read_nccl_tests(paths[0])
    records = [run.header, *run.cases, *([run.footer] if run.footer else [])]
    return "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records)
