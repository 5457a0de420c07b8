"""Export to other tools' formats: one value per launch, never raw samples.

A format is a function of paths (run files, baselines, nccl-tests' files, and folders of them). An exporter returns the
text or bytes of a file, or the files of a folder by name.
"""

import datetime
import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.records.launches import FORWARD_ONLY
from distbench.records.nccl_tests import DTYPES, OPS
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text

if TYPE_CHECKING:
    from distbench.records.dataframe import Row
    from distbench.records.launches import Launch
    from distbench.records.run_file import Environment, Record, Run

Series = dict[tuple[str, str], list[float]]
Exported = str | bytes | dict[str, bytes]
GIB = 1 << 30
NOTHING_MEASURED = "no case in these runs is ok, so nothing was exported; give runs with a measured case"


def pytest_benchmark(paths: Sequence[Path]) -> str:
    """A file in pytest-benchmark's storage format, for `pytest-benchmark compare`, with a launch per round."""
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
    """JSON for github-action-benchmark's `tool: customSmallerIsBetter`, with the median of the launches' means in
    ms."""
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


def bigger_is_better(paths: Sequence[Path]) -> str:
    """JSON for github-action-benchmark's `tool: customBiggerIsBetter`: the median launch's rate.

    The rate is the busbw of collectives, tokens or samples per second of steps that have them, else iterations per
    second.
    """
    record = []
    for case in _measured_cases(paths):
        name, unit, values = case.rate()
        span = f"{min(values):.4g} to {max(values):.4g}"
        extra = f"{name}, {count_text(len(values), 'launch', 'launches')}, torch {case.newest.about.environment.torch}"
        record.append(
            {"name": case.title, "unit": unit, "value": statistics.median(values), "range": span, "extra": extra}
        )
    return _json_text(record)


def pytorch_benchmark(paths: Sequence[Path]) -> str:
    """JSON records of the PyTorch OSS benchmark database, schema v3: a value per launch and metric.

    Source of the fields: pytorch/test-infra, clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql. Its upload action
    adds the repository, commit and job.
    """
    records: list[Record] = []
    for case in _measured_cases(paths):
        run, row = case.newest, case.rows[-1]
        environment, params = run.about.environment, run.about.settings
        common = {
            "benchmark": {
                "name": case.scenario,
                "mode": "inference" if row["mode"] == FORWARD_ONLY else "training",
                "dtype": _word(row["dtype"]),
                "extra_info": {
                    "mesh": case.mesh,
                    "settings": json.dumps(params, sort_keys=True),
                    "runner": "distbench",
                },
            },
            "model": {
                "name": case.case_id,
                "type": _word(row["kind"]),
                "backend": _word(environment.backend),
                "origins": ["distbench"],
            },
            "runners": [_runner_of(environment)],
            "dependencies": {
                "torch": {"repo": "pytorch/pytorch", "version": _word(environment.torch)},
            },
        }
        for name, unit, values in case.metrics():
            metric = {"name": name, "benchmark_values": values, "extra_info": {"unit": unit}}
            records.append(common | {"metric": metric})
    return _json_text(records)


def _runner_of(environment: "Environment") -> "Record":
    return {
        "name": _word(environment.machine),
        "type": f"{environment.num_hosts or 1} hosts, {environment.world_size or 1} ranks",
        "cpu_info": _word(environment.cpu_model),
        "cpu_count": environment.num_cpus or 0,
        "avail_mem_in_gb": round((environment.memory_bytes or 0) / GIB),
        "gpu_info": _word(environment.device_name),
        "gpu_count": environment.num_devices or 0,
    }


def openmetrics(paths: Sequence[Path]) -> str:
    """OpenMetrics text for node_exporter's textfile collector: each case's newest launch, its interval and its status.
    The interval is for the median over passes. The interval is missing if there are too few passes.
    """
    rows = [*{(row["scenario"], row["mesh"], row["id"]): row for row in _rows_of(paths)[0]}.values()]
    lines = []
    for name, (column, unit, factor, text) in OPENMETRICS.items():
        values = [(_labels(row), float(row[column]) * factor) for row in rows]
        lines += metric_lines(name, text, [sample for sample in values if math.isfinite(sample[1])], unit)
    correct = [(_labels(row), float(row["status"] == "ok")) for row in rows]
    lines += metric_lines(OK_METRIC, "1 if the case is correct, else 0.", correct)
    return "\n".join([*lines, "# EOF", ""])


