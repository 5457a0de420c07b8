"""Start and duration of each operator, collective and message of a recorded step: one host, streams, events, one queue
per communicator, and one per direction of copies between host and device.

The host issues work in order, and waits at synchronizations. Work on a stream starts when the host has issued it, when
the stream's earlier work has ended, and when the events that the stream waits for have happened; NCCL runs the
collectives of a communicator one after another. Operators and collectives that run at the same time slow each other
down, by the hardware file's `overlap_slowdown`. Collectives of several communicators of the same ranks share the links:
while two of them run, each has half of the bandwidth.

The ranks of a pipeline are replayed together: a message starts when both ranks are ready. Each rank is a generator that
pauses when it needs the end of a message and the other rank's time is unknown. Later work on other streams is replayed
before that, because the host does not wait for messages.
"""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from distbench.simulate.compile_float8 import fused_bytes
from distbench.simulate.hardware_file import Hardware, HostFigures
from distbench.simulate.operator_costs import collective_s, message_s, on_host, operator_s, page_faults_s
from distbench.simulate.recording import (
    COPIES,
    ON_HOST,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    HostWaited,
    Operator,
    Recording,
    Touched,
)
from distbench.spec.covered_time import Cover, union
from distbench.spec.errors import UserError


@dataclass
class _Message:
    """Times in s at which the ranks of a posted message were ready, by kind ("send", "recv")."""

    num_bytes: int
    ready_s: dict[str, float] = field(default_factory=dict)


class _Exchanges:
    """Sends and receives of all ranks, matched by order of issue for each pair of ranks and direction.

    `num_changes` counts batches that become ready or end, to detect a deadlock.

    Args:
        buffers_sends: sends do not wait for their receives.
    """

    def __init__(self, buffers_sends: bool = False) -> None:
        self.num_changes = 0
        self.buffers_sends = buffers_sends
        self._issued: Counter[tuple[int, int, str]] = Counter()
        self._messages: dict[tuple[int, int, int], _Message] = {}

    def issue(self, rank: int, message: Collective) -> _Message:
        """Return the message of one end. Raise UserError if the other end has another size."""
        assert message.peer is not None
        sender, receiver = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
        place = self._issued[sender, receiver, message.kind]
        self._issued[sender, receiver, message.kind] += 1
        exchange = self._messages.setdefault((sender, receiver, place), _Message(message.payload_bytes))
        if exchange.num_bytes != message.payload_bytes:
            sizes = f"{exchange.num_bytes:,} bytes on one end and {message.payload_bytes:,} on the other"
            raise UserError(f"message {place} from rank {sender} to {receiver} has {sizes}; record the step again")
        return exchange

    @property
    def one_ended(self) -> set[int]:
        """Ranks whose ends of messages are ready while the other ends are not."""
        return {
            sender if "send" in exchange.ready_s else receiver
            for (sender, receiver, _), exchange in self._messages.items()
            if len(exchange.ready_s) == 1
        }


class _Deadlock(UserError):
    """Messages that wait for each other, or for an end that is not recorded."""


class TimedEvent(NamedTuple):
    """An event on a stream with its start and end in s after the step's start."""

    start_s: float
    end_s: float
    what: Operator | Collective


@dataclass(frozen=True)
class TimedStep:
    """A step on the simulated clock.

    Args:
        step_s: seconds until the device and the host are done; for a pipeline, until the last rank's are done.
        host_s: seconds of the host's own work.
        spans: events in the order of issue; a message starts when both ranks are ready.
        awaited: (start, end) of each wait for another rank's end of a message or for the last rank, in any order.
        buffers_sends: sends do not wait for their receives, because otherwise the ranks would deadlock.
    """

    step_s: float
    host_s: float
    spans: Sequence[TimedEvent]
    awaited: Sequence[tuple[float, float]] = ()
    buffers_sends: bool = False


HOST_LINK = "host"  # of copies between host and device, in place of a mesh dim


class Exposed(NamedTuple):
    """Origin of exposed communication, or of exposed copies from or to the host, during which no operator runs."""

    mesh_dim: str
    kind: str
    source: str
    owner: str


