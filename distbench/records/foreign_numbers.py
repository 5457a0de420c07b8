"""Other tools' numbers as launches: tables in long form, and files of pytest-benchmark, vLLM and torchtitan.

Formats, from the tools' sources:
- pytest-benchmark 5 (`--benchmark-json`): machine_info, commit_info, datetime (UTC, at the end), benchmarks [{fullname,
  stats {mean, median, ops, total, ..., data [seconds per round]}}].
- vLLM: `bench serve --save-result` (date: local, at the end; duration in seconds, throughputs per second, mean_ttft_ms,
  p99_tpot_ms, ...; `--append-result` writes one object per line), `bench throughput --output-json` (tokens_per_second),
  `bench latency --output-json` (latencies: seconds).
- torchtitan's log: `[titan] DATE TIME,MS - root - INFO - step: 20  loss: 7.9  ...  tps: 4,222  tflops: 9.1  mfu: 2.5%`.
"""

import csv
import datetime
import itertools
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from distbench.records.launches import Launch, Unit, Value, tenth_percentile
from distbench.records.run_file import MAX_RUN_BYTES, Header, Record
from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import opened, shown
from distbench.spec.printable_text import count_text

# Of files in folders, next to .json and .jsonl.
TABLE_SUFFIXES, LOG_SUFFIXES = (".csv", ".tsv", ".ndjson", ".parquet"), (".log", ".txt")
TABLES = ("csv", "jsonl", "parquet")
LEAST, MOST = 1e-200, 1e200  # Bounds for numbers, so that sums and reciprocals are finite.
SECONDS_PER = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "usec", "µs", "μs", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nsec", "nanoseconds"), 1e-9),
}
UNIT_COLUMNS = ("unit", "units", "time_unit")
OF_FILES = "file"  # --pair: launches of files with the same name form a pair
IN_TABLE = "number the launches of both versions in a column, and give this column as --pair"
PER_FILE = "one file per launch"
HEAD_BYTES = 4 << 20  # torchtitan logs its configuration first
# Of `bench serve`, `bench throughput` and `bench latency`.
VLLM_NAMES = ((b'"model_id"', b'"num_prompts"'), (b'"elapsed_time"', b'"tokens_per_second"'), (b'"avg_latency"',))
_STEP = re.compile(r"(?<!validate )step:\s*\d+\s")
_NUMBER = re.compile(r"(\w+):\s*([0-9][0-9.,]*(?:e[+-]?\d+)?|nan|inf)")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"^\[(\w+)\]:")
_TITAN_TIME = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})")
_RUN_FILE = re.compile(rb'\s*\{\s*"type":\s*"run"')


@dataclass(frozen=True)
class NumberColumns:
    """The choice of the judged numbers in a file of another tool.

    Args:
        launch: column of the launch's name; None if a file is one launch.
        case: columns, separated by commas, whose values name the case.
        value: column of the numbers, or a metric of a known tool.
        better: "lower" or "higher".
        pair: column whose equal texts on both sides form a pair, or OF_FILES.
        unit: unit of the numbers, or its column.
    """

    launch: str | None = None
    case: str | None = None
    value: str | None = None
    better: str | None = None
    pair: str | None = None
    unit: str | None = None


@dataclass
class _Reading:
    """One launch while its file is read; `samples` as in `Value`, by case."""

    samples: dict[str, "array[float]"] = field(default_factory=dict)
    started_at: float = 0.0
    ended_at: float = 0.0
    variants: str = ""
    facts: Record = field(default_factory=dict)
    pair: str | None = None
    error: str | None = None

    def add(self, case_id: str, number: float) -> None:
        samples = self.samples.get(case_id)
        if samples is None:
            samples = self.samples[case_id] = array("d")
        samples.append(number)


