"""Results of a sweep: predicted and measured plans, their order by time and memory, and the notes."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distbench.report.trace_rows import Trace
from distbench.search.space import Candidate, Setup, Space, count_of
from distbench.search.sweep_child import PlanCode
from distbench.simulate.error_bars import Bar, TimedKind, best_probability, difference_errors, is_tie
from distbench.simulate.hardware_file import Hardware
from distbench.simulate.published import plan_kinds
from distbench.spec.printable_text import count_text
from distbench.statistics.pass_comparison import as_table, compare_passes

CLOSE = 0.01  # memory with smaller differences, and without error bars also times, are ties
TOKENS, MEMORY, COST = OBJECTIVES = ("tokens", "memory", "cost")
EQUAL = 0.001  # of the time: smaller differences count as equal
LEAST_SHARE = 0.002  # of the step: smaller differences are not listed as reasons
MAX_LEFT_OUT = 3
COMPUTE, IDLE, BUBBLE, ON_HOST = "compute", "idle", "bubble", "on_host"
CommunicationPath = tuple[str, str, str]


@dataclass(frozen=True)
class Prediction:
    """Prediction of a candidate's step.

    Args:
        parts_s: seconds of `compute`, `idle` (the host has not launched a kernel) and, for a pipeline, `bubble`; with
            operators on the host `on_host`.
        exposed_s: exposed communication by (mesh dim, collective, owner).
        implicit_s: exposed communication of implicit redistributions, by (owner, redistribution).
        reserved_bytes: reserved memory of the allocator at its peak.
        live_bytes: the part of the reserved memory that is alive at the peak.
        fits: whether the memory suffices without the reserve.
        is_tight: the plan fits only because the allocator releases its cache.
        takes_reserve: the plan would fit without a reserve.
        assumed: caveats: guessed, fitted, extrapolated and missing figures.
        step_bar, memory_bar: error bars; None for a host.
    """

    candidate: Candidate
    step_s: float
    parts_s: Mapping[str, float]
    exposed_s: Mapping[CommunicationPath, float]
    implicit_s: Mapping[tuple[str, str], float]
    reserved_bytes: float
    num_parameters: int
    batch_size: int
    num_tokens: int | None
    fits: bool = True
    is_tight: bool = False
    takes_reserve: bool = False
    live_bytes: float = 0.0
    mfu: float = 0.0
    assumed: tuple[str, ...] = ()
    step_bar: Bar | None = None
    memory_bar: Bar | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices; samples if the scenario gives no tokens."""
        return (self.num_tokens or self.batch_size) / self.step_s

    @property
    def timed_kind(self) -> TimedKind:
        """The step time and the kinds of parallelism, for the error of ratios."""
        return self.step_s, plan_kinds(self.candidate.mesh)

    def ties_with(self, other: "Prediction") -> bool:
        """Return whether two plans are too close for an order, by the error of ratios or, without one, by CLOSE."""
        errors = difference_errors() if self.step_bar is not None else None
        if errors is None:
            return abs(self.step_s / other.step_s - 1) <= CLOSE
        return is_tie(self.timed_kind, other.timed_kind, errors)

    def replaces(self, fastest: "Prediction") -> bool:
        """Return whether the plan ties with the fastest, and saves a larger share of memory than it adds to time."""
        saved, added = 1 - self.reserved_bytes / fastest.reserved_bytes, self.step_s / fastest.step_s - 1
        return self is fastest or (self.ties_with(fastest) and saved >= added)