def metric_lines(name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]], unit: str = "") -> list[str]:
    """Return the lines of one OpenMetrics gauge; no line without samples.

    Args:
        name, text: the metric's name, which ends with its unit, and its help.
        samples: labels and value of each sample.
    """
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    lines = []
    for labels, value in samples:
        label_text = ",".join(f'{label}="{word.translate(escapes)}"' for label, word in labels.items())
        lines.append(f"{name}{{{label_text}}} {value:.9g}" if labels else f"{name} {value:.9g}")
    units = [f"# UNIT {name} {unit}"] if unit else []
    return [f"# TYPE {name} gauge", *units, f"# HELP {name} {text}", *lines] if lines else []


OK_METRIC = "distbench_case_ok"
# Metric to column, unit, factor and help.
OPENMETRICS = {
    "distbench_case_seconds": ("median_s", "seconds", 1.0, "Median time of one iteration."),
    "distbench_case_low_seconds": ("ci_low_s", "seconds", 1.0, "Lower end of the 95 % CI of the median time."),
    "distbench_case_high_seconds": ("ci_high_s", "seconds", 1.0, "Upper end of the 95 % CI of the median time."),
    "distbench_busbw_bytes_per_second": ("busbw_gb_per_s", "bytes_per_second", 1e9, "Bus bandwidth."),
    "distbench_peak_bytes": ("peak_bytes", "bytes", 1.0, "Peak memory of a step on one rank."),
}
LABELS = ("scenario", "mesh", "id", "machine", "backend")


def _labels(row: "Row") -> dict[str, str]:
    return {"case" if name == "id" else name: _word(row[name]) for name in LABELS}


def parquet(paths: Sequence[Path]) -> bytes:
    """A Parquet file of the data frame that `report --json` prints, a row per case and launch."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError("export parquet needs pyarrow; pip install pyarrow") from error
    from distbench.records.dataframe import PASSES, frame_of

    frame = frame_of(_runs_of(paths)).drop(columns=PASSES)
    for name in [name for name, column in frame.items() if column.dtype.kind == "O"]:
        frame[name] = [_utf8(value) for value in frame[name]]
    return bytes(frame.to_parquet(index=False))


def _utf8(value: Any) -> Any:
    # Parquet has texts in UTF-8 only, but names of files need not be UTF-8.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def nccl_tests(paths: Sequence[Path]) -> dict[str, bytes]:
    """JSON files in the format of nccl-tests' `-J` (file version 2), one per run, op and mesh dim. Only collectives are
    exported.
    """
    rows, runs = _rows_of(paths)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["kind"] == "collective" and row["variant"] is None and _is_measured(row):
            groups.setdefault((row["run_file"], row["op"], row["mesh_dim"]), []).append(row)
    if not groups:
        raise UserError("no collective in these runs is ok, so nothing was exported; run `distbench run collectives`")
    about = {run.path.name: run.about for run in runs}
    files = {}
    for (file, op, mesh_dim), collectives in groups.items():
        header = about[file]
        moment = datetime.datetime.fromtimestamp(header.started_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        name = next((theirs for theirs, ours in OPS.items() if ours == op), op)
        devices = [
            {"rank": rank, "group": 0, "hostname": header.environment.machine, "device": rank}
            | {"device_info": header.environment.device_name or header.environment.cpu_model}
            for rank in range(int(collectives[0]["group_size"]))
        ]
        record = {
            "version": 2,
            "start_time": moment,
            "end_time": moment,
            "args": [f"{name}_perf"],
            "env": [],
            "nccl_version": header.environment.nccl,
            "config": {"nthreads": 1, "ngpus": len(devices), "aggregated_iterations": 1, "devices": devices},
            "results": [*map(_nccl_row, collectives)],
        }
        files[f"{Path(file).stem}-{name}-{mesh_dim}.json"] = _json_text(record).encode()
    return files


def _nccl_row(row: "Row") -> "Record":
    time_us, dtype = (
        1e6 * row["median_s"],
        next((t for t, ours in DTYPES.items() if ours == row["dtype"]), row["dtype"]),
    )
    size = int(row["payload_bytes"])
    busbw = row["busbw_gb_per_s"]
    body = {
        "time": time_us,
        "alg_bw": row["algbw_gb_per_s"],
        "bus_bw": busbw if math.isfinite(busbw) else None,
        "nwrong": 0,
    }
    redop = "sum" if row["op"] in ("all_reduce", "reduce_scatter") else "none"
    root = "0" if row["op"] in ("broadcast", "scatter", "gather") else "-1"
    count = size // WIDTHS.get(dtype, 4)
    return {"size": size, "count": count, "type": dtype, "redop": redop, "root": root, "out_of_place": body}


def tensorboard(paths: Sequence[Path]) -> dict[str, bytes]:
    """TensorBoard event files, a folder per scenario: every metric of each case, a step per launch."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError("export tensorboard needs tensorboard; pip install tensorboard") from error
    with tempfile.TemporaryDirectory() as folder:
        writers: dict[str, Any] = {}
        for case in _measured_cases(paths):
            if case.scenario not in writers:
                writers[case.scenario] = EventFileWriter(str(Path(folder) / case.scenario))
            for name, unit, values in case.metrics():
                tag = f"{name}, {unit}/{case.case_id} ({case.mesh})"
                for step, (value, moment) in enumerate(zip(values, case.moments, strict=True)):
                    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                    writers[case.scenario].add_event(Event(wall_time=moment, step=step, summary=summary))
        for writer in writers.values():
            writer.close()
        return _files_in(Path(folder))


