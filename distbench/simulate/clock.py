"""When each operator, collective and message of a recorded step begins: one host, streams, events, a queue a
communicator.

The host issues one thing after another and is never ahead of what it waits for. What is issued to a stream begins when
the host has issued it, when what was issued to the stream before has ended, and when what the stream waits for has
happened; NCCL runs the collectives of one communicator one after another. Nothing slows down what runs beside it.

The ranks of a pipeline are replayed together: a message begins when both of its ends are ready for it. Each rank is a
generator that stops where the other end is not known yet, so they go on in the order in which messages let them.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distbench.simulate.compiled import fused_bytes
from distbench.simulate.hardware_file import Hardware, HostFigures
from distbench.simulate.operator_costs import collective_s, on_host, operator_s
from distbench.simulate.recording import Collective, Event, EventRecorded, EventWaited, HostWaited, Operator, Recording
from distbench.spec.errors import UserError
from distbench.spec.time_spans import Cover, union

# Messages between ranks of a pipeline: which send is whose receive, when both ends are there, how long it takes.


@dataclass
class MessageEnds:
    """One message: when each end that is there was ready for it, s, by kind ("send", "recv")."""

    num_bytes: int
    ready_s: dict[str, float] = field(default_factory=dict)

    @property
    def has_both(self) -> bool:
        """Whether both ends are there."""
        return len(self.ready_s) > 1

    @property
    def start_s(self) -> float:
        """When it begins: NCCL sends nothing before somebody receives it."""
        return max(self.ready_s.values())


class Exchanges:
    """Sends and receives of all ranks; between two ranks, in one direction, they match by their order."""

    def __init__(self) -> None:
        self.num_posted = 0
        self._posted: Counter[tuple[int, int, str]] = Counter()
        self._found: defaultdict[tuple[int, int], list[MessageEnds]] = defaultdict(list)

    def post(self, rank: int, message: Collective, ready_s: float) -> MessageEnds:
        """One end of a message is ready.

        Raises:
            UserError: the other end has another size.
        """
        assert message.peer is not None
        ends = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
        place = self._posted[*ends, message.kind]
        self._posted[*ends, message.kind] += 1
        self.num_posted += 1
        if place == len(self._found[ends]):
            self._found[ends].append(MessageEnds(message.payload_bytes))
        exchange = self._found[ends][place]
        if exchange.num_bytes != message.payload_bytes:
            sizes = f"{exchange.num_bytes:,} bytes on one end and {message.payload_bytes:,} on the other"
            raise UserError(f"message {place} from rank {ends[0]} to {ends[1]} has {sizes}; record the step anew")
        exchange.ready_s[message.kind] = ready_s
        return exchange


def message_s(message: Collective, rank: int, hardware: Hardware) -> float:
    """Seconds of one message that has its links to itself: a fixed part, and its bytes from one device to another."""
    assert message.peer is not None
    is_near = rank // hardware.devices_per_node == message.peer // hardware.devices_per_node
    rate = hardware["peer_bytes_per_s" if is_near else "network_bytes_per_s"]
    return hardware["node_base_s" if is_near else "network_base_s"] + message.payload_bytes / rate


class TimedEvent(NamedTuple):
    """What ran on a stream from when to when, s from the step's begin."""

    start_s: float
    end_s: float
    what: Operator | Collective


@dataclass(frozen=True)
class TimedStep:
    """A step on the simulated clock.

    Args:
        step_s: until the device and the host are done, of a pipeline those of its last rank.
        host_s: of the host's own work.
        spans: in the order of issue; of a message from when both of its ends were ready.
        awaited: (start, end) of waiting for another rank's end of a message, or for the last rank; in any order.
    """

    step_s: float
    host_s: float
    spans: Sequence[TimedEvent]
    awaited: Sequence[tuple[float, float]] = ()


class Exposed(NamedTuple):
    """Who communicates while nothing is computed."""

    mesh_dim: str
    kind: str
    source: str
    owner: str


