"""The redistribution laboratory: suites of pairs on the mesh that is used, by every planner that can move them."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from distbench.costmodel.profile import Profile
from distbench.runs.run_file import DTYPE_BYTES
from distbench.spec import Laboratory, Scenario, UserError
from distbench.spec.layouts import Placement, format_placements
from distbench.spec.planner_names import PLANNERS
from distbench.spec.scenario import LABORATORY_SUITES
from distbench.worker.cases.laboratory_pairs import groups_of, sample
from distbench.worker.cases.redistributed_pair import (
    Experiment,
    check_planners,
    dtensor_under,
    open_pair,
    opened,
    redistribute_case,
    row_fields,
    torch_placements,
)
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.planners import planned_redistribution
from distbench.worker.redistribute.tensor_layout import Layout, Pair
from distbench.worker.torch_internals import flatten_mesh

# Suites that are about speed too run at every size, the others at the first.
AT_EVERY_SIZE = ("pairs", "backward")


def laboratory_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """One case for each pair and planner; the planners of a pair run next to each other, in random order.

    Raises:
        UserError: a suite, planner or dtype that is unknown, or calibrated without a profile.
    """
    order = random.Random(context.seed)
    for lab in scenario.laboratories:
        if lab.suite not in LABORATORY_SUITES:
            raise UserError(f"suite {lab.suite!r} is unknown; use {', '.join(LABORATORY_SUITES)}")
        check_planners(lab.planners, lab.dtype, context.profile)
        more, when_opened = _params_of(lab, context), lambda: context
        if lab.suite == "flattened":
            when_opened = _with_flattened_mesh(context)
        for pair in pairs_of(lab, context.mesh_shape, context.seed):
            planners = planners_for(lab, pair, context.profile)
            order.shuffle(planners)
            for name in planners:
                experiment = Experiment(pair, name, lab.dtype, lab.native_all_to_all, when_opened)
                opener = open_backward if lab.suite == "backward" else open_pair
                yield redistribute_case(experiment, lab.suite, more, opener)


def _with_flattened_mesh(context: RankContext) -> Callable[[], RankContext]:
    """The context on a mesh that has a flattened one as well.

    It has groups of its own and is made when its first case opens, by all ranks, so that no other case ever sees one.
    """

    @cache
    def made() -> RankContext:
        mesh = init_device_mesh(context.device.type, context.mesh_shape, mesh_dim_names=context.mesh_dims)
        flatten_mesh(mesh, context.mesh_dims)
        return replace(context, mesh=mesh)

    return made


def pairs_of(lab: Laboratory, mesh_shape: tuple[int, ...], seed: int) -> list[Pair]:
    """The pairs of a suite at all of its sizes; the same choice at each size and on each rank."""
    sizes = lab.sizes_bytes if lab.suite in AT_EVERY_SIZE else lab.sizes_bytes[:1]
    found: list[Pair] = []
    for size_bytes in sizes:
        groups = groups_of(lab.suite, mesh_shape, size_bytes // DTYPE_BYTES[lab.dtype])
        found += sample(groups, lab.max_pairs, mesh_shape, f"{seed}/{lab.suite}")
    return found


def planners_for(lab: Laboratory, pair: Pair, profile: Profile | None) -> list[str]:
    """The planners that can move a pair: those asked for, or all.

    calibrated needs a profile; direct adds nothing up and has no backward; neither knows a strided shard beyond shard
    orders. Those torch plans greedily whatever is asked for, and they may kill ranks: once is enough.
    """
    decodable = pair.source.state is not None
    able = {
        "min_cost": decodable,
        "calibrated": profile is not None and decodable,
        "direct": decodable and lab.suite != "backward" and not (pair.source.has_partial or pair.target.has_partial),
    }
    return [name for name in lab.planners or PLANNERS if able.get(name, True)]


def _params_of(lab: Laboratory, context: RankContext) -> dict[str, Any]:
    """What the cases of a suite have besides the parameters of every redistribution."""
    flattened = {"flattened": list(context.mesh_dims)} if lab.suite == "flattened" else {}
    direction = "backward" if lab.suite == "backward" else "forward"
    return {"suite": lab.suite, "direction": direction, "mesh_shape": list(context.mesh_shape), **flattened}


@contextlib.contextmanager
def open_backward(experiment: Experiment) -> Iterator[OpenedCase]:
    """Time the redistribution of the gradient: from the target back to the source, a Partial of it left a replica."""
    context, pair, full = experiment.context(), experiment.pair, experiment.full
    kept = (Placement() if placement.reduce_op else placement for placement in pair.source.placements)
    back = Layout.of(format_placements(kept), len(pair.shape))
    gradient = dtensor_under(full, pair.target, context)
    source = dtensor_under(full, pair.source, context).requires_grad_()
    target = torch_placements(back)
    with planned_redistribution(experiment.planner, gradient, target, context, experiment.native) as planned:
        moved = source.redistribute(context.mesh, torch_placements(pair.target))

        def call() -> Any:
            return torch.autograd.grad(moved, source, gradient, retain_graph=True)[0]

        returned = Pair(pair.target, back, pair.shape)
        fields = row_fields(returned, experiment.dtype, planned, context)
        yield opened(replace(planned, call=call), experiment, returned, context, fields)
