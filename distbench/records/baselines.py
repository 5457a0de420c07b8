"""Stored baselines: one value a launch, case and metric, small enough for git, one line a case; checked when read."""

import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from distbench.records.launch_values import Launch, Value
from distbench.records.machine import slug
from distbench.records.run_file import Header
from distbench.records.run_file_fields import Environment, Record, Status
from distbench.spec.errors import UserError
from distbench.spec.file_io import read_json, shown, write_whole
from distbench.spec.json_decoder import Amount, Count, Date, Format, Time, decode, document

# What a stored baseline may hold.


class Facts(Environment, frozen=True):
    """What launches have in common, or one launch alone."""

    mesh: str | None = None
    profile: str | None = None
    pipelined: Count | None = None
    passes: Count | None = None
    settings: Record | None = None


class LaunchRow(Struct):
    """One launch; `facts` are those that not all launches have in common, as `Facts` has them."""

    run_id: str
    variants: str
    started_at: Date
    complete: bool
    facts: Record
    ended_at: Date | None = None
    foreign_load: Amount | None = None

    def __post_init__(self) -> None:
        """Check the facts, which stay plain data."""
        decode(self.facts, Facts, "facts")


class Columns(Struct):
    """One case: an entry per launch, null where the launch has no such case or no such number.

    Args:
        status: empty where all are ok; likewise `error`.
    """

    num_samples: list[Count | None]
    mean_s: list[Time | None]
    p10_s: list[Time | None]
    status: list[Status | None] = []
    error: list[str | None] = []

    def __post_init__(self) -> None:
        """Fill the columns that may be empty, and check that all go together."""
        num_launches = len(self.num_samples)
        self.status = self.status or ["ok"] * num_launches
        self.error = self.error or [None] * num_launches
        for name in self.__struct_fields__:
            if (num_values := len(getattr(self, name))) != num_launches:
                raise ValueError(f"{name} has {num_values} values for {num_launches} launches")
        times = {"mean_s": self.mean_s, "p10_s": self.p10_s}
        for index, (count, status) in enumerate(zip(self.num_samples, self.status, strict=True)):
            needed: dict[str, Sequence[object]] = {"status": self.status, **(times if status == "ok" else {})}
            lacking = next((name for name, values in needed.items() if values[index] is None), None)
            if count is not None and lacking:
                raise ValueError(f"{lacking}[{index}] is missing")


class Baseline(Struct):
    """One baseline file."""

    distbench_baseline: int
    scenario: str
    saved_at: str
    facts: Record
    launches: list[LaunchRow]
    cases: dict[str, Columns]

    def __post_init__(self) -> None:
        """Check the facts, and that launches and columns go together."""
        decode(self.facts, Facts, "facts")
        ids = [launch.run_id for launch in self.launches]
        if twice := next((run_id for run_id in ids if ids.count(run_id) > 1), None):
            raise ValueError(f"run_id {shown(twice)} stands in two launches")
        for case_id, columns in self.cases.items():
            if (num_values := len(columns.num_samples)) != len(ids):
                raise ValueError(f"cases[{shown(case_id)}].num_samples has {num_values} values for {len(ids)} launches")


FORMAT_VERSION = 2  # 1 had minima in place of 10th percentiles
FOLDER = "baselines"
LAUNCH_FIELDS = ("run_id", "started_at", "ended_at", "variants", "foreign_load", "complete")  # stored as they are
SAVE_AGAIN = "save it again with distbench baseline save"
FORMAT = Format("baseline", SAVE_AGAIN, "distbench_baseline", FORMAT_VERSION)
SIGNIFICANT = 6  # digits of a time: a clock gives no more


def save_baselines(launches: Sequence[Launch], out: Path) -> list[Path]:
    """The files written to `baselines/<machine>/` below a results folder: one a scenario, mesh and device.

    Raises:
        UserError: no launches, or the folder cannot be written.
    """
    if not launches:
        raise UserError("there is no launch to save as a baseline; give run files or a folder of them")
    files: dict[Path, list[Launch]] = {}
    for launch in launches:
        facts = launch.facts
        name = slug("-".join(str(part) for part in (launch.scenario, facts["mesh"], facts["device"]) if part))
        files.setdefault(out / FOLDER / slug(str(facts["machine"])) / f"{name}.json", []).append(launch)
    try:
        for path, group in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, baseline_text(group))
    except OSError as error:
        raise UserError(f"baseline {error.filename} cannot be written ({error.strerror}); give --out") from error
    return list(files)


