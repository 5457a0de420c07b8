"""Exports, each read by the tool that uses it; tools that `./run.sh test` does not install skip with a reason."""

import json
import sqlite3
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from processes import Children

from distbench.cli.main import main
from distbench.records.nccl_tests import read_nccl_tests

GOLDEN = Path(__file__).parent.parent / "golden"
COLLECTIVES, STEPS = GOLDEN / "collectives.jsonl", GOLDEN / "steps.jsonl"


def export(form: str, *paths: Path, output: Path | None = None) -> Result:
    return CliRunner().invoke(main, ["export", form, *map(str, paths), *(["-o", str(output)] if output else [])])


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Runner(_Strict):
    """A table of pytorch/test-infra's clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql, as are the next ones."""

    name: str
    type: str
    cpu_info: str = ""
    cpu_count: int = 0
    mem_info: str = ""
    avail_mem_in_gb: int = 0
    gpu_info: str = ""
    gpu_count: int = 0
    gpu_mem_info: str = ""
    avail_gpu_mem_in_gb: int = 0
    extra_info: dict[str, str] = {}


class Benchmark(_Strict):
    name: str
    mode: str
    dtype: str
    extra_info: dict[str, str] = {}


class Model(_Strict):
    name: str
    type: str
    backend: str
    origins: list[str]
    extra_info: dict[str, str] = {}


class Dependency(_Strict):
    repo: str = ""
    branch: str = ""
    sha: str = ""
    version: str = ""
    extra_info: dict[str, str] = {}


class Metric(_Strict):
    name: str
    benchmark_values: list[float]
    target_value: float = 0.0
    extra_info: dict[str, str] = {}


class Row(_Strict):
    benchmark: Benchmark
    model: Model
    metric: Metric
    runners: list[Runner]
    dependencies: dict[str, Dependency]


def test_pytorch_records_have_the_types_of_schema_v3() -> None:
    rows = msgspec.json.decode(export("pytorch", COLLECTIVES, STEPS).output, type=list[Row])
    assert {row.benchmark.name for row in rows} == {"collectives", "toy"}
    names = {row.metric.name for row in rows}
    assert {"median_s", "busbw_gb_per_s", "samples_per_s"} <= names
    assert all(value > 0 for row in rows for value in row.metric.benchmark_values)
    twice = msgspec.json.decode(export("pytorch", STEPS, STEPS).output, type=list[Row])
    assert all(len(row.metric.benchmark_values) == 1 for row in twice), "a file given twice is one launch"


def test_openmetrics_is_read_by_prometheus() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus_client is not installed")
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(export("openmetrics", COLLECTIVES, STEPS).output)
    }
    seconds = families["distbench_case_seconds"].samples
    assert {sample.labels["scenario"] for sample in seconds} == {"collectives", "toy"}
    assert all(0 < sample.value < 60 for sample in seconds) and len(seconds) == len({s.labels["case"] for s in seconds})
    assert {sample.value for sample in families["distbench_case_ok"].samples} <= {0.0, 1.0}
    assert families["distbench_busbw_bytes_per_second"].unit == "bytes_per_second"


def test_bigger_is_better_has_a_rate_per_case() -> None:
    rates = json.loads(export("customBiggerIsBetter", COLLECTIVES, STEPS).output)
    assert {rate["unit"] for rate in rates} >= {"GB/s", "samples/s"} and all(rate["value"] > 0 for rate in rates)


