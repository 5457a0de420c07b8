"""The compared ways to redistribute a DTensor: torch's planners, ours, and the direct exchange."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distbench.planning.cheapest_path import forget_prices
from distbench.planning.cost_profile import DIRECT, NATIVE_ALL_TO_ALL, ZERO_FILL, Profile, measured_cost
from distbench.planning.direct_exchange import plan_exchange
from distbench.planning.placement_states import State
from distbench.ranks.context import RankContext
from distbench.ranks.dtypes import TORCH_DTYPES
from distbench.records.bus_bandwidth import busbw_factor
from distbench.redistribute import Plan, execute
from distbench.redistribute import plan as plan_by_library
from distbench.spec import UserError
from distbench.spec.placements import BASELINE, PLANNERS
from distbench.spec.plugins import load_plugin, plugin_names
from distbench.statistics.intervals import median
from distbench.torch_private import (
    BACKEND_OPS,
    ZERO_FILLS,
    OwnPlans,
    PathStep,
    Unsupported,
    calibrated_planning,
    clear_redistribution_caches,
    native_all_to_all,
    plan_only,
    plan_path,
    planner,
    require,
)

WARM_PLANS = 20


def check_planners(planners: Sequence[str], dtype: str, profile: Profile | None) -> None:
    """Raise UserError for an unknown planner or dtype, or planner calibrated without a profile."""
    if dtype not in TORCH_DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; use {', '.join(TORCH_DTYPES)}")
    for name in planners:
        if name not in (*PLANNERS, *plugin_names("planners")):
            raise UserError(f"planner {name!r} is unknown; use {', '.join((*PLANNERS, *plugin_names('planners')))}")
        if name == "calibrated" and profile is None:
            raise UserError(
                "planner calibrated needs a profile; write a profile with distbench calibrate and pass --profile"
            )


class Switch:
    """A context that is active while its case runs and inactive while other cases run; also usable in `with`."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        self._make, self._entered = make, contextlib.ExitStack()

    def on(self) -> None:
        """Enter the context, which must be inactive."""
        self._entered.enter_context(self._make())

    def off(self) -> None:
        """Leave the context if active."""
        self._entered.close()

    def __enter__(self) -> "Switch":
        self.on()
        return self

    def __exit__(self, *_: object) -> None:
        self.off()


