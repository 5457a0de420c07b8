"""Plans of one redistribution: the cheapest path, the direct exchange, and the choice between planners."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distbench.planning.cheapest_path import NoPath, Problem, Route, cheapest_route, least_peak_route, priced_steps
from distbench.planning.cost_profile import ALL_TO_ALL, CUT, DIRECT, Line, MeasuredCost, MeshCost, Profile
from distbench.planning.direct_exchange import Exchange, plan_direct
from distbench.planning.placement_states import Move, NotHandled, State
from distbench.spec.errors import UserError
from distbench.spec.placements import CALIBRATED, OUR_PLANNERS, TORCH_PLANNERS


@dataclass(frozen=True)
class Setting:
    """A tensor on a mesh, and the prices of its redistributions."""

    problem: Problem
    mesh: Mapping[str, int]  # mesh dim names to ranks, outermost first
    dtype: str
    devices_per_host: int  # that torch's prices of a mesh dim assume
    model: MeshCost
    profile: Profile | None = None  # the cost model; None for torch's own constants
    profile_path: Path | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.problem.mesh_shape)

    @property
    def tensor(self) -> str:
        """`bf16[4096,4096]`."""
        return f"{self.dtype}[{','.join(map(str, self.problem.shape))}]"

    @property
    def tensor_ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.problem.shape)

    def error(self, op: str, mesh_dim: int) -> float | None:
        """Return the expected relative error of a step's prediction; None without a profile, 0 without a line."""
        if not isinstance(self.model, MeasuredCost):
            return None
        line = self.model.lines.get((op, mesh_dim))
        return line.expected_error if line else 0.0


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
    does: Move | Exchange  # a step over one mesh dim, or one exchange over the whole mesh

    @property
    def text(self) -> str:
        """Text of the step, such as `all_gather over tp` or `local cut`."""
        return f"{self.op} over {self.over}" if self.is_collective else f"local {self.op}"


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """One planner's plan from the source to the target. A plan does not change, so a copy is the plan itself."""

    planner: str  # one of `spec.placements.PLANNERS`
    route: Route  # its layouts, predicted seconds and bytes
    problem: Problem  # mesh, shape and item size
    received_bytes: int  # of the busiest rank; for a ring collective equal to the bytes sent
    price_steps: Callable[[], tuple[PlannedStep, ...]]
    text: str = ""  # its layouts in torch's own notation, if torch planned it
    mesh: Any = None  # the DeviceMesh on which the plan can be executed, if any
    ranks: tuple[int, ...] = ()  # of this DeviceMesh, row-major
    plan_backward: "Callable[[], Plan] | None" = None  # plans the gradient's redistribution
    key: str = ""  # in compiled code

    def __copy__(self) -> "Plan":
        return self

    def __deepcopy__(self, memo: Any) -> "Plan":
        return self

    def __repr__(self) -> str:
        shape, mesh = (tuple(sizes) for sizes in (self.problem.shape, self.problem.mesh_shape))
        return f"Plan({self.path!r} by {self.planner}, shape={shape}, mesh={mesh}, sent_bytes={self.sent_bytes})"

    @cached_property
    def steps(self) -> tuple[PlannedStep, ...]:
        """The steps, in order; computed on first use, because DTensor's own executor needs the layouts only."""
        return self.price_steps()

    @property
    def path(self) -> str:
        """The layouts, in torch's notation."""
        return self.text or "->".join(map(str, self.states))

    @property
    def seconds(self) -> float:
        """Predicted seconds of all steps."""
        return self.route.seconds

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
        return self.route.sent_bytes

    @property
    def num_collectives(self) -> int:
        """Number of steps with communication."""
        return self.route.num_collectives

    @property
    def peak_bytes(self) -> int:
        """The most bytes of local tensors that a step holds, before and after together."""
        return self.route.peak_bytes

    @cached_property
    def backward(self) -> "Plan":
        """The gradient's plan, from the target to the source; UserError for a plan that cannot be executed."""
        if self.plan_backward is None:
            raise UserError("the plan was made for sizes of a mesh; give distbench.redistribute.plan a DeviceMesh")
        return self.plan_backward()

    @property
    def source(self) -> State:
        """The layout before the first step."""
        return self.route.states[0]

    @property
    def target(self) -> State:
        """The layout after the last step."""
        return self.route.states[-1]

    @property
    def states(self) -> tuple[State, ...]:
        """Every layout of the path, the source first."""
        return self.route.states


def require_max_bytes(max_bytes: int | None) -> None:
    """Raise UserError if `max_bytes` is neither None nor a positive whole number."""
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
        raise UserError(f"max_bytes is {max_bytes!r}; give a positive whole number of bytes, or None for no limit")