def wandb(paths: Sequence[Path]) -> dict[str, bytes]:
    """Offline runs of W&B, one per launch, for `wandb sync DIR/offline-run-*`; every metric of each case."""
    try:
        import wandb as library
    except ImportError as error:
        raise UserError("export wandb needs wandb; pip install wandb") from error
    settings = library.Settings(
        mode="offline", silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True
    )
    with tempfile.TemporaryDirectory() as folder:
        for run, metrics in _metrics_by_launch(paths):
            config = {"scenario": run.scenario, **run.about.facts}
            writer = library.init(
                project="distbench", name=run.about.run_id, config=config, dir=folder, settings=settings
            )
            writer.log(metrics)
            writer.finish()
        library.teardown()  # waits until its process has written the files
        return _files_in(Path(folder) / "wandb")


def mlflow(paths: Sequence[Path]) -> bytes:
    """MLflow's SQLite database: an experiment per scenario, a run per launch; every metric of each case."""
    try:
        import sqlalchemy  # noqa: F401
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise UserError("export mlflow needs mlflow; pip install mlflow") from error
    with tempfile.TemporaryDirectory() as folder:
        file, experiments = Path(folder) / "mlflow.db", {}
        client = MlflowClient(tracking_uri=f"sqlite:///{file}")
        for run, metrics in _metrics_by_launch(paths):
            if run.scenario not in experiments:
                experiments[run.scenario] = client.create_experiment(run.scenario, artifact_location="artifacts")
            moment, tags = int(1e3 * run.about.started_at), {name: str(fact) for name, fact in run.about.facts.items()}
            new = client.create_run(experiments[run.scenario], moment, tags, run.about.run_id).info.run_id
            for name, value in metrics.items():
                # MLflow allows these characters only.
                client.log_metric(new, re.sub(r"[^\w\-. :/]", ".", name), value, timestamp=moment, step=0)
            client.set_terminated(new)
        return file.read_bytes()


def _metrics_by_launch(paths: Sequence[Path]) -> "list[tuple[Run, dict[str, float]]]":
    """Each launch with (metric/case to value), in time order."""
    launches: dict[str, tuple[Run, dict[str, float]]] = {}
    for case in _measured_cases(paths):
        for name, _, values in case.metrics():
            for run, value in zip(case.runs, values, strict=True):
                launches.setdefault(run.path.name, (run, {}))[1][f"{name}/{case.case_id}"] = value
    return sorted(launches.values(), key=lambda launch: float(launch[0].about.started_at))


