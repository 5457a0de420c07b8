"""Queries of `distbench redistribute`: each planner's plan for one pair or for all pairs, and which one to use."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from distbench.planning.cost_profile import (
    ALL_TO_ALL,
    CUT,
    DIRECT,
    Line,
)
from distbench.planning.direct_exchange import Exchange, plan_direct
from distbench.planning.placement_states import NotHandled, State, parse_state
from distbench.planning.plan_request import Setting, TorchAnswers, TorchPath
from distbench.planning.search import cheapest_route, priced_steps
from distbench.show.units import percent_text, size_text, time_text
from distbench.spec.placements import BASELINE, PLANNERS, TORCH_PLANNERS

# Planners whose predictions are this close count as equal; the planner that is simplest to use wins.
EQUAL_SHARE = 0.02
# distbench's planners are recommended if they are predicted to be faster than torch's path by more than this share.
# Smaller measured gains were noise or losses: of 96 pairs at 1 MB and above (gloo, 2x4 and 2x2x2), six were slower than
# the better one of torch's two planners (by 1.5 to 11 %), although predicted 1 to 6 % faster.
LEAVING_SHARE = 0.10


def choose(predicted_s: Mapping[str, float]) -> str:
    """Return the planner to use from predicted seconds of at least one planner, in order of simplicity.

    This is the faster of torch's planners (greedy if equal), or distbench's fastest planner if faster by more than
    LEAVING_SHARE.
    """
    torchs = _fastest({name: value for name, value in predicted_s.items() if name in TORCH_PLANNERS})
    ours = _fastest({name: value for name, value in predicted_s.items() if name not in TORCH_PLANNERS})
    if torchs is None or ours is None:
        return torchs or ours or next(iter(predicted_s))
    return ours if predicted_s[ours] < (1 - LEAVING_SHARE) * predicted_s[torchs] else torchs


def _fastest(predicted_s: Mapping[str, float]) -> str | None:
    """Return the first planner whose time equals the minimum; None without planners."""
    limit = min(predicted_s.values(), default=0.0) * (1 + EQUAL_SHARE)
    return next((name for name, value in predicted_s.items() if value <= limit), None)


# Above this many ranks no exchange is planned, because planning time grows with the square of ranks.
MAX_DIRECT_RANKS = 512


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan, on the busiest rank."""

    op: str  # the collective; of a local step one of `cost_profile.LOCAL_OPS`
    over: str  # the mesh dim's name, or "the mesh"
    target: State
    seconds: float
    error: float | None  # expected relative error of the predicted seconds; None without a profile
    sent_bytes: int
    held_bytes: int  # local tensors before and after, together
    is_collective: bool

    @property
    def text(self) -> str:
        """Text of the step, such as `all_gather over tp` or `local cut`."""
        return f"{self.op} over {self.over}" if self.is_collective else f"local {self.op}"