@dataclass(frozen=True)
class Parts:
    """What the time of a step is made of; all parts together are the step.

    Args:
        compute_s: some operator runs.
        exposed_s: by whom it is exposed, communication runs and no operator.
        idle_s: neither runs: the host has not issued anything yet.
        bubble_s: neither runs: another rank of the pipeline is waited for.
        by_kind_s: of compute, what operators of each kind take, summed over streams.
        communication_s: by mesh dim, collectives' durations, summed.
    """

    compute_s: float
    exposed_s: Mapping[Exposed, float]
    idle_s: float
    by_kind_s: Mapping[str, float]
    communication_s: Mapping[str, float]
    bubble_s: float = 0.0


def replay_time(recording: Recording, hardware: Hardware) -> TimedStep:
    """Run the recorded step of one rank on a clock. Raises as `replay_together`."""
    return replay_together([recording], hardware)[0]


def replay_together(recordings: Sequence[Recording], hardware: Hardware) -> list[TimedStep]:
    """Run the steps of some ranks on one clock: all ranks of a pipeline, or one that is alone.

    Raises:
        UserError: a message has no other end, or ranks wait for one another for ever.
    """
    if hardware.host is not None:
        if any(of_rank.head.pipeline is not None for of_rank in recordings):
            raise UserError(
                f"hardware file {hardware.name} is a CPU's, whose messages between stages nobody has measured; give "
                "--hardware an accelerator's"
            )
        return [_replay_on_host(recording.step, hardware.host) for recording in recordings]
    exchanges = Exchanges()
    steps: dict[int, TimedStep] = {}
    running = [_replay(recording, hardware, exchanges, steps) for recording in recordings]
    while running:
        before = exchanges.num_posted, len(running)
        running = [rank for rank in running if next(rank, None) is not None]
        if before == (exchanges.num_posted, len(running)):
            lacking = ", ".join(str(of_rank.head.rank) for of_rank in recordings if of_rank.head.rank not in steps)
            raise UserError(
                f"rank {lacking} waits for a message whose other end is not recorded, or stands behind one that waits "
                "for it; record the step anew, all ranks of its pipeline together"
            )
    last_s = max(timed.step_s for timed in steps.values())
    return [_until(steps[recording.head.rank], last_s) for recording in recordings]


def _until(timed: TimedStep, last_s: float) -> TimedStep:
    if timed.step_s == last_s:
        return timed
    return replace(timed, step_s=last_s, awaited=[*timed.awaited, (timed.step_s, last_s)])


def _replay(
    recording: Recording, hardware: Hardware, exchanges: Exchanges, steps: dict[int, TimedStep]
) -> Iterator[bool]:
    """Replay one rank into `steps`; yields whenever it cannot go on before other ranks have."""
    events, rank = recording.step, recording.head.rank
    fused = fused_bytes(events, recording.head.compiled)
    streams: dict[int, float] = defaultdict(float)
    communicators: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    happened: dict[int, float] = {}
    spans: list[TimedEvent] = []
    awaited: list[tuple[float, float]] = []
    now = host = 0.0
    launch_s, host_s = hardware["launch_s"], hardware["host_s"]
    for place, event in enumerate(events):
        if isinstance(event, Operator):
            duration = operator_s(event, hardware, fused.get(place), recording.world_size)
            if duration <= 0:
                continue
            now, host = now + host_s, host + host_s
            start = max(streams[event.stream], now + launch_s)
            streams[event.stream] = start + duration
            spans.append(TimedEvent(start, start + duration, event))
        elif isinstance(event, Collective) and event.peer is not None:
            if not (batch := _batch_at(events, place)):
                continue
            now, host = now + host_s * len(batch), host + host_s * len(batch)
            ready = max(streams[event.stream], now + launch_s)
            passed = yield from _passed_on(batch, rank, ready, exchanges, hardware)
            awaited += [(ready, span.start_s) for span in passed]
            spans += passed
            streams[event.stream] = max(span.end_s for span in passed)
        elif isinstance(event, Collective):
            group = tuple(map(tuple, event.ranks))
            now, host = now + host_s, host + host_s
            start = max(streams[event.stream], communicators[group], now + launch_s)
            streams[event.stream] = communicators[group] = start + collective_s(event, hardware)
            spans.append(TimedEvent(start, streams[event.stream], event))
        elif isinstance(event, EventRecorded):
            happened[event.event] = max(streams[event.stream], now)
        elif isinstance(event, EventWaited):
            streams[event.stream] = max(streams[event.stream], happened.get(event.event, 0.0))
        elif isinstance(event, HostWaited):
            now = max(now, streams[event.stream])
    steps[rank] = TimedStep(max([now, *streams.values()]), host, spans, awaited)


