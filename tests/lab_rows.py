"""Run files of redistributions, made up as data, for the tests of the laboratory's report."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HEADER: Row = {
    "type": "run",
    "schema_version": 1,
    "run_id": "lab",
    "job": {
        "scenario": "redistribute_lab",
        "mesh": {"dp_shard": 2, "tp": 2},
        "started_at": 1.0,
        "device": "cpu",
        "profile": "machine.json",
    },
    "environment": {
        "machine": "box-1",
        "num_cpus": 8,
        "torch": "2.13.0",
        "device": "cpu",
        "backend": "gloo",
        "world_size": 4,
        "num_hosts": 1,
    },
}
FOOTER: Row = {"type": "footer", "status": "complete", "wall_s": 1.0}
MS, MIB = 1e-3, 1 << 20
NUM_PASSES = 9


def moved(
    pair: str,
    planner: str,
    ms: float,
    path: str,
    *,
    predicted_ms: float | None = None,
    sent: int | None = None,
    bound: int | None = None,
    num_collectives: int = 1,
    shape: tuple[int, int] = (512, 512),
    **params: Any,
) -> Row:
    """A right row of f32: nine samples within 0.8 % of `ms`."""
    source, target = pair.split("->")
    counters = {
        "path": path,
        "num_collectives": num_collectives,
        "wire_bytes_executed": sent,
        "lower_bound_bytes": bound,
        "predicted_s": None if predicted_ms is None else predicted_ms * MS,
        "planning_cold_s": 1e-4,
    }
    return {
        **row(source, target, planner, shape, "ok", **params),
        "samples_s": [ms * MS * (1 + step / 500) for step in range(-4, 5)],
        "payload_bytes": 4 * shape[0] * shape[1],
        "backend_op": "all_gather",
        "counters": counters,
    }


def broken(
    pair: str, planner: str, status: str, error: str | None, shape: tuple[int, ...] = (5, 3), **params: Any
) -> Row:
    """A row without samples: wrong, raised, aborted, timeout; or ok, where only the value was looked at."""
    source, target = pair.split("->")
    return {**row(source, target, planner, shape, status, **params), "error": error}


def row(source: str, target: str, planner: str, shape: tuple[int, ...], status: str, **params: Any) -> Row:
    """What every row has."""
    sides = ",".join(map(str, shape))
    kept = {"source": source, "target": target, "planner": planner, "dtype": "f32", "shape": list(shape), **params}
    case_id = f"redistribute/f32[{sides}]/{source}->{target}/{params.get('suite', '')}/{planner}"
    case = {"id": case_id, "kind": "redistribute", "params": kept}
    return {"type": "case", "case": case, "status": status, "samples_s": [], "counters": {}, "error": None}


def in_passes(row: Row) -> list[Row]:
    """A row of nine samples as lines of nine passes, in an order of its own; another row as it is."""
    if len(row.get("samples_s") or ()) != NUM_PASSES:
        return [row]
    samples = random.Random(row["case"]["id"]).sample(row["samples_s"], NUM_PASSES)
    more = [
        {"type": "pass", "case_id": row["case"]["id"], "number": number, "phases_s": {}} for number in range(NUM_PASSES)
    ]
    return [{**row, "samples_s": samples[:1]}, *({**one, "samples_s": [samples[one["number"]]]} for one in more[1:])]


def write(path: Path, rows: Iterable[Row], header: Row = HEADER) -> Path:
    """A run file of these rows, measured in passes."""
    lines = (line for row in rows for line in in_passes(row))
    path.write_text("".join(json.dumps(record) + "\n" for record in (header, *lines, FOOTER)))
    return path
