"""What the lines of a run file may hold: of each field that anything reads, its kind; older files lack some of them."""

from collections.abc import Callable, Sequence
from typing import Any

from distbench.spec.file_io import (
    AMOUNT,
    BYTES,
    COUNT,
    DATE,
    DURATION,
    DURATIONS,
    FLAG,
    LIST,
    MOMENT,
    NAME,
    RECORD,
    SIZE,
    TEXT,
    TIMES,
    Kind,
    Kinds,
    list_of,
    mapping_of,
    one_of,
    or_none,
    wrong_field,
)

# Columns of a trace: a row per collective, per phase, and per stretch in which a rank computes.
TRACE_COLUMNS = (
    *("rank", "step", "phase", "kind", "op", "backend_op", "mesh_dim", "group", "seq", "group_size", "dtype"),
    *("payload_bytes", "wire_bytes", "owner", "owner_known", "source", "redistribution", "explicit"),
    *("issued_s", "completed_s", "exposed_s"),
)
PHASE_COLUMNS = ("rank", "step", "phase", "start_s", "end_s")
COMPUTING_COLUMNS = ("rank", "step", "start_s", "end_s")
STATUSES = ("ok", "wrong", "raised", "timeout", "aborted", "skipped", "unsupported")
MAX_PASSES = 100_000  # a number of a pass beyond this is no number of a pass
Record = dict[str, Any]


def _is_alive(value: Any) -> bool:
    """(what it is, whose, bytes)."""
    return (
        isinstance(value, list)
        and len(value) == len(_ALIVE)
        and all(kind.fits(one) for kind, one in zip(_ALIVE, value, strict=True))
    )