@dataclass(frozen=True)
class Plan:
    """One planner's plan from the source to the target."""

    planner: str  # one of `spec.placements.PLANNERS`
    path: str  # its layouts, in torch's notation
    source: State
    steps: tuple[PlannedStep, ...]
    received_bytes: int  # of the busiest rank; for a ring collective equal to the bytes sent
    peak_bytes: int  # the most that a step holds

    @property
    def seconds(self) -> float:
        """Predicted seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def error(self) -> float | None:
        """Expected relative error of `seconds`, the steps' errors weighted by time; None without a profile."""
        if any(step.error is None for step in self.steps):
            return None
        weighted = sum((step.error or 0.0) * step.seconds for step in self.steps)
        return weighted / self.seconds if self.seconds else 0.0

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest rank sends."""
        return sum(step.sent_bytes for step in self.steps)

    @property
    def num_collectives(self) -> int:
        """Number of steps with communication."""
        return sum(step.is_collective for step in self.steps)

    @property
    def states(self) -> tuple[State, ...]:
        """Every layout of the path, the source first."""
        return (self.source, *(step.target for step in self.steps))


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
    route = cheapest_route(setting.problem, setting.model, source, target, zero_fill=zero_fill)
    outcomes: dict[str, Plan | str] = {
        **dict.fromkeys(PLANNERS, "not priced without ranks"),
        **{planner: _torch_plan(setting, planner, torch.paths[planner][number]) for planner in TORCH_PLANNERS},
        "calibrated": _stepwise(setting, "calibrated", "->".join(map(str, route.states)), route.states),
        "direct": _direct_plan(setting, source, target),
    }
    plans = {planner: plan for planner, plan in outcomes.items() if isinstance(plan, Plan)}
    missing = {planner: reason for planner, reason in outcomes.items() if isinstance(reason, str)}
    least_bytes = plans["direct"].received_bytes if "direct" in plans and not source.partials else None
    return Advice(source, target, plans, missing, least_bytes)


def _torch_plan(setting: Setting, planner: str, answer: TorchPath) -> Plan | str:
    if answer.path is None:
        return answer.reason
    try:
        states = tuple(parse_state(part, setting.tensor_ndim) for part in answer.path.split("->"))
        return _stepwise(setting, planner, answer.path, states)
    except (ValueError, NotHandled) as error:
        return f"uses {answer.path}, which is not priced here ({error})"


def _stepwise(setting: Setting, planner: str, path: str, states: tuple[State, ...]) -> Plan:
    """Return a plan of given layouts; ValueError if two neighbours are not one legal step apart."""
    steps = tuple(
        PlannedStep(
            op=step.move.op,
            over=tuple(setting.mesh)[step.move.mesh_dim],
            target=step.target,
            seconds=step.price.seconds,
            error=setting.error(step.move.op, step.move.mesh_dim),
            sent_bytes=step.price.sent_bytes,
            held_bytes=step.price.held_bytes,
            is_collective=step.price.is_collective,
        )
        for step in priced_steps(setting.problem, setting.model, states)
    )
    peak = max((step.held_bytes for step in steps), default=setting.problem.local_bytes(states[0]))
    return Plan(planner, path, states[0], steps, sum(step.sent_bytes for step in steps), peak)


def _direct_plan(setting: Setting, source: State, target: State) -> Plan | str:
    """Return one exchange instead of a path (two from a partial), or the reason without an exchange."""
    if setting.num_ranks > MAX_DIRECT_RANKS:
        return f"not planned: more than {MAX_DIRECT_RANKS} ranks"
    if target.partials:
        return "makes no Partial"
    problem, num_copies = setting.problem, _num_copies(source, target)
    stages = plan_direct(
        *(source, target, problem.shape, problem.mesh_shape),
        lambda exchange: _exchange_seconds(setting, exchange, num_copies)[0],
    )
    states, exchanges = (source, *(state for state, _ in stages)), [exchange for _, exchange in stages]
    if all(exchange.changes_nothing for exchange in exchanges):
        path = f"{source}->{target}" if source != target else str(source)
        return Plan("direct", path, source, (), 0, problem.local_bytes(source))
    steps = tuple(_exchange_step(setting, *pair, one) for pair, one in zip(pairwise(states), exchanges, strict=True))
    received = sum(max(exchange.received) for exchange in exchanges) * problem.itemsize
    return Plan("direct", "->".join(map(str, states)), source, steps, received, max(step.held_bytes for step in steps))


def _exchange_step(setting: Setting, source: State, target: State, exchange: Exchange) -> PlannedStep:
    problem, num_copies = setting.problem, _num_copies(source, target)
    before, after = problem.local_bytes(source), problem.local_bytes(target)
    op, communicates = (ALL_TO_ALL, True) if len(exchange.senders) else (CUT, False)
    if communicates:
        seconds, error = _exchange_seconds(setting, exchange, num_copies)
    else:
        seconds = max(setting.model.seconds(CUT, dim, after, num_copies) for dim in range(len(setting.mesh)))
        error = 0.0
    priced, sent = None if setting.profile is None else error, max(exchange.sent) * problem.itemsize
    return PlannedStep(op, "the mesh", target, seconds, priced, sent, before + after, communicates)


def _num_copies(source: State, target: State) -> int:
    return sum(any(state.orders[1:]) for state in (source, target))


def direct_line(setting: Setting) -> Line | None:
    """Return the profile's line for a direct exchange over the whole mesh; None without a measurement."""
    if setting.profile is None:
        return None
    return setting.profile.line(DIRECT, "x".join(setting.mesh), setting.num_ranks)


def _exchange_seconds(setting: Setting, exchange: Exchange, num_copies: int) -> tuple[float, float]:
    """Return (predicted seconds, their expected relative error) of one all-to-all with splits.

    The price is that of the profile's line for direct exchanges, if any, from the busiest rank's transfers and copies.
    Otherwise it is the sum of one all-to-all per crossed mesh dim, which is too high if links work at the same time.
    """
    if line := direct_line(setting):
        busiest, num_times, num_messages = exchange.load()
        seconds = line.seconds(busiest * setting.problem.itemsize, num_times, num_messages)
        return seconds, line.expected_error
    total, off = 0.0, 0.0
    for mesh_dim, num_bytes in enumerate(_crossing_bytes(setting, exchange)):
        if num_bytes:
            size = setting.problem.mesh_shape[mesh_dim]
            # A line's payload is the whole buffer, including the rank's own part, which is not sent.
            payload = num_bytes * size / (size - 1)
            seconds = setting.model.seconds(ALL_TO_ALL, mesh_dim, payload, num_copies)
            total += seconds
            off += seconds * (setting.error(ALL_TO_ALL, mesh_dim) or 0.0)
    return total, off / total if total else 0.0


def _crossing_bytes(setting: Setting, exchange: Exchange) -> list[int]:
    """Return for each mesh dim the bytes that the busiest rank sends or receives over it.

    Two ranks communicate over the outermost mesh dim in which they differ, their slowest link.
    """
    cells = np.indices(setting.problem.mesh_shape).reshape(len(setting.mesh), -1)
    outermost = (cells[:, exchange.senders] != cells[:, exchange.receivers]).argmax(axis=0)
    elements = np.zeros((len(cells), 2, cells.shape[1]), dtype=np.int64)
    np.add.at(elements[:, 0], (outermost, exchange.senders), exchange.volumes)
    np.add.at(elements[:, 1], (outermost, exchange.receivers), exchange.volumes)
    return [int(most) * setting.problem.itemsize for most in elements.max(axis=(1, 2))]


# Code to write in a training script. Braces: the profile's file, or the layouts of the pair.
HOW = {
    "greedy": "DTensor's default, no change needed",
    "min_cost": "with torch.distributed.tensor._redistribute.use_min_cost_redistribution_plan()",
    "calibrated": 'with distbench.calibrated_planning("{profile}")',
    "direct": 'move = distbench.DirectRedistribution("{source}", "{target}", x.shape, mesh.mesh), then '
    "move(x.to_local()) in place of redistribute",
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
