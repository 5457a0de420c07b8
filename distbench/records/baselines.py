"""Stored baselines, small enough for git, and the launches of a comparison's side from any kind of file."""

import datetime
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct

from distbench.records import foreign_numbers
from distbench.records.foreign_numbers import NumberColumns
from distbench.records.launches import Launch, Value, launch_of
from distbench.records.machine import slug
from distbench.records.nccl_tests import is_nccl_tests, read_nccl_tests
from distbench.records.results_folder import BASELINES, NO_RUNS, read_each, run_files_in
from distbench.records.run_file import (
    MAX_RUN_BYTES,
    Environment,
    Header,
    Record,
    Status,
    read_run,
)
from distbench.spec.errors import UserError
from distbench.spec.file_io import no_garbage_collection, opened, read_json, shown, write_whole, writing
from distbench.spec.json_decoder import Amount, Count, Date, Format, Time, decode, document

# Stored baselines: small enough for git, one line per launch and one per case.


class Facts(Environment, frozen=True):
    """Facts of launches."""

    mesh: str | None = None
    profile: str | None = None
    pipelined: Count | None = None
    passes: Count | None = None
    settings: Record | None = None


class LaunchRow(Struct):
    """One launch. `facts` are the fields of `Facts` that differ between launches."""

    run_id: str
    variants: str
    started_at: Date
    complete: bool
    facts: Record
    ended_at: Date | None = None
    foreign_load: Amount | None = None

    def __post_init__(self) -> None:
        decode(self.facts, Facts, "facts")


class Columns(Struct):
    """The values of one case per launch, null if the launch has no such case or number.

    Args:
        status, error: empty if all launches are ok.
    """

    num_samples: list[Count | None]
    mean_s: list[Time | None]
    p10_s: list[Time | None]
    status: list[Status | None] = []
    error: list[str | None] = []

    def __post_init__(self) -> None:
        num_launches = len(self.num_samples)
        self.status = self.status or ["ok"] * num_launches
        self.error = self.error or [None] * num_launches
        for name in self.__struct_fields__:
            if (num_values := len(getattr(self, name))) != num_launches:
                raise ValueError(f"{name} has {num_values} values for {num_launches} launches")
        for index, count in enumerate(self.num_samples):
            for name in ("status", "mean_s", "p10_s") if self.status[index] == "ok" else ("status",):
                if count is not None and getattr(self, name)[index] is None:
                    raise ValueError(f"{name}[{index}] is missing")


class Baseline(Struct):
    """One baseline file."""

    distbench_baseline: int
    scenario: str
    saved_at: str
    facts: Record
    launches: list[LaunchRow]
    cases: dict[str, Columns]

    def __post_init__(self) -> None:
        decode(self.facts, Facts, "facts")
        ids = [launch.run_id for launch in self.launches]
        if twice := next((run_id for run_id in ids if ids.count(run_id) > 1), None):
            raise ValueError(f"two launches have run_id {shown(twice)}")
        for case_id, columns in self.cases.items():
            if (num_values := len(columns.num_samples)) != len(ids):
                raise ValueError(f"cases[{shown(case_id)}].num_samples has {num_values} values for {len(ids)} launches")


FORMAT_VERSION = 2  # version 1 had minima instead of 10th percentiles
LAUNCH_FIELDS = ("run_id", "started_at", "ended_at", "variants", "foreign_load", "complete")  # stored unchanged
SAVE_AGAIN = "save the baseline again with distbench baseline save"
FORMAT = Format("baseline", SAVE_AGAIN, "distbench_baseline", FORMAT_VERSION)


def save_baselines(launches: Sequence[Launch], out: Path) -> list[Path]:
    """Write one baseline file per scenario, mesh and device to `baselines/<machine>/` below a results folder; return
    the files.

    Raises:
        UserError: no launches, or the folder is not writable.
    """
    if not launches:
        raise UserError("no launch to save as a baseline; give run files or a folder of them")
    files: dict[Path, list[Launch]] = {}
    for launch in launches:
        facts = launch.facts
        name = slug("-".join(str(part) for part in (launch.scenario, facts["mesh"], facts["device"]) if part))
        files.setdefault(out / BASELINES / slug(str(facts["machine"])) / f"{name}.json", []).append(launch)
    for path, group in files.items():
        with writing(f"baseline {path}", "--results"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, baseline_text(group))
    return list(files)