def plan_redistribution(
    setting: Setting,
    source: State,
    target: State,
    planner: str | None = None,
    max_bytes: int | None = None,
    zero_fill: bool = True,
    may_exceed: bool = False,
) -> Plan:
    """Return the plan of one of distbench's planners, by default of the planner that is predicted to be faster.

    Args:
        max_bytes: limit on the bytes of local tensors before and after a step.
        zero_fill: a step may convert a shard to P(sum); supported by the executor here and by torch since 2.14.
        may_exceed: if every path is above `max_bytes`, return the path that holds least.

    Raises:
        NotHandled: the planner has no plan, with the reason.
    """
    plans, reasons = {}, []
    for name in (planner,) if planner else OUR_PLANNERS:
        try:
            if name == DIRECT:
                plans[name] = _direct_plan(setting, source, target, max_bytes)
            elif name == CALIBRATED:
                plans[name] = _cheapest_plan(setting, source, target, max_bytes, zero_fill, may_exceed)
            else:
                raise NotHandled(
                    f"planner {name} plans on ranks only; measure this planner with distbench run redistribute"
                )
        except (NotHandled, NoPath) as reason:
            reasons.append(str(reason))
    if not plans:
        raise NotHandled(reasons[0])
    return plans[choose({name: plan.seconds for name, plan in plans.items()})]


def _cheapest_plan(
    setting: Setting, source: State, target: State, max_bytes: int | None, zero_fill: bool, may_exceed: bool
) -> Plan:
    tensor = setting.problem, setting.model, source, target
    try:
        route = cheapest_route(*tensor, max_bytes, zero_fill)
    except NoPath:
        if not may_exceed:
            raise
        route = least_peak_route(*tensor, zero_fill)
    return Plan(CALIBRATED, route, setting.problem, route.sent_bytes, partial(_steps_of_path, setting, route.states))


def plan_of_path(setting: Setting, planner: str, path: str, states: tuple[State, ...]) -> Plan:
    """Return a plan of given layouts; ValueError if two neighbours are not one legal step apart."""
    steps = _steps_of_path(setting, states)
    peak = max((step.held_bytes for step in steps), default=setting.problem.local_bytes(states[0]))
    return _plan_of_steps(setting, planner, states, steps, sum(step.sent_bytes for step in steps), peak, path)


def _plan_of_steps(
    setting: Setting,
    planner: str,
    states: tuple[State, ...],
    steps: tuple[PlannedStep, ...],
    received_bytes: int,
    peak_bytes: int,
    text: str = "",
) -> Plan:
    seconds, sent_bytes = sum(step.seconds for step in steps), sum(step.sent_bytes for step in steps)
    route = Route(states, seconds, sent_bytes, sum(step.is_collective for step in steps), peak_bytes)
    return Plan(planner, route, setting.problem, received_bytes, partial(tuple, steps), text)


def _steps_of_path(setting: Setting, states: tuple[State, ...]) -> tuple[PlannedStep, ...]:
    return tuple(
        PlannedStep(
            op=step.move.op,
            over=tuple(setting.mesh)[step.move.mesh_dim],
            target=step.target,
            seconds=step.price.seconds,
            error=setting.error(step.move.op, step.move.mesh_dim),
            sent_bytes=step.price.sent_bytes,
            held_bytes=step.price.held_bytes,
            is_collective=step.price.is_collective,
            does=step.move,
        )
        for step in priced_steps(setting.problem, setting.model, states)
    )


def _direct_plan(setting: Setting, source: State, target: State, max_bytes: int | None) -> Plan:
    """Return one exchange instead of a path (two from a partial); NotHandled without an exchange."""
    if setting.num_ranks > MAX_DIRECT_RANKS:
        raise NotHandled(f"not planned: more than {MAX_DIRECT_RANKS} ranks")
    if target.partials:
        raise NotHandled("makes no Partial")
    problem, num_copies = setting.problem, _num_copies(source, target)
    stages = plan_direct(
        *(source, target, problem.shape, problem.mesh_shape),
        lambda exchange: _exchange_seconds(setting, exchange, num_copies)[0],
    )
    states, exchanges = (source, *(state for state, _ in stages)), [exchange for _, exchange in stages]
    if all(exchange.changes_nothing for exchange in exchanges) and source == target:
        return _plan_of_steps(setting, DIRECT, (source,), (), 0, problem.local_bytes(source))
    steps = tuple(
        _exchange_step(setting, *pair, exchange) for pair, exchange in zip(pairwise(states), exchanges, strict=True)
    )
    received = sum(max(exchange.received) for exchange in exchanges) * problem.itemsize
    peak_bytes = max(step.held_bytes for step in steps)
    if max_bytes is not None and peak_bytes > max_bytes:
        raise NotHandled(f"holds {peak_bytes} bytes per rank, above {max_bytes}; allow more")
    return _plan_of_steps(setting, DIRECT, states, steps, received, peak_bytes)


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
    return PlannedStep(op, "the mesh", target, seconds, priced, sent, before + after, communicates, exchange)


def _num_copies(source: State, target: State) -> int:
    return sum(any(state.orders[1:]) for state in (source, target))


def direct_line(setting: Setting) -> Line | None:
    """Return the profile's line for a direct exchange over the whole mesh; None without a measurement."""
    if setting.profile is None:
        return None
    return setting.profile.line(DIRECT, "x".join(setting.mesh), setting.num_ranks)


def _exchange_seconds(setting: Setting, exchange: Exchange, num_copies: int) -> tuple[float, float]:
    """Return (predicted seconds, their expected relative error) of one all-to-all with splits.

    The price is from the profile's line for direct exchanges, if there is one, by the busiest rank's transfers and
    copies. Otherwise it is the sum of one all-to-all per crossed mesh dim, which is too high if links work at the same
    time.
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
