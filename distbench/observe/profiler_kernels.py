"""One step under torch's profiler: times of kernels of collectives, and exposed times without another kernel."""

import contextlib
import json
import re
import tempfile
import time
import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from distbench.observe.module_attribution import Communication, Traced, TracedRow
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.device import profiler_activities, synchronize
from distbench.spec.covered_time import Cover, Span, union
from distbench.torch_private import FAMILIES, OTHERS, PEERS, kind_of, ranks_by_group_name

# Host calls and phases of a step, from a profiler's events.
#
# Each kernel and copy has the `correlation` of the runtime call that launched the work, on any thread. Backward
# launches on autograd's threads. kineto's annotations on the device are not usable here: a stream has only the
# innermost annotation (`Optimizer.step`, `FSDP::...`), and none from other threads.

MICRO = 1e-6
# kineto's categories (ActivityType.h), and similar ones of vendors: "gpu_memcpy", "mlu_memset", ...
COPIES = ("memcpy", "memset")
ON_DEVICE = ("kernel", *COPIES, "collective_comm", "mtia_ccp_events")
ANNOTATION, HOST_OPERATOR, FLOW = "user_annotation", "cpu_op", "ac2g"
HOST_CALLS = ("_runtime", "_driver", "hpu_op")  # CUDA's, ROCm's under the same name, XPU's, Gaudi's, ...
PHASE = "distbench:"
NUMBER = "External id"
Event = Mapping[str, Any]


class HostCall(NamedTuple):
    """A host call that started work on a device."""

    at_s: float  # of the profiler's clock
    thread: Any


class Phase(NamedTuple):
    """A phase of a step, with its time span on the host and the time span of its kernels, in seconds.

    A phase without known kernels ends on the device when the previous phase ends.
    """

    name: str
    host: Span
    begun_s: float
    ended_s: float


def is_on_device(event: Event) -> bool:
    """Return whether an event is a kernel, a copy or a fill."""
    return event.get("ph") == "X" and str(event.get("cat")).lower().endswith(ON_DEVICE)


def _is_copy(event: Event) -> bool:
    """Return whether an event of the device is a copy or a fill."""
    return str(event.get("cat")).lower().endswith(COPIES)


def _span_of(event: Event) -> Span:
    """Return seconds of the profiler's clock; events have microseconds."""
    begun = float(event["ts"]) * MICRO
    return begun, begun + max(float(event.get("dur", 0.0)), 0.0) * MICRO


