"""Each planner's plan for one pair, priced under one cost model, and which one to use."""

from collections.abc import Mapping
from dataclasses import dataclass

from distbench.advise.ask_torch import TORCH_PLANNERS, TorchAnswers, TorchPath
from distbench.advise.exchange_load import Load, exchange_seconds, load_of
from distbench.advise.question import Setting, num_ranks
from distbench.planning import (
    Exchange,
    NotHandled,
    State,
    cheapest_route,
    parse_state,
    plan_exchange,
    priced_steps,
)
from distbench.planning.choice import choose

PLANNERS = (*TORCH_PLANNERS, "calibrated", "direct")
# Above this many ranks, who sends what to whom is not worked out: it grows with their square.
MAX_DIRECT_RANKS = 512
HOW = {
    "greedy": "DTensor's default, nothing to change",
    "min_cost": "torch.distributed.tensor._redistribute.use_min_cost_redistribution_plan()",
    "calibrated": "with distbench.calibrated_planning(profile file)",
    "direct": "distbench.worker.redistribute.direct_executor.DirectRedistribution, in place of redistribute",
}


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan, on the rank that has most to do.

    Args:
        op: the collective; "cut" for a local step.
        over: the mesh dim's name, or "the mesh".
        target: the layout after it.
        seconds: predicted.
        error: share by which that may be off; None without a profile.
        sent_bytes: bytes a rank sends.
        held_bytes: its local tensors before and after, together.
        is_collective: whether ranks speak.
    """

    op: str
    over: str
    target: State
    seconds: float
    error: float | None
    sent_bytes: int
    held_bytes: int
    is_collective: bool


@dataclass(frozen=True)
class Plan:
    """One planner's way from the source to the target.

    Args:
        planner: one of PLANNERS.
        path: its layouts, as torch writes them.
        source: where it starts.
        steps: from there on; none where nothing is to be done.
        received_bytes: bytes that the busiest rank receives; a ring collective's are as many as it sends.
        peak_bytes: the most that a step holds.
    """

    planner: str
    path: str
    source: State
    steps: tuple[PlannedStep, ...]
    received_bytes: int
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Predicted for all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def error(self) -> float | None:
        """The share by which `seconds` may be off, its steps' errors weighted by their time; None without a profile."""
        errors = [step.error for step in self.steps]
        if any(error is None for error in errors):
            return None
        weighted = sum((step.error or 0.0) * step.seconds for step in self.steps)
        return weighted / self.seconds if self.seconds else 0.0

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest rank sends."""
        return sum(step.sent_bytes for step in self.steps)

    @property
    def num_collectives(self) -> int:
        """Steps in which ranks speak."""
        return sum(step.is_collective for step in self.steps)

    @property
    def states(self) -> tuple[State, ...]:
        """Every layout on the way, the source first."""
        return (self.source, *(step.target for step in self.steps))


@dataclass(frozen=True)
class Advice:
    """What is known of one pair.

    Args:
        source: the layout before.
        target: the layout after.
        plans: planner to its plan, in the order of PLANNERS; those that have one.
        missing: planner to why it has none.
        least_bytes: what the rank that lacks most must receive; None if not known (Partial, or too many ranks).
    """

    source: State
    target: State
    plans: Mapping[str, Plan]
    missing: Mapping[str, str]
    least_bytes: int | None

    @property
    def best(self) -> Plan:
        """The plan of least predicted time."""
        return min(self.plans.values(), key=lambda plan: plan.seconds)

    @property
    def use(self) -> Plan:
        """The plan to use, see `choice.choose`."""
        return self.plans[choose({planner: plan.seconds for planner, plan in self.plans.items()})]

    def received_ratio(self, plan: Plan) -> float | None:
        """Received bytes over the receive lower bound; None where that is 0 or not known."""
        return plan.received_bytes / self.least_bytes if self.least_bytes else None


def advise(setting: Setting, source: State, target: State, torch: TorchAnswers, number: int = 0) -> Advice:
    """Every planner's plan for one pair.

    Args:
        setting: the tensor, the mesh and the cost model.
        source: the layout before.
        target: the layout after, without Partial.
        torch: what torch's planners said.
        number: which of its answers are this pair's.
    """
    plans: dict[str, Plan] = {}
    missing: dict[str, str] = {}
    exchange, reason = _exchange(setting, source, target)
    load = load_of(setting, exchange) if exchange else None
    for planner in PLANNERS:
        found: Plan | str
        if planner in TORCH_PLANNERS:
            found = _torch_plan(setting, planner, torch.paths[planner][number])
        elif planner == "calibrated":
            route = cheapest_route(setting.problem, setting.model, source, target)
            found = stepwise(setting, planner, "->".join(map(str, route.states)), route.states)
        else:
            found = _direct_plan(setting, source, target, exchange, load) if exchange and load else reason
        if isinstance(found, Plan):
            plans[planner] = found
        else:
            missing[planner] = found
    return Advice(source, target, plans, missing, load.received_bytes if load else None)


def _torch_plan(setting: Setting, planner: str, answer: TorchPath) -> Plan | str:
    if answer.path is None:
        return answer.reason
    try:
        states = tuple(parse_state(part, setting.tensor_ndim) for part in answer.path.split("->"))
        return stepwise(setting, planner, answer.path, states)
    except (ValueError, NotHandled) as error:
        return f"takes {answer.path}, which is not priced here ({error})"


def stepwise(setting: Setting, planner: str, path: str, states: tuple[State, ...]) -> Plan:
    """A plan of given layouts.

    Raises:
        ValueError: two neighbours are not one legal step apart.
    """
    steps = []
    for step in priced_steps(setting.problem, setting.model, states):
        move, price = step.move, step.price
        steps.append(
            PlannedStep(
                move.op,
                setting.mesh_dim_name(move.mesh_dim),
                step.target,
                price.seconds,
                setting.error(move.op, move.mesh_dim) if price.seconds or price.is_collective else _nothing(setting),
                price.sent_bytes,
                price.held_bytes,
                price.is_collective,
            )
        )
    received = sum(step.sent_bytes for step in steps)
    peak = max((step.held_bytes for step in steps), default=setting.problem.local_bytes(states[0]))
    return Plan(planner, path, states[0], tuple(steps), received, peak)


def _nothing(setting: Setting) -> float | None:
    return None if setting.profile is None else 0.0


def _exchange(setting: Setting, source: State, target: State) -> tuple[Exchange | None, str]:
    if source.partials:
        return None, "not possible: Partial (one all-to-all adds nothing up)"
    if num_ranks(setting) > MAX_DIRECT_RANKS:
        return None, f"not planned: more than {MAX_DIRECT_RANKS} ranks"
    return plan_exchange(source, target, setting.problem.shape, setting.problem.mesh_shape), ""


def _direct_plan(setting: Setting, source: State, target: State, exchange: Exchange, load: Load) -> Plan:
    problem, path = setting.problem, f"{source}->{target}" if source != target else str(source)
    before, after = problem.local_bytes(source), problem.local_bytes(target)
    if exchange.source_boxes == exchange.target_boxes:
        return Plan("direct", path, source, (), 0, before)
    num_copies = sum(any(state.orders[1:]) for state in (source, target))
    if exchange.transfers:
        seconds, error = exchange_seconds(setting, load, num_copies)
    else:
        seconds = max(setting.model.seconds("cut", dim, after, num_copies) for dim in range(len(setting.mesh)))
        error = _nothing(setting)
    speaks = bool(exchange.transfers)
    op = "all_to_all" if speaks else "cut"
    step = PlannedStep(op, "the mesh", target, seconds, error, load.sent_bytes, before + after, speaks)
    return Plan("direct", path, source, (step,), load.received_bytes, before + after)