@dataclass(frozen=True)
class _Measure:
    """The unit of the numbers of a launch, and the factor from the given numbers to this unit (times: to seconds)."""

    unit: Unit
    factor: float = 1.0

    def stored(self, value: object) -> float:
        """Return the number as in `Value`. Raise ValueError if the value is not a number above 0."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not LEAST < number < MOST:
            raise ValueError(f"is {shown(value)}, not a number above 0")
        return 1 / (number * self.factor) if self.unit.is_reciprocal else number * self.factor


def kind_of(head: bytes, file: BinaryIO, columns: NumberColumns) -> str | None:
    """The kind of a file that begins with `head` (a key of `READERS`), or None for other files.

    Args:
        file: the rest.
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{"):
        if b'"machine_info"' in head:
            return "pytest-benchmark"
        is_table = columns.case is not None and columns.value is not None
        if not is_table and any(all(name in head for name in names) for names in VLLM_NAMES):
            return "vllm"
        return "jsonl" if columns.value and not _RUN_FILE.match(head) else None
    start = (head + file.read(HEAD_BYTES)).decode("utf-8", "replace")
    is_titan = any(_STEP.search(line) and "tps:" in line for line in _COLOR.sub("", start).splitlines())
    return "torchtitan" if is_titan else "csv" if columns.value else None


def read_foreign(path: Path, kind: str, columns: NumberColumns, warnings: list[str]) -> list[Launch]:
    """The launches of a file of another tool.

    Args:
        kind: from `kind_of`.
        warnings: receives a sentence on repeated rows.

    Raises:
        UserError: a missing column, a value that is not a number above 0, mixed units, or no number at all.
    """
    if kind not in TABLES:
        for name in ("launch", "case", "unit", "pair"):
            if getattr(columns, name) not in (None, OF_FILES):
                raise UserError(f"--{name} is for tables; {path} is a file of {kind}. Leave --{name} out")
    units: dict[str, Unit] = {}
    with opened(path, "file", MAX_RUN_BYTES) as file:
        readings = READERS[kind](path, file, columns, units, warnings)
    if not any(reading.samples for reading in readings.values()):
        raise UserError(f"{path} has no number to judge; write at least one row per launch and case")
    more = IN_TABLE if kind in TABLES and (columns.launch or columns.pair) else PER_FILE
    return [_launch(path, kind, name, reading, units, more, columns) for name, reading in readings.items()]


def _launch(
    path: Path, kind: str, name: str, reading: _Reading, units: dict[str, Unit], more: str, columns: NumberColumns
) -> Launch:
    status = "wrong" if reading.error else "ok"
    cases = {
        case_id: Value(status, len(samples), math.fsum(samples) / len(samples), p10, reading.error, unit=units[case_id])
        for case_id, samples in reading.samples.items()
        for p10 in [tenth_percentile(samples)]
    }
    return Launch(
        run_id=f"{path}: {name}" if name else str(path),
        source=str(path),
        scenario=kind if kind not in TABLES else "table",
        started_at=reading.started_at,
        ended_at=reading.ended_at,
        variants=reading.variants,
        facts={**Header().facts, **reading.facts},
        foreign_load=None,
        complete=True,
        cases=cases,
        label=name or path.stem,
        pair=path.stem if reading.pair is None and columns.pair == OF_FILES else reading.pair,
        more=more,
    )


def require_one_log_per_launch(launches: Sequence[Launch]) -> None:
    """Raise UserError if two logs of one side overlap in time, because they are of two ranks of one launch."""
    logs = sorted((log for log in launches if log.scenario == "torchtitan"), key=lambda log: log.started_at)
    for first, second in itertools.pairwise(log for log in logs if log.started_at):
        if second.started_at + 1 < first.ended_at:
            same = f"logs {first.source} and {second.source} overlap in time, as the ranks of one launch do"
            raise UserError(f"{same}; give the log of one rank per launch")


# Tables.

Table = tuple[list[str], Iterator[tuple[int, Sequence[Any]]]]


def _csv_rows(path: Path, file: BinaryIO) -> Table:
    """The header, and each row with its line."""
    first = file.readline().decode("utf-8-sig")
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader((line.decode() for line in file), delimiter=delimiter)
    names = next(csv.reader([first], delimiter=delimiter), [])

    def rows() -> Iterator[tuple[int, Sequence[Any]]]:
        for row in reader:
            if row and len(row) < len(names):
                fields = f"line {reader.line_num + 1} of {path} has {len(row)} fields, and the header {len(names)}"
                raise UserError(f"{fields}; correct the line")
            if row:
                yield reader.line_num + 1, row

    return [name.strip() for name in names], rows()


def _json_rows(path: Path, file: BinaryIO) -> Table:
    lines = ((number, record) for number, line in enumerate(file, 1) if (record := _object(path, number, line)))
    first = next(lines, (0, dict[str, Any]()))
    names = list(first[1])
    rows = ((number, [record.get(name) for name in names]) for number, record in itertools.chain([first], lines))
    return names, rows


def _object(path: Path, number: int, line: bytes) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"line {number} of {path} is not valid JSON; write one object per line") from error
    if not isinstance(record, dict):
        raise UserError(f"line {number} of {path} is {shown(record)}; write one object per line")
    return record


