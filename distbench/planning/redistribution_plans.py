"""What `distbench redistribute` is asked; each planner's plan for one pair or for all pairs, and which one to use."""

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from distbench.planning.cost_profile import (
    ALL_TO_ALL,
    COLLECTIVES,
    CUT,
    DIRECT,
    Line,
    MeasuredCost,
    MeshCost,
    Profile,
    TorchCost,
    load_profile,
    measured_cost,
)
from distbench.planning.direct_exchange import Exchange, plan_direct
from distbench.planning.placement_states import NotHandled, State, parse_state
from distbench.planning.search import Problem, cheapest_route, priced_steps
from distbench.processes import ask_child
from distbench.records.run_file import DTYPE_BYTES
from distbench.show.units import percent_text, size_text, time_text
from distbench.spec.devices import device_of, known_device
from distbench.spec.errors import UserError
from distbench.spec.mesh import MESH_DIMS, check_num_ranks, format_mesh, mesh_dim_size, parse_mesh
from distbench.spec.placements import BASELINE, PLANNERS, TORCH_PLANNERS, format_placements
from distbench.spec.printable_text import count_text, cut

PLACEMENTS = "write R, S(tensor dim), S(tensor dim)[turn] or P(sum), one a mesh dim"
MAX_DIGITS = 4000  # Python reads no longer numbers


@dataclass(frozen=True)
class Setting:
    """A tensor on a mesh, and the prices of its redistributions."""

    problem: Problem
    mesh: Mapping[str, int]  # mesh dim names to ranks, outermost first
    dtype: str
    devices_per_host: int  # of the hosts by which torch prices a mesh dim
    model: MeshCost
    profile: Profile | None = None  # of the model; None for torch's own constants
    profile_path: Path | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.problem.mesh_shape)

    @property
    def tensor(self) -> str:
        """`bf16[4096,4096]`."""
        return f"{self.dtype}[{','.join(map(str, self.problem.shape))}]"

    @property
    def tensor_ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.problem.shape)

    @property
    def prices(self) -> str:
        """The source of the prices, in words."""
        if self.profile is None:
            return f"torch's own constants ({count_text(self.devices_per_host, 'device')} a host), unmeasured"
        return f"profile {self.profile_path} ({self.profile.machine})"

    def error(self, op: str, mesh_dim: int) -> float | None:
        """The share by which a step's prediction may be off; None without a profile, 0 where there is no line."""
        if not isinstance(self.model, MeasuredCost):
            return None
        line = self.model.lines.get((op, mesh_dim))
        return line.expected_error if line else 0.0


def setting_of(
    shape: str, dtype: str, mesh: str, profile_path: Path | None = None, devices_per_host: int | None = None
) -> Setting:
    """Read a tensor, a mesh and a cost model.

    Args:
        shape: of the full tensor, as `4096,4096`.
        dtype: `f64`, `f32`, `bf16` or `f16`.
        mesh: `2x4`, or `dp_shard=2,tp=4`.
        profile_path: a file, or None for torch's own constants.
        devices_per_host: what torch takes a host to hold; None: 8 under a profile of NCCL, else 1, as on CPU.

    Raises:
        UserError: any of them cannot be read, or the profile does not cover the mesh.
    """
    parts = [part.strip() for part in shape.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= MAX_DIGITS and int(part) > 0 for part in parts):
        raise UserError(f"shape {cut(shape)!r} is no list of sizes above 0; write for example --shape 4096,4096")
    if dtype not in DTYPE_BYTES:
        raise UserError(f"dtype {dtype!r} is unknown; use {', '.join(DTYPE_BYTES)}")
    profile = load_profile(profile_path) if profile_path else None
    mesh_sizes = _mesh(mesh, profile)
    try:
        problem = Problem(tuple(mesh_sizes.values()), tuple(map(int, parts)), DTYPE_BYTES[dtype])
    except NotHandled as reason:
        raise UserError(f"{reason}; give a smaller --shape") from reason
    profile = profile.on(mesh_sizes) if profile else None
    devices = devices_per_host or known_device(device_of(profile.backend if profile else "")).per_host
    model: MeshCost = _measured(profile, mesh_sizes, mesh) if profile else TorchCost(problem.mesh_shape, devices)
    return Setting(problem, mesh_sizes, dtype, devices, model, profile, profile_path)


