"""DTensor redistributions of one tensor over the whole mesh, by torch's own planners."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from distbench.results import DTYPE_BYTES, Case, busbw_factor, median
from distbench.spec import Redistributions, Scenario, UserError
from distbench.spec.plan import PLANNERS
from distbench.worker.bench import Bench, Prepared, first_difference
from distbench.worker.dtypes import TORCH_DTYPES, shape_text
from distbench.worker.place import Place
from distbench.worker.sharding import cut, parse_placement, source_shard, tagged
from distbench.worker.torch_internals import (
    PathStep,
    clear_redistribution_caches,
    plan_only,
    plan_path,
    planner,
)

Placements = tuple[str, ...]
WARM_PLANS = 20


def redistribution_benches(scenario: Scenario, place: Place) -> Iterator[Bench]:
    """One bench for each pair and planner; the planners of a pair run next to each other, in random order.

    Raises:
        UserError: a planner, dtype or placement that is unknown, or a pair of another length than the mesh.
    """
    order = random.Random(place.seed)
    for sweep in scenario.redistributions:
        _check_sweep(sweep, place)
        for source, target in sweep.pairs:
            planners = list(sweep.planners)
            order.shuffle(planners)
            for name in planners:
                yield _bench(sweep, source, target, name, place)


def _check_sweep(sweep: Redistributions, place: Place) -> None:
    if sweep.dtype not in TORCH_DTYPES:
        raise UserError(f"dtype {sweep.dtype!r} is unknown; use {', '.join(TORCH_DTYPES)}")
    for name in sweep.planners:
        if name not in PLANNERS:
            raise UserError(f"planner {name!r} is unknown; use {', '.join(PLANNERS)}")
    for pair in sweep.pairs:
        for placements in pair:
            if len(placements) != len(place.mesh_dims):
                text = "".join(placements)
                raise UserError(
                    f"placements {text} name {len(placements)} mesh dims, the mesh has {len(place.mesh_dims)}"
                )
            for text in placements:
                dim = getattr(parse_placement(text), "dim", 0)
                if dim >= len(sweep.shape):
                    raise UserError(f"placement {text} shards a tensor dim that shape {sweep.shape} does not have")


def _bench(sweep: Redistributions, source: Placements, target: Placements, name: str, place: Place) -> Bench:
    where = f"{sweep.dtype}{shape_text(sweep.shape)}"
    pair = f"{''.join(source)}->{''.join(target)}"
    params = {
        "source": "".join(source),
        "target": "".join(target),
        "planner": name,
        "dtype": sweep.dtype,
        "shape": list(sweep.shape),
    }
    case = Case(f"redistribute/{where}/{pair}/{name}", "redistribute", params)
    return Bench(case, partial(_open, sweep, source, target, name, place))


@contextlib.contextmanager
def _open(
    sweep: Redistributions, source: Placements, target: Placements, name: str, place: Place
) -> Iterator[Prepared]:
    from torch.distributed.tensor import DTensor

    full = tagged(sweep.shape, TORCH_DTYPES[sweep.dtype])
    before = [parse_placement(text) for text in source]
    after = [parse_placement(text) for text in target]
    local = source_shard(full, before, place.mesh_shape, place.coordinate).to(place.device)
    dtensor = DTensor.from_local(local, place.mesh, before, run_check=False, shape=full.shape, stride=full.stride())

    def redistribute(stamp: Callable[[], None] | None = None) -> Any:
        return dtensor.redistribute(place.mesh, after)

    def check() -> str | None:
        wanted = cut(full, after, place.mesh_shape, place.coordinate)
        return first_difference(redistribute().to_local().cpu(), wanted)

    with planner(name):
        cold_s, warm_s = planning_seconds(plan_only(dtensor, after))
        path, steps = plan_path(dtensor, after)
        payload_bytes = full.numel() * DTYPE_BYTES[sweep.dtype]
        collectives = [step.op for step in steps if step.op and step.group_size > 1]
        fields = {
            "payload_bytes": payload_bytes,
            "wire_bytes": wire_bytes(steps, DTYPE_BYTES[sweep.dtype]),
            "group_size": place.mesh.size(),
            "mesh_dim": "x".join(place.mesh_dims),
            "backend_op": "+".join(_executed_as(op, place) for op in collectives) or "none",
            "counters": {
                "path": path,
                "num_collectives": len(collectives),
                "wire_bytes_executed": wire_bytes_executed(steps, DTYPE_BYTES[sweep.dtype], place),
                "planning_cold_s": cold_s,
                "planning_warm_s": warm_s,
            },
        }
        yield Prepared(redistribute, check, fields=fields)


def planning_seconds(plan: Callable[[], object]) -> tuple[float, float]:
    """Thread CPU seconds to plan with empty caches, and again from them (the median of several)."""
    clear_redistribution_caches()
    start = time.thread_time()
    plan()
    cold_s = time.thread_time() - start
    warm = []
    for _ in range(WARM_PLANS):
        start = time.thread_time()
        plan()
        warm.append(time.thread_time() - start)
    return cold_s, median(warm)


def wire_bytes(steps: Sequence[PathStep], itemsize: int) -> int:
    """Bytes that one rank must send along the path, each step counted as its ring algorithm would."""
    return round(sum(_sent(step, step.op) for step in steps) * itemsize)


def wire_bytes_executed(steps: Sequence[PathStep], itemsize: int, place: Place) -> int:
    """The same, each step counted as the backend runs it: on CPU an all-to-all is an all-gather and a cut."""
    return round(sum(_sent(step, _executed_as(step.op, place) if step.op else None) for step in steps) * itemsize)


def _executed_as(op: str, place: Place) -> str:
    if place.device.type == "cpu" and op == "all_to_all":
        return "all_gather"
    if place.backend == "gloo" and op == "reduce_scatter":
        return "all_reduce"
    return op


def _sent(step: PathStep, op: str | None) -> float:
    if op is None:
        return 0.0
    share = busbw_factor(op, step.group_size) * step.logical_numel
    return share / step.group_size if op == "all_to_all" else share
