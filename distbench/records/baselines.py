"""Stored baselines: one value a launch, case and metric, small enough for git, one line a case; checked when read."""

import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distbench.records.launches import Launch, Value
from distbench.records.machine import slug
from distbench.records.run_file import Header
from distbench.records.run_file_fields import ENVIRONMENT, STATUSES, Record
from distbench.spec.errors import UserError
from distbench.spec.file_io import (
    AMOUNT,
    COUNT,
    DATE,
    FLAG,
    LIST,
    RECORD,
    TEXT,
    TIME,
    Kinds,
    list_of,
    one_of,
    or_none,
    read_json,
    shown,
    write_whole,
    wrong_field,
)

# What a stored baseline may hold: the kind of each field that is read, and that columns fit the launches.

HEAD: Kinds = {
    **dict.fromkeys(("scenario", "saved_at"), TEXT),
    **dict.fromkeys(("facts", "cases"), RECORD),
    "launches": LIST,
}
FACTS: Kinds = {
    **ENVIRONMENT,
    **dict.fromkeys(("mesh", "profile"), TEXT),
    **dict.fromkeys(("pipelined", "passes"), COUNT),
    "settings": RECORD,
}
LAUNCH: Kinds = {
    **dict.fromkeys(("run_id", "variants"), TEXT),
    **dict.fromkeys(("started_at", "ended_at"), DATE),
    "foreign_load": AMOUNT,
    "complete": FLAG,
    "facts": RECORD,
}
COLUMNS: Kinds = {
    "num_samples": list_of(or_none(COUNT)),
    **dict.fromkeys(("mean_s", "p10_s"), list_of(or_none(TIME))),
    "status": list_of(or_none(one_of(STATUSES))),
    "error": list_of(or_none(TEXT)),
}


def wrong_in_baseline(record: Record) -> str | None:
    """The first wrong field of a baseline file, in words; None where there is none."""
    if wrong := wrong_field(record, HEAD, tuple(HEAD)) or wrong_field(record["facts"], FACTS, within="facts."):
        return wrong
    for index, launch in enumerate(record["launches"]):
        if wrong := _wrong_in_launch(launch, f"launches[{index}]"):
            return wrong
    ids = [launch["run_id"] for launch in record["launches"]]
    if len(set(ids)) < len(ids):
        return f"run_id {shown(next(one for one in ids if ids.count(one) > 1))} stands in two launches"
    for case_id, columns in record["cases"].items():
        if wrong := _wrong_in_columns(columns, len(ids), f"cases[{shown(case_id)}]"):
            return wrong
    return None


def _wrong_in_launch(launch: object, where: str) -> str | None:
    if not isinstance(launch, dict):
        return f"{where} is {shown(launch)}, not an object"
    needed = ("run_id", "variants", "started_at", "complete", "facts")
    return wrong_field(launch, LAUNCH, needed, f"{where}.") or wrong_field(
        launch["facts"], FACTS, within=f"{where}.facts."
    )


def _wrong_in_columns(columns: object, num_launches: int, where: str) -> str | None:
    if not isinstance(columns, dict):
        return f"{where} is {shown(columns)}, not an object"
    if wrong := wrong_field(columns, COLUMNS, ("num_samples", "mean_s", "p10_s"), f"{where}."):
        return wrong
    given = {name: columns[name] for name in COLUMNS if columns.get(name) is not None}
    if wrong := next((name for name, values in given.items() if len(values) != num_launches), None):
        return f"{where}.{wrong} has {len(given[wrong])} values for {num_launches} launches"
    statuses = given.get("status", ["ok"] * num_launches)
    for index, status in enumerate(statuses):
        is_there = columns["num_samples"][index] is not None
        lacking = next((name for name in ("mean_s", "p10_s") if columns[name][index] is None), None)
        if is_there and status is None:
            return f"{where}.status[{index}] is missing"
        if is_there and status == "ok" and lacking:
            return f"{where}.{lacking}[{index}] is missing"
    return None


FORMAT_VERSION = 2  # 1 had minima in place of 10th percentiles
FOLDER = "baselines"
LAUNCH_FIELDS = ("run_id", "started_at", "ended_at", "variants", "foreign_load", "complete")  # stored as they are
SAVE_AGAIN = "save it again with distbench baseline save"
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
    """The launches of one baseline file. Raises as `load_record`."""
    record = load_record(path)
    return [_launch(record, index, str(path)) for index in range(len(record["launches"]))]


def load_record(path: Path) -> Record:
    """A baseline file as plain data.

    Raises:
        UserError: it cannot be read, is no baseline, is damaged, or a newer distbench wrote it.
    """
    record: Any = read_json(path, "baseline")
    version = record.get("distbench_baseline") if isinstance(record, dict) else None
    if type(version) is not int:
        raise UserError(f"{path} is no baseline; write one with distbench baseline save")
    if version < FORMAT_VERSION:
        raise UserError(f"baseline {path} has version {version}, without 10th percentiles; {SAVE_AGAIN}")
    if version > FORMAT_VERSION:
        reads = f"this distbench reads up to {FORMAT_VERSION}"
        raise UserError(f"baseline {path} has version {version}, {reads}; update it")
    if wrong := wrong_in_baseline(record):
        raise UserError(f"baseline {path} is damaged: {wrong}; {SAVE_AGAIN}")
    return record


def _launch(record: Record, index: int, source: str) -> Launch:
    row = record["launches"][index]
    return Launch(
        run_id=row["run_id"],
        source=source,
        scenario=record["scenario"],
        started_at=float(row["started_at"]),
        ended_at=float(row.get("ended_at") or 0.0),
        variants=row["variants"],
        # A fact that the file lacks is not known, as in a run file.
        facts={**Header().facts, **record["facts"], **row["facts"]},
        foreign_load=row.get("foreign_load"),
        complete=row["complete"],
        cases={
            case_id: _value(columns, index)
            for case_id, columns in record["cases"].items()
            if columns["num_samples"][index] is not None
        },
    )


def _value(columns: Record, index: int) -> Value:
    status = (columns.get("status") or {index: "ok"})[index]
    count, mean_s, p10_s = (columns[name][index] for name in ("num_samples", "mean_s", "p10_s"))
    if mean_s is None or p10_s is None:
        return Value(status, count, math.nan, math.nan, (columns.get("error") or {index: None})[index])
    return Value(status, count, float(mean_s), float(p10_s))


def describe(out: Path) -> list[tuple[str, ...]]:
    """Rows (file, scenario, mesh, launches, cases, commit, saved at) for the baselines below a results folder."""
    rows: list[tuple[str, ...]] = []
    for path in sorted((out / FOLDER).rglob("*.json")):
        record = load_record(path)
        name, facts = str(path.relative_to(out / FOLDER)), record["facts"]
        numbers = str(len(record["launches"])), str(len(record["cases"]))
        commit = str(facts.get("git_commit") or "several")[:8]
        rows.append((name, record["scenario"], str(facts.get("mesh")), *numbers, commit, record["saved_at"]))
    return rows
