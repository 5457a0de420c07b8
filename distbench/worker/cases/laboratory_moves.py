"""One pair of the laboratory, laid out by our own arithmetic, moved, and checked by the same arithmetic."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distbench.planning import Problem, State
from distbench.worker.cases.laboratory_layouts import Layout, plain
from distbench.worker.cases.laboratory_pairs import Pair
from distbench.worker.cases.redistribution import row_fields
from distbench.worker.rank.dtypes import TORCH_DTYPES
from distbench.worker.rank.opened_case import OpenedCase, first_difference
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import cut_in_order, cut_strided, parse_placement, part_of, tagged
from distbench.worker.redistribute.planners import PlannedRedistribution, exchange_between, planned_redistribution
from distbench.worker.torch_internals import OrderedPlacements, OrderedTensor

TURN = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class Experiment:
    """What one case does.

    Args:
        pair: what is redistributed.
        planner: a name out of `spec.planner_names.PLANNERS`.
        dtype: a name out of `spec.plan.DTYPES`.
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


@contextlib.contextmanager
def open_forward(experiment: Experiment) -> Iterator[OpenedCase]:
    """Time the redistribution itself."""
    context, pair, full = experiment.context(), experiment.pair, experiment.full
    local = shard_under(full, pair.source, context).to(context.device)
    with _moved(experiment, local, full, context) as planned:

        def check() -> str | None:
            return _difference(planned.local_result(), full, pair, context)

        fields = _fields(experiment, pair.source, pair.target, planned, context)
        yield OpenedCase(lambda _: planned.call(), check, fields=fields)


@contextlib.contextmanager
def open_backward(experiment: Experiment) -> Iterator[OpenedCase]:
    """Time the redistribution of the gradient: from the target back to the source, a Partial of it left a replica."""
    context, pair, full = experiment.context(), experiment.pair, experiment.full
    local = shard_under(full, pair.source, context).to(context.device)
    back = plain(["R" if text.startswith("P") else text for text in pair.source.placements], len(pair.shape))
    gradient = _dtensor(shard_under(full, pair.target, context).to(context.device), pair.target, full, context)
    source: Any = _dtensor(local, pair.source, full, context).requires_grad_()
    with planned_redistribution(experiment.planner, gradient, _placements(back), context, experiment.native) as planned:
        moved = source.redistribute(context.mesh, _placements(pair.target))

        def call() -> Any:
            return torch.autograd.grad(moved, source, gradient, retain_graph=True)[0]

        through_autograd = replace(planned, call=call)

        def check() -> str | None:
            return _difference(through_autograd.local_result(), full, replace(pair, target=back), context)

        fields = _fields(experiment, pair.target, back, planned, context)
        yield OpenedCase(lambda _: call(), check, fields=fields)


@contextlib.contextmanager
def _moved(
    experiment: Experiment, local: torch.Tensor, full: torch.Tensor, context: RankContext
) -> Iterator[PlannedRedistribution]:
    pair = experiment.pair
    before, after = pair.source.state, pair.target.state
    if experiment.planner == "direct":
        assert before is not None and after is not None
        yield exchange_between(before, after, pair.shape, local, context)
        return
    source: Any = _dtensor(local, pair.source, full, context)
    target: Any = _placements(pair.target)
    if before and after and not pair.source.is_strided and _needs_internals(pair):
        source, target = OrderedTensor(local, context.mesh, before, full), OrderedPlacements.of(after)
    with planned_redistribution(experiment.planner, source, target, context, experiment.native) as planned:
        yield planned


def _needs_internals(pair: Pair) -> bool:
    """Whether only DTensor's own operators can ask for it: `DTensor.redistribute` takes no order and no Partial."""
    return pair.source.has_own_order or pair.target.has_own_order or pair.target.has_partial


def shard_under(full: torch.Tensor, layout: Layout, context: RankContext) -> torch.Tensor:
    """This rank's shard of `full` under a layout; a Partial rank's part of it."""
    placements, at = _placements(layout), (context.mesh_shape, context.coordinate)
    if layout.is_strided or layout.state is None:
        return cut_strided(full, placements, *at).contiguous()
    return cut_in_order(part_of(full, placements, *at), layout.state.orders, *at).contiguous()


def _placements(layout: Layout) -> list[Any]:
    return [parse_placement(TURN.sub("", text)) for text in layout.placements]


def _dtensor(local: torch.Tensor, layout: Layout, full: torch.Tensor, context: RankContext) -> DTensor:
    whole: dict[str, Any] = {"shape": full.shape, "stride": full.stride()}
    return DTensor.from_local(local, context.mesh, _placements(layout), run_check=False, **whole)


def _difference(got: torch.Tensor, full: torch.Tensor, pair: Pair, context: RankContext) -> str | None:
    """What is wrong with this rank's result; parts of a Partial target are first reduced, one mesh dim at a time."""
    assert pair.target.state is not None
    wanted = cut_in_order(full, pair.target.state.orders, context.mesh_shape, context.coordinate)
    partials = pair.target.state.partials
    if partials:
        got = got.clone()
    for mesh_dim, _ in partials:
        dist.all_reduce(got, group=context.mesh.get_group(mesh_dim))
    got = got.cpu()
    if _rounds(pair.source.state, context) and got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-5):
        return None
    return first_difference(got, wanted)


def _rounds(source: State | None, context: RankContext) -> bool:
    """Whether averages are no exact numbers: over mesh dims whose sizes are no powers of two."""
    averaged = [context.mesh_shape[mesh_dim] for mesh_dim, op in (source.partials if source else ()) if op == "avg"]
    return any(size & (size - 1) for size in averaged)


def _fields(
    experiment: Experiment, before: Layout, after: Layout, planned: PlannedRedistribution, context: RankContext
) -> dict[str, Any]:
    problem = Problem(context.mesh_shape, experiment.pair.shape, TORCH_DTYPES[experiment.dtype].itemsize)
    sides = None
    if before.state and after.state and not (before.has_partial or after.has_partial):
        sides = before.state, after.state
    return row_fields(problem, sides, planned, context)