@dataclass(frozen=True)
class Parts:
    """Parts of a step's time, which add up to the step.

    Args:
        compute_s: at least one operator runs on the device.
        exposed_s: communication, or a copy from or to the host, runs without an operator, by origin.
        idle_s: neither runs, because the host has not issued work yet.
        bubble_s: neither runs, because another rank of the pipeline is not ready.
        on_host_s: neither runs, because the host runs operators itself, as the optimizer of offloaded parameters.
        by_kind_s: compute seconds per kind of operator, summed over streams.
        communication_s: durations of collectives by mesh dim, and of copies from and to the host, summed.
    """

    compute_s: float
    exposed_s: Mapping[Exposed, float]
    idle_s: float
    by_kind_s: Mapping[str, float]
    communication_s: Mapping[str, float]
    bubble_s: float = 0.0
    on_host_s: float = 0.0


def replay_together(recordings: Sequence[Recording], hardware: Hardware) -> list[TimedStep]:
    """Run the steps of all ranks of a pipeline, or of a single rank, on one clock.

    A send starts when the receiver is ready, as NCCL's sends of large messages. If the ranks would deadlock, as with
    `defer_pp_recv` and one communicator per pair of ranks, all sends are buffered: a send does not wait.

    Raises:
        UserError: a message has no other end, or ranks deadlock even with buffered sends.
    """
    if hardware.host is not None:
        if any(of_rank.head.pipeline is not None for of_rank in recordings):
            raise UserError(
                f"hardware file {hardware.name} describes a CPU and has no measured messages between stages; use "
                "--hardware with an accelerator"
            )
        if any(of_rank.offloads for of_rank in recordings):
            raise UserError(
                f"hardware file {hardware.name} describes a CPU, whose shards are in host memory already; leave out "
                "CPU offload, or use --hardware with an accelerator"
            )
        return [_replay_on_host(recording.step, hardware.host) for recording in recordings]
    buffers_sends = False
    try:
        alone = _replay_all(recordings, hardware, {})
    except _Deadlock:
        buffers_sends = True
        alone = _replay_all(recordings, hardware, {}, buffers_sends)
    shares_links = any(event.communicator for of_rank in recordings for event in of_rank.collectives)
    if not hardware["overlap_slowdown"] and not shares_links:
        return alone
    # The share of each event that overlaps is that of a step without slowdown.
    slower = {
        recording.head.rank: _overlap_factors(timed, hardware["overlap_slowdown"])
        for recording, timed in zip(recordings, alone, strict=True)
    }
    return _replay_all(recordings, hardware, slower, buffers_sends)


