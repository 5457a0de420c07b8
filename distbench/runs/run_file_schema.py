"""The run file as a JSON schema (draft 2020-12), made of the same declarations that its reader checks lines by.

`python -m distbench.runs.run_file_schema > docs/run_file.schema.json` writes it anew; a test holds that file to it.
"""

import json
from collections.abc import Sequence
from typing import Any

from distbench.runs.record_checks import (
    CASE,
    COUNTERS,
    ENVIRONMENT,
    FOOTER,
    HEADER,
    IN_TRACE,
    JOB,
    NEEDED,
    PARAMS,
    PASS,
    RESULT,
    TRACE,
)
from distbench.runs.run_file import SCHEMA_VERSION
from distbench.spec.fields import Kinds, nullable

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
NAMES = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
ROWS = {"type": "array", "items": {"type": "array"}}


def run_file_schema() -> Schema:
    """The schema of one line. What stands in no declaration may hold anything, as with the reader.

    The reader asks more: one header, first; no case twice; as many values in a trace's row as it has columns.
    """
    case = _object(CASE, ("id",), params=_object(PARAMS))
    has_error = {"required": ["error"]}
    has_reason = {**has_error, "properties": {"error": {"type": "string"}}}
    lines = {
        "run": _object(HEADER, ("schema_version",), **_header()),
        "case": _object(RESULT, NEEDED["case"], case=case, counters=_object(COUNTERS)),
        "pass": _either(has_error, _object(PASS, NEEDED["pass of an error"]), _object(PASS, NEEDED["pass"])),
        "trace": _either(has_reason, _object(TRACE, ("case_id",)), _object(TRACE, NEEDED["trace"], **_trace())),
        "footer": _object(FOOTER),
    }
    return {
        "$schema": DRAFT,
        "title": "A line of a distbench run file",
        "description": f"schema_version 1 to {SCHEMA_VERSION}; docs/run-file.md says what each field means",
        "type": "object",
        "required": ["type"],
        "allOf": [
            {"if": {"properties": {"type": {"const": kind}}}, "then": {"$ref": f"#/$defs/{kind}"}} for kind in lines
        ],
        "$defs": lines,
    }


def _header() -> Schema:
    version = {"type": "integer", "minimum": 1, "maximum": SCHEMA_VERSION}
    return {"schema_version": version, "job": _object(JOB), "environment": _object(ENVIRONMENT)}


def _trace() -> Schema:
    tables = {"columns": NAMES, "rows": ROWS}
    parts = {name: _object(kinds) for name, kinds in IN_TRACE.items()}
    phases = {"type": "object", "properties": tables, "required": list(tables)}
    return {**parts, **tables, "phases": phases, "computing": nullable(phases)}


def _object(kinds: Kinds, needed: Sequence[str] = (), **inner: Schema) -> Schema:
    """An object with these fields: null counts as missing, and what is needed must not be missing."""
    own = {name: dict(kind.schema) for name, kind in kinds.items()} | inner
    fields = {name: schema if name in needed else nullable(schema) for name, schema in sorted(own.items())}
    return {"type": "object", "properties": fields, **({"required": list(needed)} if needed else {})}


def _either(condition: Schema, one: Schema, other: Schema) -> Schema:
    return {"if": condition, "then": one, "else": other}


if __name__ == "__main__":
    print(json.dumps(run_file_schema(), indent=1))
