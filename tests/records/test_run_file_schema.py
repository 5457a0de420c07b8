"""docs/run_file.schema.json and docs/run-file.md against the reader: the same lines pass, the same are refused."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import ROOT
from trace_records import record

from distbench.judge.compare_runs import FRAME_COLUMNS
from distbench.records.dataframe import frame_of
from distbench.records.run_file import HeaderLine, read_run, require_line, run_file_schema
from distbench.spec.json_decoder import decode

GOLDEN = sorted((ROOT / "tests" / "golden").glob("*.jsonl"))
SCHEMA = json.loads((ROOT / "docs" / "run_file.schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)
PAGE = (ROOT / "docs" / "run-file.md").read_text()
PASS_LINE = {"type": "pass", "case_id": "c", "number": 1, "samples_s": [0.1], "phases_s": {}}
CASE_LINE = {"type": "case", "case": {"id": "c", "params": {}}, "status": "ok", "counters": {}}
HEADER_LINE = {"type": "run", "schema_version": 2, "job": {}, "environment": {}}


def test_the_file_in_docs_is_what_the_declarations_give() -> None:
    again = "python -m distbench.records.run_file > docs/run_file.schema.json"
    assert run_file_schema() == SCHEMA, f"write it anew: {again}"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_line_of_a_golden_run_file_is_one(path: Path) -> None:
    # A line that was cut short, as a killed run leaves one, is no JSON at all.
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert len(lines) > 2
    for line in lines:
        CHECK.validate(json.loads(line))


@pytest.mark.parametrize("line", [PASS_LINE, {"type": "pass", "case_id": "c", "status": "aborted", "error": None}])
def test_lines_that_the_reader_takes_are_taken(line: dict[str, Any]) -> None:
    require_line(line)
    assert CHECK.is_valid(line)
    assert CHECK.is_valid(record()) and CHECK.is_valid({"type": "of a newer version"})


# Of each type in the schema a line that is right, and the way to the object in it.
TRACE_LINE = {"pipeline": {}} | record()
PLACES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "HeaderLine": (HEADER_LINE, ()),
    "JobFields": (HEADER_LINE, ("job",)),
    "Environment": (HEADER_LINE, ("environment",)),
    "CaseLine": (CASE_LINE, ()),
    "CaseFields": (CASE_LINE, ("case",)),
    "Params": (CASE_LINE, ("case", "params")),
    "Counters": (CASE_LINE, ("counters",)),
    "PassLine": (PASS_LINE, ()),
    "FailedPassLine": ({"type": "pass", "case_id": "c", "status": "aborted", "error": None}, ()),
    "FailedTraceLine": ({"type": "trace", "case_id": "c", "error": "no"}, ()),
    "Footer": ({"type": "footer"}, ()),
    "TraceLine": (TRACE_LINE, ()),
    **{name.capitalize(): (TRACE_LINE, (name,)) for name in ("overhead", "agreement", "memory", "pipeline")},
}
# None of them is right in any field but one of text, a flag or a list.
VALUES = (-1, 1e300, "text", True, [], {}, ["x"], {"x": []}, [-1], {"x": -1}, 2.5, 0, "", None)
# The reader checks the version apart; how columns and rows go together is what no schema can say.
ELSEWHERE = {"schema_version", "log_dir", "variants", "columns", "rows", "phases", "computing"}


def test_every_type_of_the_schema_is_tried() -> None:
    assert {*PLACES, "TraceTable"} == set(SCHEMA["$defs"])


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.long
def test_what_the_reader_refuses_the_schema_refuses_field_by_field(kind: str) -> None:
    line, way = PLACES[kind]
    assert CHECK.is_valid(line)
    for name in set(SCHEMA["$defs"][kind]["properties"]) - ELSEWHERE:
        refused = 0
        for value in VALUES:
            changed = copy.deepcopy(line)
            holder = changed
            for key in way:
                holder = holder[key]
            holder[name] = value
            try:
                decode(changed, HeaderLine) if line["type"] == "run" else require_line(changed)
                is_right = True
            except ValueError:
                is_right = False
            assert CHECK.is_valid(changed) == is_right, (name, value)
            refused += not is_right
        assert refused, f"{name} takes everything"


@pytest.mark.parametrize(
    "line",
    [
        {**HEADER_LINE, "schema_version": 99},
        {name: value for name, value in HEADER_LINE.items() if name != "schema_version"},
        {**CASE_LINE, "status": None},
        {**CASE_LINE, "case": {}},
        {**PASS_LINE, "samples_s": None},
        {"type": "trace", "case_id": "c"},
        {"no": "type"},
    ],
)
def test_what_is_needed_is_needed(line: dict[str, Any]) -> None:
    assert not CHECK.is_valid(line)


def columns_of(section: str) -> list[str]:
    """Return the names before the text of each row of a section's table, or of each item of its list."""
    rows = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return [
        name
        for names in re.findall(r"^(?:\| |- )((?:`\w+` ?)+)(?:\||:)", rows, re.M)
        for name in re.findall(r"\w+", names)
    ]


def test_the_page_has_every_column_and_no_other() -> None:
    frame = frame_of([read_run(path) for path in GOLDEN])
    assert sorted(columns_of("Columns of the frame")) == sorted(frame.columns)
    assert columns_of("Columns of a comparison") == list(FRAME_COLUMNS)


def test_the_page_names_every_kind_of_line() -> None:
    assert columns_of("Lines") == [line["if"]["properties"]["type"]["const"] for line in SCHEMA["allOf"]]
