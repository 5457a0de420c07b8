"""What a stored baseline may hold: the kind of each field that is read, and that columns fit the launches."""

from distbench.runs.record_checks import ENVIRONMENT, STATUSES, Record
from distbench.spec.fields import (
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
    shown,
    wrong_field,
)

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