def _batch_at(events: Sequence[Event], place: int) -> list[Collective]:
    """The messages that begin and end together from one on; none where it is not the first of them."""

    def of(at: int) -> int | None:
        event = events[at] if 0 <= at < len(events) else None
        return event.batch if isinstance(event, Collective) and event.peer is not None else None

    if of(place - 1) == of(place):
        return []
    end = next(at for at in itertools.count(place) if of(at) != of(place))
    return [event for event in events[place:end] if isinstance(event, Collective)]


def _passed_on(
    batch: Sequence[Collective], rank: int, ready_s: float, exchanges: Exchanges, hardware: Hardware
) -> Generator[bool, None, list[TimedEvent]]:
    """When a rank's messages begin and end that it is ready for together; yields while an end is not there."""
    posted = [exchanges.post(rank, message, ready_s) for message in batch]
    while not all(exchange.has_both for exchange in posted):
        yield True
    events = []
    for message, exchange in zip(batch, posted, strict=True):
        events.append(TimedEvent(exchange.start_s, exchange.start_s + message_s(message, rank, hardware), message))
    return events


def _replay_on_host(events: Iterable[Event], host: HostFigures) -> TimedStep:
    """One thing after another: on a CPU the host runs the operators itself, and waits for each collective."""
    now = waited = 0.0
    spans = []
    for event in events:
        if isinstance(event, Operator | Collective):
            took = on_host(event, host)
            start = now + took.host_s
            now, waited = start + took.seconds, waited + took.host_s
            if took.seconds > 0:
                spans.append(TimedEvent(start, now, event))
    return TimedStep(now, waited, spans)


def parts_of(timed: TimedStep) -> Parts:
    """Where the time of a step went."""
    operators = [span for span in timed.spans if isinstance(span.what, Operator)]
    collectives = [span for span in timed.spans if isinstance(span.what, Collective)]
    computing = computing_of(timed)
    exposed: dict[Exposed, float] = defaultdict(float)
    for span, alone_s in exposed_spans(timed):
        assert isinstance(span.what, Collective)
        exposed[Exposed(span.what.mesh_dim, span.what.kind, span.what.source, span.what.owner)] += alone_s
    compute_s = sum(end - start for start, end in computing)
    by_kind: dict[str, float] = defaultdict(float)
    for span in operators:
        assert isinstance(span.what, Operator)
        by_kind[span.what.kind] += span.end_s - span.start_s
    communication: dict[str, float] = defaultdict(float)
    for span in collectives:
        assert isinstance(span.what, Collective)
        communication[span.what.mesh_dim] += span.end_s - span.start_s
    bubble_s = _bubble_s(timed)
    idle_s = timed.step_s - compute_s - sum(exposed.values()) - bubble_s
    return Parts(compute_s, dict(exposed), idle_s, dict(by_kind), dict(communication), bubble_s)


def _bubble_s(timed: TimedStep) -> float:
    """Seconds in which another rank is waited for, and nothing runs."""
    busy = Cover((span.start_s, span.end_s) for span in timed.spans)
    return sum(end - start - busy.seconds((start, end)) for start, end in union(timed.awaited))


def computing_of(timed: TimedStep) -> list[tuple[float, float]]:
    """When some operator runs, s: ascending stretches that do not touch."""
    return union((span.start_s, span.end_s) for span in timed.spans if isinstance(span.what, Operator))


def exposed_spans(timed: TimedStep) -> list[tuple[TimedEvent, float]]:
    """The collectives in the order in which they began, and how long each is what the step waits for, s.

    Of several at once, that is the one that began first.
    """
    computed, exposed, until = Cover(computing_of(timed)), [], 0.0
    for span in sorted(
        (timed_event for timed_event in timed.spans if isinstance(timed_event.what, Collective)),
        key=lambda timed_event: timed_event.start_s,
    ):
        start, alone_s = max(span.start_s, until), 0.0
        if span.end_s > start:
            until = span.end_s
            alone_s = max(span.end_s - start - computed.seconds((start, span.end_s)), 0.0)
        exposed.append((span, alone_s))
    return exposed
