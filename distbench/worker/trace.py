"""A step's communication with times, in a pass of its own after the step was timed and checked.

A second model is built on process groups that forward each collective and stamp it (`torch_internals.forwarding`); the
timed one stays as it is, to say what that costs, and what another method sees.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from distbench.results import busbw_factor, median
from distbench.worker.attribution import Communication, communications_of, watched
from distbench.worker.failure import one_line
from distbench.worker.place import Place
from distbench.worker.torch_internals import BACKEND_OPS, Forwarding, Issued, tracked_peak_bytes

if TYPE_CHECKING:
    from distbench.worker.workloads.step import Step

NUM_STEPS, ROUNDS = 3, 5
MAX_DIFFERENCES = 20
PHASE_COLUMNS = ("rank", "step", "phase", "start_s", "end_s")
COLUMNS = (
    *("rank", "step", "phase", "kind", "op", "backend_op", "mesh_dim", "group", "seq", "group_size", "dtype"),
    *("payload_bytes", "wire_bytes", "owner", "owner_known", "source", "redistribution", "explicit"),
    *("issued_s", "completed_s", "exposed_s"),
)
NOTHING_OVERLAPS = "on CPU, FSDP2 waits for each collective where it issues it, and gloo's threads need the same CPUs"
NO_TIMES_ON_CUDA = "times are not taken on CUDA yet: the rows are the dispatch mode's, without issue and completion"

NO_PREDICTION = "torch's memory tracker takes neither frozen parameters nor a second forward in one step"


@dataclass(frozen=True)
class Tracing:
    """What a traced pass needs of the launch.

    Args:
        forwarding: the mesh's forwarding groups, kept from case to case.
        clock_shared: whether the ranks' monotonic clocks are one.
        alive: called now and then, so that a long trace is not taken for a hang.
    """

    forwarding: Forwarding
    clock_shared: bool
    alive: Callable[[], None] = lambda: None


class Row(NamedTuple):
    """One collective of one traced step; moments are seconds of this rank's monotonic clock, None where not taken."""

    what: Communication
    issued_s: float | None = None
    completed_s: float | None = None


class Traced(NamedTuple):
    """One traced step of one rank: when it began, when each phase ended, its CPU seconds, and its collectives."""

    start_s: float
    ends_s: list[float]
    cpu_s: float
    rows: list[Row]


@dataclass(frozen=True)
class StepTrace:
    """Traces a step that was timed.

    Args:
        bare: the step.
        build: makes another one like it.
        place: this rank's place.
    """

    bare: "Step"
    build: Callable[[], "Step"]
    place: Place

    def record(self, tracing: Tracing, counters: dict[str, Any]) -> dict[str, Any]:
        """The fields of the case's trace record; all ranks do this together.

        Args:
            tracing: the launch's part.
            counters: the case's, for the measured peak of memory.

        Raises:
            Unsupported: torch is not the one we know.
        """
        if self.place.device.type == "cuda":
            return self._without_times(counters)
        forwarded, steps = self.forwarded(tracing.forwarding, NUM_STEPS)
        tracing.alive()
        overhead = _overhead(self.bare, forwarded, self.place, tracing)
        dispatched = self.dispatched()
        found = differences([row.what for row in steps[0].rows], dispatched)
        agreement = {
            "method": "dispatch mode",
            "num_rows": len(dispatched),
            "differences": _of_all_ranks(self.place, found),
        }
        return {
            "method": "forwarding process groups",
            "clock_shared": tracing.clock_shared,
            "overhead": overhead,
            "agreement": agreement,
            "exposed_reason": NOTHING_OVERLAPS,
            "memory": _memory(self.bare, self.place, counters),
            **tables(steps, self.bare.phases, self.place, tracing.clock_shared),
        }

    def forwarded(self, forwarding: Forwarding, num_steps: int) -> tuple["Step", list[Traced]]:
        """Another step like this one, built on forwarding groups, and what was told of some runs of it."""
        with forwarding.on():
            step = self.build()
            _run(step, self.place)
            return step, [traced(step, self.place, forwarding) for _ in range(num_steps)]

    def dispatched(self) -> list[Communication]:
        """What the dispatch mode sees of the step itself."""
        _run(self.bare, self.place)  # the first step sets things up
        return communications_of(self.bare, self.bare.phases, self.bare.plan, self.place, self.bare.model)

    def _without_times(self, counters: dict[str, Any]) -> dict[str, Any]:
        rows = [Row(what) for what in self.dispatched()]
        return {
            "method": "dispatch mode",
            "clock_shared": False,
            "overhead": {"rounds": 0, "bare_cpu_s": [], "traced_cpu_s": [], "ratio": None},
            "agreement": {"method": None, "num_rows": len(rows), "differences": []},
            "exposed_reason": NO_TIMES_ON_CUDA,
            "memory": _memory(self.bare, self.place, counters),
            **tables([Traced(0.0, [], 0.0, rows)], self.bare.phases, self.place, False),
        }


def traced(step: "Step", place: Place, forwarding: Forwarding) -> Traced:
    """One step with every collective told; its model was built while `forwarding` was on, and it still is."""
    found: list[tuple[Issued, Any]] = []
    ends: list[float] = []
    with watched(step.model, step.phases, step.plan, place) as watch:

        def stamp() -> None:
            ends.append(time.monotonic())
            watch.stamp()

        with forwarding.told(lambda issued: found.append((issued, watch.sight()))):
            _meet(place)
            start, cpu = time.monotonic(), time.process_time()
            step(stamp)
            cpu = time.process_time() - cpu
    rows = [Row(watch.communication(one.call, seen), one.issued_s, one.completed_s) for one, seen in found]
    return Traced(start, ends, cpu, rows)