_ALIVE = (TEXT, TEXT, BYTES)
HEADER: Kinds = {
    **dict.fromkeys(("run_id", "invocation_id"), TEXT),
    **dict.fromkeys(("job", "environment", "simulated"), RECORD),
}
JOB: Kinds = {
    **dict.fromkeys(("scenario", "device", "profile", "label"), TEXT),
    "mesh": mapping_of(SIZE),
    "settings": RECORD,
    "started_at": DATE,
}
ENVIRONMENT: Kinds = {
    **dict.fromkeys(("machine", "cpu_model", "device_name", "device", "backend", "scheduler", "torch"), TEXT),
    **dict.fromkeys(("backend_class", "nccl", "python", "platform", "git_commit"), TEXT),
    **dict.fromkeys(("num_cpus", "num_devices", "memory_bytes", "world_size", "num_hosts", "num_threads"), COUNT),
    "git_dirty": FLAG,
    **dict.fromkeys(("hosts", "cautions"), list_of(TEXT)),
    "load_at_start": list_of(AMOUNT),
    "variables": RECORD,
}
CASE: Kinds = {"id": NAME, "kind": TEXT, "params": RECORD}
PARAMS: Kinds = {
    **dict.fromkeys(("op", "dtype", "mesh_dim", "source", "target", "planner", "variant", "suite", "direction"), TEXT),
    **dict.fromkeys(("scenario", "computes", "call", "mode"), TEXT),
    **dict.fromkeys(("size_bytes", "num_tokens", "batch_size"), BYTES),
    **dict.fromkeys(("shape", "mesh_shape"), list_of(COUNT)),
    **dict.fromkeys(("flattened", "hosts"), list_of(TEXT)),
    **dict.fromkeys(("pairs", "groups"), list_of(list_of(COUNT))),
    "ranks": list_of(COUNT),
    "level": TEXT,
}
RESULT: Kinds = {
    "case": RECORD,
    "status": one_of(STATUSES),
    "samples_s": TIMES,
    "phases_s": mapping_of(DURATIONS),
    "rank_median_s": DURATIONS,
    **dict.fromkeys(("payload_bytes", "wire_bytes"), BYTES),
    "group_size": SIZE,
    **dict.fromkeys(("mesh_dim", "backend", "backend_op", "stop_reason", "error"), TEXT),
    "counters": RECORD,
    "simulated": FLAG,
}
COUNTERS: Kinds = {
    **dict.fromkeys(("path", "worst_grad", "check", "peak_phase", "peak_owner", "memory_reason"), TEXT),
    **dict.fromkeys(("result", "gradients", "forward_pays", "backward_pays"), TEXT),
    **dict.fromkeys(("num_implicit", "state_bytes", "forward_wire_bytes", "backward_wire_bytes"), BYTES),
    **dict.fromkeys(("num_collectives", "num_messages", "wire_bytes_executed", "lower_bound_bytes"), BYTES),
    **dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "peak_growth_bytes", "parameter_bytes"), BYTES),
    **dict.fromkeys(("predicted_s", "planning_cold_s", "planning_warm_s", "entry_skew_s", "isolated_s"), DURATION),
    **dict.fromkeys(("loss_rel_error", "grad_rel_error", "output_rel_error", "num_copies"), AMOUNT),
    **dict.fromkeys(("peak_bytes", "predicted_peak_bytes", "baseline_bytes", "cache_bytes"), BYTES),
    "peak_by_kind": mapping_of(BYTES),
    # Of a pipeline.
    **dict.fromkeys(("idle_share", "least_idle_share"), AMOUNT),
    "idle_shares": list_of(AMOUNT),
    # Of a simulated step.
    **dict.fromkeys(("compute_s", "exposed_s", "idle_s", "host_s", "bubble_s"), DURATION),
    "bubble_shares": list_of(AMOUNT),
    **dict.fromkeys(("predicted_phases_s", "exposed_by_mesh_dim_s"), mapping_of(DURATION)),
    **dict.fromkeys(("mfu", "hfu"), AMOUNT),
    **dict.fromkeys(("slowest_rank", "num_retries"), COUNT),
    "fits": FLAG,
    # Of links, by rank.
    **dict.fromkeys(("tcp_segments", "tcp_segments_again"), list_of(COUNT)),
    "alive": Kind(
        lambda value: isinstance(value, list) and all(map(_is_alive, value)),
        "a list of (what, owner, bytes)",
        {
            "type": "array",
            "items": {"type": "array", "minItems": 3, "maxItems": 3, "prefixItems": [kind.schema for kind in _ALIVE]},
        },
    ),
}
PASS: Kinds = {
    "case_id": NAME,
    "number": Kind(
        lambda value: type(value) is int and 0 < value < MAX_PASSES,
        "a number of a pass",
        {"type": "integer", "minimum": 1, "maximum": MAX_PASSES - 1},
    ),
    "samples_s": TIMES,
    "phases_s": mapping_of(DURATIONS),
    "rank_median_s": DURATIONS,
    "stop_reason": TEXT,
    "status": one_of(STATUSES),
    "error": TEXT,
}
FOOTER: Kinds = {
    **dict.fromkeys(("status", "message"), TEXT),
    "finished_at": DATE,
    **dict.fromkeys(("wall_s", "measuring_s"), AMOUNT),
    "spent_s": mapping_of(AMOUNT),
    "num_by_status": mapping_of(COUNT),
    **dict.fromkeys(("num_relaunches", "num_not_run"), COUNT),
    "load_at_end": list_of(AMOUNT),
    "foreign_cpu": AMOUNT,
}
TRACE: Kinds = {
    "case_id": NAME,
    **dict.fromkeys(("error", "method", "exposed_reason"), TEXT),
    **dict.fromkeys(("clock_shared", "simulated"), FLAG),
    "steps_s": DURATIONS,
    **dict.fromkeys(("overhead", "agreement", "memory", "phases", "computing", "pipeline"), RECORD),
    **dict.fromkeys(("columns", "rows"), LIST),
}
IN_TRACE: dict[str, Kinds] = {
    "overhead": {"ratio": AMOUNT, "bare_cpu_s": list_of(AMOUNT), "traced_cpu_s": list_of(AMOUNT)},
    "pipeline": {
        **dict.fromkeys(("mesh_dim", "schedule"), TEXT),
        "bubble_shares": list_of(AMOUNT),
        **dict.fromkeys(("num_stages", "microbatches"), COUNT),
        "least_idle_share": AMOUNT,
    },
    "agreement": {"method": TEXT, "num_rows": COUNT, "differences": list_of(TEXT)},
    "memory": {
        **dict.fromkeys(("measured_by", "reason"), TEXT),
        **dict.fromkeys(("measured_peak_bytes", "predicted_peak_bytes"), BYTES),
    },
}
# Of each column of a trace's two tables, what one value may be.
CELLS: Kinds = {
    **dict.fromkeys(("rank", "step", "seq"), COUNT),
    **dict.fromkeys(("phase", "kind", "op", "group", "dtype", "source"), TEXT),
    **dict.fromkeys(("backend_op", "mesh_dim", "owner", "redistribution"), or_none(TEXT)),
    "group_size": SIZE,
    "payload_bytes": COUNT,
    "wire_bytes": or_none(COUNT),
    "owner_known": FLAG,
    "explicit": or_none(FLAG),
    **dict.fromkeys(("issued_s", "completed_s", "start_s", "end_s"), or_none(MOMENT)),
    "exposed_s": or_none(DURATION),
}