@dataclass(frozen=True)
class RankedPlan:
    """One row of a sweep's result.

    Args:
        memory_bytes: memory at the peak; None if unknown.
        memory_basis: "predicted" or "measured".
        verdict: verdict of a measured plan compared with the recommended plan; "" for a predicted plan.
        prediction: None for a plan without a prediction.
        measured: for a measured plan, bounds of its time divided by the recommended plan's.
    """

    candidate: Candidate
    step_s: float
    tokens_per_s: float
    memory_bytes: float | None
    memory_basis: str = "predicted"
    fits: bool | None = None
    verdict: str = ""
    prediction: Prediction | None = None
    measured: tuple[float, float, float] | None = None

    @property
    def predicted_s(self) -> float | None:
        """The predicted time of a measured plan."""
        return self.prediction.step_s if self.prediction is not None and self.memory_basis == "measured" else None

    @property
    def takes_reserve(self) -> bool:
        """Whether the missing reserve is the only reason against a recommendation."""
        return self.fits is False and self.prediction is not None and self.prediction.takes_reserve

    @property
    def is_tight(self) -> bool:
        """Whether the plan fits only because the allocator releases its cache."""
        return self.fits is not False and self.prediction is not None and self.prediction.is_tight

    @property
    def step_bar(self) -> Bar | None:
        """Error bar of a predicted step time."""
        return None if self.prediction is None or self.memory_basis == "measured" else self.prediction.step_bar

    @property
    def memory_bar(self) -> Bar | None:
        """Error bar of predicted memory."""
        return None if self.prediction is None or self.memory_basis == "measured" else self.prediction.memory_bar

    @property
    def timed_kind(self) -> TimedKind:
        """The step time and the kinds of parallelism, for the error of ratios."""
        return self.step_s, plan_kinds(self.candidate.mesh)


def plan_of(prediction: Prediction) -> RankedPlan:
    """Return a row for a prediction."""
    return RankedPlan(
        prediction.candidate,
        prediction.step_s,
        prediction.tokens_per_s,
        prediction.reserved_bytes,
        "predicted",
        prediction.fits,
        prediction=prediction,
    )


def judged(plans: Sequence[RankedPlan], passes: Sequence[Any]) -> list[RankedPlan]:
    """Return rows of measured plans, the fastest first; other rows have a verdict compared with the fastest."""
    best = int(np.argmin([plan.step_s for plan in plans]))
    comparison = compare_passes(as_table(passes), [best] * len(plans))
    bounds = zip(comparison.ratio.tolist(), comparison.low.tolist(), comparison.high.tolist(), strict=True)
    ranked = [
        replace(plan, verdict=verdict, measured=bound)
        for plan, verdict, bound in zip(plans, comparison.verdict, bounds, strict=True)
    ]
    del ranked[best]
    return [replace(plans[best], verdict="recommended"), *sorted(ranked, key=lambda plan: plan.step_s)]


def undominated(plans: Sequence[RankedPlan]) -> list[RankedPlan]:
    """Return plans that fit and that no other plan beats in both time and memory, the fastest first."""
    front: list[RankedPlan] = []
    least = float("inf")
    for plan in sorted(plans, key=lambda plan: (plan.step_s, plan.memory_bytes or 0)):
        if plan.memory_bytes is not None and plan.fits is not False and plan.memory_bytes < least:
            front.append(plan)
            least = plan.memory_bytes
    return front


@dataclass(frozen=True)
class Limits:
    """Limits of the search: candidates and seconds."""

    max_plans: int
    budget_s: float
    started_s: float = field(default_factory=time.monotonic)

    @property
    def reached(self) -> str:
        """Sentence on the reached limit of candidates."""
        return f"the limit --plans {self.max_plans} was reached"

    def left_s(self, share: float = 1.0) -> float:
        """Return the remaining seconds of a share of the budget."""
        return share * self.budget_s - (time.monotonic() - self.started_s)