@dataclass(frozen=True)
class PlannedRedistribution:
    """One redistribution, planned and ready to run while its context is open."""

    call: Callable[[], Any]  # runs it, and returns the local tensor or a DTensor
    path: str  # in torch's own notation, or a description of the exchange
    collectives: tuple[str, ...]  # as planned, in order
    executed_as: tuple[str, ...]  # the backend's collective for each of them
    wire_bytes: int  # that one rank must send, by each step's ring algorithm
    wire_bytes_executed: int  # the same for steps as the backend runs them
    planning_s: tuple[float, float]  # thread CPU seconds to plan with empty caches, and again from them
    predicted_s: float | None = None  # from the profile; None without a profile or line
    steps: tuple[PathStep, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # the executor's own counters
    switch: Switch = field(default_factory=Switch)  # while off, others may be planned and run

    def local_result(self) -> Any:
        """Run the redistribution; return this rank's local tensor in the target layout."""
        moved = self.call()
        return moved.to_local() if hasattr(moved, "to_local") else moved


@contextlib.contextmanager
def planned_redistribution(
    name: str,
    source: Any,
    target: Sequence[Any],
    context: RankContext,
    native: bool,
    known_planning_s: tuple[float, float] | None = None,
) -> Iterator[PlannedRedistribution]:
    """Plan a DTensor's redistribution by a planner of torch or distbench, which remains active until the case has been
    timed.

    `native` runs all-to-alls unchanged on CPU; `known_planning_s` is an earlier measurement of planning. Raises
    Unsupported if this planner cannot redistribute this pair, or torch's planner has another interface.
    """
    if name not in PLANNERS:
        with planning_switch(BASELINE, None, context, native) as switch:
            yield replace(_by_plugin(name, source, target, context, native), switch=switch)
        return
    profile = context.profile.natively() if context.profile and native else context.profile
    with planning_switch(name, profile, context, native) as switch:
        yield replace(_path(source, target, context, profile, native, known_planning_s), switch=switch)


def _by_plugin(
    name: str, source: Any, target: Sequence[Any], context: RankContext, native: bool
) -> PlannedRedistribution:
    """Return the path through the placements that a plug-in chooses; greedy plans each stage of it."""
    if not isinstance(source, DTensor):
        raise Unsupported(f"planner {name} is a plug-in, which supports neither shard orders nor Partial targets")
    stages = [tuple(stage) for stage in load_plugin("planners", name)(source, tuple(target))]
    if stages[-1:] != [tuple(target)]:
        raise UserError(f"planner {name!r} ends at {stages[-1:]} instead of the target {target}")
    parts: list[PlannedRedistribution] = []
    tensor, profile = source, context.profile.natively() if context.profile and native else context.profile
    for stage in stages:
        parts.append(_path(tensor, stage, context, profile, native, None))
        tensor = parts[-1].call()
    predicted = [part.predicted_s for part in parts]
    states = [parts[0].path, *(part.path.partition("->")[2] for part in parts[1:])]

    def call() -> Any:
        moved = source
        for stage in stages:
            moved = moved.redistribute(context.mesh, stage)
        return moved

    return PlannedRedistribution(
        call=call,
        path="->".join(filter(None, states)),
        collectives=tuple(op for part in parts for op in part.collectives),
        executed_as=tuple(op for part in parts for op in part.executed_as),
        wire_bytes=sum(part.wire_bytes for part in parts),
        wire_bytes_executed=sum(part.wire_bytes_executed for part in parts),
        planning_s=(sum(part.planning_s[0] for part in parts), sum(part.planning_s[1] for part in parts)),
        predicted_s=None if None in predicted else sum(filter(None, predicted)),
        steps=tuple(step for part in parts for step in part.steps),
    )


def planning_switch(name: str, profile: Profile | None, context: RankContext, native: bool = False) -> Switch:
    """Context in which DTensor plans by one of torch's planners or by the profile; the plans are reused each time.

    Raises `Unsupported` if the profile has no line for a step.
    """
    plans = OwnPlans()

    @contextlib.contextmanager
    def planning() -> Iterator[None]:
        with _planning_by(name, profile, context), plans.used(), native_all_to_all(native):
            yield

    return Switch(planning)


@contextlib.contextmanager
def _planning_by(name: str, profile: Profile | None, context: RankContext) -> Iterator[None]:
    if name not in PLANNERS:
        raise Unsupported(f"planner {name} is a plug-in, which plans redistributions, not operators")
    if name != "calibrated":
        with planner(name):
            yield
        return
    if profile is None:
        raise Unsupported("planner calibrated needs a profile; pass --profile")
    try:
        measured_cost(profile, dict(zip(context.mesh_dims, context.mesh_shape, strict=True)))
    except UserError as error:
        raise Unsupported(str(error)) from error
    # All ranks of a launch have the same profile (`rank_session`).
    with calibrated_planning(profile, check_ranks=False):
        yield


def _path(
    source: Any,
    target: Sequence[Any],
    context: RankContext,
    profile: Profile | None,
    native: bool,
    known_planning_s: tuple[float, float] | None,
) -> PlannedRedistribution:
    plan = plan_only(source, target)

    def forget() -> None:
        clear_redistribution_caches()
        forget_prices()

    planning_s = known_planning_s or planning_seconds(plan, forget, context.rank == 0)
    plan()  # The redistribution is planned here, so that no iteration plans it.
    text, steps = plan_path(source, target)
    if any(step.does == ZERO_FILL for step in steps):
        require(ZERO_FILLS)  # Older versions of torch plan this redistribution by greedy, which raises an error.
    itemsize = source.dtype.itemsize
    communicating = [step for step in steps if step.op and step.group_size > 1]
    executed = [executed_as(step.op, context, native) for step in communicating if step.op]
    return PlannedRedistribution(
        call=lambda: source.redistribute(context.mesh, target),
        path=text,
        collectives=tuple(step.op for step in communicating if step.op),
        executed_as=tuple(executed),
        wire_bytes=wire_bytes(steps, itemsize),
        wire_bytes_executed=round(sum(map(_sent, communicating, executed)) * itemsize),
        planning_s=planning_s,
        predicted_s=predicted_seconds(steps, itemsize, profile),
        steps=tuple(steps),
    )


def exchange_between(
    before: State,
    after: State,
    shape: tuple[int, ...],
    local: torch.Tensor,
    context: RankContext,
    known_planning_s: tuple[float, float] | None = None,
) -> PlannedRedistribution:
    """Direct exchange of a local tensor between two layouts, with shard orders, to a target without Partial."""

    def plan() -> Plan:
        return plan_by_library(before, after, shape, context.mesh, context.profile, dtype=local.dtype, planner=DIRECT)

    try:
        planning_s = known_planning_s or planning_seconds(plan, plan_exchange.cache_clear, context.rank == 0)
    except UserError as reason:
        raise Unsupported(f"direct: {reason}") from reason
    direct = plan()
    ops = tuple(step.op for step in direct.steps if step.is_collective)
    steps = [f"-[{'direct' if step.is_collective else 'local'}]->{step.target}" for step in direct.steps]
    is_measured = context.profile and context.profile.line(DIRECT, "x".join(context.mesh_dims), context.mesh.size())
    return PlannedRedistribution(
        call=lambda: execute(local, direct),
        path=f"{before}{''.join(steps)}",
        collectives=ops,
        executed_as=tuple("send_recv" if local.device.type == "cpu" else op for op in ops),
        wire_bytes=direct.sent_bytes,
        wire_bytes_executed=direct.sent_bytes,
        planning_s=planning_s,
        predicted_s=direct.seconds if is_measured else None,
        facts={"received_bytes": direct.received_bytes},
    )


def predicted_seconds(steps: Sequence[PathStep], itemsize: int, profile: Profile | None) -> float | None:
    """Return a path's predicted seconds; None without a profile, or without a line for a step. Itemsize in bytes."""
    if profile is None:
        return None
    total = 0.0
    for step in steps:
        if step.group_size == 1:
            continue
        line = profile.line(step.does, step.mesh_dim, step.group_size)
        if line is not None:
            total += line.seconds(step.payload_numel * itemsize, step.num_copies)
        elif step.op:
            return None
    return total


def planning_seconds(plan: Callable[[], object], forget: Callable[[], None], is_measured: bool) -> tuple[float, float]:
    """Return thread CPU seconds to plan with empty caches, and again with full caches.

    The reporting rank measures several times and returns the median; others measure once, to leave CPUs free.
    """
    forget()
    seconds = []
    for _ in range(1 + (WARM_PLANS if is_measured else 1)):
        start = time.thread_time()
        plan()
        seconds.append(time.thread_time() - start)
    return seconds[0], median(seconds[1:])


def executed_as(op: str, context: RankContext, native: bool) -> str:
    """Return the backend's collective for a step; on CPU, non-native all-to-alls are all-gathers and local chunks."""
    if op == NATIVE_ALL_TO_ALL:
        return "all_to_all"
    if context.device.type == "cpu" and op == "all_to_all" and not native:
        return "all_gather"
    return BACKEND_OPS.get((context.backend, op), op)


def wire_bytes(steps: Sequence[PathStep], itemsize: int) -> int:
    """Return the bytes that one rank must send on a path, by each step's ring algorithm."""
    return round(sum(_sent(step, step.op) for step in steps) * itemsize)


def _sent(step: PathStep, op: str | None) -> float:
    """Return the elements that one rank sends for a step that runs as `op`, by its ring algorithm."""
    if op is None:
        return 0.0
    share = busbw_factor(op, step.group_size) * step.logical_numel
    return share / step.group_size if op == "all_to_all" else share
