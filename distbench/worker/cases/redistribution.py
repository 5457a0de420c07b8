"""DTensor redistributions over the whole mesh: sweeps of pairs, and the laboratory's suites, each by every planner."""

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
from distbench.spec import Laboratory, Redistributions, Scenario, UserError
from distbench.spec.layouts import Placement, format_placements
from distbench.spec.planner_names import PLANNERS, TORCH_PLANNERS
from distbench.spec.scenario import LABORATORY_SUITES
from distbench.worker.cases.laboratory_pairs import groups_of, sample
from distbench.worker.cases.redistributed_pair import (
    Experiment,
    open_pair,
    opened,
    redistribute_case,
)
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import dtensor_under, parse_placement, torch_placements
from distbench.worker.redistribute.planners import check_planners, planned_redistribution
from distbench.worker.redistribute.tensor_layout import Layout, Pair
from distbench.worker.torch_internals import flatten_mesh

# Suites that are about speed too run at every size, the others at the first.
AT_EVERY_SIZE = ("pairs", "backward")


def redistribution_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """One case for each pair and planner; the planners of a pair run next to each other, in random order.

    UserError for a planner, dtype or placement that is unknown, or a pair of another length than the mesh.
    """
    order = random.Random(context.seed)
    for sweep in scenario.redistributions:
        check_planners(sweep.planners, sweep.dtype, context.profile)
        for source, target in sweep.pairs:
            for placements in (source, target):
                _check_placements(placements, sweep.shape, context)
            pair = Pair.of("".join(source), "".join(target), sweep.shape)
            planners = planners_of(sweep, pair, context.profile)
            order.shuffle(planners)
            for name in planners:
                experiment = Experiment(pair, name, sweep.dtype, sweep.native_all_to_all, lambda: context)
                yield redistribute_case(experiment)


def planners_of(sweep: Redistributions, pair: Pair, profile: Profile | None) -> list[str]:
    """The planners asked for; or torch's, and with a profile also ours, direct only where it can move the pair."""
    if sweep.planners:
        return list(sweep.planners)
    ours = [] if profile is None else ["calibrated"] if pair.target.has_partial else ["calibrated", "direct"]
    return [*TORCH_PLANNERS, *ours]


def _check_placements(placements: tuple[str, ...], shape: tuple[int, ...], context: RankContext) -> None:
    if len(placements) != len(context.mesh_dims):
        text = "".join(placements)
        raise UserError(f"placements {text} name {len(placements)} mesh dims, the mesh has {len(context.mesh_dims)}")
    for text in placements:
        if getattr(parse_placement(text), "dim", 0) >= len(shape):
            raise UserError(f"placement {text} shards a tensor dim that shape {shape} does not have")


def laboratory_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """One case for each pair and planner; the planners of a pair run next to each other, in random order.

    UserError for a suite, planner or dtype that is unknown, or calibrated without a profile.
    """
    order = random.Random(context.seed)
    for lab in scenario.laboratories:
        if lab.suite not in LABORATORY_SUITES:
            raise UserError(f"suite {lab.suite!r} is unknown; use {', '.join(LABORATORY_SUITES)}")
        check_planners(lab.planners, lab.dtype, context.profile)
        is_flattened, is_backward = lab.suite == "flattened", lab.suite == "backward"
        more = {
            "suite": lab.suite,
            "direction": "backward" if is_backward else "forward",
            "mesh_shape": list(context.mesh_shape),
            **({"flattened": list(context.mesh_dims)} if is_flattened else {}),
        }
        when_opened = _with_flattened_mesh(context) if is_flattened else lambda: context
        for pair in pairs_of(lab, context.mesh_shape, context.seed):
            planners = planners_for(lab, pair, context.profile)
            order.shuffle(planners)
            for name in planners:
                experiment = Experiment(pair, name, lab.dtype, lab.native_all_to_all, when_opened)
                yield redistribute_case(experiment, lab.suite, more, open_backward if is_backward else open_pair)


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

    calibrated needs a profile; direct makes no Partial and has no backward; neither knows a strided shard beyond shard
    orders. Those torch plans greedily whatever is asked for, and they may kill ranks: once is enough.
    """
    decodable = pair.source.state is not None
    able = {
        "min_cost": decodable,
        "calibrated": profile is not None and decodable,
        "direct": decodable and lab.suite != "backward" and not pair.target.has_partial,
    }
    return [name for name in lab.planners or PLANNERS if able.get(name, True)]


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

        returned = replace(experiment, pair=Pair(pair.target, back, pair.shape))
        yield opened(returned, replace(planned, call=call), context)
