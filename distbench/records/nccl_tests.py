"""JSON files of nccl-tests (`all_reduce_perf -J FILE`, file version 2) as runs.

The fields of the JSON, from nccl-tests' sources: start_time, args, env, nccl_version, config {nthreads, ngpus, ...,
devices [{rank, group, hostname, device_info, ...}]}, results [{size, count, type, redop, root, out_of_place {time,
alg_bw, bus_bw, nwrong}, in_place {...}, out_of_place_per_iter {times_us, ...}}]. Times are in microseconds. `env` is
the whole environment, including secrets, and is not read.
"""

import datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from distbench.records.run_file import SCHEMA_VERSION, Case, CaseResult, HeaderLine, Record, Run, require_line
from distbench.spec.devices import device_of
from distbench.spec.errors import UserError
from distbench.spec.file_io import read_json
from distbench.spec.json_decoder import Count, Time, decode, is_of_type
from distbench.spec.mesh import dim_shape

DTYPES = {"float": "f32", "double": "f64", "half": "f16", "bfloat16": "bf16"}
OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
PLACEMENTS = ("out_of_place", "in_place")
MESH_DIM = "ranks"


class ResultRow(Struct):
    """Fields of a result in addition to times."""

    size: Count
    count: Count
    type: str
    redop: str
    root: Any


def read_nccl_tests(path: Path) -> Run:
    """A file of nccl-tests as a run, with one case per size and placement.

    With the option `-I` of nccl-tests each iteration is a sample. Otherwise the average is the only sample.
    """
    data: Any = read_json(path, "nccl-tests file")
    results = data.get("results") if isinstance(data, dict) else None
    if not isinstance(results, list) or not results:
        raise UserError(f"nccl-tests file {path} has no results; run nccl-tests with -J again until the end")
    try:
        name = Path(str(data["args"][0])).name.removesuffix("_perf").removesuffix("_perf_mpi")
        op = OPS.get(name, name)
        devices = (data.get("config") or {}).get("devices") or []
        group_size, shape = _group_of(devices)
        cases = [
            _case(row, op, placement, group_size, shape)
            for row in results
            for placement in PLACEMENTS
            if isinstance(row.get(placement), dict)
        ]
        header, footer = _header(data, path, op, devices), None
        if "end_time" in data:
            ended = {"status": "complete", "message": "", "finished_at": _moment(data["end_time"])}
            footer = {"type": "footer", "spent_s": {}, "num_by_status": {}, **ended}
        decode(header, HeaderLine)
        for record in (*cases, footer or {}):
            require_line(record)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"nccl-tests file {path} does not have the format of version 2 ({error!r})"
        raise UserError(f"{problem}; use a version of nccl-tests that writes file version 2") from error
    by_id = {case["case"]["id"]: case for case in reversed(cases)}
    left_out = len(cases) - len(by_id)
    twice = f"{path.name}: left out: {left_out} results with the size and placement of an earlier result"
    return Run(path, header, list(reversed(by_id.values())), footer, [twice] if left_out else [])


def _group_of(devices: list[Record]) -> tuple[int, str | None]:
    """Return the ranks of a group (NCCL_TESTS_SPLIT makes several groups) and its shape; None for devices without
    hosts.
    """
    groups: dict[Any, list[int]] = {}
    hosts = []
    for number, device in enumerate(sorted(devices, key=lambda device: int(device.get("rank", 0)))):
        groups.setdefault(device.get("group", 0), []).append(number)
        hosts.append(str(device.get("hostname") or ""))
    sizes = sorted({len(ranks) for ranks in groups.values()})
    if len(sizes) > 1:
        raise ValueError(f"groups of {' and '.join(map(str, sizes))} ranks")
    return (sizes[0] if sizes else 1), (dim_shape(groups.values(), hosts) if hosts and all(hosts) else None)


def is_nccl_tests(head: bytes) -> bool:
    """Return whether a file that begins with `head` is one of nccl-tests."""
    return b'"version"' in head and b'"start_time"' in head and b'"args"' in head


def _header(data: Record, path: Path, op: str, devices: list[Record]) -> Record:
    config = data.get("config") or {}
    hosts = sorted({str(device.get("hostname")) for device in devices})
    num_ranks, num_hosts = max(len(devices), 1), max(len(hosts), 1)
    # A sample is one iteration, or the average over all iterations, which run back to back.
    results, together = data["results"], int(config.get("aggregated_iterations") or 1)
    if not any(row.get(f"{placement}_per_iter") for row in results for placement in PLACEMENTS):
        together *= int(config.get("iterations") or 1)
    settings = {name: config.get(name) for name in ("iterations", "aggregated_iterations", "warmup_iters", "graph")}
    return {
        "type": "run",
        "schema_version": SCHEMA_VERSION,
        "run_id": f"nccl-tests-{op}-{data['start_time']}-{path.name}",
        "invocation_id": None,
        "job": {
            "scenario": f"nccl-tests-{op}",
            "variants": [],
            "mesh": {MESH_DIM: num_ranks},
            "device": device_of("nccl"),
            "settings": {**settings, "iterations_per_sample": together},
            "started_at": _moment(data["start_time"]),
        },
        "environment": {
            "machine": "+".join(hosts) or None,
            "device": device_of("nccl"),
            "device_name": next((device.get("device_info") for device in devices), None),
            "backend": "nccl",
            "world_size": num_ranks,
            "num_hosts": num_hosts,
            "num_devices": len(devices) // num_hosts,
            "nccl": str(data.get("nccl_version")),
        },
    }


def _case(row: Record, op: str, placement: str, group_size: int, shape: str | None) -> Record:
    fields = decode(row, ResultRow)
    dtype, root = DTYPES.get(fields.type, fields.type), str(fields.root).strip()
    reduction = [fields.redop] if fields.redop != "none" else []
    how = [op, *reduction, *([f"root{root}"] if root != "-1" else []), MESH_DIM, placement]
    body = row[placement]
    iterations = row.get(f"{placement}_per_iter") or {}
    times_us = iterations.get("times_us") or [body["time"] if "time" in body else body["cpu_time"]]
    wrong = body.get("nwrong")
    is_wrong = is_of_type(wrong, float) and wrong != 0
    usable = all(is_of_type(time, float) and is_of_type(time * 1e-6, Time) for time in times_us)
    status, error = ("ok", None) if usable else ("raised", "a time is not above 0 s and at most one day")
    if is_wrong:
        status, error = "wrong", f"{wrong:g} elements are wrong"
    params = {"op": op, "dtype": dtype, "mesh_dim": MESH_DIM, "size_bytes": fields.size}
    params |= {"lies": shape} if shape else {}
    result = CaseResult(
        Case(f"collective/{dtype}[{fields.count}]/{'/'.join(how)}", "collective", params),
        status,
        [time * 1e-6 for time in times_us] if usable else [],
        payload_bytes=fields.size,
        group_size=group_size,
        mesh_dim=MESH_DIM,
        backend="nccl",
        backend_op=op,
        counters={"placement": placement, "reported_busbw_gb_per_s": body.get("bus_bw")},
        error=error,
    )
    return result.to_record()


def _moment(text: str) -> float:
    return datetime.datetime.strptime(text, "%Y-%m-%d %H:%M:%S").astimezone().timestamp()
