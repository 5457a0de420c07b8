"""Valid files of each kind that distbench reads, what may become of one, and what a reader must not take for measured.

A mutation of a JSON value changes one place of it; a mutation of text changes bytes or lines. `Mutated.is_nonsense`
says whether what came out can be no measurement: it is known here from what was put where, not from our reader.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
DEEP = "@@deep@@"
# JSON that Python cannot write: each text stands for itself until the file is written.
RAW = {
    "@@nan@@": "NaN",
    "@@inf@@": "-Infinity",
    "@@1e400@@": "1e400",
    "@@big@@": "9" * 400,
    DEEP: "[" * 3000 + "]" * 3000,
    "@@nested@@": '{"a":' * 200 + "1" + "}" * 200,
    "@@half@@": '"\\ud800"',
}
TEXTS = ("", "x", "\x1b[31mred\x07", "\n::error::x", "a|b`c`<b>\\", "$\\frac$", "\u202eback", "9" * 5000, "x" * 100_000)
NUMBERS = (-1, 0, 1, 1.5, -0.5, 1e308, -1e308, 90_000, 2**63, 10**17, 5e-324)
OTHERS = (None, True, False, [], {}, [None], {"a": 1}, [[1]], ["x", 1])
# Fields that hold what was measured or counted, wherever they stand.
COUNTS = frozenset(
    [
        "group_size",
        "number",
        "payload_bytes",
        "wire_bytes",
        "size_bytes",
        "num_tokens",
        "num_cpus",
        "world_size",
        "num_hosts",
        "rank",
        "step",
        "seq",
        "num_samples",
        "count",
        "size",
        "knee_bytes",
        "profile_version",
    ]
)
TIMES = frozenset(["samples_s", "mean_s", "p10_s", "times_us"])
AMOUNTS = frozenset(
    ["started_at", "wall_s", "base_s", "per_byte_s", "per_byte_beyond_s", "per_copied_byte_s", "exposed_s"]
)


@dataclass(frozen=True)
class Mutated:
    """A file's new bytes, and what was done to it."""

    data: bytes
    what: str
    is_nonsense: bool = False


def mutated(kind: str, draw: random.Random) -> Mutated:
    """One mutation of a valid file of a kind out of KINDS."""
    texts = KINDS[kind]()
    text = texts[draw.randrange(len(texts))]
    if kind == "signature" or draw.random() < 0.25:
        return _of_text(text, draw)
    return _of_lines(text, draw) if kind in LINES else _of_value(text, draw)


def _of_lines(text: str, draw: random.Random) -> Mutated:
    lines = text.splitlines()
    place = draw.randrange(len(lines))
    inner = _of_value(lines[place], draw)
    done = [line.encode() for line in lines]
    done[place] = inner.data
    return Mutated(b"\n".join(done) + b"\n", f"line {place + 1}: {inner.what}", inner.is_nonsense)


def _of_value(text: str, draw: random.Random) -> Mutated:
    """One place of a JSON value replaced, removed or written twice."""
    try:
        value = json.loads(text)
    except ValueError:
        return _of_text(text, draw)
    path = draw.choice(list(_paths(value)))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    where, old = "/".join(map(str, path)), holder[path[-1]]
    if draw.random() < 0.15:
        del holder[path[-1]]
        return Mutated(json.dumps(value).encode(), f"{where} removed")
    if isinstance(holder, list) and draw.random() < 0.1:
        holder.insert(path[-1], old)
        return Mutated(json.dumps(value).encode(), f"{where} twice")
    new = draw.choice(draw.choice((tuple(RAW), TEXTS, NUMBERS, OTHERS)))
    holder[path[-1]] = new
    written = json.dumps(value)
    for token, raw in RAW.items():
        written = written.replace(json.dumps(token), raw)
    return Mutated(
        written.encode(), f"{where}: {str(old)[:40]} -> {ascii(new)[:40]}", _is_nonsense(path, value, old, new)
    )


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from _paths(inner, (*before, key))


