"""One step under torch's profiler: when each of its collectives ran on the accelerator. It is never timed itself."""

import contextlib
import json
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from distbench.worker.plans.training_step import TrainingStep
from distbench.worker.rank.device import profiler_activities, synchronize
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import ranks_by_group_name
from distbench.worker.tracing.communication import Communication
from distbench.worker.tracing.host_calls import PHASE, HostCalls, in_no_phase, phases_among
from distbench.worker.tracing.kernels import UNNAMED, collectives_among, differing_bytes, matched, without_kernels
from distbench.worker.tracing.trace_rows import Traced, TracedRow

BETWEEN_EVENTS = re.compile(r"[\s,]*")
# kineto writes names as they are, quotation marks included, and what is divided by nothing as C++ prints it.
NAMED = re.compile(r'("name": ")(.*)(", "pid": )')
NO_NUMBER = re.compile(r"(?<=\": )-?(inf|nan)\b")
END_OF_EVENT = "\n  }"
ALIVE_EVERY = 20_000  # events; some tenths of a second


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


def profiled_step(
    step: TrainingStep,
    context: RankContext,
    rows: Sequence[Communication],
    on_progress: Callable[[], None] = lambda: None,
) -> ProfiledStep:
    """Run a step under the profiler, all ranks together; `rows` are what another run of it communicated.

    `on_progress` is called now and then: reading a large trace takes minutes.
    """
    names = iter(step.phases)
    _begin_profiling(context.device)
    synchronize(context.device)  # what an earlier step left behind is none of this one's
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
    on_progress()
    try:
        events = _events_of(profiler, on_progress)
        return step_of_events(events, step.phases, cpu_s, rows, ranks_by_group_name())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # A vendor's profiler may write anything; the other ranks wait for this one.
        traceback.print_exc()
        reason = f"the profiler's trace cannot be read ({error})"
        return ProfiledStep(_untimed(rows, cpu_s), [reason], reason)


def _events_of(profiler: profile, on_progress: Callable[[], None]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        on_progress()
        return list(events_in(file, on_progress))


def _untimed(rows: Sequence[Communication], cpu_s: float) -> Traced:
    return Traced(0.0, [], cpu_s, [TracedRow(what) for what in rows])


@cache
def _begin_profiling(device: torch.device) -> None:
    """The first use in a process sets the vendor's library up, which takes seconds and may lose the first kernels."""
    with profile(activities=profiler_activities(device)):
        torch.ones(1, device=device)
        synchronize(device)


def step_of_events(
    events: Sequence[dict[str, Any]],
    phases: Sequence[str],
    cpu_s: float,
    rows: Sequence[Communication],
    group_names: dict[str, str],
) -> ProfiledStep:
    """A profiled step's events (of a Chrome trace) as a traced step; `rows` are its collectives in the order of
    issue, `group_names` has ranks as `Communication.group` has them."""
    launches = HostCalls(events)
    kernels = collectives_among(events, launches)
    ran, reason = matched(rows, kernels, group_names)
    found = [
        TracedRow(what, one.begun_s, one.ended_s, one.exposed_s) if one else TracedRow(what)
        for what, one in zip(rows, ran, strict=True)
    ]
    seen = phases_among(events, launches)
    if [phase.name for phase in seen] != list(phases):
        reason = reason or f"the device ran phases {[phase.name for phase in seen]}, not {list(phases)}"
        return ProfiledStep(_untimed(rows, cpu_s), [reason], reason)
    # What forward launched for later may end after what backward launched first.
    ends = [*accumulate((phase.ended_s for phase in seen), max)]
    traced = Traced(min(phase.begun_s for phase in seen), ends, cpu_s, found)
    if reason:
        return ProfiledStep(traced, [reason], reason)
    unnamed = sum(one.kind == UNNAMED for one in kernels)
    untold = [f"{unnamed} kernels communicate and do not say what; they hide nothing"] if unnamed else []
    lost, outside, num_events = in_no_phase(events, launches)
    for count, why in ((lost, "have no launch in the trace"), (outside, "were launched before or after the step")):
        untold += [f"{count} of {num_events} kernels and copies {why}; they are in no phase"] if count else []
    return ProfiledStep(traced, [*differing_bytes(rows, ran), *without_kernels(rows, ran), *untold], None)


def events_in(file: Path, on_progress: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace, one after another: parsed at once, a large one would keep this rank from saying
    that it is alive.

    Raises:
        ValueError: it ends in the middle, as on a full disk, or an event is no JSON.
    """
    text, decoder = file.read_text(encoding="utf-8", errors="replace"), json.JSONDecoder()
    at = text.find("[", text.find('"traceEvents"')) + 1 if '"traceEvents"' in text else 0
    if not at:
        raise ValueError("it has no list of events")
    number = 0
    while text[at := _next_event(text, at)] != "]":
        try:
            event, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            event, at = _mended(text, at, number)
        yield event
        number += 1
        if number % ALIVE_EVERY == 0:
            on_progress()


def _next_event(text: str, at: int) -> int:
    match = BETWEEN_EVENTS.match(text, at)
    assert match is not None
    if match.end() == len(text):
        raise ValueError("it ends in the middle; is the disk of temporary files full?")
    return match.end()


def _mended(text: str, at: int, number: int) -> tuple[Any, int]:
    """An event that kineto wrote as no JSON, as one, and where it ends."""
    end = text.find(END_OF_EVENT, at) + len(END_OF_EVENT)
    if end < len(END_OF_EVENT):
        _next_event(text, len(text))
    written = NO_NUMBER.sub("null", text[at:end])
    written = NAMED.sub(lambda match: match[1] + match[2].replace('"', "'") + match[3], written)
    try:
        return json.loads(written, strict=False), end
    except json.JSONDecodeError as error:
        raise ValueError(f"its event {number} is no JSON: {error}") from error
