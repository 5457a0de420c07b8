"""Export to other tools' formats: one value per launch, never raw samples.

A format is a function of paths: run files, baselines, nccl-tests' files, and folders of them.
"""

import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text

if TYPE_CHECKING:
    from distbench.records.launches import Launch
    from distbench.records.run_file import Record

Series = dict[tuple[str, str], list[float]]


def pytest_benchmark(paths: Sequence[Path]) -> str:
    """A file in pytest-benchmark's storage format, for `pytest-benchmark compare`: a round is a launch."""
    series, latest = _series_of(paths)
    facts, moment = latest.facts, datetime.datetime.fromtimestamp(latest.started_at, datetime.UTC).isoformat()
    record = {
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
    return _json_text(record)


def _stats(values: Sequence[float]) -> "Record":
    ordered, mean = sorted(values), statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    half = len(ordered) // 2
    low, high = (statistics.median(ordered[:half]), statistics.median(ordered[-half:])) if half else (mean, mean)
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
        "median": statistics.median(values),
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


def smaller_is_better(paths: Sequence[Path]) -> str:
    """JSON for github-action-benchmark's `tool: customSmallerIsBetter`: the mean of the median launch, in ms."""
    series, latest = _series_of(paths)
    torch = latest.facts["torch"]
    record = [
        {
            "name": f"{scenario}: {case_id}",
            "unit": "ms",
            "value": 1e3 * statistics.median(values),
            "range": f"{1e3 * min(values):.4g} to {1e3 * max(values):.4g}",
            "extra": f"{count_text(len(values), 'launch', 'launches')}, mean of each, torch {torch}",
        }
        for (scenario, case_id), values in series.items()
    ]
    return _json_text(record)


def run_text(paths: Sequence[Path]) -> str:
    """One nccl-tests file as the lines of a run file."""
    from distbench.records.nccl_tests import read_nccl_tests

    if len(paths) != 1:
        raise UserError(f"export run converts one nccl-tests file at a time; {len(paths)} were given, give one")
    run = read_nccl_tests(paths[0])
    records = [run.header, *run.cases, *([run.footer] if run.footer else [])]
    return "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records)


def _series_of(paths: Sequence[Path]) -> "tuple[Series, Launch]":
    """(scenario, case id) to the mean of each launch that measured it, seconds, in time order; and the last launch."""
    from distbench.records.baselines import read_side

    launches = read_side(paths, "run", [])
    series: Series = {}
    for launch in launches:
        for case_id, value in launch.cases.items():
            if value.status == "ok":
                series.setdefault((launch.scenario, case_id), []).append(value.mean_s)
    if not series:
        raise UserError("no case in these runs is ok, so nothing was exported; give runs with a measured case")
    return series, launches[-1]


def _json_text(record: "Record | list[Record]") -> str:
    return json.dumps(record, indent=1) + "\n"


# Names of `distbench export`.
EXPORTS: dict[str, Callable[[Sequence[Path]], str]] = {
    "pytest-benchmark": pytest_benchmark,
    "customSmallerIsBetter": smaller_is_better,
    "run": run_text,
}
