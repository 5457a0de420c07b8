"""Operators of DTensors under `calibrated_planning` against torch's default: first call, warm, in a new context.

    python benchmarks/bench_operators.py

A fake process group of 8 ranks, so that only planning, pricing and dispatching take time. The two take turns; medians
of thread CPU seconds. A first call finds every cache empty, torch's and ours; a call in a new context is timed without
entering and leaving, which have a row of their own.
"""

import contextlib
import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.claims import Claim, Row
from distbench.planning.cheapest_path import forget_prices
from distbench.planning.cost_profile import COLLECTIVES, Line, Profile
from distbench.planning.placement_states import graph_of
from distbench.torch_private import clear_redistribution_caches
from distbench.torch_private.calibrated_planner import calibrated_planning, forget_plans

Call = Callable[[], object]
MESHES = ((2, 4), (2, 2, 2))
FIRST_CALLS, WARM_CALLS = 5, 30
KINDS = {"first": "first call", "warm": "warm", "anew": "in a new context"}
MEAN_LIMIT, WORST_LIMIT = 1.5, 3.0
CLAIMS = (
    Claim(
        "CPU time of DTensor operators under `calibrated_planning` relative to torch's default, geometric mean: "
        "first, warm call on 2x4; on 2x2x2",
        "{:.2f}x, {:.2f}x; {:.2f}x, {:.2f}x",
        "at most 1.5x",
        ("first call, 2x4: geo*", "warm, 2x4: geo*", "first call, 2x2x2: geo*", "warm, 2x2x2: geo*"),
    ),
)


def main() -> list[Row]:
    """(what, ratio to torch's default, its limit): geometric mean and worst of all operators, for each kind of call."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    num_threads = torch.get_num_threads()
    # Threads that wait for each other on a busy machine would be counted as an operator's time.
    torch.set_num_threads(1)
    try:
        return _rows()
    finally:
        torch.set_num_threads(num_threads)
        dist.destroy_process_group()


def _rows() -> list[Row]:
    rows: list[Row] = []
    for mesh_shape in MESHES:
        names, text = tuple(f"m{mesh_dim}" for mesh_dim in range(len(mesh_shape))), "x".join(map(str, mesh_shape))
        mesh, profile = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names), profile_of(names, mesh_shape)
        measured = {name: times(call, profile) for name, call in operators(mesh)}
        for kind, default in (("first", "first"), ("warm", "warm"), ("anew", "warm")):
            result = {name: taken[1][kind] / taken[0][default] for name, taken in measured.items()}
            worst = max(result, key=lambda name: result[name])
            mean = math.exp(sum(map(math.log, result.values())) / len(result))
            rows.append((f"{KINDS[kind]}, {text}: geometric mean", mean, MEAN_LIMIT))
            rows.append((f"{KINDS[kind]}, {text}: worst, {worst}", result[worst], WORST_LIMIT))
        entering = median([taken[1]["entering"] for taken in measured.values()])
        add_s = measured["add"][0]["warm"]
        rows.append((f"entering and leaving, {text}, in the default's warm adds", entering / add_s, WORST_LIMIT))
    return rows


def profile_of(names: tuple[str, ...], mesh_shape: tuple[int, ...]) -> Profile:
    """Plausible lines of every collective over each mesh dim."""
    lines = [
        Line(op, name, size, 2e-5, 1e-9) for name, size in zip(names, mesh_shape, strict=True) for op in COLLECTIVES
    ]
    return Profile("made up", "gloo", torch.__version__, dict(zip(names, mesh_shape, strict=True)), tuple(lines))


def operators(mesh: DeviceMesh) -> Iterator[tuple[str, Call]]:
    """Each operator with inputs of which some must move, forward, and with its backward where it has one."""
    rest = [Replicate()] * (mesh.ndim - 1)
    rows, columns, both = [Shard(0), *rest], [*rest, Shard(1)], [Shard(0), *[Shard(1)] * (mesh.ndim - 1)]
    left, right = (distribute_tensor(torch.rand(64, 64), mesh, to).requires_grad_() for to in (both, columns))
    partial: Any = DTensor.from_local(torch.rand(64, 64), mesh, [Partial(), *rest], run_check=False)
    hidden = distribute_tensor(torch.rand(8, 16, 64), mesh, rows).requires_grad_()
    weight = distribute_tensor(torch.rand(64), mesh, [Replicate(), *rest]).requires_grad_()
    ids = distribute_tensor(torch.ones(8, 16, dtype=torch.long), mesh, rows)
    tables = [distribute_tensor(torch.rand(96, 64), mesh, to).requires_grad_() for to in (columns, [*rest, Shard(0)])]
    logits = distribute_tensor(torch.rand(64, 96), mesh, rows).requires_grad_()
    labels = distribute_tensor(torch.ones(64, dtype=torch.long), mesh, rows)
    forwards: dict[str, Callable[[], Any]] = {
        "add": lambda: left + right,
        "add of a partial": lambda: partial + right,
        "mul": lambda: left * right,
        "mul of a partial": lambda: partial * right,
        "mm": lambda: left @ right,
        "mm of a partial": lambda: partial @ right,
        "layer norm": lambda: F.layer_norm(hidden, (64,), weight, weight),
        "embedding by columns": lambda: F.embedding(ids, tables[0]),
        "embedding by rows": lambda: F.embedding(ids, tables[1]),
        "cross entropy": lambda: F.cross_entropy(logits, labels),
    }
    for name, forward in forwards.items():
        yield name, forward
        yield f"{name}, backward", lambda forward=forward: forward().sum().backward()


def times(call: Call, profile: Profile) -> tuple[dict[str, float], dict[str, float]]:
    """(the default's, ours): median CPU seconds of each kind of call, and of entering and leaving."""
    call()
    result: tuple[dict[str, list[float]], ...] = (defaultdict(list), defaultdict(list))
    for number in range(FIRST_CALLS):
        for side in (number % 2, 1 - number % 2):
            forget_everything()
            context: Any = calibrated_planning(profile) if side else contextlib.nullcontext()
            with context:
                result[side]["first"].append(seconds(call))
                result[side]["warm"] += [seconds(call) for _ in range(WARM_CALLS)]
            for _ in range(WARM_CALLS if side else 0):
                start = time.thread_time()
                with calibrated_planning(profile):
                    inside = seconds(call)
                result[1]["anew"].append(inside)
                result[1]["entering"].append(time.thread_time() - start - inside)
    default, ours = [{kind: median(taken) for kind, taken in side.items()} for side in result]
    return default, ours


def forget_everything() -> None:
    """As a process begins: no sharding, plan, price or graph is known."""
    _clear_sharding_prop_cache()
    clear_redistribution_caches()
    forget_plans()
    forget_prices()
    graph_of.cache_clear()
    gc.collect()


def seconds(call: Call) -> float:
    """Thread CPU seconds of one call; backward runs on this thread too on CPU."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


if __name__ == "__main__":
    for what, ratio, limit in main():
        print(f"{what:<60} {ratio:6.2f}  (at most {limit})")
