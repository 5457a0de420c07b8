"""DTensor redistributions of one tensor over the whole mesh, by torch's planners and ours."""

import random
from collections.abc import Iterator

from distbench.costmodel.profile import Profile
from distbench.spec import Redistributions, Scenario, UserError
from distbench.spec.planner_names import TORCH_PLANNERS
from distbench.worker.cases.redistributed_pair import Experiment, check_planners, redistribute_case
from distbench.worker.rank.opened_case import CaseSpec
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import parse_placement
from distbench.worker.redistribute.tensor_layout import Pair


def redistribution_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """One case for each pair and planner; the planners of a pair run next to each other, in random order.

    Raises:
        UserError: a planner, dtype or placement that is unknown, or a pair of another length than the mesh.
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
    ours = [] if profile is None else ["calibrated"] if pair.source.has_partial else ["calibrated", "direct"]
    return [*TORCH_PLANNERS, *ours]


def _check_placements(placements: tuple[str, ...], shape: tuple[int, ...], context: RankContext) -> None:
    if len(placements) != len(context.mesh_dims):
        text = "".join(placements)
        raise UserError(f"placements {text} name {len(placements)} mesh dims, the mesh has {len(context.mesh_dims)}")
    for text in placements:
        if getattr(parse_placement(text), "dim", 0) >= len(shape):
            raise UserError(f"placement {text} shards a tensor dim that shape {shape} does not have")