def test_nccl_tests_files_are_read_back(tmp_path: Path) -> None:
    assert export("nccl-tests", COLLECTIVES, output=tmp_path / "out").exit_code == 0
    written = [read_nccl_tests(path) for path in sorted((tmp_path / "out").glob("*.json"))]
    source = {row["name"]: row for row in json.loads(export("customBiggerIsBetter", COLLECTIVES).output)}
    assert written and {case["status"] for run in written for case in run.cases} == {"ok"}
    busbw = [case["counters"]["reported_busbw_gb_per_s"] for run in written for case in run.cases]
    rates = [row["value"] for row in source.values() if row["unit"] == "GB/s"]
    assert sorted(filter(None, busbw)) == pytest.approx(sorted(rates))
    # As nccl-tests write them: a sum where the op reduces, a root where the op has one.
    files = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    how = {(file["args"][0], row["redop"], row["root"]) for file in files for row in file["results"]}
    wanted = {("all_reduce_perf", "sum", "-1"), ("reduce_scatter_perf", "sum", "-1"), ("broadcast_perf", "none", "0")}
    wanted |= {(f"{op}_perf", "none", "-1") for op in ("all_gather", "alltoall", "mystery")}
    assert how == wanted
    again = export("nccl-tests", COLLECTIVES, output=tmp_path / "out")
    assert again.exit_code == 2 and "is not a new folder" in again.stderr
    refused = export("nccl-tests", STEPS, output=tmp_path / "steps")
    assert refused.exit_code == 2 and "no collective in these runs" in refused.stderr


def test_parquet_is_read_by_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pandas as pd

    assert export("parquet", COLLECTIVES, STEPS, output=tmp_path / "runs.parquet").exit_code == 0
    frame = pd.read_parquet(tmp_path / "runs.parquet")
    assert set(frame["scenario"]) == {"collectives", "toy"} and frame["median_s"].gt(0).any()
    refused = export("parquet", STEPS)
    assert refused.exit_code == 2 and "writes a binary file; give its name with -o" in refused.stderr


def test_a_name_that_is_not_utf8_is_escaped_in_parquet(tmp_path: Path) -> None:
    """With pyarrow, pandas' own texts must be UTF-8; `report` and the other formats are tried by bench faults."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pandas as pd

    file = tmp_path / "x\udcff.jsonl"
    file.write_bytes(COLLECTIVES.read_bytes())
    assert export("parquet", file, output=tmp_path / "runs.parquet").exit_code == 0
    (name,) = set(pd.read_parquet(tmp_path / "runs.parquet")["run_file"])
    assert name.endswith("x\\udcff.jsonl")
    assert export("openmetrics", file).exit_code == 0
    for form in ("table", "csv", "json"):
        assert CliRunner().invoke(main, ["report", str(file), "--format", form]).exit_code == 0, form


def test_tensorboard_reads_its_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert export("tensorboard", STEPS, output=tmp_path / "logs").exit_code == 0
    events = EventAccumulator(str(tmp_path / "logs" / "toy")).Reload()
    tags = events.Tags()["scalars"]
    assert any(tag.startswith("samples_per_s, samples/s/") for tag in tags)
    assert all(events.Scalars(tag)[0].value > 0 for tag in tags)


@pytest.mark.filterwarnings("ignore")  # of its libraries
def test_mlflow_reads_its_database(children: Children, tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")
    assert export("mlflow", STEPS, output=tmp_path / "mlflow.db").exit_code == 0
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    [experiment] = [each for each in client.search_experiments() if each.name == "toy"]
    [run] = client.search_runs([experiment.experiment_id])
    assert any(name.startswith("samples_per_s/") and value > 0 for name, value in run.data.metrics.items())
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)


def records_of_log(data: bytes) -> list[bytes]:
    """The records of W&B's file: LevelDB's log format in blocks of 32 KiB, after a header of 7 bytes."""
    assert data[:4] == b":W&B"
    records, place = [b""], 7
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        records[-1] += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(b"")
    return records[:-1]


def test_wandb_reads_its_offline_run(children: Children, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    assert export("wandb", STEPS, output=tmp_path / "out").exit_code == 0
    [file] = (tmp_path / "out").rglob("*.wandb")
    items = [item for each in records_of_log(file.read_bytes()) for item in Record.FromString(each).history.item]
    metrics = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    assert any(name.startswith("samples_per_s/") and value > 0 for name, value in metrics.items())


@pytest.mark.parametrize("form", ["pytorch", "customBiggerIsBetter"])
def test_nothing_measured_is_one_sentence(form: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in STEPS.read_text().splitlines()]
    for line in lines:
        if line["type"] == "case":
            line |= {"status": "skipped", "samples_s": []}
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = export(form, tmp_path / "run.jsonl")
    assert done.exit_code == 2 and "nothing was exported" in done.stderr
