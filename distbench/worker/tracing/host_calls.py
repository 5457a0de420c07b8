"""Where in the program the work of a device was launched: host calls, and phases of a step, out of a profiler's events.

kineto gives each kernel and copy the `correlation` of the runtime call that launched it, on whatever thread: backward's
are autograd's. Annotations that it draws on the device itself are of no use here: it keeps the innermost alone, and
`Optimizer.step` and `FSDP::...` lie inside ours, one a stream, and those of other threads are not seen.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MICRO = 1e-6
# kineto's categories (ActivityType.h), and those that vendors put beside them: "gpu_memcpy", "mlu_memset", ...
COPIES = ("memcpy", "memset")
ON_DEVICE = ("kernel", *COPIES, "collective_comm", "mtia_ccp_events")
ANNOTATION, HOST_OPERATOR, FLOW = "user_annotation", "cpu_op", "ac2g"
HOST_CALLS = ("_runtime", "_driver", "hpu_op")  # CUDA's, ROCm's under the same name, XPU's, Gaudi's, ...
PHASE = "distbench:"
Event = Mapping[str, Any]
Span = tuple[float, float]


class HostCall(NamedTuple):
    """A host call that gave a device work: when, in seconds of the profiler's clock, and on which thread."""

    at_s: float
    thread: Any


class Phase(NamedTuple):
    """A phase of a step: when the host went through it, and when what it launched ran; seconds.

    A phase that launched nothing, or nothing that is known, ends on the device where the one before it did.
    """

    name: str
    host: Span
    begun_s: float
    ended_s: float


def is_on_device(event: Event) -> bool:
    """Whether an event is a kernel, a copy or a fill."""
    return event.get("ph") == "X" and str(event.get("cat")).lower().endswith(ON_DEVICE)


def is_copy(event: Event) -> bool:
    """Whether an event of the device is a copy or a fill."""
    return str(event.get("cat")).lower().endswith(COPIES)


def span_of(event: Event) -> Span:
    """Seconds of the profiler's clock; events have microseconds."""
    begun = float(event["ts"]) * MICRO
    return begun, begun + max(float(event.get("dur", 0.0)), 0.0) * MICRO


class HostCalls:
    """The host calls of one rank's events, by what they launched."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_number: dict[Any, HostCall] = {}
        self._by_operator: dict[Any, HostCall] = {}
        self._flow_ends: dict[tuple[Any, Any, float], Any] = {}
        self._by_flow: dict[Any, HostCall] = {}
        for event in events:
            kind, cat = event.get("ph"), str(event.get("cat"))
            facts = event.get("args") or {}
            if kind == "X" and cat.endswith(HOST_CALLS):
                self._note(self._by_number, facts.get("correlation"), event)
                self._note(self._by_operator, facts.get("External id"), event)
            elif kind == "X" and cat == HOST_OPERATOR:
                self._note(self._by_operator, facts.get("External id"), event)
            elif cat == FLOW and kind == "s":
                self._note(self._by_flow, event.get("id"), event)
            elif cat == FLOW and kind == "f":
                self._flow_ends[_place(event)] = event.get("id")

    @staticmethod
    def _note(where: dict[Any, HostCall], number: Any, event: Event) -> None:
        """A runtime call that makes a driver's has its number too: the outer one came first. 0 is no number: vendors'
        libraries give it to what they could not tell."""
        launch = HostCall(float(event["ts"]) * MICRO, event.get("tid"))
        if number and (number not in where or launch.at_s < where[number].at_s):
            where[number] = launch

    def of(self, event: Event) -> HostCall | None:
        """What launched an event of the device; None where the trace does not tell."""
        facts = event.get("args") or {}
        number, flow = facts.get("correlation"), self._flow_ends.get(_place(event))
        # kineto numbers a flow as its call; others number flows by themselves.
        found = self._by_number.get(number) or self._by_flow.get(flow) or self._by_flow.get(number)
        return found or self._by_number.get(flow) or self._by_operator.get(facts.get("External id"))


def _place(event: Event) -> tuple[Any, Any, float]:
    return event.get("pid"), event.get("tid"), float(event["ts"])


def phases_among(events: Sequence[Event], launches: HostCalls | None = None) -> list[Phase]:
    """Our phases, in the order in which the host went through them, with the time that what they launched took.

    A launch belongs to the phase whose annotation was open then, whatever the thread: while autograd's works, the one
    that opened it waits.
    """
    launches = launches or HostCalls(events)
    hosts = _hosts_phases(events)
    ran: list[list[Span]] = [[] for _ in hosts]
    for event in filter(is_on_device, events):
        launch = launches.of(event)
        if launch and (place := _place_among(hosts, launch)) is not None:
            ran[place].append(span_of(event))
    began = min((begun for spans in ran for begun, _ in spans), default=0.0)
    found: list[Phase] = []
    for (host, name), spans in zip(hosts, ran, strict=True):
        before = found[-1].ended_s if found else began
        first = min((begun for begun, _ in spans), default=before)
        found.append(Phase(name, host, first, max((ended for _, ended in spans), default=before)))
    return found if any(ran) else []


def _hosts_phases(events: Iterable[Event]) -> list[tuple[Span, str]]:
    """Our annotations of the host, in order."""
    return sorted(
        (span_of(event), str(event["name"]).removeprefix(PHASE))
        for event in events
        if event.get("ph") == "X" and event.get("cat") == ANNOTATION and str(event.get("name", "")).startswith(PHASE)
    )


def _place_among(hosts: Sequence[tuple[Span, str]], launch: HostCall) -> int | None:
    """Which phase was open at a launch."""
    place = bisect_right(hosts, launch.at_s, key=lambda phase: phase[0][0]) - 1
    return place if place >= 0 and launch.at_s <= hosts[place][0][1] else None


def in_no_phase(events: Sequence[Event], launches: HostCalls) -> tuple[int, int, int]:
    """How many of a device's events have no launch in the trace, how many were launched in none of our phases (by a
    thread that goes on after them, say), and how many there are."""
    hosts = _hosts_phases(events)
    found = [launches.of(event) for event in events if is_on_device(event)]
    outside = sum(launch is not None and _place_among(hosts, launch) is None for launch in found)
    return found.count(None), outside, len(found)
