"""Each planner's plan for one pair, priced under one cost model, and which one to use."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from distbench.advise.question import Setting
from distbench.advise.torch_paths import TorchAnswers, TorchPath
from distbench.costmodel.lines import ALL_TO_ALL, CUT, DIRECT, Line
from distbench.planning import Exchange, NotHandled, State, cheapest_route, parse_state, plan_direct, priced_steps
from distbench.planning.choice import choose
from distbench.spec.planner_names import PLANNERS, TORCH_PLANNERS

# Above this many ranks, who sends what to whom is not worked out: it grows with their square.
MAX_DIRECT_RANKS = 512


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan, on the rank that has most to do.

    Args:
        op: the collective; of a local step one of `costmodel.lines.LOCAL_OPS`.
        over: the mesh dim's name, or "the mesh".
        target: the layout after it.
        error: share by which the predicted seconds may be off; None without a profile.
        held_bytes: local tensors before and after, together.
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
        steps: none where nothing is to be done.
        received_bytes: that the busiest rank receives; of a ring collective as many as it sends.
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
    """Every planner's plan for one pair; torch's are its answers of that number."""
    zero_fill = torch.no_zero_fill is None
    route = cheapest_route(setting.problem, setting.model, source, target, zero_fill=zero_fill)
    found: dict[str, Plan | str] = {
        **dict.fromkeys(PLANNERS, "not priced without ranks"),
        **{planner: _torch_plan(setting, planner, torch.paths[planner][number]) for planner in TORCH_PLANNERS},
        "calibrated": _stepwise(setting, "calibrated", "->".join(map(str, route.states)), route.states),
        "direct": _direct_plan(setting, source, target),
    }
    plans = {planner: plan for planner, plan in found.items() if isinstance(plan, Plan)}
    missing = {planner: reason for planner, reason in found.items() if isinstance(reason, str)}
    least_bytes = plans["direct"].received_bytes if "direct" in plans and not source.partials else None
    return Advice(source, target, plans, missing, least_bytes)


def _torch_plan(setting: Setting, planner: str, answer: TorchPath) -> Plan | str:
    if answer.path is None:
        return answer.reason
    try:
        states = tuple(parse_state(part, setting.tensor_ndim) for part in answer.path.split("->"))
        return _stepwise(setting, planner, answer.path, states)
    except (ValueError, NotHandled) as error:
        return f"takes {answer.path}, which is not priced here ({error})"


def _stepwise(setting: Setting, planner: str, path: str, states: tuple[State, ...]) -> Plan:
    """A plan of given layouts; ValueError where two neighbours are not one legal step apart."""
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
    """One exchange in the place of a path, or two from a partial; or why there is none."""
    if setting.num_ranks > MAX_DIRECT_RANKS:
        return f"not planned: more than {MAX_DIRECT_RANKS} ranks"
    if target.partials:
        return "makes no Partial"
    problem = setting.problem
    num_copies = _num_copies(source, target)
    stages = plan_direct(
        source,
        target,
        problem.shape,
        problem.mesh_shape,
        lambda exchange: _exchange_seconds(setting, exchange, num_copies)[0],
    )
    states = (source, *(state for state, _ in stages))
    if all(exchange.changes_nothing for _, exchange in stages):
        path = f"{source}->{target}" if source != target else str(source)
        return Plan("direct", path, source, (), 0, problem.local_bytes(source))
    exchanges = [exchange for _, exchange in stages]
    steps = tuple(_exchange_step(setting, *pair, one) for pair, one in zip(pairwise(states), exchanges, strict=True))
    received = sum(max(exchange.received) for exchange in exchanges) * problem.itemsize
    return Plan("direct", "->".join(map(str, states)), source, steps, received, max(step.held_bytes for step in steps))


def _exchange_step(setting: Setting, source: State, target: State, exchange: Exchange) -> PlannedStep:
    problem, num_copies = setting.problem, _num_copies(source, target)
    before, after = problem.local_bytes(source), problem.local_bytes(target)
    op, communicates = (ALL_TO_ALL, True) if exchange.num_transfers else (CUT, False)
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
    """The profile's line for this all-to-all over the whole mesh; None where it was not measured."""
    if setting.profile is None:
        return None
    return setting.profile.line(DIRECT, "x".join(setting.mesh), setting.num_ranks)


def _exchange_seconds(setting: Setting, exchange: Exchange, num_copies: int) -> tuple[float, float]:
    """(predicted seconds, the share by which they may be off) of one all-to-all with splits.

    By the profile's own line for it, over what the busiest rank sends or receives, copies and adds, where there is one.
    Else as one all-to-all after the other over each mesh dim that it crosses: an upper estimate where links of
    different mesh dims work at the same time.
    """
    if line := direct_line(setting):
        busiest, num_times, num_messages = exchange.load()
        seconds = line.seconds(busiest * setting.problem.itemsize, num_times, num_messages)
        return seconds, line.expected_error
    total, off = 0.0, 0.0
    for mesh_dim, num_bytes in enumerate(_crossing_bytes(setting, exchange)):
        if num_bytes:
            size = setting.problem.mesh_shape[mesh_dim]
            # A line is over the whole buffer, a rank's own part included, which does not travel.
            payload = num_bytes * size / (size - 1)
            seconds = setting.model.seconds(ALL_TO_ALL, mesh_dim, payload, num_copies)
            total += seconds
            off += seconds * (setting.error(ALL_TO_ALL, mesh_dim) or 0.0)
    return total, off / total if total else 0.0


def _crossing_bytes(setting: Setting, exchange: Exchange) -> list[int]:
    """For each mesh dim the bytes that the busiest rank sends or receives over it.

    Of the mesh dims that differ between two ranks the outermost counts: the slowest link between them.
    """
    cells = np.indices(setting.problem.mesh_shape).reshape(len(setting.mesh), -1)
    outermost = (cells[:, exchange.senders] != cells[:, exchange.receivers]).argmax(axis=0)
    elements = np.zeros((len(cells), 2, cells.shape[1]), dtype=np.int64)
    np.add.at(elements[:, 0], (outermost, exchange.senders), exchange.volumes)
    np.add.at(elements[:, 1], (outermost, exchange.receivers), exchange.volumes)
    return [int(most) * setting.problem.itemsize for most in elements.max(axis=(1, 2))]