def _parquet_rows(path: Path, file: BinaryIO) -> Table:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow, or write CSV") from error
    try:
        table = parquet.ParquetFile(file)
        names = list(table.schema_arrow.names)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet; write the file again") from error

    def rows() -> Iterator[Sequence[Any]]:
        for batch in table.iter_batches():
            yield from zip(*batch.to_pydict().values(), strict=True)

    return names, enumerate(rows(), 1)


def _read_table(rows_of: Callable[[Path, BinaryIO], Table]) -> Callable[..., dict[str, _Reading]]:
    """A reader of one form of table."""

    def read(
        path: Path, file: BinaryIO, columns: NumberColumns, units: dict[str, Unit], warnings: list[str]
    ) -> dict[str, _Reading]:
        try:
            names, rows = rows_of(path, file)
            if not names:
                raise UserError(f"{path} is empty; write a header, and one row per number")
            return _grouped(path, names, rows, columns, units, warnings)
        except csv.Error as error:
            raise UserError(f"{path} cannot be read as CSV ({error}); write the file again") from error

    return read


def _grouped(
    path: Path,
    names: Sequence[str],
    rows: Iterator[tuple[int, Sequence[Any]]],
    columns: NumberColumns,
    units: dict[str, Unit],
    warnings: list[str],
) -> dict[str, _Reading]:
    """Samples by launch and case; memory grows with the numbers, not with the texts of rows."""
    if not columns.case or not columns.value:
        missing = "--case" if columns.value else "--value"
        raise UserError(f"{path} is a table; give {missing}, one of its columns: {', '.join(names)}")

    def place(option: str, name: str) -> int:
        if name not in names:
            raise UserError(f"--{option} {name!r} is not a column of {path} ({nearest(name, names)})")
        return names.index(name)

    value, cases = place("value", columns.value), [place("case", name) for name in columns.case.split(",")]
    pair = None if columns.pair in (None, OF_FILES) else place("pair", str(columns.pair))
    launch = pair if columns.launch is None else place("launch", columns.launch)
    in_rows = (columns.unit,) if columns.unit else UNIT_COLUMNS
    unit = next((names.index(name) for name in in_rows if name in names and name != columns.value), None)
    measure = _measure(columns.unit or _unit_in(columns.value, columns.better), columns.better)
    measures: dict[str, _Measure] = {}
    readings: dict[str, _Reading] = {}
    seen: set[int] = set()
    num_rows = 0
    for line, row in rows:
        num_rows += 1
        seen.add(hash(repr(row)))
        case_id = "/".join([str(row[index]) for index in cases]) if len(cases) > 1 else str(row[cases[0]])
        if unit is not None:
            text = str(row[unit])
            measure = measures[text] if text in measures else measures.setdefault(text, _measure(text, columns.better))
        known = units.setdefault(case_id, measure.unit)
        if known is not measure.unit and known != measure.unit:
            both = f"{measure.unit.name or 'no unit'} and in {known.name or 'no unit'}"
            raise UserError(f"{path} has case {case_id!r} in {both}; write one unit per case")
        name = "" if launch is None else str(row[launch])
        reading = readings.get(name)
        if reading is None:
            reading = readings[name] = _Reading(pair=None if pair is None else str(row[pair]))
        try:
            reading.add(case_id, measure.stored(row[value]))
        except ValueError as error:
            where = f"{columns.value!r} in line {line} of {path}"
            raise UserError(f"{where} {error}; correct the number, or leave the launch out") from error
        if pair is not None and str(row[pair]) != reading.pair:
            both = f"{reading.pair!r} and {row[pair]!r} in column {columns.pair!r}"
            raise UserError(f"launch {name!r} of {path} has {both}; a launch is in one pair")
    if repeated := num_rows - len(seen):
        warnings.append(
            f"{path} has {count_text(repeated, 'copy', 'copies')} of an earlier row, and each copy counts as a sample. "
            "Remove copies"
        )
    return readings