def baseline_text(launches: Sequence[Launch]) -> str:
    """The JSON text of a baseline file for one scenario's launches, with one line per launch and per case."""
    facts = launches[0].facts.items()
    common = {name: value for name, value in facts if all(launch.facts.get(name) == value for launch in launches)}
    head = {
        "distbench_baseline": FORMAT_VERSION,
        "scenario": launches[0].scenario,
        "saved_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "facts": common,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    rows = []
    for launch in launches:
        own_facts = {name: value for name, value in launch.facts.items() if name not in common}
        rows.append(json.dumps({**{name: getattr(launch, name) for name in LAUNCH_FIELDS}, "facts": own_facts}))
    lines.append('"launches": [\n  ' + ",\n  ".join(rows) + "\n ]")
    ids = sorted({case_id for launch in launches for case_id in launch.cases})
    cases = [f"{json.dumps(case_id)}: {json.dumps(_case_record(case_id, launches))}" for case_id in ids]
    lines.append('"cases": {\n  ' + ",\n  ".join(cases) + "\n }")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _case_record(case_id: str, launches: Sequence[Launch]) -> Record:
    """Columns with one entry per launch, null if the launch has no such case or number."""
    values = [launch.cases.get(case_id) for launch in launches]
    record: Record = {"num_samples": [value.num_samples if value else None for value in values]}
    for name in ("mean_s", "p10_s"):
        times_s = (getattr(value, name) if value and value.status == "ok" else None for value in values)
        # Measured times have at most 6 significant digits.
        record[name] = [None if seconds is None else float(f"{seconds:.6g}") for seconds in times_s]
    if any(value and value.status != "ok" for value in values):
        record["status"] = [value.status if value else None for value in values]
        record["error"] = [value.error if value else None for value in values]
    return record


def read_baseline(path: Path) -> list[Launch]:
    """The launches of one baseline file. Raise UserError as `load_baseline`."""
    return launches_of(load_baseline(path), str(path))


def load_baseline(path: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        UserError: the file is not readable, not a baseline, damaged, or from a newer distbench.
    """
    record: Any = read_json(path, "baseline")
    version = record.get("distbench_baseline") if isinstance(record, dict) else None
    if type(version) is not int:
        raise UserError(f"{path} is not a baseline; write a baseline with distbench baseline save")
    if version < FORMAT_VERSION:
        raise UserError(f"baseline {path} has version {version}, without 10th percentiles; {SAVE_AGAIN}")
    return document(record, Baseline, f"baseline {path}", FORMAT)


def launches_of(baseline: Baseline, source: str) -> list[Launch]:
    """The launches of a baseline. `source` is the baseline's file."""
    return [
        Launch(
            run_id=row.run_id,
            source=source,
            scenario=baseline.scenario,
            started_at=row.started_at,
            ended_at=row.ended_at or 0.0,
            variants=row.variants,
            # A missing field is None, as in a run file.
            facts={**Header().facts, **baseline.facts, **row.facts},
            foreign_load=row.foreign_load,
            complete=row.complete,
            cases={
                case_id: value
                for case_id, columns in baseline.cases.items()
                if (value := _value(columns, index)) is not None
            },
        )
        for index, row in enumerate(baseline.launches)
    ]


def _value(columns: Columns, index: int) -> Value | None:
    """One launch's value of a case, or None if the launch has no such case."""
    count, status = columns.num_samples[index], columns.status[index]
    if count is None or status is None:
        return None
    mean_s, p10_s = columns.mean_s[index], columns.p10_s[index]
    if mean_s is None or p10_s is None:
        return Value(status, count, math.nan, math.nan, columns.error[index])
    return Value(status, count, mean_s, p10_s)


def describe(out: Path) -> list[tuple[str, ...]]:
    """Rows (file, scenario, mesh, launches, cases, commit, saved at) for the baselines below a results folder."""
    rows: list[tuple[str, ...]] = []
    for path in sorted((out / BASELINES).rglob("*.json")):
        baseline = load_baseline(path)
        name, facts = str(path.relative_to(out / BASELINES)), baseline.facts
        numbers = str(len(baseline.launches)), str(len(baseline.cases))
        commit = str(facts.get("git_commit") or "several")[:8]
        rows.append((name, baseline.scenario, str(facts.get("mesh")), *numbers, commit, baseline.saved_at))
    return rows


def read_side(
    paths: Iterable[Path], side: str, warnings: list[str], columns: NumberColumns | None = None
) -> list[Launch]:
    """The launches of one side, oldest first.

    Args:
        paths: run files, baseline files, nccl-tests' JSON files, and folders of them.
        side: its name in messages.
        warnings: receives sentences on files left out and on unreadable lines.
        columns: the columns of the numbers in other tools' files; None to reject these files.

    Raises:
        UserError: a path does not exist, a named file is of another kind, or a file of another tool cannot be judged.
    """
    launches: dict[str, Launch] = {}
    with no_garbage_collection():
        for path in paths:
            launches.update({launch.run_id: launch for launch in _read_path(path, side, warnings, columns)})
    foreign_numbers.require_one_log_per_launch([*launches.values()])
    return sorted(launches.values(), key=lambda launch: (launch.started_at, launch.source))


def _read_path(path: Path, side: str, warnings: list[str], columns: NumberColumns | None) -> list[Launch]:
    read = partial(read_file, warnings=warnings, columns=columns)
    files = files_of(path, side, warnings, columns)
    if not path.is_dir() or columns not in (None, NumberColumns()):
        # Columns are given for every file, so a file that lacks them is an error.
        return list(chain.from_iterable(map(read, files)))
    return list(chain.from_iterable(read_each(files, read, warnings)))


def files_of(path: Path, side: str, warnings: list[str], columns: NumberColumns | None) -> list[Path]:
    """The files with launches of a path, by kind of file and name. Arguments and errors are as in `read_side`."""
    if not path.exists():
        raise UserError(f"{side} {path} does not exist; give run files or a folder of them, such as results/")
    if not path.is_dir():
        return [path]
    json_files = sorted(file for file in path.rglob("*.json") if file.is_file())
    kinds = read_each(json_files, lambda file: (file, _sniffed(file, columns)), warnings)
    files = [*run_files_in(path), *(file for file, kind in kinds if kind)]
    if columns is not None and (columns.value or not files):
        files += _foreign_files(path, columns)
    return files


def _foreign_files(folder: Path, columns: NumberColumns) -> list[Path]:
    """Files of other tools below a folder; UserError if there are only tables whose columns are not given."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = sorted(folder / path for path in paths if not NO_RUNS & {*path.parts})
    tables = [file for file in files if file.suffix in foreign_numbers.TABLE_SUFFIXES]
    logs = [file for file in files if file.suffix in foreign_numbers.LOG_SUFFIXES]
    logs = [file for file in logs if _sniffed(file, columns) == "torchtitan"]
    if tables and not logs and not columns.value:
        raise UserError(f"{tables[0]} is not a run file; for a table, give the columns --case and --value")
    return [*(tables if columns.value else []), *logs]


def read_file(path: Path, warnings: list[str], columns: NumberColumns | None) -> list[Launch]:
    """The launch of a run file or an nccl-tests file, or the launches of a baseline or of another tool.

    Arguments and errors are as in `read_side`.
    """
    kind = _sniffed(path, columns)
    if columns is not None and kind in foreign_numbers.READERS:
        return foreign_numbers.read_foreign(path, kind, columns, warnings)
    if columns not in (None, NumberColumns()):
        options = "--launch, --case, --value, --better, --pair and --unit"
        raise UserError(f"{path} is a file of {kind or 'distbench'}, in which nothing is chosen; leave {options} out")
    if kind == "baseline":
        return read_baseline(path)
    if (
        columns is not None
        and kind is None
        and path.suffix in (*foreign_numbers.TABLE_SUFFIXES, *foreign_numbers.LOG_SUFFIXES)
    ):
        raise UserError(f"{path} is not a run file; for a table, give the columns --case and --value")
    run = read_nccl_tests(path) if kind == "nccl-tests" else read_run(path)
    if run.is_simulated:
        instead = "use distbench compare for predicted times, or distbench signature check for communication"
        raise UserError(f"{path} is a simulated run without measured times; {instead}")
    warnings += run.warnings
    return [replace(launch_of(run), more=foreign_numbers.PER_FILE if kind == "nccl-tests" else "")]


def _sniffed(path: Path, columns: NumberColumns | None) -> str | None:
    """The kind of a file by its first bytes: "baseline", "nccl-tests", another tool's kind, or None for other files."""
    with opened(path, "file", MAX_RUN_BYTES) as file:
        head = file.read(512)
        if b'"distbench_baseline"' in head:
            return "baseline"
        if is_nccl_tests(head):
            return "nccl-tests"
        return None if columns is None else foreign_numbers.kind_of(head, file, columns)
