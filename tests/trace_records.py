"""Run files with a trace whose every figure can be worked out by hand.

Four ranks on dp_shard=2,tp=2: tp groups 0,1 and 2,3, dp_shard groups 0,2 and 1,3. Two traced steps, 100 and 200 ms
long, alike but for that. Rank 3 comes late to the first all-gather over dp_shard, rank 2 to the one over tp.
"""

import json
from pathlib import Path
from typing import Any

COLUMNS = (
    *("rank", "step", "phase", "kind", "op", "backend_op", "mesh_dim", "group", "seq", "group_size", "dtype"),
    *("payload_bytes", "wire_bytes", "owner", "owner_known", "source", "redistribution", "explicit"),
    *("issued_s", "completed_s", "exposed_s"),
)
GROUPS = {"tp": ("0,1", "0,1", "2,3", "2,3"), "dp_shard": ("0,2", "1,3", "0,2", "1,3")}
WIRE = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1.0}
ID = "step/i64[4,8]/toy"
REASON = "gloo collectives of FSDP2 run synchronously on CPU: nothing can overlap"
Collective = dict[str, Any]


def collective(phase: str, source: str, kind: str, dim: str, size: int, owner: str | None, *times: int, **more: Any):
    """One collective on four ranks.

    Args:
        times: milliseconds: when the first rank begins, then how long each rank takes; it ends on all of them at once.
        more: `move`, its redistribution, and `explicit`.
    """
    start, *each = times
    what = {"phase": phase, "source": source, "kind": kind, "mesh_dim": dim, "payload_bytes": size}
    whose = {"owner": owner or "", "owner_known": owner is not None, "redistribution": more.get("move", "")}
    ends = {"end_s": (start + max(each)) / 1000, "each_s": [taken / 1000 for taken in each]}
    return {**what, **whose, "explicit": more.get("explicit"), "exposed_s": more.get("exposed_s"), **ends}


STEP: tuple[Collective, ...] = (
    collective("forward", "fsdp", "all_gather", "dp_shard", 1000, "layers.0", 0, 10, 10, 10, 4),
    collective("forward", "fsdp", "all_gather", "dp_shard", 3000, "layers.1", 10, 10, 10, 10, 10),
    collective("forward", "tp", "all_gather", "tp", 2000, "layers.0.attention", 30, 20, 20, 8, 20,
               move="S(1)->R", explicit=False),
    collective("backward", "tp", "reduce_scatter", "tp", 4000, "layers.1.attention", 60, 5, 5, 5, 5,
               move="P(sum)->S(1)", explicit=True),
    collective("backward", "fsdp", "reduce_scatter", "dp_shard", 8000, "", 70, 2, 2, 2, 2),
    collective("backward", "autograd", "all_reduce", "dp_shard", 16, None, 80, 1, 1, 1, 1),
)  # fmt: skip


def rows_of(steps: int = 2, collectives: tuple[Collective, ...] = STEP) -> list[list[Any]]:
    """The record's rows, in order of rank, step and issue."""
    rows = []
    for rank in range(4):
        for step in range(steps):
            seen: dict[str, int] = {}
            for one in collectives:
                group, kind = GROUPS[one["mesh_dim"]][rank], one["kind"]
                seen[group] = seen.get(group, -1) + 1
                row = {
                    **one,
                    **{"rank": rank, "step": step, "group": group, "seq": seen[group], "group_size": 2, "dtype": "f32"},
                    "op": f"c10d.{kind}_",
                    "backend_op": "all_reduce" if kind == "reduce_scatter" else kind,
                    "wire_bytes": int(one["payload_bytes"] * WIRE[kind]),
                    "issued_s": one["end_s"] - one["each_s"][rank],
                    "completed_s": one["end_s"],
                }
                rows.append([row[name] for name in COLUMNS])
    return rows


def record(collectives: tuple[Collective, ...] = STEP, case_id: str = ID, **more: Any) -> dict[str, Any]:
    """The trace's line; `more` replaces fields."""
    lengths = (0.1, 0.2)
    phases = [
        [rank, step, phase, lengths[step] * start, lengths[step] * end]
        for rank in range(4)
        for step in range(2)
        for phase, start, end in (("forward", 0.0, 0.55), ("backward", 0.55, 0.9), ("optimizer", 0.9, 1.0))
    ]
    return {
        "type": "trace",
        "case_id": case_id,
        "method": "timed operators of c10d",
        "num_steps": 2,
        "steps_s": list(lengths),
        "clock_shared": True,
        "overhead": {"rounds": 3, "bare_cpu_s": [1.0, 2.0, 1.0], "traced_cpu_s": [1.04, 2.1, 1.08], "ratio": 1.05},
        "agreement": {"method": "dispatch mode", "num_rows": 24, "differences": []},
        "memory": {"measured_peak_bytes": 3145728, "measured_by": "torch's allocator",
                   "predicted_peak_bytes": 2097152, "reason": None},
        "exposed_reason": REASON,
        "phases": {"columns": ["rank", "step", "phase", "start_s", "end_s"], "rows": phases},
        "columns": list(COLUMNS),
        "rows": rows_of(collectives=collectives),
        **more,
    }  # fmt: skip


def run_file(
    path: Path,
    *traces: dict[str, Any],
    mesh: dict[str, int] | None = None,
    samples_s: tuple[float, ...] = (0.098, 0.099, 0.1, 0.1, 0.101, 0.102, 0.1),
    scenario: str = "toy",
) -> Path:
    """A run file with a right step case before each trace."""
    job = {"scenario": scenario, "mesh": mesh or {"dp_shard": 2, "tp": 2}, "started_at": 5.0, "device": "cpu"}
    environment = {"machine": "box-1", "num_cpus": 8, "torch": "2.13.0", "device": "cpu", "backend": "gloo"}
    lines = [
        {"type": "run", "schema_version": 1, "run_id": "r", "job": job, "environment": environment | {"world_size": 4}}
    ]
    for trace in traces:
        params = {
            "scenario": scenario,
            "variant": "/".join(trace["case_id"].split("/", 3)[3:]),
        }
        case = {"id": trace["case_id"], "kind": "step", "params": {**params, "shape": [4, 8]}}
        lines += [
            {
                "type": "case",
                "case": case,
                "status": "ok",
                "samples_s": list(samples_s),
                "backend": "gloo",
                "group_size": 4,
            },
            trace,
        ]
    lines.append({"type": "footer", "status": "complete"})
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path