class HostCalls:
    """The host calls among one rank's events, by the launched work."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_number: dict[Any, HostCall] = {}
        self._by_operator: dict[Any, HostCall] = {}
        self._flow_ends: dict[tuple[Any, Any, float], Any] = {}
        self._by_flow: dict[Any, HostCall] = {}
        for event in events:
            kind, cat, facts = event.get("ph"), str(event.get("cat")), event.get("args") or {}
            is_runtime = cat.endswith(HOST_CALLS)
            if kind == "X" and is_runtime:
                self._note(self._by_number, facts.get("correlation"), event)
            if kind == "X" and (is_runtime or cat == HOST_OPERATOR):
                self._note(self._by_operator, facts.get(NUMBER), event)
            elif cat == FLOW and kind == "s":
                self._note(self._by_flow, event.get("id"), event)
            elif cat == FLOW and kind == "f":
                self._flow_ends[_place(event)] = event.get("id")

    @staticmethod
    def _note(where: dict[Any, HostCall], number: Any, event: Event) -> None:
        """Store the outer call of a number: a runtime call begins before the driver's call with the same number.

        0 is not a valid number, because vendors' libraries use 0 for unknown calls.
        """
        launch = HostCall(float(event["ts"]) * MICRO, event.get("tid"))
        if number and (number not in where or launch.at_s < where[number].at_s):
            where[number] = launch

    def of(self, event: Event) -> HostCall | None:
        """Return the call that launched an event of the device; None if the trace has none."""
        facts = event.get("args") or {}
        number, flow = facts.get("correlation"), self._flow_ends.get(_place(event))
        # In kineto a flow has the number of its call. Other profilers number flows separately.
        call = self._by_number.get(number) or self._by_flow.get(flow) or self._by_flow.get(number)
        return call or self._by_number.get(flow) or self._by_operator.get(facts.get(NUMBER))


def _place(event: Event) -> tuple[Any, Any, float]:
    return event.get("pid"), event.get("tid"), float(event["ts"])


def phases_among(events: Sequence[Event], launches: HostCalls | None = None) -> list[Phase]:
    """Return the phases in the order on the host, with the times of their kernels.

    A launch on any thread belongs to the phase that was open at that time, because the annotating thread waits for
    autograd's thread.
    """
    launches = launches or HostCalls(events)
    hosts = _hosts_phases(events)
    ran: list[list[Span]] = [[] for _ in hosts]
    for event in filter(is_on_device, events):
        launch = launches.of(event)
        if launch and (place := _place_among(hosts, launch)) is not None:
            ran[place].append(_span_of(event))
    began = min((begun for spans in ran for begun, _ in spans), default=0.0)
    phases: list[Phase] = []
    for (host, name), spans in zip(hosts, ran, strict=True):
        before = phases[-1].ended_s if phases else began
        first = min((begun for begun, _ in spans), default=before)
        phases.append(Phase(name, host, first, max((ended for _, ended in spans), default=before)))
    return phases if any(ran) else []


def _hosts_phases(events: Iterable[Event]) -> list[tuple[Span, str]]:
    return sorted(
        (_span_of(event), str(event["name"]).removeprefix(PHASE))
        for event in events
        if event.get("ph") == "X" and event.get("cat") == ANNOTATION and str(event.get("name", "")).startswith(PHASE)
    )


def _place_among(hosts: Sequence[tuple[Span, str]], launch: HostCall) -> int | None:
    """Return the index of the phase that was open at a launch."""
    place = bisect_right(hosts, launch.at_s, key=lambda phase: phase[0][0]) - 1
    return place if place >= 0 and launch.at_s <= hosts[place][0][1] else None


def in_no_phase(events: Sequence[Event], launches: HostCalls) -> tuple[int, int, int]:
    """Return the numbers of device events without a launch in the trace, of device events launched in no phase (such as
    by a thread that continues after the phases), and of all device events.
    """
    hosts = _hosts_phases(events)
    calls = [launches.of(event) for event in events if is_on_device(event)]
    outside = sum(launch is not None and _place_among(hosts, launch) is None for launch in calls)
    return calls.count(None), outside, len(calls)


# The host's calls of collectives (`record_param_comms`), and the kernels of each call.
#
# kineto adds a call's facts to the kernels that were launched during the call. NCCL launches a batch of messages
# (`batch_isend_irecv`, and other calls that torch coalesces) when the batch ends, after the calls. Kernels of batches
# have no facts, and belong to the preceding calls without kernels.

# Kernels of NCCL and RCCL (ncclDevKernel_..., ncclKernel_..., ncclSymDevKernel_...), similar libraries (MCCL, CNCL),
# MSCCL, oneCCL, Ascend's HCCL, torch's kernels over symmetric memory, and vLLM's kernels. Some profilers do not
# demangle C++ names.
OF_COMMUNICATION = re.compile(
    r"(?:nccl|rccl|mccl|cncl)\w*kernel|msccl|oneccl_|hcom_|nvshmem|_shot_all_reduce|multimem_all_|cross_device_reduce",
    re.IGNORECASE,
)
COLLECTIVE, GROUP = "Collective name", "Process Group Name"


class HostCollective:
    """One call, with the profiler's facts and its time span in seconds of the profiler's clock."""

    def __init__(self, facts: Event, at_s: float, ended_s: float) -> None:
        self.facts, self.at_s, self.ended_s = facts, at_s, ended_s
        self.within: HostCollective | None = None
        self.has_kernel = False

    @property
    def communicates(self) -> bool:
        """Return whether the call's kind has a kernel. Other kinds wait or do set-up."""
        return kind_of(str(self.facts[COLLECTIVE])) in (*FAMILIES, *OTHERS)


@cache
def communicates(kernel: str) -> bool:
    """Return whether a kernel's name is of a communication library. The cache helps because few names repeat often."""
    return OF_COMMUNICATION.search(kernel) is not None