def _run(step: "Step", place: Place) -> float:
    """One step with nothing added to it; its CPU seconds on this rank, all threads."""
    _meet(place)
    before = time.process_time()
    step(_nothing)
    return time.process_time() - before


def _meet(place: Place) -> None:
    dist.barrier(place.control)


def _nothing() -> None:
    """No phase is timed here."""


def _overhead(bare: "Step", forwarded: "Step", place: Place, tracing: Tracing) -> dict[str, Any]:
    """CPU seconds of bare and traced steps in turn, summed over ranks; who goes first changes each round."""
    bare_cpu, traced_cpu = [], []
    _run(bare, place)  # the first step after checking still has what checking left behind
    for turn in range(ROUNDS):
        tracing.alive()
        if turn % 2:
            bare_cpu.append(_run(bare, place))
        with tracing.forwarding.on():
            traced_cpu.append(traced(forwarded, place, tracing.forwarding).cpu_s)
        if not turn % 2:
            bare_cpu.append(_run(bare, place))
    by_rank = place.gather((bare_cpu, traced_cpu))
    bare_s, traced_s = ([sum(turn) for turn in zip(*one, strict=True)] for one in zip(*by_rank, strict=True))
    ratio = median([after / before for before, after in zip(bare_s, traced_s, strict=True) if before > 0])
    return {"rounds": ROUNDS, "bare_cpu_s": bare_s, "traced_cpu_s": traced_s, "ratio": ratio}


def differences(forwarded: Sequence[Communication], dispatched: Sequence[Communication]) -> list[str]:
    """Where two methods saw other collectives, or in another order, as sentences; rows are compared by kind, group
    and bytes."""
    ours, theirs = ([_text(row) for row in rows] for rows in (forwarded, dispatched))
    found = []
    for tag, start, end, other_start, other_end in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if tag != "equal":
            one, other = (", ".join(rows) or "nothing" for rows in (ours[start:end], theirs[other_start:other_end]))
            found.append(f"after {start} collectives the forwarding groups saw {one}, the dispatch mode saw {other}")
    return found


def _text(row: Communication) -> str:
    return f"{row.kind} over ranks {row.group} of {row.payload_bytes} B"


def _of_all_ranks(place: Place, own: list[str]) -> list[str]:
    found = [f"rank {rank}: {sentence}" for rank, theirs in enumerate(place.gather(own)) for sentence in theirs]
    more = [f"and {len(found) - MAX_DIFFERENCES} more"] if len(found) > MAX_DIFFERENCES else []
    return found[:MAX_DIFFERENCES] + more


def tables(steps: Sequence[Traced], phases: Sequence[str], place: Place, clock_shared: bool) -> dict[str, Any]:
    """All ranks' steps, phases and rows, as the trace record has them."""
    by_rank: list[Sequence[Traced]] = place.gather(steps)
    lengths, phase_rows, rows = [], [], []
    for number, ranks in enumerate(zip(*by_rank, strict=True)):
        lengths += [max(one.ends_s[-1] - one.start_s for one in ranks)] if ranks[0].ends_s else []
        last_in = max(one.start_s for one in ranks)
        for rank, one in enumerate(ranks):
            zero = last_in if clock_shared else one.start_s
            starts = [one.start_s, *one.ends_s]
            phase_rows += [
                [rank, number, phase, begun - zero, ended - zero]
                for phase, begun, ended in zip(phases, starts, one.ends_s, strict=False)
            ]
            rows += _rows_of(rank, number, one.rows, zero, place.backend)
    return {
        "num_steps": len(steps),
        "steps_s": lengths,
        "phases": {"columns": PHASE_COLUMNS, "rows": phase_rows},
        "columns": COLUMNS,
        "rows": rows,
    }


def _rows_of(rank: int, step: int, rows: Sequence[Row], zero: float, backend: str) -> list[list[Any]]:
    seen: Counter[str] = Counter()
    found = []
    for what, issued_s, completed_s in rows:
        values = {
            **vars(what),
            "rank": rank,
            "step": step,
            "seq": seen[what.group],
            "backend_op": BACKEND_OPS.get((backend, what.kind), what.kind),
            "wire_bytes": _wire_bytes(what),
            "issued_s": None if issued_s is None else issued_s - zero,
            "completed_s": None if completed_s is None else completed_s - zero,
            "exposed_s": None,
        }
        seen[what.group] += 1
        found.append([values[name] for name in COLUMNS])
    return found


def _wire_bytes(what: Communication) -> int | None:
    """Bytes that one rank must send, by the algorithm's own count; None for what nccl-tests knows no count of."""
    try:
        return round(what.payload_bytes * busbw_factor(what.kind, what.group_size))
    except ValueError:
        return None


def _memory(bare: "Step", place: Place, counters: dict[str, Any]) -> dict[str, Any]:
    """Measured and predicted peak of the rank that needs most, bytes."""
    on_cuda = place.device.type == "cuda"
    others = [bare.optimizer] if bare.optimizer is not None else []
    predicted, reason = None, None
    try:
        predicted = tracked_peak_bytes(lambda: bare(_nothing), bare.model, *others)
        reason = NO_PREDICTION if predicted is None else None
    except Exception as error:
        reason = f"torch's memory tracker: {one_line(error)}"
    of_ranks = place.gather((predicted, reason))
    known = [theirs for theirs, _ in of_ranks if theirs is not None]
    return {
        "measured_peak_bytes": counters.get("peak_allocated_bytes" if on_cuda else "peak_growth_bytes"),
        "measured_by": "torch's allocator" if on_cuda else "growth of resident memory",
        "predicted_peak_bytes": max(known) if len(known) == len(of_ranks) else None,
        "reason": next((why for _, why in of_ranks if why), None),
    }