@dataclass
class SweepState:
    """Current results of a sweep.

    Args:
        written: the scenario's own plan, if only its neighbours are tried.
        predictions: prediction of each simulated candidate.
        measured: latest measurement of each candidate that ran on this machine.
        final: plans of the last measured round, the recommended plan first.
        left_out: reason per candidate that was neither predicted nor measured.
        refused: lower bound in bytes per mesh whose lower bound exceeds the memory.
        stopped: reason for an early stop of the search; "" for a complete search.
        option: the --set option with which a plan works, if no plan works without.
        traces: the communication of each plan of the last measured round.
        faster_outside: options outside of the search, with the recommended plan's prediction if they make it faster.
        num_reused: measured rounds taken from an earlier sweep; None without --reuse.
        objective: one of OBJECTIVES. The number of devices is fixed, so the fastest plan costs least.
        max_step_s: slower plans are not recommended.
    """

    space: Space
    written: Candidate | None = None
    objective: str = TOKENS
    max_step_s: float = math.inf
    predictions: dict[Candidate, Prediction] = field(default_factory=dict)
    measured: dict[Candidate, RankedPlan] = field(default_factory=dict)
    final: list[RankedPlan] = field(default_factory=list)
    left_out: dict[Candidate, str] = field(default_factory=dict)
    refused: dict[Candidate, int] = field(default_factory=dict)
    stopped: str = ""
    option: str = ""
    run_files: list[str] = field(default_factory=list)
    traces: Mapping[Candidate, Trace] = field(default_factory=dict)
    faster_outside: dict[str, Prediction] = field(default_factory=dict)
    num_reused: int | None = None
    interrupted: bool = False

    @property
    def num_legal(self) -> int:
        """Number of candidates."""
        return 1 + len(self.space.around(self.written)) if self.written else count_of(self.space)

    @property
    def ranked_predictions(self) -> list[Prediction]:
        """Return predictions that fit, the fastest first, then predictions that are slower than
        `max_step_s`, then predictions that do not fit, the smallest first.

        Of plans that tie with the fastest and save a larger share of its memory than they add to its time (with the
        objective `memory`, of all plans), the plan with the least memory comes first, or the fastest of those with
        about as little memory.
        """
        fitting = [prediction for prediction in self.predictions.values() if prediction.fits]
        too_large = [prediction for prediction in self.predictions.values() if not prediction.fits]
        fitting.sort(key=lambda prediction: 1 / prediction.tokens_per_s)
        too_large.sort(key=lambda prediction: prediction.reserved_bytes)
        usable = [prediction for prediction in fitting if prediction.step_s <= self.max_step_s]
        too_large = [*(prediction for prediction in fitting if prediction.step_s > self.max_step_s), *too_large]
        is_small = self.objective == MEMORY
        near = [prediction for prediction in usable if is_small or prediction.replaces(usable[0])]
        if near:
            least = min(prediction.reserved_bytes for prediction in near)
            best = next(prediction for prediction in near if prediction.reserved_bytes <= (1 + CLOSE) * least)
            usable = [best, *(prediction for prediction in usable if prediction is not best)]
        return [*usable, *too_large]

    @property
    def leading_predictions(self) -> list[Prediction]:
        """Return predictions in the order in which their changes are tried: the fastest, then the first of the ranking,
        which leaves memory for a faster change, then by time.
        """
        ranked = self.ranked_predictions
        fastest = sorted(ranked, key=lambda prediction: (not prediction.fits, 1 / prediction.tokens_per_s))
        return ranked if self.objective == MEMORY else [*fastest[:1], *ranked[:1], *fastest[1:]]

    @property
    def fastest_measured(self) -> list[RankedPlan]:
        """Return measured plans by time."""
        return sorted(self.measured.values(), key=lambda plan: plan.step_s)

    @property
    def ranked_measured(self) -> list[RankedPlan]:
        """Return plans of the last round first, then all other plans by time."""
        final = {plan.candidate for plan in self.final}
        return [*self.final, *(plan for plan in self.fastest_measured if plan.candidate not in final)]


@dataclass(frozen=True)
class Change:
    """One change of the plan as written, and its effect.

    Args:
        imports, code: lines that make the change, after the plan as written; empty if unavailable.
        time_share: added time as a share of the step as written; negative for a faster change.
        memory_bytes: added bytes; None if unknown.
    """

    imports: Sequence[str]
    code: Sequence[str]
    time_share: float
    memory_bytes: float | None
    plan: RankedPlan


def changes_of(
    plans: Sequence[RankedPlan], as_written: Candidate | None, codes: Mapping[Candidate, PlanCode]
) -> list[Change]:
    """Return every plan except the plan as written as a change of that plan, the largest gain first."""
    written_plan = next((plan for plan in plans if plan.candidate == as_written), None)
    if written_plan is None:
        return []
    changes = []
    for plan in plans:
        if plan is written_plan:
            continue
        more = None
        if plan.memory_bytes is not None and written_plan.memory_bytes is not None:
            more = plan.memory_bytes - written_plan.memory_bytes
        code = codes.get(plan.candidate, PlanCode([], [], []))
        is_moved = plan.candidate.sizes != written_plan.candidate.sizes
        lines = [f"mesh = {plan.candidate.mesh!r}"] if is_moved else code.changes
        changes.append(Change(code.imports, lines, plan.step_s / written_plan.step_s - 1, more, plan))
    return sorted(changes, key=lambda change: (change.plan.fits is False, change.time_share))


