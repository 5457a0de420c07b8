"""Queries of `distbench redistribute`: each planner's plan for one pair or for all pairs, and which planner to use."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distbench.planning.placement_states import NotHandled, State, parse_state
from distbench.planning.redistribution_plans import (
    LEAVING_SHARE,
    Plan,
    Setting,
    choose,
    plan_of_path,
    plan_redistribution,
)
from distbench.planning.redistribution_request import TorchAnswers, TorchPath
from distbench.show.units import percent_text, size_text, time_text
from distbench.spec.placements import BASELINE, OUR_PLANNERS, PLANNERS, TORCH_PLANNERS


@dataclass(frozen=True)
class Advice:
    """The plans of one pair."""

    source: State
    target: State
    plans: Mapping[str, Plan]  # by planner, in the order of `spec.placements.PLANNERS`
    missing: Mapping[str, str]  # planner to the reason why it has no plan
    least_bytes: (
        int | None
    )  # minimum number that the rank with most missing elements must receive; None for Partial, or too many ranks

    @property
    def use(self) -> Plan:
        """The plan to use, see `choose`."""
        return self.plans[choose({planner: plan.seconds for planner, plan in self.plans.items()})]

    def received_ratio(self, plan: Plan) -> float | None:
        """Return received bytes divided by the receive lower bound; None if the bound is 0 or unknown."""
        return plan.received_bytes / self.least_bytes if self.least_bytes else None


def advise(setting: Setting, source: State, target: State, torch: TorchAnswers, number: int = 0) -> Advice:
    """Return every planner's plan for one pair; torch's plans are its answers at index `number`."""
    zero_fill = torch.no_zero_fill is None
    outcomes: dict[str, Plan | str] = {
        **dict.fromkeys(PLANNERS, "not priced without ranks"),
        **{planner: _torch_plan(setting, planner, torch.paths[planner][number]) for planner in TORCH_PLANNERS},
        **{planner: _planned(setting, planner, source, target, zero_fill) for planner in OUR_PLANNERS},
    }
    plans = {planner: plan for planner, plan in outcomes.items() if isinstance(plan, Plan)}
    missing = {planner: reason for planner, reason in outcomes.items() if isinstance(reason, str)}
    least_bytes = plans["direct"].received_bytes if "direct" in plans and not source.partials else None
    return Advice(source, target, plans, missing, least_bytes)


def _planned(setting: Setting, planner: str, source: State, target: State, zero_fill: bool) -> Plan | str:
    try:
        return plan_redistribution(setting, source, target, planner, zero_fill=zero_fill)
    except NotHandled as reason:
        return str(reason)


def _torch_plan(setting: Setting, planner: str, answer: TorchPath) -> Plan | str:
    if answer.path is None:
        return answer.reason
    try:
        states = tuple(parse_state(part, setting.tensor_ndim) for part in answer.path.split("->"))
        return plan_of_path(setting, planner, answer.path, states)
    except (ValueError, NotHandled) as error:
        return f"uses {answer.path}, which has no price ({error})"


# Code to write in a training script. Braces: the profile's file, or the layouts of the pair.
HOW = {
    "greedy": "DTensor's default, no change needed",
    "min_cost": "with torch.distributed.tensor._redistribute.use_min_cost_redistribution_plan()",
    "calibrated": 'with distbench.calibrated_planning("{profile}")',
    "direct": 'from distbench import redistribute; plan = redistribute.plan("{source}", "{target}", x.shape, mesh); '
    "redistribute.execute(x.to_local(), plan)",
}


def verdict(setting: Setting, advice: Advice) -> str:
    """Return the planner to use, the reason, and the reliability of the reason."""
    use, default = advice.use, advice.plans.get(BASELINE)
    if advice.source == advice.target:
        return "Nothing to do: source and target are the same."
    if not use.num_collectives and not use.seconds:
        reason = "every step is local, without communication"
    elif default is None:
        reason = f"predicted {time_words(use.seconds)}, the shortest of all plans"
    elif use is default:
        reason = (
            f"neither calibrated nor direct is predicted to be more than {percent_text(LEAVING_SHARE)} faster, "
            "and min_cost is not faster"
        )
    else:
        sent = f"each rank sends {size_text(use.sent_bytes)} instead of {size_text(default.sent_bytes)}"
        share = (
            f"predicted {time_words(use.seconds)}, {percent_text(use.seconds / default.seconds)} of {BASELINE}'s time"
        )
        is_same = use.sent_bytes == default.sent_bytes
        reason = f"{share}, for the same bytes sent per rank" if is_same else f"{share}; {sent}"
    return f"Use {use.planner}: {reason}{_doubt(setting, use, default)}. How: {how(setting, advice)}."


def how(setting: Setting, advice: Advice) -> str:
    """Return the code that enables the recommended plan in a training script."""
    profile = setting.profile_path or "profile.json"
    text = HOW.get(advice.use.planner, f"planner {advice.use.planner!r}, as redistribute/planners.py applies it")
    return text.format(profile=profile, source=advice.source, target=advice.target)


def _doubt(setting: Setting, use: Plan, default: Plan | None) -> str:
    if default is None or use is default:
        return ""
    if setting.profile is None:
        return " (by torch's constants; use --profile for your machine)"
    error = max(use.error or 0.0, default.error or 0.0)
    if 1 - use.seconds / default.seconds < error:
        return f" (the difference is below the prediction's error of {percent_text(error)}: measure both)"
    return ""


def time_words(seconds: float) -> str:
    """Format a time inside a sentence: `1.20 s`, `0 us`."""
    return " ".join(time_text(seconds).split()) if seconds else "0 us"


# The time to plan an exchange grows with the square of the ranks. This limit on pairs times ranks squared takes about
# ten seconds.
MAX_WORK = 4_000_000


@dataclass(frozen=True)
class PairRanking:
    """Every pair's advice, largest difference first."""

    advices: tuple[Advice, ...]  # by predicted time of DTensor's default over the best plan's
    num_used: dict[str, int]  # planner to the number of pairs for which it is recommended
    num_all: int  # all ordered pairs; `advices` may have fewer
    num_unasked: int  # pairs for which at least one of torch's planners gave no path