def _is_nonsense(path: Sequence[Any], value: Any, old: Any, new: Any) -> bool:
    if new in tuple(RAW) if isinstance(new, str) else False:
        return True
    if {"settings", "devices"} & set(path) or isinstance(old, bool) or not isinstance(old, int | float):
        return False
    name = next((key for key in reversed(path) if isinstance(key, str)), "")
    if name == "rows":  # a trace's: (..., "rows", row, column)
        table = value["phases"] if "phases" in path else value
        name = table["columns"][path[-1]]
    if name not in COUNTS | TIMES | AMOUNTS:
        return False
    if isinstance(new, bool | str | list | dict):
        return True
    if new is None:
        return name in TIMES and isinstance(path[-1], int) and "cases" not in path
    most = 86_400e6 if name == "times_us" else 86_400
    return (
        new < 0 or (name in TIMES and not 0 < new <= most) or (name in COUNTS and isinstance(new, float) and new > 1e18)
    )


def _of_text(text: str, draw: random.Random) -> Mutated:
    data = bytearray(text.encode())
    at = draw.randrange(len(data))
    lines = text.splitlines(keepends=True)
    line = draw.randrange(len(lines))
    done: dict[str, Callable[[], bytes]] = {
        "cut short": lambda: bytes(data[:at]),
        "one byte changed": lambda: bytes(data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]),
        "bytes put in": lambda: bytes(
            data[:at] + draw.choice((b"\x00", b"\xff", b"\r", b"\n", b"9" * 5000, b"[" * 5000)) + data[at:]
        ),
        "a line removed": lambda: "".join(lines[:line] + lines[line + 1 :]).encode(),
        "a line twice": lambda: "".join(lines[: line + 1] + lines[line:]).encode(),
        "nothing left": lambda: b"",
        "another encoding": lambda: text.encode("utf-16"),
        "a byte order mark": lambda: b"\xef\xbb\xbf" + bytes(data),
    }
    what = draw.choice(tuple(done))
    return Mutated(done[what](), f"{what} at {at}")


def run_files() -> list[str]:
    """Collectives, steps, redistributions and a laboratory, with a pass and without."""
    texts = [(GOLDEN / f"{name}.jsonl").read_text() for name in ("collectives", "steps", "redistributions")]
    laboratory = (GOLDEN / "laboratory.jsonl").read_text().splitlines(keepends=True)
    texts.append("".join(laboratory[:12]))
    header, *rest = texts[1].splitlines(keepends=True)
    case_id = json.loads(rest[0])["case"]["id"]
    again = {
        "type": "pass",
        "case_id": case_id,
        "number": 1,
        "samples_s": [0.1, 0.2],
        "phases_s": {"forward": [0.1, 0.1]},
    }
    texts.append("".join([header, *rest[:-1], json.dumps(again) + "\n", rest[-1]]))
    return texts


def traces() -> list[str]:
    """A run file with a traced step of two ranks, and one with a simulated step."""
    times = {"issued_s": 0.0, "completed_s": 0.03, "exposed_s": None}
    call = {
        "kind": "all_gather",
        "op": "c10d.all_gather_",
        "backend_op": "all_gather",
        "mesh_dim": "tp",
        "group": "0,1",
    }
    sizes = {"seq": 0, "group_size": 2, "dtype": "f32", "payload_bytes": 1000, "wire_bytes": 500}
    whose = {"owner": "layers.0", "owner_known": True, "source": "tp", "redistribution": "S(1)->R", "explicit": True}
    result = [
        {"rank": rank, "step": step, "phase": phase, **call, **sizes, **whose, **times, "issued_s": begin + 0.01 * rank}
        for rank in range(2)
        for step in range(2)
        for phase, begin in (("forward", 0.0), ("backward", 0.01))
    ]
    columns, rows = list(result[0]), [list(row.values()) for row in result]
    phases = [
        [rank, step, phase, start, start + 0.1]
        for rank in range(2)
        for step in range(2)
        for phase, start in (("forward", 0.0), ("backward", 0.1))
    ]
    trace = {
        **{"type": "trace", "case_id": "step/i64[4,8]/toy", "method": "timed operators of c10d", "num_steps": 2},
        **{"steps_s": [0.2, 0.2], "clock_shared": True, "exposed_reason": "nothing can overlap"},
        "overhead": {"rounds": 2, "bare_cpu_s": [1.0, 2.0], "traced_cpu_s": [1.1, 2.1], "ratio": 1.05},
        "agreement": {"method": "dispatch mode", "num_rows": 4, "differences": []},
        "memory": {
            "measured_peak_bytes": 1 << 20,
            "measured_by": "growth",
            "predicted_peak_bytes": 1 << 19,
            "reason": None,
        },
        "phases": {"columns": ["rank", "step", "phase", "start_s", "end_s"], "rows": phases},
        **{"columns": columns, "rows": rows},
    }
    job = {"scenario": "toy", "mesh": {"tp": 2}, "started_at": 5.0, "device": "cpu"}
    environment = {"machine": "box-1", "num_cpus": 8, "device": "cpu", "backend": "gloo", "world_size": 2}
    case = {"id": "step/i64[4,8]/toy", "kind": "step", "params": {"scenario": "toy", "variant": "", "num_tokens": 32}}
    records = [
        {"type": "run", "schema_version": 2, "run_id": "r", "job": job, "environment": environment},
        {"type": "case", "case": case, "status": "ok", "samples_s": [0.1, 0.11, 0.12], "group_size": 2},
        trace,
        {"type": "footer", "status": "complete", "wall_s": 3.0, "spent_s": {"timed": 1.0}},
    ]
    simulated = (ROOT / "tests" / "data" / "simulated_run.jsonl").read_text()
    return ["".join(json.dumps(record) + "\n" for record in records), simulated]