class HostCollectives:
    """The calls of collectives among one rank's events, by the launched kernels."""

    def __init__(self, events: Sequence[Event], launches: HostCalls) -> None:
        self._launches = launches
        self._by_number: dict[Any, HostCollective] = {}
        self._by_thread: dict[Any, list[HostCollective]] = {}
        for event in events:
            facts = event.get("args") or {}
            if event.get("cat") == HOST_OPERATOR and event.get("ph") == "X" and facts.get(COLLECTIVE):
                call = HostCollective(facts, *_span_of(event))
                self._by_thread.setdefault(event.get("tid"), []).append(call)
                if number := facts.get(NUMBER):
                    self._by_number[number] = call
        for calls in self._by_thread.values():
            _nest(calls)
        self._of_kernels = self._find([event for event in events if is_on_device(event)])

    def of(self, event: Event) -> tuple[HostCollective, ...] | None:
        """Return the calls of a kernel, () if the kernel communicates without a known call, None for other work."""
        return self._of_kernels.get(id(event))

    def _find(self, events: Sequence[Event]) -> dict[int, tuple[HostCollective, ...] | None]:
        by_event: dict[int, tuple[HostCollective, ...] | None] = {}
        silent = []
        for event in events:
            facts = event.get("args") or {}
            if facts.get(COLLECTIVE):
                by_event[id(event)] = (self._by_facts(event),)
            elif not _is_copy(event) and communicates(str(event.get("name", ""))):
                call = self._around(self._launches.of(event))
                if call is None:
                    silent.append(event)
                else:
                    call.has_kernel = True
                by_event[id(event)] = () if call is None else (call,)
        return by_event | self._of_batches(silent) | self._of_copies(events)

    def _by_facts(self, event: Event) -> HostCollective:
        """Return the call of a kernel's facts. Other kernels with the same number belong to the same call."""
        facts, launch = event["args"], self._launches.of(event)
        number = facts.get(NUMBER)
        call = self._by_number.get(number) if number else self._around(launch)
        if call is None or call.facts[COLLECTIVE] != facts[COLLECTIVE]:
            at_s = launch.at_s if launch else _span_of(event)[0]
            call = HostCollective(facts, at_s, at_s)
            if number:
                self._by_number[number] = call
        call.has_kernel = True
        return call

    def _around(self, launch: HostCall | None) -> HostCollective | None:
        """Return the innermost call on the same thread that was open at a launch."""
        if launch is None:
            return None
        calls = self._by_thread.get(launch.thread, [])
        place = bisect_right(calls, launch.at_s, key=lambda call: call.at_s) - 1
        call = calls[place] if place >= 0 else None
        while call is not None and call.ended_s < launch.at_s:
            call = call.within
        return call

    def _of_batches(self, kernels: Sequence[Event]) -> dict[int, tuple[HostCollective, ...]]:
        """Map kernels launched outside of calls to the thread's calls without a kernel since the previous launch
        outside of calls.

        The next kernel with the same name on the same stream belongs to the same batch, if no call is in between.
        """
        launched = [(launch, event) for event in kernels if (launch := self._launches.of(event))]
        by_event: dict[int, tuple[HostCollective, ...]] = {}
        last_of_thread: dict[Any, tuple[int, Any, tuple[HostCollective, ...]]] = {}
        for launch, event in sorted(launched, key=lambda launch_and_event: launch_and_event[0].at_s):
            calls = self._by_thread.get(launch.thread, [])
            since, last_key, before = last_of_thread.get(launch.thread, (0, None, ()))
            until = bisect_right(calls, launch.at_s, key=lambda call: call.at_s)
            open_calls = [call for call in calls[since:until] if call.communicates and not call.has_kernel]
            batch = tuple(call for call in open_calls if call.facts.get(GROUP) == open_calls[-1].facts.get(GROUP))
            kernel_key = event.get("tid"), event.get("name")
            if since == until and last_key == kernel_key:
                batch = before
            last_of_thread[launch.thread] = until, kernel_key, batch
            by_event[id(event)] = batch
        return by_event

    def _of_copies(self, events: Sequence[Event]) -> dict[int, tuple[HostCollective, ...]]:
        """Map copies with the number of a call without a kernel to that call.

        NCCL over symmetric memory moves data without reductions by copy engines, and kineto adds facts only to kernels.
        """
        by_event: dict[int, tuple[HostCollective, ...]] = {}
        for event in filter(_is_copy, events):
            call = self._by_number.get((event.get("args") or {}).get(NUMBER))
            if call is not None and call.communicates and not call.has_kernel:
                by_event[id(event)] = (call,)
        return by_event


