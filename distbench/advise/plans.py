"""Each planner's plan for one pair, priced under one cost model, and which one to use."""

from collections.abc import Mapping
from dataclasses import dataclass

from distbench.advise.exchange_load import Load, exchange_seconds, load_of
from distbench.advise.question import Setting
from distbench.advise.torch_paths import TorchAnswers, TorchPath
from distbench.costmodel.lines import ALL_TO_ALL, CUT
from distbench.planning import Exchange, NotHandled, State, cheapest_route, parse_state, plan_exchange, priced_steps
from distbench.planning.choice import choose
from distbench.spec.planner_names import TORCH_PLANNERS

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
        op: the collective; "cut" for a local one.
        over: the mesh dim's name, or "the mesh".
        target: the layout after it.
        seconds: predicted.
        error: share by which that may be off; None without a profile.
        sent_bytes: bytes a rank sends.
        held_bytes: its local tensors before and after, together.
        is_collective: whether ranks communicate.
    """

    op: str
    over: str
    target: State
    seconds: float
    error: float | None
    sent_bytes: int
    held_bytes: int
    is_collective: bool

    @property
    def text(self) -> str:
        """`all_gather over tp`, `local cut`."""
        return f"{self.op} over {self.over}" if self.is_collective else f"local {self.op}"


@dataclass(frozen=True)
class Plan:
    """One planner's way from the source to the target.

    Args:
        planner: one of `planner_names.PLANNERS`.
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
        """Steps in which ranks communicate."""
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
        plans: planner to its plan, in the order of `planner_names.PLANNERS`; those that have one.
        missing: planner to why it has none.
        least_bytes: what the rank that lacks most must receive; None if not known (Partial, or too many ranks).
    """

    source: State
    target: State
    plans: Mapping[str, Plan]
    missing: Mapping[str, str]
    least_bytes: int | None

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
    found: dict[str, Plan | str] = {
        planner: _torch_plan(setting, planner, torch.paths[planner][number]) for planner in TORCH_PLANNERS
    }
    route = cheapest_route(setting.problem, setting.model, source, target)
    found["calibrated"] = _stepwise(setting, "calibrated", "->".join(map(str, route.states)), route.states)
    exchange, load = _exchange(setting, source, target), None
    if isinstance(exchange, str):
        found["direct"] = exchange
    else:
        load = load_of(setting, exchange)
        found["direct"] = _direct_plan(setting, source, target, exchange, load)
    plans = {planner: plan for planner, plan in found.items() if isinstance(plan, Plan)}
    missing = {planner: reason for planner, reason in found.items() if isinstance(reason, str)}
    return Advice(source, target, plans, missing, load.received_bytes if load else None)


def _torch_plan(setting: Setting, planner: str, answer: TorchPath) -> Plan | str:
    if answer.path is None:
        return answer.reason
    try:
        states = tuple(parse_state(part, setting.tensor_ndim) for part in answer.path.split("->"))
        return _stepwise(setting, planner, answer.path, states)
    except (ValueError, NotHandled) as error:
        return f"takes {answer.path}, which is not priced here ({error})"


def _stepwise(setting: Setting, planner: str, path: str, states: tuple[State, ...]) -> Plan:
    """A plan of given layouts.

    Raises:
        ValueError: two neighbours are not one legal step apart.
    """
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
    received = sum(step.sent_bytes for step in steps)
    peak = max((step.held_bytes for step in steps), default=setting.problem.local_bytes(states[0]))
    return Plan(planner, path, states[0], steps, received, peak)


def _exchange(setting: Setting, source: State, target: State) -> Exchange | str:
    """The direct exchange, or why there is none."""
    if source.partials:
        return "not possible: Partial (one all-to-all adds nothing up)"
    if setting.num_ranks > MAX_DIRECT_RANKS:
        return f"not planned: more than {MAX_DIRECT_RANKS} ranks"
    return plan_exchange(source, target, setting.problem.shape, setting.problem.mesh_shape)


def _direct_plan(setting: Setting, source: State, target: State, exchange: Exchange, load: Load) -> Plan:
    path = f"{source}->{target}" if source != target else str(source)
    before, after = setting.problem.local_bytes(source), setting.problem.local_bytes(target)
    if exchange.source_boxes == exchange.target_boxes:
        return Plan("direct", path, source, (), 0, before)
    num_copies = sum(any(state.orders[1:]) for state in (source, target))
    communicates = bool(exchange.transfers)
    error: float | None
    if communicates:
        op, (seconds, error) = ALL_TO_ALL, exchange_seconds(setting, load, num_copies)
    else:
        seconds = max(setting.model.seconds(CUT, dim, after, num_copies) for dim in range(len(setting.mesh)))
        op, error = CUT, None if setting.profile is None else 0.0
    step = PlannedStep(op, "the mesh", target, seconds, error, load.sent_bytes, before + after, communicates)
    return Plan("direct", path, source, (step,), load.received_bytes, before + after)