def _mesh(text: str, profile: Profile | None) -> dict[str, int]:
    if "=" in text:
        return parse_mesh(text)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UserError(f"mesh {text!r} is neither sizes nor names; write --mesh 2x4 or --mesh dp_shard=2,tp=4")
    sizes = [mesh_dim_size(size, text) for size in text.split("x")]
    if len(sizes) > len(MESH_DIMS):
        raise UserError(f"mesh {cut(text)!r} has {len(sizes)} mesh dims; give at most {len(MESH_DIMS)}")
    unnamed = {f"m{number}": size for number, size in enumerate(sizes)}
    check_num_ranks(unnamed)
    if profile and len(profile.mesh) == len(sizes):
        mesh_sizes = dict(zip(profile.mesh, sizes, strict=True))
        if not _uncovered(profile.on(mesh_sizes), mesh_sizes):
            return mesh_sizes
    return unnamed


def _measured(profile: Profile, mesh_sizes: Mapping[str, int], text: str) -> MeasuredCost:
    if missing := _uncovered(profile, mesh_sizes):
        measured_dims = sorted({(line.mesh_dim, line.group_size) for line in profile.lines if line.op == "all_gather"})
        covered = ", ".join(f"{name} of {size}" for name, size in measured_dims)
        raise UserError(
            f"the profile prices no {missing} of mesh {text}, only mesh dims {covered}; "
            f"give such a mesh, e.g. --mesh {format_mesh(profile.mesh)}, or measure yours with distbench calibrate"
        )
    return measured_cost(profile, mesh_sizes)


def _uncovered(profile: Profile, mesh_sizes: Mapping[str, int]) -> str | None:
    needed = [(op, name, size) for name, size in mesh_sizes.items() for op in COLLECTIVES if size > 1]
    return next((f"{op} over {name} of {size}" for op, name, size in needed if not profile.line(op, name, size)), None)


def pair_of(source: str, target: str, setting: Setting) -> tuple[State, State]:
    """Two layouts as torch writes them, e.g. `S(0)[1]S(0)[0]`.

    The target may have Partial where the source has the same, and P(sum) where the source has a shard: these are what
    `DTensor.redistribute` takes (the latter with torch 2.14 or newer, see `zero_filled`).

    Raises:
        UserError: a layout cannot be read, or is none of this tensor on this mesh.
    """
    states = _state(source, setting), _state(target, setting)
    for mesh_dim in dict(set(states[1].partials) - set(states[0].partials)).keys() - zero_filled(*states):
        before, after = (state.placements()[mesh_dim] for state in states)
        raise UserError(
            f"{source} -> {target} turns {format_placements([before])} into {format_placements([after])}; "
            "DTensor.redistribute turns only S(dim) into Partial, and only into P(sum); write R or S(dim) there"
        )
    return states


def zero_filled(source: State, target: State) -> set[int]:
    """The mesh dims whose shards become P(sum)."""
    sharded = {mesh_dim for order in source.orders for mesh_dim in order}
    return {mesh_dim for mesh_dim, reduce_op in target.partials if reduce_op == "sum" and mesh_dim in sharded}


def _state(text: str, setting: Setting) -> State:
    try:
        state = parse_state("".join(text.split()), setting.tensor_ndim)
    except ValueError as error:
        raise UserError(f"{error}" if "write" in str(error) else f"{error}; {PLACEMENTS}") from error
    except NotHandled as reason:
        raise UserError(f"{reason} of {text!r} is unknown; use sum, avg, min, max or product") from reason
    if state.mesh_ndim != len(setting.mesh):
        raise UserError(
            f"{text!r} has {state.mesh_ndim} placements, mesh {format_mesh(setting.mesh)} has {len(setting.mesh)} "
            f"mesh dims; {PLACEMENTS}"
        )
    if len(ops := {op for _, op in state.partials}) > 1 and ops != {"sum", "avg"}:
        raise UserError(f"{text!r} mixes the reduce ops {', '.join(sorted(ops))}, which DTensor refuses; write one")
    return state


def every_pair(setting: Setting) -> Iterator[tuple[State, State]]:
    """All ordered pairs of different layouts in default shard order; sources of R, S and P(sum), targets of R, S."""
    shards = ["R", *(f"S({tensor_dim})" for tensor_dim in range(setting.tensor_ndim))]
    targets = ["".join(choice) for choice in product(shards, repeat=len(setting.mesh))]
    sources = ["".join(choice) for choice in product([*shards, "P(sum)"], repeat=len(setting.mesh))]
    for source, target in product(sources, targets):
        if source != target:
            yield parse_state(source, setting.tensor_ndim), parse_state(target, setting.tensor_ndim)


@dataclass(frozen=True)
class TorchPath:
    """One planner's answer for one pair: its path in torch's own notation, or None and the reason why."""

    path: str | None
    reason: str = ""


BUDGET_S, START_S = 20.0, 120.0


@dataclass(frozen=True)
class TorchAnswers:
    """torch's version, for each planner one answer a pair, and why this torch makes no partial of a shard (None where
    it does). Version and reason are None where torch could not be asked."""

    torch: str | None
    paths: dict[str, tuple[TorchPath, ...]]
    no_zero_fill: str | None = None