def baseline_text(launches: Sequence[Launch]) -> str:
    """One baseline file's text, of launches of one scenario: JSON, one line a launch and one a case."""
    facts = launches[0].facts.items()
    common = {name: value for name, value in facts if all(launch.facts.get(name) == value for launch in launches)}
    head = {
        "distbench_baseline": FORMAT_VERSION,
        "scenario": launches[0].scenario,
        "saved_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "facts": common,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    rows = [_launch_record(launch, common) for launch in launches]
    lines.append('"launches": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]")
    ids = sorted({case_id for launch in launches for case_id in launch.cases})
    cases = [f"{json.dumps(case_id)}: {json.dumps(_case_record(case_id, launches))}" for case_id in ids]
    lines.append('"cases": {\n  ' + ",\n  ".join(cases) + "\n }")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _launch_record(launch: Launch, common: Record) -> Record:
    facts = {name: value for name, value in launch.facts.items() if name not in common}
    return {**{name: getattr(launch, name) for name in LAUNCH_FIELDS}, "facts": facts}


def _case_record(case_id: str, launches: Sequence[Launch]) -> Record:
    """Columns, one entry a launch; null where the launch has no such case or no such number."""
    values = [launch.cases.get(case_id) for launch in launches]
    record: Record = {"num_samples": [value.num_samples if value else None for value in values]}
    for name in ("mean_s", "p10_s"):
        record[name] = [_rounded(getattr(value, name)) if value and value.status == "ok" else None for value in values]
    if any(value and value.status != "ok" for value in values):
        record["status"] = [value.status if value else None for value in values]
        record["error"] = [value.error if value else None for value in values]
    return record


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{SIGNIFICANT}g}")


def read_baseline(path: Path) -> list[Launch]:
    """The launches of one baseline file. Raises as `load_baseline`."""
    return launches_of(load_baseline(path), str(path))


def load_baseline(path: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        UserError: it cannot be read, is no baseline, is damaged, or a newer distbench wrote it.
    """
    record: Any = read_json(path, "baseline")
    version = record.get("distbench_baseline") if isinstance(record, dict) else None
    if type(version) is not int:
        raise UserError(f"{path} is no baseline; write one with distbench baseline save")
    if version < FORMAT_VERSION:
        raise UserError(f"baseline {path} has version {version}, without 10th percentiles; {SAVE_AGAIN}")
    return document(record, Baseline, f"baseline {path}", FORMAT)


def launches_of(baseline: Baseline, source: str) -> list[Launch]:
    """The launches that a baseline holds; `source` is its file."""
    return [
        Launch(
            run_id=row.run_id,
            source=source,
            scenario=baseline.scenario,
            started_at=row.started_at,
            ended_at=row.ended_at or 0.0,
            variants=row.variants,
            # A fact that the file lacks is not known, as in a run file.
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
    """What one launch measured of a case; None where it has no such case."""
    count, mean_s, p10_s = columns.num_samples[index], columns.mean_s[index], columns.p10_s[index]
    if count is None:
        return None
    status = columns.status[index] or ""  # `Columns` requires one
    if mean_s is None or p10_s is None:
        return Value(status, count, math.nan, math.nan, columns.error[index])
    return Value(status, count, mean_s, p10_s)


def describe(out: Path) -> list[tuple[str, ...]]:
    """Rows (file, scenario, mesh, launches, cases, commit, saved at) for the baselines below a results folder."""
    rows: list[tuple[str, ...]] = []
    for path in sorted((out / FOLDER).rglob("*.json")):
        baseline = load_baseline(path)
        name, facts = str(path.relative_to(out / FOLDER)), baseline.facts
        numbers = str(len(baseline.launches)), str(len(baseline.cases))
        commit = str(facts.get("git_commit") or "several")[:8]
        rows.append((name, baseline.scenario, str(facts.get("mesh")), *numbers, commit, baseline.saved_at))
    return rows