# Of each kind of line, the fields that must be there.
NEEDED = {
    "case": ("case", "status"),
    "pass": ("case_id", "number", "samples_s", "phases_s"),
    "pass of an error": ("case_id", "status"),
    "trace": ("case_id", "columns", "rows", "phases"),
}


def wrong_in_header(record: Record) -> str | None:
    """The first wrong field of the first line, in words; None where there is none."""
    return (
        wrong_field(record, HEADER)
        or wrong_field(record.get("job") or {}, JOB, within="job.")
        or wrong_field(record.get("environment") or {}, ENVIRONMENT, within="environment.")
    )


def wrong_in_record(record: Record) -> str | None:
    """The same of any other line; a type that is not known here is left to newer versions."""
    check = _OF_TYPE.get(kind) if isinstance(kind := record.get("type"), str) else None
    return check(record) if check else None


def _wrong_in_case(record: Record) -> str | None:
    if wrong := wrong_field(record, RESULT, NEEDED["case"]):
        return wrong
    case = record["case"]
    if wrong := wrong_field(case, CASE, ("id",), "case."):
        return wrong
    return wrong_field(case.get("params") or {}, PARAMS, within="case.params.") or wrong_field(
        record.get("counters") or {}, COUNTERS, within="counters."
    )


def _wrong_in_pass(record: Record) -> str | None:
    return wrong_field(record, PASS, NEEDED["pass of an error" if "error" in record else "pass"])


def _wrong_in_trace(record: Record) -> str | None:
    if wrong := wrong_field(record, TRACE, ("case_id",)):
        return wrong
    if record.get("error") is not None:
        return None
    if wrong := wrong_field(record, TRACE, NEEDED["trace"]):
        return wrong
    for name, kinds in IN_TRACE.items():
        if wrong := wrong_field(record.get(name) or {}, kinds, within=f"{name}."):
            return wrong
    computing = record.get("computing")
    return (
        _wrong_in_table(record, "")
        or _wrong_in_table(record["phases"], "phases.")
        or (_wrong_in_table(computing, "computing.") if computing is not None else None)
    )


def _wrong_in_table(table: Record, within: str) -> str | None:
    """What is wrong with `columns`, and `rows` with a value for each."""
    columns, rows = table.get("columns"), table.get("rows")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        return f"{within}columns is no list of names"
    if len(set(columns)) < len(columns):
        return f"{within}columns has a name twice"
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        return f"{within}rows is no list of rows with {len(columns)} values each"
    for name, values in zip(columns, zip(*rows, strict=True), strict=False):
        if (kind := CELLS.get(name)) and not all(map(kind.fits, values)):
            return f"{within}rows: {wrong_field({name: _first(values, kind)}, CELLS, (name,))}"
    return None


def _first(values: Sequence[Any], kind: Kind) -> Any:
    return next(value for value in values if not kind.fits(value))


def _wrong_in_footer(record: Record) -> str | None:
    return wrong_field(record, FOOTER)


_OF_TYPE: dict[str, Callable[[Record], str | None]] = {
    "case": _wrong_in_case,
    "pass": _wrong_in_pass,
    "trace": _wrong_in_trace,
    "footer": _wrong_in_footer,
}