def _layouts(prediction: Prediction) -> list[str]:
    """Return sentences on implicit redistributions, with the largest possible saving of keeping the layouts."""
    ranked = sorted(prediction.implicit_s.items(), key=lambda item: -item[1])
    return [
        f"{owner or 'the root'}: {moved or 'a redistribution'} is implicit; at most "
        f"{100 * seconds / prediction.step_s:.1f} % of the step could be saved by keeping the layout between the two "
        "modules (use_local_output=False)"
        for (owner, moved), seconds in ranked[:3]
        if seconds > LEAST_SHARE * prediction.step_s
    ]


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Args:
        plans: the best plan first; plans that do not fit last.
        where: origin of the figures, such as "predicted on h100" or "measured here".
        world: devices.
        unit: unit of the throughput, "tokens" or "samples".
        code: Python lines to paste.
        command: command that measures the recommended plan.
        capacity_bytes: memory of a device, if limited.
        reserve_bytes: the part of the memory that is left free.
        notes: assumptions, and plans that were tried or left out.
        changes: changes of the plan as written, each alone, if requested.
        written_sizes: mesh sizes of the plan as written, if requested.
        layouts: sentences on further possible changes of the plan as written.
        traces: the communication of measured plans, if traced.
        predicted: all predicted plans, if `plans` are the measured best of them.
        faster_outside, objective: as in SweepState.
    """

    title: str
    plans: Sequence[RankedPlan]
    where: str
    world: int
    unit: str
    code: Sequence[str]
    command: str
    capacity_bytes: float | None = None
    reserve_bytes: float = 0.0
    price: float | None = None
    notes: Sequence[str] = ()
    changes: Sequence[Change] = ()
    written_sizes: tuple[tuple[str, int], ...] = ()
    layouts: Sequence[str] = ()
    traces: Mapping[Candidate, Trace] = field(default_factory=dict)
    predicted: Sequence[RankedPlan] = ()
    faster_outside: Mapping[str, Prediction] = field(default_factory=dict)
    objective: str = TOKENS

    @property
    def best(self) -> RankedPlan:
        """The recommended plan of the result."""
        return self.plans[0]

    @property
    def best_probability(self) -> float | None:
        """Probability that the recommended plan is the fastest of the usable plans; None without error bars."""
        errors = difference_errors() if self.best.step_bar is not None else None
        if errors is None or self.objective == MEMORY:
            return None
        return best_probability([plan.timed_kind for plan in self.plans if plan.fits is not False], errors)

    def is_tie(self, plan: RankedPlan) -> bool:
        """Return whether a predicted plan and the recommended plan are too close for an order."""
        errors = difference_errors() if self.best.step_bar is not None else None
        if errors is None:
            return abs(plan.step_s / self.best.step_s - 1) <= CLOSE
        return is_tie(plan.timed_kind, self.best.timed_kind, errors)

    @property
    def runner_up(self) -> RankedPlan | None:
        """The next usable plan, preferably a plan that does not tie."""
        usable = [plan for plan in self.plans[1:] if plan.fits is not False]
        distinct = (plan for plan in usable if plan.verdict or abs(plan.step_s / self.best.step_s - 1) > EQUAL)
        return next(distinct, usable[0] if usable else None)


def plans_of(state: SweepState, hardware: Hardware | None) -> list[RankedPlan]:
    """Return the ranked plans: plans of the last measured round if any, else all predicted plans; without a hardware
    file all measured plans.
    """
    if hardware is None:
        return state.ranked_measured
    if state.final:
        return [replace(plan, prediction=state.predictions[plan.candidate]) for plan in state.final]
    return [plan_of(prediction) for prediction in state.ranked_predictions]


def result_of(
    setup: Setup,
    state: SweepState,
    hardware: Hardware | None,
    codes: Mapping[Candidate, PlanCode],
    price: float | None,
) -> SweepResult:
    """Return the result of a sweep that has predicted or measured a plan.

    Args:
        hardware: None if all plans were measured.
        codes: code of the best plan, and of changes of the plan as written; {} after an earlier interrupt.
    """
    plans = plans_of(state, hardware)
    predicted = [plan_of(prediction) for prediction in state.ranked_predictions]
    is_measured = hardware is None or bool(state.final)
    title = f"{setup.entry.name} on {count_text(setup.world, 'rank' if is_measured else 'device')}: "
    if hardware is None:
        title += f"{count_text(len(plans), 'plan')}, measured on this machine"
    elif is_measured:
        best_of = "it" if len(predicted) == 1 else f"the best {len(plans)}"
        title += f"{count_text(len(predicted), 'plan')} predicted, {best_of} measured on this machine"
    else:
        title += f"{count_text(len(plans), 'plan')}, predicted on {hardware.name}"
    compared = predicted
    if hardware is None and state.written:  # two changes together are not a neighbour of the plan as written
        near = {state.written, *state.space.around(state.written)}
        compared = [plan for plan in plans if plan.candidate in near]
    best, memory = plans[0].candidate, hardware if hardware is not None and not is_measured else None
    written_prediction = state.predictions.get(state.written) if state.written and memory else None
    return SweepResult(
        title=title,
        plans=plans,
        where="measured here" if memory is None else f"predicted on {memory.name}",
        world=setup.world,
        unit="tokens" if state.space.facts["num_tokens"] else "samples",
        code=codes[best].plan if best in codes else (),
        command=setup.command(best),
        capacity_bytes=memory["memory_bytes"] if memory else None,
        reserve_bytes=memory["memory_bytes"] - memory.usable_bytes if memory else 0.0,
        price=price,
        notes=_notes(setup, state, hardware),
        changes=changes_of(compared, state.written, codes),
        written_sizes=state.written.sizes if state.written else (),
        layouts=_layouts(written_prediction) if written_prediction else (),
        traces=state.traces,
        predicted=predicted if is_measured else (),
        faster_outside={} if is_measured else state.faster_outside,
        objective=state.objective,
    )


def _notes(setup: Setup, state: SweepState, hardware: Hardware | None) -> list[str]:
    facts, left_out = state.space.facts, list(state.left_out.items())
    amount = count_text(*((facts["num_tokens"], "token") if facts["num_tokens"] else (facts["batch_size"], "sample")))
    notes = [f"every plan has the same global batch per step ({amount}), so step times rank the plans"]
    if hardware is None:
        if state.interrupted:
            notes.insert(0, "warning: the sweep was interrupted; --reuse continues the sweep")
        elif not state.final:
            unchecked = (
                "warning: the recommended plan is unchecked, because no plan of the last round, which checks results, "
                "is correct"
            )
            notes.insert(0, unchecked)
        notes.append(
            f"measured: {len(state.measured)} of {count_text(count_of(state.space), 'plan')}; each round measures the "
            "best third of the previous round, and plans of the last round alternate"
        )
    else:
        order = "meshes as written, meshes with the fewest fast links first, and single changes of the best plans"
        if state.written is not None:
            order = "the plan as written, and plans that differ by one change or by one factor of the mesh"
        num_tried = len({*state.predictions, *state.left_out})
        stopped = f"; {state.stopped}" if state.stopped else ""
        notes.append(f"tried: {num_tried} of {count_text(state.num_legal, 'plan')} ({order}{stopped})")
        notes += [setup.note] if setup.note else []
    if state.refused:
        skipped = count_text(len(state.refused), "mesh", "meshes")
        notes.append(f"{skipped} skipped: parameter shards alone exceed the memory")
    notes += [f"left out: {candidate.text}: {why}" for candidate, why in left_out[:MAX_LEFT_OUT]]
    if len(left_out) > MAX_LEFT_OUT:
        notes.append(f"left out: {len(left_out) - MAX_LEFT_OUT} more: --format json")
    if setup.float8:
        notes.append("--float8 changes predictions only; distbench run measures the plan without float8")
    if state.predictions:
        notes += state.ranked_predictions[0].assumed
    if state.final and state.interrupted and hardware is not None:
        notes.append("warning: the sweep was interrupted while measuring; --reuse continues the sweep")
    notes += [f"run file of a round: {file}" for file in state.run_files]
    if state.num_reused is not None:
        notes.append(f"rounds reused by --reuse: {state.num_reused}")
    return notes
