"""One pair of layouts moved by one planner: laid out by our own arithmetic, timed, and checked by the same arithmetic.

Redistributions, the laboratory and calibration all open their cases here.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distbench.costmodel.lines import DIRECT
from distbench.costmodel.profile import Profile
from distbench.planning import Problem, least_received_bytes
from distbench.runs.run_file import Case
from distbench.spec import UserError
from distbench.spec.planner_names import NATIVE, PLANNERS
from distbench.worker.rank.dtypes import TORCH_DTYPES, shape_text
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase, first_difference
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import (
    part_of,
    rounding_of,
    shard_in_order,
    strided_shard_of,
    tagged,
    torch_placement,
)
from distbench.worker.redistribute.planners import PlannedRedistribution, exchange_between, planned_redistribution
from distbench.worker.redistribute.tensor_layout import Layout, Pair
from distbench.worker.torch_internals import OrderedPlacements, OrderedTensor, Unsupported

REDUCTIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Experiment:
    """What one case does.

    Args:
        pair: what is redistributed.
        planner: a name out of `spec.planner_names.PLANNERS`.
        dtype: a name out of `spec.scenario.DTYPES`.
        native: on CPU, run all-to-alls as such.
        context: this rank's context, asked for when the case opens.
    """

    pair: Pair
    planner: str
    dtype: str
    native: bool
    context: Callable[[], RankContext]

    @property
    def full(self) -> torch.Tensor:
        """The value that moves."""
        return tagged(self.pair.shape, TORCH_DTYPES[self.dtype])


FieldsOf = Callable[[PlannedRedistribution, RankContext], dict[str, Any]]


def check_planners(planners: Sequence[str], dtype: str, profile: Profile | None) -> None:
    """Refuse what a sweep cannot ask for.

    Raises:
        UserError: a planner or dtype that is unknown, or calibrated without a profile.
    """
    if dtype not in TORCH_DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; use {', '.join(TORCH_DTYPES)}")
    for name in planners:
        if name not in PLANNERS:
            raise UserError(f"planner {name!r} is unknown; use {', '.join(PLANNERS)}")
        if name == "calibrated" and profile is None:
            raise UserError("planner calibrated plans by a profile; write one with distbench calibrate, give --profile")


def redistribute_case(
    experiment: Experiment, suite: str = "", more: Mapping[str, Any] | None = None, open_case: Any = None
) -> CaseSpec:
    """The case of an experiment, of a suite of the laboratory if any, with more parameters and an opener of its own."""
    pair, dtype, native = experiment.pair, experiment.dtype, experiment.native
    how = f"{experiment.planner}{NATIVE}" if native else experiment.planner
    params = {
        "source": str(pair.source),
        "target": str(pair.target),
        "planner": how,
        "native_all_to_all": native,
        "dtype": dtype,
        "shape": list(pair.shape),
        **(more or {}),
    }
    where = f"redistribute/{dtype}{shape_text(pair.shape)}/{pair}"
    case = Case(f"{where}/{suite}/{how}" if suite else f"{where}/{how}", "redistribute", params)
    return CaseSpec(case, partial(open_case or open_pair, experiment))


@contextlib.contextmanager
def open_pair(experiment: Experiment, fields_of: FieldsOf | None = None) -> Iterator[OpenedCase]:
    """Time the redistribution itself; its row's fields are `row_fields` where none are given."""
    context = experiment.context()
    with planned_pair(experiment, context) as planned:
        if fields_of is None:
            fields_of = partial(row_fields, experiment.pair, experiment.dtype)
        fields = fields_of(planned, context)
        yield opened(planned, experiment, experiment.pair, context, fields)


def opened(
    planned: PlannedRedistribution, experiment: Experiment, pair: Pair, context: RankContext, fields: dict[str, Any]
) -> OpenedCase:
    """A planned redistribution, ready to run, whose result is checked against the pair's target."""

    def check() -> str | None:
        return difference(planned.local_result(), experiment.full, pair, context)

    return OpenedCase(lambda _: planned.call(), check, fields=fields)