def _overlap_factors(timed: TimedStep, slowdown: float) -> list[float]:
    """Return the factor of each span: 1 + `slowdown` for operators during collectives, and for the reverse; 1 more for
    a collective during collectives of other communicators of its ranks."""
    computing = Cover(computing_of(timed))
    communicating = Cover(union((span.start_s, span.end_s) for span in timed.spans if _communicates(span)))
    queues: dict[Touched, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for span in timed.spans:
        if isinstance(span.what, Collective) and span.what.peer is None:
            queues[_ranks(span.what)][span.what.communicator].append((span.start_s, span.end_s))
    rivals = {
        (ranks, number): Cover(union(itertools.chain(*(spans for other, spans in of.items() if other != number))))
        for ranks, of in queues.items()
        if len(of) > 1
        for number in of
    }
    factors = []
    for span in timed.spans:
        others = computing if _communicates(span) else communicating if _computes(span) else None
        overlapped_s = others.seconds((span.start_s, span.end_s)) if others else 0.0
        factor = 1 + slowdown * overlapped_s / (span.end_s - span.start_s) if overlapped_s else 1.0
        if isinstance(span.what, Collective):
            rival = rivals.get((_ranks(span.what), span.what.communicator))
            shared_s = rival.seconds((span.start_s, span.end_s)) if rival else 0.0
            factor += shared_s / (span.end_s - span.start_s) if shared_s else 0.0
        factors.append(factor)
    return factors


def _ranks(collective: Collective) -> Touched:
    return tuple(map(tuple, collective.ranks))


def _replay_all(
    recordings: Sequence[Recording],
    hardware: Hardware,
    slower: Mapping[int, Sequence[float]],
    buffers_sends: bool = False,
) -> list[TimedStep]:
    """Replay all ranks; `slower` has the factors of each rank's spans, in the order of issue."""
    exchanges = _Exchanges(buffers_sends)
    steps: dict[int, TimedStep] = {}
    running = [
        _replay(recording, hardware, exchanges, steps, slower.get(recording.head.rank, ())) for recording in recordings
    ]
    while running:
        before = exchanges.num_changes, len(running)
        running = [rank for rank in running if next(rank, None) is not None]
        unfinished = {of_rank.head.rank for of_rank in recordings} - set(steps)
        if before == (exchanges.num_changes, len(running)) or (not running and exchanges.one_ended):
            waiting = ", ".join(map(str, sorted(unfinished or exchanges.one_ended)))
            raise _Deadlock(
                f"rank {waiting} waits for a message whose other end is not recorded, or is queued behind such a "
                "message; record the step again with all ranks of the pipeline"
            )
    last_s = max(timed.step_s for timed in steps.values())
    for rank, timed in steps.items():
        if timed.step_s < last_s:
            steps[rank] = replace(timed, step_s=last_s, awaited=[*timed.awaited, (timed.step_s, last_s)])
    return [steps[recording.head.rank] for recording in recordings]


@dataclass
class _Batch:
    """Messages that start together, issued at `issued_s`; `span` and `wait` are the places of their first span and
    wait."""

    messages: Sequence[Collective]
    exchanges: Sequence[_Message]
    issued_s: float
    span: int
    wait: int
    ready_s: float | None = None


class _Streams:
    """One rank's streams: the end of each stream's work, and the work whose time is unknown, in order per stream.

    Work is a function that returns False while it must wait for another rank.

    Args:
        end_s: the end of a stream's work whose times are known.
        queues: stream to its work whose times are unknown.
        spans, awaited: as in `TimedStep`; messages whose times are unknown have placeholders.
    """

    def __init__(self, rank: int, hardware: Hardware, exchanges: _Exchanges, slower: Sequence[float]) -> None:
        self.end_s: dict[int, float] = defaultdict(float)
        self.spans: list[TimedEvent] = []
        self.awaited: list[tuple[float, float]] = []
        self._rank, self._hardware, self._exchanges, self._slower = rank, hardware, exchanges, slower
        self._happened_s: dict[int, float] = {}
        self._unknown_events: set[int] = set()
        self.queues: dict[int, deque[Callable[[], bool]]] = {}

    def issue(self, messages: Sequence[Collective], issued_s: float) -> None:
        """Issue messages that start together."""
        posted = [self._exchanges.issue(self._rank, message) for message in messages]
        batch = _Batch(messages, posted, issued_s, len(self.spans), len(self.awaited))
        self.spans += [TimedEvent(issued_s, issued_s, message) for message in messages]
        self.awaited += [(issued_s, issued_s)] * len(messages)
        self._add(messages[0].stream, partial(self._pass_on, batch))

    def record(self, event: EventRecorded, issued_s: float) -> None:
        """Record an event after the stream's earlier work."""

        def happen() -> bool:
            self._happened_s[event.event] = max(self.end_s[event.stream], issued_s)
            self._unknown_events.discard(event.event)
            return True

        self._unknown_events.add(event.event)
        self._add(event.stream, happen)

    def wait(self, event: EventWaited) -> Iterator[bool]:
        """Delay a stream until an event; yield while the event's time is unknown."""
        yield from self._wait_while(lambda: event.event in self._unknown_events)
        happened_s = self._happened_s.get(event.event, 0.0)

        def delay() -> bool:
            self.end_s[event.stream] = max(self.end_s[event.stream], happened_s)
            return True

        self._add(event.stream, delay)

    def finish(self, streams: Sequence[int] = ()) -> Iterator[bool]:
        """Yield while the end of a stream's work is unknown; of all streams by default."""
        yield from self._wait_while(lambda: not self.queues.keys().isdisjoint(streams or [*self.queues]))

    def _pass_on(self, batch: _Batch) -> bool:
        """Start messages together if their other ends are ready; a buffered send needs no other end."""
        stream = batch.messages[0].stream
        if batch.ready_s is None:
            batch.ready_s = max(self.end_s[stream], batch.issued_s)
            self._exchanges.num_changes += 1
            for message, exchange in zip(batch.messages, batch.exchanges, strict=True):
                exchange.ready_s[message.kind] = batch.ready_s
        starts_s = []
        for message, exchange in zip(batch.messages, batch.exchanges, strict=True):
            needed = ("send",) if message.kind == "send" and self._exchanges.buffers_sends else ("send", "recv")
            if any(kind not in exchange.ready_s for kind in needed):
                return False
            starts_s.append(max(exchange.ready_s[kind] for kind in needed))
        self._exchanges.num_changes += 1
        for place, (message, start_s) in enumerate(zip(batch.messages, starts_s, strict=True)):
            factor = self._slower[batch.span + place] if self._slower else 1.0
            end_s = start_s + message_s(message, self._rank, self._hardware) * factor
            self.spans[batch.span + place] = TimedEvent(start_s, end_s, message)
            self.awaited[batch.wait + place] = (batch.ready_s, start_s)
            self.end_s[stream] = max(self.end_s[stream], end_s)
        return True

    def _add(self, stream: int, work: Callable[[], bool]) -> None:
        """Do work on a stream now, or after the stream's earlier work."""
        if stream in self.queues or not work():
            self.queues.setdefault(stream, deque()).append(work)

    def _wait_while(self, is_unknown: Callable[[], bool]) -> Iterator[bool]:
        """Do the work of all streams as far as it is possible; yield while a time is unknown."""
        while is_unknown():
            for stream, queue in list(self.queues.items()):
                while queue and queue[0]():
                    queue.popleft()
                if not queue:
                    del self.queues[stream]
            if is_unknown():
                yield True


def _replay(
    recording: Recording,
    hardware: Hardware,
    exchanges: _Exchanges,
    steps: dict[int, TimedStep],
    slower: Sequence[float],
) -> Iterator[bool]:
    """Replay one rank into `steps`; yield whenever the rank must wait for other ranks.

    Args:
        slower: a factor of each span's time, in the order of issue; empty for 1.
    """
    events, rank, world_size = recording.step, recording.head.rank, recording.world_size
    fused = fused_bytes(events, recording.head.compiled)
    streams = _Streams(rank, hardware, exchanges, slower)
    end_s, spans = streams.end_s, streams.spans
    queues: dict[object, float] = defaultdict(float)
    now = host = 0.0
    launch_s, host_s = hardware["launch_s"], hardware["host_s"]
    for place, event in enumerate(events):
        is_message = isinstance(event, Collective) and event.peer is not None
        if isinstance(event, Operator | Collective) and not is_message and event.stream in streams.queues:
            yield from streams.finish([event.stream])
        if isinstance(event, Operator):
            duration = operator_s(event, hardware, fused.get(place), world_size)
            if duration <= 0:
                continue
            duration *= slower[len(spans)] if slower else 1.0
            now, host = now + host_s, host + host_s
            if event.kind == ON_HOST:
                spans.append(TimedEvent(now, now + duration, event))
                now += duration
                continue
            start = max(end_s[event.stream], now + launch_s)
            if event.kind in COPIES:
                start = max(start, queues[event.kind])
                queues[event.kind] = start + duration
            end_s[event.stream] = start + duration
            spans.append(TimedEvent(start, start + duration, event))
        elif is_message:
            if messages := _batch_at(events, place):
                now, host = now + host_s * len(messages), host + host_s * len(messages)
                streams.issue(messages, now + launch_s)
        elif isinstance(event, Collective):
            group = (_ranks(event), event.communicator)
            now, host = now + host_s, host + host_s
            start = max(end_s[event.stream], queues[group], now + launch_s)
            duration = collective_s(event, hardware) * (slower[len(spans)] if slower else 1.0)
            end_s[event.stream] = queues[group] = start + duration
            spans.append(TimedEvent(start, end_s[event.stream], event))
        elif isinstance(event, EventRecorded):
            streams.record(event, now)
        elif isinstance(event, EventWaited):
            yield from streams.wait(event)
        elif isinstance(event, HostWaited):
            yield from streams.finish([event.stream])
            now = max(now, end_s[event.stream])
    yield from streams.finish()
    steps[rank] = TimedStep(max([now, *end_s.values()]), host, spans, streams.awaited, exchanges.buffers_sends)


def _batch_at(events: Sequence[Event], place: int) -> list[Collective]:
    """Return the messages that start and end together with the message at `place`; [] unless that is the first."""

    def of(at: int) -> int | None:
        event = events[at] if 0 <= at < len(events) else None
        return event.batch if isinstance(event, Collective) and event.peer is not None else None

    if of(place - 1) == of(place):
        return []
    end = next(at for at in itertools.count(place) if of(at) != of(place))
    return [event for event in events[place:end] if isinstance(event, Collective)]


def _replay_on_host(events: Iterable[Event], host: HostFigures) -> TimedStep:
    """Replay sequentially: the host runs the operators, and waits for each collective."""
    now = waited = 0.0
    spans = []
    for event in events:
        if isinstance(event, Operator | Collective):
            host_s, seconds = on_host(event, host)
            start = now + host_s
            now, waited = start + seconds, waited + host_s
            if seconds > 0:
                spans.append(TimedEvent(start, now, event))
        elif isinstance(event, Allocated):
            faults_s = page_faults_s(event, host)
            now, waited = now + faults_s, waited + faults_s
    return TimedStep(now, waited, spans)


def parts_of(timed: TimedStep) -> Parts:
    """Divide the time of a step into parts."""
    by_kind: dict[str, float] = defaultdict(float)
    communication: dict[str, float] = defaultdict(float)
    exposed: dict[Exposed, float] = defaultdict(float)
    for span in timed.spans:
        if _computes(span):
            by_kind[span.what.kind] += span.end_s - span.start_s
        elif _moves(span):
            communication[_origin(span.what).mesh_dim] += span.end_s - span.start_s
    for span, alone_s in exposed_spans(timed):
        exposed[_origin(span.what)] += alone_s
    compute_s = sum(end - start for start, end in computing_of(timed))
    of_device = Cover((span.start_s, span.end_s) for span in timed.spans if _computes(span) or _moves(span))
    on_host = union((span.start_s, span.end_s) for span in timed.spans if not _computes(span) and not _moves(span))
    busy = Cover((span.start_s, span.end_s) for span in timed.spans)
    on_host_s = sum(end - start - of_device.seconds((start, end)) for start, end in on_host)
    bubble_s = sum(end - start - busy.seconds((start, end)) for start, end in union(timed.awaited))
    idle_s = timed.step_s - compute_s - sum(exposed.values()) - bubble_s - on_host_s
    return Parts(compute_s, dict(exposed), idle_s, dict(by_kind), dict(communication), bubble_s, on_host_s)


def _computes(span: TimedEvent) -> bool:
    return isinstance(span.what, Operator) and span.what.kind not in (*COPIES, ON_HOST)


def _communicates(span: TimedEvent) -> bool:
    return isinstance(span.what, Collective)


def _moves(span: TimedEvent) -> bool:
    return _communicates(span) or span.what.kind in COPIES


def _origin(event: Operator | Collective) -> Exposed:
    if isinstance(event, Collective):
        return Exposed(event.mesh_dim, event.kind, event.source, event.owner)
    return Exposed(HOST_LINK, event.kind, "copy", event.owner)


def computing_of(timed: TimedStep) -> list[tuple[float, float]]:
    """Return the times in s when an operator runs on the device, as ascending intervals that do not touch."""
    return union((span.start_s, span.end_s) for span in timed.spans if _computes(span))


def exposed_spans(timed: TimedStep) -> list[tuple[TimedEvent, float]]:
    """Return the collectives, and copies from and to the host, in order of start, each with its exposed time in s.

    Of several simultaneous collectives, the first to start counts as exposed.
    """
    computed, exposed, until = Cover(computing_of(timed)), [], 0.0
    for span in sorted(filter(_moves, timed.spans), key=lambda span: span.start_s):
        start, alone_s = max(span.start_s, until), 0.0
        if span.end_s > start:
            until = span.end_s
            alone_s = max(span.end_s - start - computed.seconds((start, span.end_s)), 0.0)
        exposed.append((span, alone_s))
    return exposed
