"""A step's communication with times, in a separate pass after the step was timed and checked.

Each collective is recorded when c10d dispatches it (`torch_private.collectives`). On CPU its times are recorded there.
On accelerators the profiler records the times of its kernels.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from distbench.observe.memory import largest_known, prediction_of
from distbench.observe.module_attribution import (
    Traced,
    TracedRow,
    communications_of,
    tables,
    tracked_collectives,
)
from distbench.observe.profiler_kernels import profiled_step
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.spec.devices import known_device
from distbench.spec.printable_text import capped_lines
from distbench.statistics.intervals import median
from distbench.torch_private import Issued, timed_collectives

NUM_STEPS, ROUNDS = 3, 5
# New rounds of the overhead measurement begin only in the first seconds. This limits the number of rounds of long
# steps.
OVERHEAD_S = 2.0
MAX_DIFFERENCES = 20
OVERLAP_SHARES_CPUS = "on CPU, gloo's threads and backward share the CPUs"
NOTHING_OVERLAPS = "on CPU, FSDP2 waits for each collective at once, and gloo's threads share the CPUs"
METHOD = "timed operators of c10d"


@dataclass(frozen=True)
class Tracing:
    """Facts of the launch for a traced pass."""

    clock_shared: bool  # all ranks read the same monotonic clock
    on_progress: Callable[[], None] = lambda: None  # called repeatedly, because a long trace must not count as a hang


@dataclass(frozen=True)
class StepTrace:
    """Tracing of a step after its timing and check. Tracing changes the step's values."""

    step: TrainingStep
    context: RankContext

    def record(self, tracing: Tracing, counters: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the case's trace record. All ranks must call this. `counters` contain the memory
        peak."""
        if not known_device(self.context.device.type).waits_on_host:
            return self._profiled(tracing, counters)
        steps = self.timed(NUM_STEPS)
        tracing.on_progress()
        return {
            "method": METHOD,
            "clock_shared": tracing.clock_shared,
            "overhead": _overhead(self.step, self.context, tracing),
            "exposed_reason": NOTHING_OVERLAPS if self.step.plan.ddp is None else OVERLAP_SHARES_CPUS,
            "memory": _memory(self.step, self.context, counters),
            **({} if self.step.pipeline is None else {"pipeline": self.step.pipeline.facts}),
            **tables(steps, self.step.phases, self.context, tracing.clock_shared),
        }

    def timed(self, num_steps: int) -> list[Traced]:
        """Trace `num_steps` runs of the step on CPU, from its initial values."""
        self._restart()
        return [traced(self.step, self.context) for _ in range(num_steps)]

    def _restart(self) -> None:
        self.step.start_anew()
        for _ in range(self.step.num_setup_steps):
            _run(self.step, self.context)

    def _profiled(self, tracing: Tracing, counters: dict[str, Any]) -> dict[str, Any]:
        """On accelerators: return the issued collectives, with times of kernels of profiled steps."""
        self._restart()
        rows = communications_of(self.step, self.step.phases, self.step.plan, self.context, self.step.model)
        bare_cpu, steps = [], []
        for _ in range(NUM_STEPS):
            bare_cpu.append(_run(self.step, self.context))
            steps.append(profiled_step(self.step, self.context, rows, tracing.on_progress))
        reasons = self.context.gather(next((step.reason for step in steps if step.reason), None))
        why = next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), None)
        by_rank = enumerate(self.context.gather(steps[0].differences))
        sentences = [f"rank {rank}: {sentence}" for rank, of_rank in by_rank for sentence in of_rank]
        return {
            "method": "profiler",
            "clock_shared": False,
            "overhead": _ratio(self.context.gather((bare_cpu, [step.traced.cpu_s for step in steps]))),
            "agreement": {
                "method": "operators of c10d",
                "num_rows": len(rows),
                "differences": capped_lines(sentences, MAX_DIFFERENCES, "and {} more"),
            },
            "exposed_reason": why,
            "memory": _memory(self.step, self.context, counters),
            **tables([step.traced for step in steps], self.step.phases, self.context, False),
        }


def traced(step: TrainingStep, context: RankContext) -> Traced:
    """Run one step on CPU, and record every collective."""
    issued_calls: list[tuple[Issued, Any]] = []
    ends: list[float] = []
    with (
        tracked_collectives(step.model, step.phases, step.plan, [context.mesh]) as tracker,
        contextlib.nullcontext(()) if step.pipeline is None else step.pipeline.observed() as working,
    ):

        def stamp() -> None:
            ends.append(time.monotonic())
            tracker.stamp()

        with timed_collectives(lambda issued: issued_calls.append((issued, tracker.issue_context(issued.call)))):
            dist.barrier(context.control)
            start, cpu = time.monotonic(), time.process_time()
            step(stamp)
            cpu = time.process_time() - cpu
    rows = [
        TracedRow(tracker.communication(issued_call.call, call_context), issued_call.issued_s, issued_call.completed_s)
        for issued_call, call_context in issued_calls
    ]
    return Traced(start, ends, cpu, rows, [(span.begun_s, span.ended_s) for span in working])


def _run(step: TrainingStep, context: RankContext) -> float:
    """Run one step without tracing, and return the CPU seconds of all threads of this rank."""
    dist.barrier(context.control)
    before = time.process_time()
    step(no_stamp)
    return time.process_time() - before


def _overhead(step: TrainingStep, context: RankContext, tracing: Tracing) -> dict[str, Any]:
    """Return CPU seconds of untraced and traced steps, summed over ranks. The order alternates between rounds."""
    bare_cpu, traced_cpu = [], []
    began_s = time.monotonic()
    for number in range(ROUNDS):
        if number and max(context.gather(time.monotonic() - began_s)) > OVERHEAD_S:
            break
        tracing.on_progress()
        if number % 2:
            bare_cpu.append(_run(step, context))
        traced_cpu.append(traced(step, context).cpu_s)
        if not number % 2:
            bare_cpu.append(_run(step, context))
    return _ratio(context.gather((bare_cpu, traced_cpu)))


def _ratio(by_rank: Sequence[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Return the overhead from each rank's CPU seconds of untraced and traced steps."""
    bare_s, traced_s = ([sum(turn) for turn in zip(*of_ranks, strict=True)] for of_ranks in zip(*by_rank, strict=True))
    ratio = median([after / before for before, after in zip(bare_s, traced_s, strict=True) if before > 0])
    return {"rounds": len(bare_s), "bare_cpu_s": bare_s, "traced_cpu_s": traced_s, "ratio": ratio}


def _memory(step: TrainingStep, context: RankContext, counters: dict[str, Any]) -> dict[str, Any]:
    """Measured and predicted peak bytes of the rank with the highest peak. The prediction includes compiled modules,
    because this runs last."""
    predicted, reason = prediction_of(step, of_compiled=True)
    of_ranks = context.gather((predicted, reason))
    return {
        "measured_peak_bytes": counters.get("peak_bytes"),
        "measured_by": "torch's allocator",
        "predicted_peak_bytes": largest_known([theirs for theirs, _ in of_ranks]),
        "reason": next((why for _, why in of_ranks if why), None),
    }