def _measure(unit: str | None, better: str | None) -> _Measure:
    """The measure of a unit's name; times become seconds."""
    factor = SECONDS_PER.get((unit or "").strip().lower())
    name = "s" if factor else (unit or "").strip()
    return _Measure(Unit(name, is_reciprocal=better == "higher"), factor or 1.0)


def _unit_in(column: str, better: str | None) -> str | None:
    """The time unit that ends a column's name: `time_us`, `latency (ms)`; None for rates such as `tokens_per_s`."""
    words = re.findall(r"[^\W\d_]+", column)
    is_rate = better == "higher" or "/" in column or "per" in words
    return words[-1] if words and not is_rate and words[-1].lower() in SECONDS_PER else None


# Known tools.


def _pytest_benchmark(
    path: Path, file: BinaryIO, columns: NumberColumns, units: dict[str, Unit], warnings: list[str]
) -> dict[str, _Reading]:
    (data,) = _objects(path, file, is_single=True)
    try:
        machine, commit = data["machine_info"], data.get("commit_info") or {}
        cpu = machine.get("cpu") or {}
        ended_at = datetime.datetime.fromisoformat(data["datetime"])
        ended_at = ended_at if ended_at.tzinfo else ended_at.replace(tzinfo=datetime.UTC)
        facts = {"machine": machine.get("node"), "cpu_model": cpu.get("brand_raw"), "num_cpus": cpu.get("count")}
        facts |= {"python": machine.get("python_version"), "git_commit": commit.get("id")}
        reading = _Reading(facts={**facts, "git_dirty": commit.get("dirty")}, ended_at=ended_at.timestamp())
        measure = _measure("ops/s", "higher") if columns.value == "ops" else _measure("s", columns.better)
        for benchmark in data["benchmarks"]:
            stats, case_id = benchmark["stats"], str(benchmark["fullname"])
            units[case_id] = measure.unit
            if columns.value and not isinstance(stats.get(columns.value), int | float):
                numbers = [name for name, value in stats.items() if isinstance(value, int | float)]
                raise UserError(
                    f"--value {columns.value!r} is not a number in {path} ({nearest(columns.value, numbers)})"
                )
            values = [stats[columns.value]] if columns.value else stats.get("data") or [stats["mean"]]
            for value in values:
                reading.add(case_id, measure.stored(value))
        measured_s = sum(float(benchmark["stats"].get("total") or 0) for benchmark in data["benchmarks"])
        reading.started_at = reading.ended_at - measured_s
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unlike(path, "pytest-benchmark", "--benchmark-json", error) from error
    return {"": reading}


def _vllm(
    path: Path, file: BinaryIO, columns: NumberColumns, units: dict[str, Unit], warnings: list[str]
) -> dict[str, _Reading]:
    readings = {}
    for number, data in enumerate(documents := _objects(path, file), 1):
        try:
            reading = readings[str(number) if len(documents) > 1 else ""] = _vllm_reading(path, data, columns, units)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unlike(path, "vLLM", "--save-result or --output-json", error) from error
        if failed := data.get("failed"):
            reading.error = f"{failed} requests failed"
    return readings