def ask_torch(setting: Setting, pairs: Sequence[tuple[State, State]], budget_s: float = BUDGET_S) -> TorchAnswers:
    """Each pair's path by torch's own planners; after `budget_s` seconds of planning, pairs are left out.

    Never raises: where torch fails, the answers say so.
    """
    request = {
        "mesh_shape": setting.problem.mesh_shape,
        "shape": setting.problem.shape,
        "dtype": setting.dtype,
        "devices_per_host": setting.devices_per_host,
        "pairs": [[str(source), str(target)] for source, target in pairs],
        "budget_s": budget_s,
    }
    try:
        failure = "torch cannot be asked: {why}"
        record: dict[str, Any] = ask_child("plan_paths", given=request, timeout_s=budget_s + START_S, failure=failure)
    except UserError as error:
        record = {"unsupported": str(error)}
    if reason := record.get("unsupported"):
        return TorchAnswers(None, dict.fromkeys(TORCH_PLANNERS, (TorchPath(None, reason),) * len(pairs)))
    not_asked = {"error": "not asked: time was up"}
    paths = {
        name: tuple(TorchPath((one or not_asked).get("path"), (one or not_asked).get("error", "")) for one in answers)
        for name, answers in record["paths"].items()
    }
    return TorchAnswers(record["torch"], paths, record["no_zero_fill"])


# Planners whose predictions are this close count as equal, and the simplest to use is taken.
EQUAL_SHARE = 0.02
# One of ours must be predicted faster by this share before torch's own path is left. Measured gains below it were noise
# or losses: of 96 pairs at 1 MB and above (gloo, 2x4 and 2x2x2) the six that were slower than the better of torch's two
# (by 1.5 to 11 %) were predicted 1 to 6 % faster.
LEAVING_SHARE = 0.10


def choose(predicted_s: Mapping[str, float]) -> str:
    """The planner to use by predicted seconds alone, given simplest to use first, one at least: the better of torch's
    (greedy where they are equal), or the fastest of ours where that is faster by more than LEAVING_SHARE."""
    torchs = _fastest({name: value for name, value in predicted_s.items() if name in TORCH_PLANNERS})
    ours = _fastest({name: value for name, value in predicted_s.items() if name not in TORCH_PLANNERS})
    if torchs is None or ours is None:
        return torchs or ours or next(iter(predicted_s))
    return ours if predicted_s[ours] < (1 - LEAVING_SHARE) * predicted_s[torchs] else torchs


def _fastest(predicted_s: Mapping[str, float]) -> str | None:
    """The first whose time is as good as the least; None for none."""
    limit = min(predicted_s.values(), default=0.0) * (1 + EQUAL_SHARE)
    return next((name for name, value in predicted_s.items() if value <= limit), None)


# Above this many ranks, who sends what to whom is not worked out: it grows with their square.
MAX_DIRECT_RANKS = 512


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan, on the rank that has most to do."""

    op: str  # the collective; of a local step one of `cost_profile.LOCAL_OPS`
    over: str  # the mesh dim's name, or "the mesh"
    target: State
    seconds: float
    error: float | None  # share by which the predicted seconds may be off; None without a profile
    sent_bytes: int
    held_bytes: int  # local tensors before and after, together
    is_collective: bool

    @property
    def text(self) -> str:
        """`all_gather over tp`, `local cut`."""
        return f"{self.op} over {self.over}" if self.is_collective else f"local {self.op}"


@dataclass(frozen=True)
class Plan:
    """One planner's way from the source to the target."""

    planner: str  # one of `spec.placements.PLANNERS`
    path: str  # its layouts, as torch writes them
    source: State
    steps: tuple[PlannedStep, ...]
    received_bytes: int  # of the busiest rank; of a ring collective as many as it sends
    peak_bytes: int  # the most that a step holds

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
    """The plans of one pair."""

    source: State
    target: State
    plans: Mapping[str, Plan]  # by planner, in the order of `spec.placements.PLANNERS`
    missing: Mapping[str, str]  # planner to why it has none
    least_bytes: int | None  # that the rank that lacks most must receive; None for Partial, or too many ranks

    @property
    def use(self) -> Plan:
        """The plan to use, see `choose`."""
        return self.plans[choose({planner: plan.seconds for planner, plan in self.plans.items()})]

    def received_ratio(self, plan: Plan) -> float | None:
        """Received bytes over the receive lower bound; None where that is 0 or not known."""
        return plan.received_bytes / self.least_bytes if self.least_bytes else None


