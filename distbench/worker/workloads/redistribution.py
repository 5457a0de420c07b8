"""DTensor redistributions of one tensor over the whole mesh, by torch's planners and ours."""

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from distbench.costmodel import Profile
from distbench.planning import Problem, State, least_received_bytes, parse_state
from distbench.results import DTYPE_BYTES, Case
from distbench.spec import Redistributions, Scenario, UserError
from distbench.spec.plan import PLANNERS
from distbench.worker.bench import Bench, Prepared, first_difference
from distbench.worker.dtypes import TORCH_DTYPES, shape_text
from distbench.worker.place import Place
from distbench.worker.planners import Movement, movement
from distbench.worker.sharding import cut, parse_placement, source_shard, tagged

Placements = tuple[str, ...]
TORCHS = ("greedy", "min_cost")


def redistribution_benches(scenario: Scenario, place: Place) -> Iterator[Bench]:
    """One bench for each pair and planner; the planners of a pair run next to each other, in random order.

    Raises:
        UserError: a planner, dtype or placement that is unknown, or a pair of another length than the mesh.
    """
    order = random.Random(place.seed)
    for sweep in scenario.redistributions:
        _check_sweep(sweep, place)
        for source, target in sweep.pairs:
            planners = planners_of(sweep, source, place.profile)
            order.shuffle(planners)
            for name in planners:
                yield _bench(sweep, source, target, name, place)


def planners_of(sweep: Redistributions, source: Placements, profile: Profile | None) -> list[str]:
    """The planners asked for; or torch's, and with a profile also ours, direct only where it can move the pair."""
    if sweep.planners:
        return list(sweep.planners)
    ours = [] if profile is None else ["calibrated", "direct"]
    return [*TORCHS, *(name for name in ours if name != "direct" or not _has_partial(source))]


def _has_partial(placements: Placements) -> bool:
    return any(text.startswith("P") for text in placements)


def _check_sweep(sweep: Redistributions, place: Place) -> None:
    if sweep.dtype not in TORCH_DTYPES:
        raise UserError(f"dtype {sweep.dtype!r} is unknown; use {', '.join(TORCH_DTYPES)}")
    for name in sweep.planners:
        if name not in PLANNERS:
            raise UserError(f"planner {name!r} is unknown; use {', '.join(PLANNERS)}")
        if name == "calibrated" and place.profile is None:
            raise UserError("planner calibrated plans by a profile; write one with distbench calibrate, give --profile")
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
    how = f"{name}+native" if sweep.native_all_to_all else name
    params = {
        "source": "".join(source),
        "target": "".join(target),
        "planner": how,
        "native_all_to_all": sweep.native_all_to_all,
        "dtype": sweep.dtype,
        "shape": list(sweep.shape),
    }
    case = Case(f"redistribute/{where}/{pair}/{how}", "redistribute", params)
    return Bench(case, partial(_open, sweep, source, target, name, place))


@contextlib.contextmanager
def _open(
    sweep: Redistributions, source: Placements, target: Placements, name: str, place: Place
) -> Iterator[Prepared]:
    full = tagged(sweep.shape, TORCH_DTYPES[sweep.dtype])
    after = [parse_placement(text) for text in target]
    dtensor = dtensor_of(full, source, place)
    with movement(name, dtensor, after, place, sweep.native_all_to_all) as planned:

        def redistribute(stamp: Callable[[], None] | None = None) -> Any:
            return planned.call()

        def check() -> str | None:
            wanted = cut(full, after, place.mesh_shape, place.coordinate)
            return first_difference(planned.local_result().cpu(), wanted)

        yield Prepared(redistribute, check, fields=_fields(sweep, source, target, planned, place))


def dtensor_of(full: Any, source: Placements, place: Place) -> Any:
    """The DTensor whose value is `full`, laid out by our own arithmetic.

    Args:
        full: the global tensor.
        source: one placement a mesh dim.
        place: this rank's place.
    """
    from torch.distributed.tensor import DTensor

    before = [parse_placement(text) for text in source]
    local = source_shard(full, before, place.mesh_shape, place.coordinate).to(place.device)
    return DTensor.from_local(local, place.mesh, before, run_check=False, shape=full.shape, stride=full.stride())


def _fields(
    sweep: Redistributions, source: Placements, target: Placements, planned: Movement, place: Place
) -> dict[str, Any]:
    sides = None
    if not _has_partial(source) and not _has_partial(target):
        before, after = (parse_state("".join(placements), len(sweep.shape)) for placements in (source, target))
        sides = before, after
    return row_fields(Problem(place.mesh_shape, sweep.shape, DTYPE_BYTES[sweep.dtype]), sides, planned, place)


def row_fields(problem: Problem, sides: tuple[State, State] | None, planned: Movement, place: Place) -> dict[str, Any]:
    """What a redistribution's row says beside its times.

    Args:
        problem: the tensor on its mesh.
        sides: the layouts before and after, where the receive lower bound is known: no Partial on either side.
        planned: how it is moved.
        place: this rank's place.
    """
    cold_s, warm_s = planned.planning_s
    bound = least_received_bytes(problem, *sides) if sides else None
    return {
        "payload_bytes": problem.num_bytes,
        "wire_bytes": planned.wire_bytes,
        "group_size": place.mesh.size(),
        "mesh_dim": "x".join(place.mesh_dims),
        "backend_op": "+".join(planned.executed_as) or "none",
        "counters": {
            "path": planned.path,
            "num_collectives": len(planned.collectives),
            "wire_bytes_executed": planned.wire_bytes_executed,
            "lower_bound_bytes": bound,
            "lower_bound_ratio": planned.wire_bytes_executed / bound if bound else None,
            "planning_cold_s": cold_s,
            "planning_warm_s": warm_s,
            "predicted_s": planned.predicted_s,
            **planned.facts,
        },
    }