def _vllm_reading(path: Path, data: Record, columns: NumberColumns, units: dict[str, Unit]) -> _Reading:
    about = ("model_id", "num_prompts", "num_requests", "request_rate", "max_concurrency")
    config = " ".join(f"{name}={data[name]}" for name in about if data.get(name) is not None)
    reading = _Reading(variants=config)
    if "date" in data:
        reading.ended_at = datetime.datetime.strptime(data["date"], "%Y%m%d-%H%M%S").astimezone().timestamp()
        reading.started_at = reading.ended_at - float(data["duration"])
    rates = ("output_throughput", "total_token_throughput", "tokens_per_second")
    defaults = [next((name for name in rates if data.get(name)), ""), "latencies"]
    metrics = [columns.value] if columns.value else [name for name in defaults if data.get(name)]
    if not columns.value:
        metrics += [name for name in data if re.fullmatch(r"(mean|p99)_\w+_ms", name) and data[name]]
    for metric in metrics:
        if not isinstance(data.get(metric), int | float | list):
            numbers = [name for name, value in data.items() if isinstance(value, int | float)]
            raise UserError(f"--value {metric!r} is not a number in {path} ({nearest(metric, numbers)})")
        is_rate = re.search("throughput|goodput|per_second", metric) is not None
        per_second = "requests/s" if metric.startswith("request") else "tokens/s"
        unit = per_second if is_rate else "ms" if metric.endswith("_ms") else "s"
        measure = _measure(unit, columns.better or ("higher" if is_rate else "lower"))
        case_id = f"{config}/{metric}" if config else metric
        units[case_id] = measure.unit
        for value in data[metric] if isinstance(data[metric], list) else [data[metric]]:
            reading.add(case_id, measure.stored(value))
    return reading


TITAN_UNITS = {"tps": "tokens/s", "tflops": "TFLOPS", "mfu": "%", "memory": "GiB"}


def _torchtitan(
    path: Path, file: BinaryIO, columns: NumberColumns, units: dict[str, Unit], warnings: list[str]
) -> dict[str, _Reading]:
    """Return a sample per logged step. The first step includes the warm-up and is left out."""
    metric, reading, rank, num_steps = columns.value or "tps", _Reading(), None, 0
    better = columns.better or ("higher" if metric in ("tps", "tflops", "mfu") else "lower")
    measure = _measure(TITAN_UNITS.get(metric, ""), better)
    units[metric] = measure.unit
    for number, line in enumerate(file, 1):
        plain = _COLOR.sub("", line.decode("utf-8", "replace"))
        if moment := _TITAN_TIME.search(plain):
            started = datetime.datetime.strptime(moment[1], "%Y-%m-%d %H:%M:%S").astimezone()
            reading.ended_at = started.timestamp() + int(moment[2]) / 1000
            reading.started_at = reading.started_at or reading.ended_at
        if not (step := _STEP.search(plain)) or "tps:" not in plain:
            continue
        of_rank = prefix[1] if (prefix := _RANK.match(plain)) else ""
        rank = of_rank if rank is None else rank
        if of_rank != rank:
            continue
        num_steps += 1
        numbers = dict(_NUMBER.findall(plain[step.start() :]))
        if metric not in numbers:
            raise UserError(f"--value {metric!r} is not in line {number} of {path} ({nearest(metric, numbers)})")
        if num_steps > 1:
            try:
                reading.add(metric, measure.stored(numbers[metric].replace(",", "")))
            except ValueError as error:
                raise UserError(f"{metric} in line {number} of {path} {error}; leave this launch out") from error
    if num_steps < 2:
        few = f"{path} has {count_text(num_steps, 'logged step')}, and the first includes the warm-up"
        raise UserError(f"{few}; train for more steps, or log more often (--metrics.log_freq)")
    return {"": reading}


def _objects(path: Path, file: BinaryIO, is_single: bool = False) -> list[Record]:
    """The JSON object of a file, or one object per line."""
    text = file.read()
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError) as error:
        if is_single:
            raise UserError(f"{path} is not valid JSON; write the file again") from error
    return [record for number, line in enumerate(text.splitlines(), 1) if (record := _object(path, number, line))]


def _unlike(path: Path, tool: str, option: str, error: Exception) -> UserError:
    why = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else f"a value {error}"
    return UserError(
        f"{path} does not have the format of {tool} ({why}); write the file with {option}, or leave this launch out"
    )


READERS: dict[str, Callable[..., dict[str, _Reading]]] = {
    "csv": _read_table(_csv_rows),
    "jsonl": _read_table(_json_rows),
    "parquet": _read_table(_parquet_rows),
    "pytest-benchmark": _pytest_benchmark,
    "vllm": _vllm,
    "torchtitan": _torchtitan,
}
