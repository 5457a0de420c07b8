"""DTensor redistributions of one tensor over the whole mesh, by torch's planners and ours."""

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from distbench.costmodel.profile import Profile
from distbench.planning import Problem, State, least_received_bytes, parse_state
from distbench.runs.run_file import DTYPE_BYTES, Case
from distbench.spec import Redistributions, Scenario, UserError
from distbench.spec.planner_names import PLANNERS, TORCH_PLANNERS
from distbench.worker.rank.dtypes import TORCH_DTYPES, shape_text
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase, first_difference
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import cut, parse_placement, source_shard, tagged
from distbench.worker.redistribute.planners import PlannedRedistribution, planned_redistribution

Placements = tuple[str, ...]


def redistribution_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """One case for each pair and planner; the planners of a pair run next to each other, in random order.

    Raises:
        UserError: a planner, dtype or placement that is unknown, or a pair of another length than the mesh.
    """
    order = random.Random(context.seed)
    for sweep in scenario.redistributions:
        _check_sweep(sweep, context)
        for source, target in sweep.pairs:
            planners = planners_of(sweep, source, context.profile)
            order.shuffle(planners)
            for name in planners:
                yield _case_spec(sweep, source, target, name, context)


def planners_of(sweep: Redistributions, source: Placements, profile: Profile | None) -> list[str]:
    """The planners asked for; or torch's, and with a profile also ours, direct only where it can move the pair."""
    if sweep.planners:
        return list(sweep.planners)
    ours = [] if profile is None else ["calibrated", "direct"]
    return [*TORCH_PLANNERS, *(name for name in ours if name != "direct" or not _has_partial(source))]


def _has_partial(placements: Placements) -> bool:
    return any(text.startswith("P") for text in placements)


def _check_sweep(sweep: Redistributions, context: RankContext) -> None:
    if sweep.dtype not in TORCH_DTYPES:
        raise UserError(f"dtype {sweep.dtype!r} is unknown; use {', '.join(TORCH_DTYPES)}")
    for name in sweep.planners:
        if name not in PLANNERS:
            raise UserError(f"planner {name!r} is unknown; use {', '.join(PLANNERS)}")
        if name == "calibrated" and context.profile is None:
            raise UserError("planner calibrated plans by a profile; write one with distbench calibrate, give --profile")
    for pair in sweep.pairs:
        for placements in pair:
            if len(placements) != len(context.mesh_dims):
                text = "".join(placements)
                raise UserError(
                    f"placements {text} name {len(placements)} mesh dims, the mesh has {len(context.mesh_dims)}"
                )
            for text in placements:
                dim = getattr(parse_placement(text), "dim", 0)
                if dim >= len(sweep.shape):
                    raise UserError(f"placement {text} shards a tensor dim that shape {sweep.shape} does not have")


def _case_spec(
    sweep: Redistributions, source: Placements, target: Placements, name: str, context: RankContext
) -> CaseSpec:
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
    return CaseSpec(case, partial(_open, sweep, source, target, name, context))


@contextlib.contextmanager
def _open(
    sweep: Redistributions, source: Placements, target: Placements, name: str, context: RankContext
) -> Iterator[OpenedCase]:
    full = tagged(sweep.shape, TORCH_DTYPES[sweep.dtype])
    after = [parse_placement(text) for text in target]
    dtensor = dtensor_of(full, source, context)
    with planned_redistribution(name, dtensor, after, context, sweep.native_all_to_all) as planned:

        def redistribute(stamp: Callable[[], None] | None = None) -> Any:
            return planned.call()

        def check() -> str | None:
            wanted = cut(full, after, context.mesh_shape, context.coordinate)
            return first_difference(planned.local_result().cpu(), wanted)

        yield OpenedCase(redistribute, check, fields=_fields(sweep, source, target, planned, context))


def dtensor_of(full: Any, source: Placements, context: RankContext) -> Any:
    """The DTensor whose value is `full`, laid out by our own arithmetic.

    Args:
        full: the global tensor.
        source: one placement a mesh dim.
        context: this rank's context.
    """
    from torch.distributed.tensor import DTensor

    before = [parse_placement(text) for text in source]
    local = source_shard(full, before, context.mesh_shape, context.coordinate).to(context.device)
    return DTensor.from_local(local, context.mesh, before, run_check=False, shape=full.shape, stride=full.stride())


def _fields(
    sweep: Redistributions, source: Placements, target: Placements, planned: PlannedRedistribution, context: RankContext
) -> dict[str, Any]:
    sides = None
    if not _has_partial(source) and not _has_partial(target):
        before, after = (parse_state("".join(placements), len(sweep.shape)) for placements in (source, target))
        sides = before, after
    return row_fields(Problem(context.mesh_shape, sweep.shape, DTYPE_BYTES[sweep.dtype]), sides, planned, context)


def row_fields(
    problem: Problem, sides: tuple[State, State] | None, planned: PlannedRedistribution, context: RankContext
) -> dict[str, Any]:
    """What a redistribution's row says beside its times.

    Args:
        problem: the tensor on its mesh.
        sides: the layouts before and after, where the receive lower bound is known: no Partial on either side.
        planned: how it is moved.
        context: this rank's context.
    """
    cold_s, warm_s = planned.planning_s
    bound = least_received_bytes(problem, *sides) if sides else None
    return {
        "payload_bytes": problem.num_bytes,
        "wire_bytes": planned.wire_bytes,
        "group_size": context.mesh.size(),
        "mesh_dim": "x".join(context.mesh_dims),
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
