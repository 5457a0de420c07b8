"""One step under torch's profiler on CUDA: when each of its collectives ran on the device. It is never timed itself."""

import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, record_function

from distbench.worker.plans.training_step import TrainingStep
from distbench.worker.rank.device import profiler_activities, synchronize
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import ranks_by_group_name
from distbench.worker.tracing.attribution import Communication
from distbench.worker.tracing.kernels import PHASE, collectives_among, differing_bytes, matched, phases_among
from distbench.worker.tracing.trace_rows import Traced, TracedRow


@dataclass(frozen=True)
class ProfiledStep:
    """What came of it.

    Args:
        traced: moments are seconds of the profiler's clock, of kernels.
        differences: where kernels and dispatched collectives differ, as sentences.
        reason: why there are no times, or None.
    """

    traced: Traced
    differences: list[str]
    reason: str | None


def profiled_step(step: TrainingStep, context: RankContext, rows: Sequence[Communication]) -> ProfiledStep:
    """Run a step under the profiler on CUDA, all ranks together; `rows` are what another run of it communicated."""
    names = iter(step.phases)
    with profile(activities=profiler_activities(context.device)) as profiler, contextlib.ExitStack() as phase:

        def next_phase() -> None:
            phase.close()
            if (name := next(names, None)) is not None:
                phase.enter_context(record_function(PHASE + name))

        dist.barrier(context.control)
        before = time.process_time()
        next_phase()
        step(next_phase)
        cpu_s = time.process_time() - before
        synchronize(context.device)
    return step_of_events(_events(profiler), step.phases, cpu_s, rows, ranks_by_group_name())


def step_of_events(
    events: Sequence[dict[str, Any]],
    phases: Sequence[str],
    cpu_s: float,
    rows: Sequence[Communication],
    group_names: dict[str, str],
) -> ProfiledStep:
    """A profiled step's events (of a Chrome trace) as a traced step; `rows` are its collectives in the order of
    issue, `group_names` has ranks as `Communication.group` has them."""
    kernels = collectives_among(events)
    ran, reason = matched(rows, kernels, group_names)
    found = [
        TracedRow(what, one.begun_s, one.ended_s, one.exposed_s) if one else TracedRow(what)
        for what, one in zip(rows, ran, strict=True)
    ]
    spans = phases_among(events)
    if [name for name, _, _ in spans] != list(phases):
        reason = reason or f"the device ran phases {[name for name, _, _ in spans]}, not {list(phases)}"
        return ProfiledStep(Traced(0.0, [], cpu_s, [TracedRow(what) for what in rows]), [reason], reason)
    traced = Traced(spans[0][1], [ended for _, _, ended in spans], cpu_s, found)
    return ProfiledStep(traced, [reason] if reason else differing_bytes(rows, ran), reason)


def _events(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return list(trace["traceEvents"])