def _nest(calls: list[HostCollective]) -> None:
    """Sort a thread's calls, and link each nested call to the call around it."""
    calls.sort(key=lambda call: (call.at_s, -call.ended_s))
    around: list[HostCollective] = []
    for call in calls:
        while around and around[-1].ended_s < call.at_s:
            around.pop()
        call.within = around[-1] if around else None
        around.append(call)


# Collectives among the kernels of a profiled step.
#
# The profiler writes a collective's name, sizes and process group with its kernel (kineto's `output_json.cpp`); kernels
# are renamed from one NCCL to the next. A kernel without these facts belongs to the host's calls that launched the
# kernel. A kernel without such calls is recognised by its name, and does not reduce exposed times. A collective's
# duration is the duration of its kernels, which includes waiting for the slowest rank, as in all NCCL durations.

# Bytes per element by the profiler's names of dtypes (c10::toString). For other dtypes, bytes are not compared.
DTYPE_BYTES = {
    **dict.fromkeys(("Double", "Long", "UInt64", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "UInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
}
UNNAMED = "unnamed communication"
MEETING = "barrier"  # has a kernel, and moves nothing


class Ran(NamedTuple):
    """The kernels of one collective, with times in seconds of the profiler's clock."""

    kind: str  # as in Communication; UNNAMED if unknown
    group: str  # name of its process group
    begun_s: float
    ended_s: float
    exposed_s: float  # without another kernel or copy; an equal share for each message of a batch in one kernel
    payload_bytes: int | None = None  # nccl-tests' S by the profiler's count, None if not recorded
    issued_s: float = 0.0  # time of the host's call, or of the begin if the call is unknown


def collectives_among(events: Sequence[Event], launches: HostCalls | None = None) -> list[Ran]:
    """Return the collectives on one rank's device in order of begin, from the events of a Chrome trace of
    `torch.profiler` (`ts` and `dur` in microseconds).

    NCCL may run one collective in several kernels, and messages of one batch in a single kernel.
    """
    calls = HostCollectives(events, launches or HostCalls(events))
    covered = Cover(_span_of(event) for event in events if is_on_device(event) and calls.of(event) is None)
    kernels: dict[HostCollective, list[tuple[Span, int]]] = {}
    unnamed: list[Span] = []
    for event in filter(is_on_device, events):
        event_calls = calls.of(event)
        for call in event_calls or ():
            kernels.setdefault(call, []).append((_span_of(event), len(event_calls or ())))
        unnamed += [_span_of(event)] if event_calls == () else []

    def ran(shared: Sequence[tuple[Span, int]], facts: Mapping[str, Any], issued_s: float) -> Ran:
        # Copy engines, and several kernels of a split collective, may run at once.
        spans = union(span for span, _ in shared)
        exposed = sum(max(ended - begun - covered.seconds((begun, ended)), 0.0) for begun, ended in spans)
        kind, group = kind_of(str(facts[COLLECTIVE])) if facts else UNNAMED, str(facts.get(GROUP, ""))
        numel = facts.get("Out msg nelems" if kind == "all_gather" else "In msg nelems")
        itemsize = DTYPE_BYTES.get(str(facts.get("dtype")))
        payload_bytes = numel * itemsize if isinstance(numel, int) and itemsize is not None else None
        size = max(size for _, size in shared)
        return Ran(kind, group, spans[0][0], spans[-1][1], exposed / size, payload_bytes, issued_s)

    collectives = [ran(shared, call.facts, call.at_s) for call, shared in kernels.items()]
    collectives += [ran([(span, 1)], {}, span[0]) for span in unnamed]
    return sorted(collectives, key=lambda collective: (collective.begun_s, collective.issued_s))


def matched(
    rows: Sequence[Communication], kernels: Sequence[Ran], group_names: Mapping[str, str]
) -> tuple[list[Ran | None], str | None]:
    """Return each row's kernel. The n-th collective of a group has the group's n-th kernel, because a group's kernels
    run in order.

    Messages between two ranks are matched separately, in the order of the host's calls. If the messages differ from the
    rows' messages, only messages have no times.

    Args:
        rows: the collectives that one step issued on this rank.
        kernels: of another run of the same step.
        group_names: process group name to its ranks as a row's `group` has them.

    Returns:
        One kernel per row and None; or only None and a sentence, if rows and kernels do not match.
    """
    none: list[Ran | None] = [None] * len(rows)
    unnamed = sum(ran.kind == UNNAMED for ran in kernels)
    messages = sorted((ran for ran in kernels if ran.kind in PEERS), key=lambda ran: ran.issued_s)
    # A collective of one rank may be a kernel, a copy, or nothing.
    kernels = [
        ran
        for ran in kernels
        if ran.kind not in (UNNAMED, MEETING, *PEERS) and group_names.get(ran.group, ",").count(",")
    ]
    ours = Counter((row.group, row.kind) for row in rows if row.group_size > 1 and row.kind not in PEERS)
    theirs = Counter((group_names.get(ran.group, f"group {ran.group}"), ran.kind) for ran in kernels)
    if ours != theirs:
        differing = [
            f"{text} {kind} over {group}: {count}"
            for text, counts in (("only among kernels", theirs - ours), ("no kernel of", ours - theirs))
            for (group, kind), count in counts.items()
        ]
        differing += [f"{unnamed} kernels communicate without a recorded collective"] if unnamed else []
        return none, f"kernels in the profiler's trace differ from the issued collectives: {'; '.join(differing)}"
    waiting: dict[str, list[Ran]] = {}
    for ran in reversed(kernels):
        waiting.setdefault(group_names[ran.group], []).append(ran)
    are_equal = [row.kind for row in rows if row.kind in PEERS] == [ran.kind for ran in messages]
    in_order = iter(messages if are_equal else ())
    row_kernels = [
        next(in_order, None) if row.kind in PEERS else waiting[row.group].pop() if row.group_size > 1 else None
        for row in rows
    ]
    for row, kernel in zip(rows, row_kernels, strict=True):
        if kernel is not None and kernel.kind != row.kind:
            return none, f"kernels of group {row.group} ran in another order than the issue of their collectives"
    return row_kernels, None


def _differences(rows: Sequence[Communication], kernels: Sequence[Ran | None]) -> list[str]:
    """Return rows and kernels with different bytes, and the number of messages without a kernel, as sentences."""
    sentences = [
        f"{row.kind} over ranks {row.group} has {row.payload_bytes} B, but its kernel moved {ran.payload_bytes} B"
        for row, ran in zip(rows, kernels, strict=True)
        if ran is not None and ran.payload_bytes not in (None, row.payload_bytes)
    ]
    if num_messages := sum(ran is None for row, ran in zip(rows, kernels, strict=True) if row.kind in PEERS):
        sentences.append(f"{num_messages} messages have no times, because the profiler's trace has no kernel for them")
    return sentences


BETWEEN_EVENTS = re.compile(r"[\s,]*")
# kineto writes names without escapes, and divisions by zero as inf or nan.
NAMED = re.compile(r'("name": ")(.*)(", "pid": )')
NO_NUMBER = re.compile(r"(?<=\": )-?(inf|nan)\b")
END_OF_EVENT = "\n  }"
ALIVE_EVERY = 20_000  # events; some tenths of a second


@dataclass(frozen=True)
class ProfiledStep:
    """A profiled step, with times in seconds of the profiler's clock."""

    traced: Traced
    differences: list[str]  # between kernels and issued collectives, as sentences
    reason: str | None  # why there are no times


def profiled_step(
    step: TrainingStep,
    context: RankContext,
    rows: Sequence[Communication],
    on_progress: Callable[[], None] = lambda: None,
) -> ProfiledStep:
    """Run a step under the profiler on all ranks. `rows` are the collectives of another run of the step.

    `on_progress` is called repeatedly, because reading a large trace takes minutes.
    """
    names = iter(step.phases)
    _begin_profiling(context.device)
    synchronize(context.device)  # no kernel of an earlier step is left
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
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            on_progress()
            events = list(events_in(file, on_progress))
        return step_of_events(events, step.phases, cpu_s, rows, ranks_by_group_name())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # A vendor's profiler may write invalid data. A failure here would leave the other ranks waiting.
        traceback.print_exc()
        reason = f"the profiler's trace cannot be read ({error})"
        return ProfiledStep(_untimed(rows, cpu_s), [reason], reason)


def _untimed(rows: Sequence[Communication], cpu_s: float) -> Traced:
    return Traced(0.0, [], cpu_s, [TracedRow(row) for row in rows])


@cache
def _begin_profiling(device: torch.device) -> None:
    """Profile once, because the first use takes seconds for set-up of the vendor's library, and may lose kernels."""
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
    """Convert a profiled step's events from a Chrome trace to a traced step.

    `rows` are the collectives in order of issue. `group_names` maps names to ranks in the format of
    `Communication.group`.
    """
    launches = HostCalls(events)
    kernels = collectives_among(events, launches)
    ran, reason = matched(rows, kernels, group_names)
    traced_rows = [
        TracedRow(row, kernel.begun_s, kernel.ended_s, kernel.exposed_s) if kernel else TracedRow(row)
        for row, kernel in zip(rows, ran, strict=True)
    ]
    device_phases = phases_among(events, launches)
    if [phase.name for phase in device_phases] != list(phases):
        reason = reason or f"the device ran phases {[phase.name for phase in device_phases]} instead of {list(phases)}"
        return ProfiledStep(_untimed(rows, cpu_s), [reason], reason)
    # Kernels launched in forward may end after the first kernels of backward.
    ends = [*accumulate((phase.ended_s for phase in device_phases), max)]
    traced = Traced(min(phase.begun_s for phase in device_phases), ends, cpu_s, traced_rows)
    if reason:
        return ProfiledStep(traced, [reason], reason)
    sentences = _differences(rows, ran)
    if unnamed := sum(kernel.kind == UNNAMED for kernel in kernels):
        sentences.append(
            f"{unnamed} kernels communicate without a recorded collective, and do not reduce exposed times"
        )
    num_lost, outside, num_events = in_no_phase(events, launches)
    for count, why in ((num_lost, "have no launch in the trace"), (outside, "were launched before or after the step")):
        sentences += [f"{count} of {num_events} kernels and copies {why}, and belong to no phase"] if count else []
    return ProfiledStep(traced, sentences, None)


def events_in(file: Path, on_progress: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace one by one. Parsing a large trace at once would delay progress reports.

    Raises:
        ValueError: the trace is incomplete, as on a full disk, or an event is not JSON.
    """
    text, decoder = file.read_text(encoding="utf-8", errors="replace"), json.JSONDecoder()
    at = text.find("[", text.find('"traceEvents"')) + 1 if '"traceEvents"' in text else 0
    if not at:
        raise ValueError("no list of events")
    number = 0
    while text[at := _next_event(text, at)] != "]":
        try:
            event, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            event, at = _repaired(text, at, number)
        yield event
        number += 1
        if number % ALIVE_EVERY == 0:
            on_progress()


def _next_event(text: str, at: int) -> int:
    match = BETWEEN_EVENTS.match(text, at)
    assert match is not None
    if match.end() == len(text):
        raise ValueError("the trace is incomplete; check that the disk of temporary files is not full")
    return match.end()


def _repaired(text: str, at: int, number: int) -> tuple[Any, int]:
    """Return an event that kineto wrote as invalid JSON, and the position of its end."""
    end = text.find(END_OF_EVENT, at) + len(END_OF_EVENT)
    if end < len(END_OF_EVENT):
        _next_event(text, len(text))
    repaired = NO_NUMBER.sub("null", text[at:end])
    repaired = NAMED.sub(lambda match: match[1] + match[2].replace('"', "'") + match[3], repaired)
    try:
        return json.loads(repaired, strict=False), end
    except json.JSONDecodeError as error:
        raise ValueError(f"event {number} is not JSON: {error}") from error