def _files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass
class MeasuredCase:
    """One case over its launches, in time order.

    Args:
        rows: rows of the data frame, one per launch.
        runs: their runs.
    """

    scenario: str
    mesh: str
    case_id: str
    rows: "list[Row]"
    runs: "list[Run]"

    @property
    def title(self) -> str:
        """The case's id with its scenario and mesh, unique in an export."""
        return f"{self.scenario} ({self.mesh}): {self.case_id}"

    @property
    def newest(self) -> "Run":
        """Return the newest launch."""
        return self.runs[-1]

    @property
    def moments(self) -> list[float]:
        """Return the start of each launch, in seconds since the epoch."""
        return [float(run.about.started_at) for run in self.runs]

    def metrics(self) -> list[tuple[str, str, list[float]]]:
        """Return (name, unit, a value per launch) of each metric that all launches have."""
        columns = [(name, unit, [float(row[name]) for row in self.rows]) for name, unit in METRICS.items()]
        return [(name, unit, values) for name, unit, values in columns if all(map(math.isfinite, values))]

    def rate(self) -> tuple[str, str, list[float]]:
        """Return the metric of METRICS that is a rate, or iterations per second if the case has no such metric."""
        rates = [metric for metric in self.metrics() if metric[0] in RATES]
        return rates[0] if rates else ("iterations", "1/s", [1 / row["median_s"] for row in self.rows])


RATES = ("busbw_gb_per_s", "tokens_per_s", "samples_per_s")
METRICS = {"median_s": "s", **dict(zip(RATES, ("GB/s", "tokens/s", "samples/s"), strict=True)), "peak_bytes": "B"}
# Bytes per element of nccl-tests' types.
WIDTHS = {"float": 4, "double": 8, "half": 2, "bfloat16": 2}


def _measured_cases(paths: Sequence[Path]) -> list[MeasuredCase]:
    """The cases with status ok, by scenario, mesh and id."""
    rows, runs = _rows_of(paths)
    by_file = {run.path.name: run for run in runs}
    cases: dict[tuple[str, str, str], MeasuredCase] = {}
    for row in filter(_is_measured, rows):
        key = (_word(row["scenario"]), _word(row["mesh"]), str(row["id"]))
        case = cases.setdefault(key, MeasuredCase(*key, [], []))
        case.rows.append(row)
        case.runs.append(by_file[row["run_file"]])
    if not cases:
        raise UserError(NOTHING_MEASURED)
    return [*cases.values()]


def _runs_of(paths: Sequence[Path]) -> "list[Run]":
    from distbench.records.results_folder import collect

    return collect(tuple(paths), None)[0]


def _rows_of(paths: Sequence[Path]) -> "tuple[list[Row], list[Run]]":
    """The rows of the data frame, and their runs; in time order."""
    from distbench.records.dataframe import frame_of, records_of

    runs = _runs_of(paths)
    return records_of(frame_of(runs)), runs


def _is_measured(row: "Row") -> bool:
    return bool(row["status"] == "ok" and math.isfinite(row["median_s"]))


def _word(value: object) -> str:
    return "" if value is None else str(value)


def run_text(paths: Sequence[Path]) -> str:
    """One nccl-tests file as the lines of a run file."""
    from distbench.records.nccl_tests import read_nccl_tests

    if len(paths) != 1:
        raise UserError(f"export run converts one file of nccl-tests per command, not {len(paths)}; give one file")
    run = read_nccl_tests(paths[0])
    records = [run.header, *run.cases, *([run.footer] if run.footer else [])]
    return "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records)


def _series_of(paths: Sequence[Path]) -> "tuple[Series, Launch]":
    """A dict from (scenario, case id) to the means of launches in seconds, in time order; and the last launch."""
    from distbench.records.baselines import read_side

    launches = read_side(paths, "run", [])
    series: Series = {}
    for launch in launches:
        for case_id, value in launch.cases.items():
            if value.status == "ok":
                series.setdefault((launch.scenario, case_id), []).append(value.mean_s)
    if not series:
        raise UserError(NOTHING_MEASURED)
    return series, launches[-1]


def _json_text(record: "Record | list[Record]") -> str:
    return json.dumps(record, indent=1) + "\n"


# Names of `distbench export`.
EXPORTS: dict[str, Callable[[Sequence[Path]], Exported]] = {
    "pytest-benchmark": pytest_benchmark,
    "customSmallerIsBetter": smaller_is_better,
    "customBiggerIsBetter": bigger_is_better,
    "pytorch": pytorch_benchmark,
    "openmetrics": openmetrics,
    "parquet": parquet,
    "nccl-tests": nccl_tests,
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "run": run_text,
}
