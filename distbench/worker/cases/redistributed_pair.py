"""One pair of layouts moved by one planner: laid out by our own arithmetic, timed, and checked by the same arithmetic.

Redistributions, the laboratory and calibration all open their cases here.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distbench.costmodel.lines import DIRECT
from distbench.planning import Problem, least_received_bytes
from distbench.runs.run_file import Case
from distbench.spec.planner_names import NATIVE
from distbench.worker.rank.dtypes import TORCH_DTYPES, shape_text
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase, first_difference
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import (
    dtensor_under,
    rounding_of,
    shard_under,
    tagged,
    torch_placements,
)
from distbench.worker.redistribute.planners import PlannedRedistribution, exchange_between, planned_redistribution
from distbench.worker.redistribute.tensor_layout import Pair
from distbench.worker.torch_internals import OrderedPlacements, OrderedTensor, Unsupported

REDUCTIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Experiment:
    """What one case does; `native` runs all-to-alls as such on CPU, the context is asked for when the case opens.

    `known` has what its first opening found and later ones need not measure again.
    """

    pair: Pair
    planner: str
    dtype: str
    native: bool
    context: Callable[[], RankContext]
    known: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def full(self) -> torch.Tensor:
        """The value that moves."""
        return tagged(self.pair.shape, TORCH_DTYPES[self.dtype])


FieldsOf = Callable[[Experiment, PlannedRedistribution, RankContext], dict[str, Any]]


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
    where = f"redistribute/{dtype}{shape_text(pair.shape)}/{pair}" + (f"/{suite}" if suite else "")
    case = Case(f"{where}/{how}", "redistribute", params)
    return CaseSpec(case, partial(open_case or open_pair, experiment), group=where)


def row_fields(experiment: Experiment, planned: PlannedRedistribution, context: RankContext) -> dict[str, Any]:
    """What a redistribution's row says besides its times; the lower bound is known where neither side has a Partial."""
    pair = experiment.pair
    problem = Problem(context.mesh_shape, pair.shape, TORCH_DTYPES[experiment.dtype].itemsize)
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


@contextlib.contextmanager
def open_pair(experiment: Experiment, fields_of: FieldsOf = row_fields) -> Iterator[OpenedCase]:
    """Time the redistribution itself."""
    context = experiment.context()
    with planned_pair(experiment, context) as planned:
        experiment.known["planning_s"] = planned.planning_s
        yield opened(experiment, planned, context, fields_of)


def opened(
    experiment: Experiment, planned: PlannedRedistribution, context: RankContext, fields_of: FieldsOf = row_fields
) -> OpenedCase:
    """A planned redistribution, ready to run, whose result is checked against the experiment's target."""
    full_bytes = math.prod(experiment.pair.shape) * TORCH_DTYPES[experiment.dtype].itemsize
    return OpenedCase(
        lambda _: planned.call(),
        lambda: difference(planned.local_result(), experiment.full, experiment.pair, context),
        fields=fields_of(experiment, planned, context),
        stays_open=True,
        held_bytes=2 * full_bytes,
        pause=planned.switch.off,
        resume=planned.switch.on,
        starts_on=dist.group.WORLD,
    )


@contextlib.contextmanager
def planned_pair(experiment: Experiment, context: RankContext) -> Iterator[PlannedRedistribution]:
    """Plan an experiment's redistribution, and keep what it needs switched on until it has been timed."""
    pair, full = experiment.pair, experiment.full
    before, after = pair.source.state, pair.target.state
    source, target = dtensor_under(full, pair.source, context), torch_placements(pair.target)
    if experiment.planner == DIRECT:
        if before is None or after is None:
            raise Unsupported("direct: strided shards")
        yield exchange_between(
            before, after, pair.shape, source.to_local(), context, experiment.known.get("planning_s")
        )
        return
    # `DTensor.redistribute` takes no order and no Partial; DTensor's own operators do.
    needs_internals = pair.source.has_own_order or pair.target.has_own_order or pair.target.has_partial
    if before and after and not pair.source.is_strided and needs_internals:
        source = OrderedTensor(source.to_local(), context.mesh, before, full)
        target = OrderedPlacements.of(after)
    known = experiment.known.get("planning_s")
    with planned_redistribution(experiment.planner, source, target, context, experiment.native, known) as planned:
        yield planned


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