def advise(setting: Setting, source: State, target: State, torch: TorchAnswers, number: int = 0) -> Advice:
    """Every planner's plan for one pair; torch's are its answers of that number."""
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
    """One exchange in the place of a path (two from a partial), or why there is none."""
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
    """The profile's line for this all-to-all over the whole mesh; None where it was not measured."""
    if setting.profile is None:
        return None
    return setting.profile.line(DIRECT, "x".join(setting.mesh), setting.num_ranks)


def _exchange_seconds(setting: Setting, exchange: Exchange, num_copies: int) -> tuple[float, float]:
    """(predicted seconds, the share by which they may be off) of one all-to-all with splits.

    By the profile's own line for it, if any, over what the busiest rank sends or receives, copies and adds. Else as one
    all-to-all after the other over each mesh dim that it crosses: too slow where links work at the same time.
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
    """For each mesh dim the bytes that the busiest rank sends or receives over it; two ranks use the outermost mesh dim
    in which they differ, their slowest link."""
    cells = np.indices(setting.problem.mesh_shape).reshape(len(setting.mesh), -1)
    outermost = (cells[:, exchange.senders] != cells[:, exchange.receivers]).argmax(axis=0)
    elements = np.zeros((len(cells), 2, cells.shape[1]), dtype=np.int64)
    np.add.at(elements[:, 0], (outermost, exchange.senders), exchange.volumes)
    np.add.at(elements[:, 1], (outermost, exchange.receivers), exchange.volumes)
    return [int(most) * setting.problem.itemsize for most in elements.max(axis=(1, 2))]


# What to write in training code. Braces: the profile's file, or the layouts of the pair.
HOW = {
    "greedy": "DTensor's default, nothing to change",
    "min_cost": "with torch.distributed.tensor._redistribute.use_min_cost_redistribution_plan()",
    "calibrated": 'with distbench.calibrated_planning("{profile}")',
    "direct": 'move = distbench.DirectRedistribution("{source}", "{target}", x.shape, mesh.mesh), then '
    "move(x.to_local()) in place of redistribute",
}


def verdict(setting: Setting, advice: Advice) -> str:
    """Which planner to use and why, and how far to trust that."""
    use, default = advice.use, advice.plans.get(BASELINE)
    if advice.source == advice.target:
        return "Nothing to do: source and target are the same."
    if not use.num_collectives and not use.seconds:
        reason = "every step is local, so no rank sends anything"
    elif default is None:
        reason = f"predicted {time_words(use.seconds)}, the least of those that could be planned"
    elif use is default:
        reason = f"none of ours is predicted more than {percent_text(LEAVING_SHARE)} faster, nor min_cost at all"
    else:
        sent = f"a rank sends {size_text(use.sent_bytes)}, not {size_text(default.sent_bytes)}"
        share = f"predicted {time_words(use.seconds)}, {use.seconds / default.seconds:.2f} of {BASELINE}'s time"
        is_same = use.sent_bytes == default.sent_bytes
        reason = f"{share}, for the same bytes sent by a rank" if is_same else f"{share}; {sent}"
    return f"Use {use.planner}: {reason}{_doubt(setting, use, default)}. How: {how(setting, advice)}."


def how(setting: Setting, advice: Advice) -> str:
    """What to write in training code to have the recommended plan."""
    profile = setting.profile_path or "profile.json"
    text = HOW.get(advice.use.planner, f"planner {advice.use.planner!r}, as redistribute/planners.py applies it")
    return text.format(profile=profile, source=advice.source, target=advice.target)


def _doubt(setting: Setting, use: Plan, default: Plan | None) -> str:
    if default is None or use is default:
        return ""
    if setting.profile is None:
        return " (by torch's constants; --profile decides for your machine)"
    error = max(use.error or 0.0, default.error or 0.0)
    if 1 - use.seconds / default.seconds < error:
        return f" (less apart than the prediction's error of {percent_text(error)}: measure both)"
    return ""


def time_words(seconds: float) -> str:
    """A time inside a sentence: `1.20 s`, `0 us`."""
    return " ".join(time_text(seconds).split()) if seconds else "0 us"


# Who sends what to whom takes time with the square of the ranks: pairs times ranks squared, for some ten seconds.
MAX_WORK = 4_000_000


@dataclass(frozen=True)
class PairRanking:
    """Every pair's advice, the most striking first."""

    advices: tuple[Advice, ...]  # by how many times longer than the best plan DTensor's default is predicted to take
    num_used: dict[str, int]  # planner to the number of pairs for which it is the one to use
    num_all: int  # all ordered pairs; `advices` may be of some
    num_unasked: int  # pairs for which torch gave no path by one planner at least


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
    """Every pair's advice by torch's answers, one a pair; `advised` is called after each pair."""
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