def baselines() -> list[str]:
    """A stored baseline of three launches."""
    from distbench.records.baselines import baseline_text
    from distbench.records.launches import launch_of
    from distbench.records.run_file import read_run

    run = read_run(GOLDEN / "collectives.jsonl")
    launches = []
    for index in range(3):
        run.__dict__.pop("about", None)
        run.header["run_id"], run.header["job"]["started_at"] = f"r{index}", 1000.0 + index
        launches.append(launch_of(run))
    return [baseline_text(launches)]


def profiles() -> list[str]:
    """A hand-written one, and one as measured, with samples."""
    written = json.loads((ROOT / "profiles" / "h100_8x_ib.json").read_text())
    measured = [
        {"op": op, "mesh_dim": name, "group_size": 2, "base_s": 1e-5, "per_byte_s": 1e-9, "per_copied_byte_s": 1e-10}
        | {
            "knee_bytes": 1e6,
            "per_byte_beyond_s": 2e-9,
            "error": 0.1,
            "held_out_error": 0.2,
            "samples": [[1e6, 0, 1e-3]],
        }
        for op in (
            "all_gather",
            "all_to_all",
            "all_reduce",
            "reduce_scatter",
            "cut",
            "partition",
            "zero_fill",
            "all_to_all_native",
        )
        for name in ("dp_shard", "tp")
    ]
    head = {"profile_version": 1, "machine": "m", "backend": "gloo", "torch": "2", "mesh": {"dp_shard": 2, "tp": 2}}
    return [json.dumps(written), json.dumps({**head, "lines": measured})]


def signatures() -> list[str]:
    """Those of the repository."""
    return [path.read_text() for path in sorted((ROOT / "signatures").glob("*.signature"))]


def recordings() -> list[str]:
    """A simulated step's, as version 1 and of two ranks as version 2."""
    return [path.read_text() for path in sorted((ROOT / "tests" / "data").glob("recording_v*.jsonl"))]


def nccl_tests() -> list[str]:
    """A file as nccl-tests' version 2 writes it, with the times of each iteration."""
    devices = [{"rank": rank, "group": 0, "hostname": "node1", "device_info": "H100"} for rank in range(2)]
    results = []
    for size in (1024, 4096):
        row: dict[str, Any] = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "-1"}
        for placement in ("out_of_place", "in_place"):
            row[placement] = {"time": 20.0, "alg_bw": 0.05, "bus_bw": 0.09, "nwrong": 0}
            row[f"{placement}_per_iter"] = {"times_us": [20.0, 21.0, 19.0]}
        results.append(row)
    head = {"version": 2, "start_time": "2026-01-01 10:00:00", "args": ["./all_reduce_perf", "-J", "x"], "env": []}
    config = {"nthreads": 1, "ngpus": 2, "iterations": 20, "aggregated_iterations": 1, "devices": devices}
    tail = {"nccl_version": 22703, "config": config, "results": results, "end_time": "2026-01-01 10:01:00"}
    return [json.dumps({**head, **tail})]


KINDS: dict[str, Callable[[], list[str]]] = {
    **{"run": run_files, "trace": traces, "baseline": baselines},
    **{"profile": profiles, "signature": signatures, "nccl-tests": nccl_tests, "recording": recordings},
}
LINES = ("run", "trace", "recording")
SUFFIXES = {"run": ".jsonl", "trace": ".jsonl", "recording": ".jsonl", "signature": ".signature"}
