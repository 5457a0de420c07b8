"""All ordered pairs of layouts on one mesh: which planner wins each, and by how much."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distbench.advise.plans import Advice, advise
from distbench.advise.question import Setting
from distbench.advise.torch_paths import TorchAnswers
from distbench.planning import State
from distbench.spec.planner_names import BASELINE, PLANNERS, TORCH_PLANNERS

# Who sends what to whom takes time with the square of the ranks: pairs times ranks squared, for some ten seconds.
MAX_WORK = 4_000_000


@dataclass(frozen=True)
class PairRanking:
    """Every pair's advice, the most striking first.

    Args:
        advices: by how many times longer than the best plan DTensor's default is predicted to take.
        num_used: planner to the number of pairs for which it is the one to use.
        num_all: ordered pairs that there are; more than `advices` if only some were chosen.
        num_unasked: pairs for which torch gave no path by one planner at least.
    """

    advices: tuple[Advice, ...]
    num_used: dict[str, int]
    num_all: int
    num_unasked: int


def chosen_pairs(setting: Setting, pairs: Sequence[tuple[State, State]]) -> list[tuple[State, State]]:
    """All pairs, or as many random ones of a large mesh as fit into some ten seconds; always the same ones."""
    count = max(MAX_WORK // setting.num_ranks**2, 1)
    return list(pairs) if len(pairs) <= count else random.Random(0).sample(list(pairs), count)


def ranking_of(
    setting: Setting,
    pairs: Sequence[tuple[State, State]],
    torch: TorchAnswers,
    num_all: int | None = None,
    advised: Callable[[], None] = lambda: None,
) -> PairRanking:
    """Every pair's advice; torch gave one answer a pair, and `num_all` pairs there are, if `pairs` are only some.
    `advised` is called after each.
    """
    advices = []
    for number, (source, target) in enumerate(pairs):
        advices.append(advise(setting, source, target, torch, number))
        advised()
    advices.sort(key=lambda advice: (-times_longer(advice), str(advice.source), str(advice.target)))
    used = {planner: sum(advice.use.planner == planner for advice in advices) for planner in PLANNERS}
    unasked = sum(not advice.missing.keys().isdisjoint(TORCH_PLANNERS) for advice in advices)
    return PairRanking(tuple(advices), used, num_all or len(pairs), unasked)


def times_longer(advice: Advice) -> float:
    """DTensor's default plan's time over the best plan's; 1 where both are free, 0 where torch gave no default plan."""
    if BASELINE not in advice.plans:
        return 0.0
    default, best = advice.plans[BASELINE].seconds, min(plan.seconds for plan in advice.plans.values())
    if best:
        return default / best
    return math.inf if default else 1.0