def chosen_pairs(setting: Setting, pairs: Sequence[tuple[State, State]]) -> list[tuple[State, State]]:
    """Return all pairs, or for a large mesh a fixed random sample that takes about ten seconds to plan."""
    count = max(MAX_WORK // setting.num_ranks**2, 1)
    return list(pairs) if len(pairs) <= count else random.Random(0).sample(list(pairs), count)


def ranking_of(
    setting: Setting,
    pairs: Sequence[tuple[State, State]],
    torch: TorchAnswers,
    num_all: int | None = None,
    advised: Callable[[], None] = lambda: None,
) -> PairRanking:
    """Return every pair's advice from torch's answers, one per pair; `advised` is called after each pair."""
    advices = []
    for number, (source, target) in enumerate(pairs):
        advices.append(advise(setting, source, target, torch, number))
        advised()
    advices.sort(key=lambda advice: (-times_longer(advice), str(advice.source), str(advice.target)))
    used = {planner: sum(advice.use.planner == planner for advice in advices) for planner in PLANNERS}
    unasked = sum(not advice.missing.keys().isdisjoint(TORCH_PLANNERS) for advice in advices)
    return PairRanking(tuple(advices), used, num_all or len(pairs), unasked)


def times_longer(advice: Advice) -> float:
    """Return the time of DTensor's default plan divided by the best plan's; 1 if both are 0 s, 0 if unknown."""
    if BASELINE not in advice.plans:
        return 0.0
    default, best = advice.plans[BASELINE].seconds, min(plan.seconds for plan in advice.plans.values())
    if best:
        return default / best
    return math.inf if default else 1.0