@contextlib.contextmanager
def planned_pair(experiment: Experiment, context: RankContext) -> Iterator[PlannedRedistribution]:
    """Plan an experiment's redistribution, and keep what it needs switched on until it has been timed.

    Raises:
        Unsupported: the planner cannot move the pair.
    """
    pair, full = experiment.pair, experiment.full
    before, after = pair.source.state, pair.target.state
    source, target = dtensor_under(full, pair.source, context), torch_placements(pair.target)
    if experiment.planner == DIRECT:
        if before is None or after is None:
            raise Unsupported("direct: strided shards")
        yield exchange_between(before, after, pair.shape, source.to_local(), context)
        return
    if before and after and not pair.source.is_strided and _needs_internals(pair):
        source = OrderedTensor(source.to_local(), context.mesh, before, full)
        target = OrderedPlacements.of(after)
    with planned_redistribution(experiment.planner, source, target, context, experiment.native) as planned:
        yield planned


def _needs_internals(pair: Pair) -> bool:
    """Whether only DTensor's own operators can ask for it: `DTensor.redistribute` takes no order and no Partial."""
    return pair.source.has_own_order or pair.target.has_own_order or pair.target.has_partial


def torch_placements(layout: Layout) -> Any:
    """torch's placements, one a mesh dim, which say nothing of shard orders."""
    return [torch_placement(placement) for placement in layout.placements]


def shard_under(full: torch.Tensor, layout: Layout, context: RankContext) -> torch.Tensor:
    """This rank's shard of `full` under a layout."""
    at = context.mesh_shape, context.coordinate
    if layout.is_strided or layout.state is None:
        return strided_shard_of(full, torch_placements(layout), *at).contiguous()
    return shard_in_order(full, layout.state.orders, *at).contiguous()


def dtensor_under(full: torch.Tensor, layout: Layout, context: RankContext) -> Any:
    """The DTensor whose value is `full`, laid out by our own arithmetic; a Partial rank holds its part."""
    placements = torch_placements(layout)
    part = part_of(full, placements, context.mesh_shape, context.coordinate)
    local = shard_under(part, layout, context).to(context.device)
    return DTensor.from_local(local, context.mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def difference(got: torch.Tensor, full: torch.Tensor, pair: Pair, context: RankContext) -> str | None:
    """What is wrong with this rank's local result of moving `full`; None when it is right.

    Parts of a Partial target are first reduced, one mesh dim at a time: all ranks must call this together.
    """
    for mesh_dim, placement in enumerate(pair.target.placements):
        if placement.reduce_op:
            got = got.clone()
            op = REDUCTIONS.get(placement.reduce_op, dist.ReduceOp.SUM)
            dist.all_reduce(got, op, group=context.mesh.get_group(mesh_dim))
            if placement.reduce_op == "avg":
                got /= context.mesh_shape[mesh_dim]
    got, wanted = got.cpu(), shard_under(full, pair.target, context)
    sides = torch_placements(pair.source), torch_placements(pair.target)
    rounding = rounding_of(*sides, context.mesh_shape, full.dtype)
    if rounding and got.shape == wanted.shape and torch.allclose(got, wanted, rtol=0, atol=rounding):
        return None
    return first_difference(got, wanted)


def row_fields(pair: Pair, dtype: str, planned: PlannedRedistribution, context: RankContext) -> dict[str, Any]:
    """What a redistribution's row says besides its times; the lower bound is known where neither side has a Partial."""
    problem = Problem(context.mesh_shape, pair.shape, TORCH_DTYPES[dtype].itemsize)
    before, after = pair.source.state, pair.target.state
    bound = None
    if before and after and not (pair.source.has_partial or pair.target.has_partial):
        bound = least_received_bytes(problem, before, after)
    cold_s, warm_s = planned.planning_s
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
