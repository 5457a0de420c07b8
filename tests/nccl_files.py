"""Made-up files of nccl-tests: their times follow rates that are known, with noise."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distbench.records.bus_bandwidth import busbw_factor
from distbench.records.nccl_tests import OPS

SIZES = [2**power for power in range(10, 31)]
OF_NCCL = ("all_gather", "all_reduce", "reduce_scatter", "alltoall")
TRUTH = {"node_bytes_per_s": 360e9, "node_base_s": 12e-6, "network_bytes_per_s": 40e9, "network_base_s": 22e-6}
TRUE_HOP_S = 3e-6


def true_s(op: str, on_hosts: Sequence[int], size: float) -> float:
    """The rule of docs/simulation.md, written a second time."""
    num_ranks, turns = sum(on_hosts), 2 if op == "all_reduce" else 1
    moved = turns * (num_ranks - 1) / num_ranks * size
    if len(on_hosts) == 1:
        return TRUTH["node_base_s"] + moved / TRUTH["node_bytes_per_s"]
    num_links = (num_ranks - 1) / (num_ranks - on_hosts[0]) if op == "alltoall" else on_hosts[0]
    rate = min(TRUTH["node_bytes_per_s"], TRUTH["network_bytes_per_s"] * num_links)
    further = len(on_hosts) - 2
    hops = {"all_reduce": 2 * (math.ceil(math.log2(len(on_hosts))) - 1), "alltoall": further}
    num_hops = hops.get(op, further * (1 + (on_hosts[0] - 1) * 1.9 / 4))
    return TRUTH["network_base_s"] + num_hops * TRUE_HOP_S + moved / rate


def nccl_file(
    path: Path,
    op: str = "all_reduce",
    on_hosts: Sequence[int] = (8,),
    sizes: Sequence[int] = SIZES,
    noise: float = 0.03,
    factor: float = 1.0,
    dtype: str = "float",
    change: Callable[[dict[str, Any]], object] = lambda data: None,
) -> Path:
    """A file of nccl-tests with true times within `noise`; in place it is twice as fast."""
    rng = random.Random(f"{op}{on_hosts}")
    hosts = [f"node{number}" for number, count in enumerate(on_hosts) for _ in range(count)]
    results = []
    for size in sizes:
        row: dict[str, Any] = {"size": size, "count": size // 4, "type": dtype, "redop": "none", "root": "    -1"}
        for placement, share in (("out_of_place", 1.0), ("in_place", 0.5)):
            seconds = true_s(op, on_hosts, size) * share * factor * (1 + noise * rng.uniform(-1, 1))
            busbw = size / seconds / 1e9 * busbw_factor(OPS.get(op, op), len(hosts))
            row[placement] = {"time": seconds * 1e6, "alg_bw": size / seconds / 1e9, "bus_bw": busbw, "nwrong": 0.0}
        results.append(row)
    data = {
        "version": 2,
        "start_time": "2026-01-01 10:00:00",
        "args": [f"./build/{op}_perf", "-J", path.name],
        "env": [],
        "nccl_version": 22703,
        "config": {
            "devices": [
                {"rank": rank, "group": 0, "hostname": host, "device_info": "NVIDIA H100"}
                for rank, host in enumerate(hosts)
            ]
        },
        "results": results,
    }
    change(data)
    path.write_text(json.dumps(data))
    return path
