"""Start and duration of each operator, collective and message of a recorded step: one host, streams, events, and one
queue per communicator.

The host issues its work in order, and waits where it must. Work on a stream begins when the host has issued it, when
the stream's earlier work has ended, and when the events that the stream waits for have happened; NCCL runs the
collectives of one communicator one after another. Simultaneous work is not slowed down.

The ranks of a pipeline are replayed together: a message begins when both of its ends are ready for it. Each rank is a
generator that stops while the other end is unknown, so ranks continue in the order of their messages.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from distbench.simulate.compile_float8 import FLOAT8, HALF, fused_bytes
from distbench.simulate.hardware_file import Curve, Hardware, HostFigures
from distbench.simulate.recording import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MATMUL,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    HostWaited,
    Operator,
    Recording,
    ranks_of,
)
from distbench.spec.errors import UserError
from distbench.spec.mesh import group_shape
from distbench.spec.printable_text import count_text
from distbench.spec.time_spans import Cover, union

FSDP, DDP = "fsdp", "ddp"
WORTH_SAYING = 0.01  # smallest extrapolated share of the step that is reported


def operator_s(operator: Operator, hardware: Hardware, fused: int | None = None, world_size: int = 1) -> float:
    """Return an operator's seconds: of its floating point operations or its bytes, whichever take longer.

    Args:
        fused: bytes of the kernel that it became with others, 0 if another operator counts for it; None for its
            own.
        world_size: number of devices that wait for one another.
    """
    num_bytes = operator.num_bytes if fused is None else fused
    bytes_s = num_bytes / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
    if operator.kind == MATMUL:
        name = "fp8" if operator.dtype == FLOAT8 else "bf16" if operator.dtype in HALF else "f32"
        return max(operator.flops / hardware[f"matmul_{name}_flops"] * slowest(hardware, world_size), bytes_s)
    if operator.kind in (ATTENTION, ATTENTION_BACKWARD):
        # By shape: causal or not, forward or backward, and slower for short sequences.
        queries, keys, is_causal = operator.attention or (0, 0, 1)
        name = "attention_backward" if operator.kind == ATTENTION_BACKWARD else "attention"
        rate = hardware[f"{name}_flops" if is_causal else f"{name}_full_flops"]
        if length := min(queries, keys):
            rate = rate * length / (length + hardware["attention_half_length"])
        return operator.flops / rate * slowest(hardware, world_size)
    return bytes_s + hardware["operator_s"] if num_bytes else 0.0


def slowest(hardware: Hardware, world_size: int) -> float:
    """Return how much longer the slowest of `world_size` devices computes than the mean one.

    All devices wait for it in every step, so a larger world is slower. Speeds are assumed to be normally distributed
    with the hardware file's spread; the largest of n is Blom's approximation (Statistical Estimates, 1958).
    """
    return 1 + hardware["device_spread"] * _largest_of(world_size)


@lru_cache(maxsize=64)
def _largest_of(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def collective_s(collective: Collective, hardware: Hardware) -> float:
    """Return the seconds of one collective that does not share its links.

    Bytes over bus bandwidth, as nccl-tests defines it: factor x S / busbw, with 2(n-1)/n for an all-reduce and (n-1)/n
    for the others. Within a node that is the node's links. Across nodes a ring enters and leaves each node once per
    device of the group on it, so their network links add up, to at most the node's own limit. In an all-to-all they do
    not: each rank sends (n - n_here)/n of its bytes over its own network link, where n_here ranks of the group share
    its node. Bus bandwidth is then the link's times (n-1)/(n - n_here) (nccl-tests, issues 130, 267). If nodes have
    different numbers of the group's ranks, the node with the fewest is the slowest.
    """
    size = collective.group_size
    if size == 1:
        return 0.0
    on_nodes = ranks_by_node(tuple(map(tuple, collective.ranks)), hardware.devices_per_node)
    nodes = len(on_nodes)
    if is_rotation(collective):
        within = "peer_bytes_per_s" if size == 2 else "ring_bytes_per_s"
        fixed = hardware["node_base_s" if nodes == 1 else "network_base_s"]
        return fixed + collective.payload_bytes / hardware[within if nodes == 1 else "network_bytes_per_s"]
    turns = 2 if collective.kind == "all_reduce" else 1
    moved = turns * (size - 1) / size * collective.payload_bytes
    if collective.kind in ("broadcast", "send", "recv"):
        moved = float(collective.payload_bytes)
    if nodes == 1:
        return hardware["node_base_s"] + moved / hardware["node_bytes_per_s"]
    num_here = min(on_nodes)
    num_links = (size - 1) / (size - num_here) if collective.kind == "all_to_all" else num_here
    bandwidth = min(hardware["node_bytes_per_s"], hardware["network_bytes_per_s"] * num_links)
    fixed = hardware["network_base_s"] + turns * (nodes - 2) * hardware["network_hop_s"]
    return fixed + moved / bandwidth


def is_rotation(collective: Collective) -> bool:
    """Return whether ring attention passes a block on: each device sends to one other device, over fewer links.

    Ulysses exchanges heads and sequence by DTensor, between all devices.
    """
    return collective.source == "cp" and collective.kind == "all_to_all" and not collective.redistribution


@lru_cache(maxsize=1024)
def ranks_by_node(ranks: tuple[tuple[int, ...], ...], devices_per_node: int) -> tuple[int, ...]:
    """Return the number of a group's ranks on each node that it spans. Ranks are numbered node by node."""
    return tuple(Counter(rank // devices_per_node for rank in ranks_of(ranks)).values())


def _message_s(message: Collective, rank: int, hardware: Hardware) -> float:
    """Seconds of one message that does not share its links: a fixed part plus its bytes between two devices."""
    assert message.peer is not None
    is_near = rank // hardware.devices_per_node == message.peer // hardware.devices_per_node
    rate = hardware["peer_bytes_per_s" if is_near else "network_bytes_per_s"]
    return hardware["node_base_s" if is_near else "network_base_s"] + message.payload_bytes / rate


def on_host(event: Operator | Collective, host: HostFigures) -> tuple[float, float]:
    """Return the seconds of the host's own work before the event, and of the event itself, with the file's factors.

    Both are 0 for events without work.
    """
    factor = host["step_factor"]
    if isinstance(event, Collective):
        if event.group_size == 1:
            return 0.0, 0.0
        # The host's own time depends on the issuer: DDP's reducer issues in C++, like an operator.
        name = {FSDP: "fsdp_s", DDP: "operator_s"}.get(event.source, "redistribution_s")
        return host[name] * factor, collective_on_host(event, host) * factor
    if not event.num_bytes and not event.flops:
        return 0.0, 0.0
    host_s = host["listed_s"] * num_listed(event) if is_listed(event) else host["operator_s"]
    return host_s * factor, operator_on_host(event, host) * host["operator_factor"] * factor


def operator_on_host(operator: Operator, host: HostFigures) -> float:
    """Return the seconds of an operator alone."""
    name, amount = _curve_of(operator)
    return num_listed(operator) * host.operators[name].seconds(amount) if amount else 0.0


def _curve_of(operator: Operator) -> tuple[str, float]:
    """Return the operator's curve of OPERATOR_CURVES, and its amount."""
    if operator.kind == MATMUL:
        return ("matmul_bf16" if operator.dtype in HALF else "matmul_f32"), operator.flops
    if operator.kind in (ATTENTION, ATTENTION_BACKWARD):
        return operator.kind, operator.flops
    return "memory", operator.num_bytes / num_listed(operator) if operator.num_bytes else 0.0


def num_listed(operator: Operator) -> int:
    """Return the number of tensors in the lists of an optimizer's operator, which a host runs singly; 1 for others."""
    return max(len(operator.reads), 1) if is_listed(operator) else 1


def is_listed(operator: Operator) -> bool:
    """Whether a device runs the operator once for lists of tensors, and torch's optimizers on CPU once per tensor."""
    return operator.phase == "optimizer" and "_foreach" in operator.name


def collective_on_host(collective: Collective, host: HostFigures) -> float:
    """Return the seconds of a collective; an unmeasured group size uses the nearest measured one.

    On CPU DTensor runs its all-to-alls as all-gathers of the whole tensor.
    """
    kind, payload = collective.kind, float(collective.payload_bytes)
    if kind == "all_to_all" and collective.redistribution:
        kind, payload = "all_gather", payload * collective.group_size
    curve, size = _curve_of_group(kind, collective, host)
    share = (collective.group_size - 1) / collective.group_size / ((size - 1) / size)
    return curve.seconds(payload) * share


def _curve_of_group(kind: str, collective: Collective, host: HostFigures) -> tuple[Curve, int]:
    """Return the curve of a kind (an all-gather's if it was not measured), and its group size.

    It is the curve of groups with the same placement on hosts if they were measured, else of the nearest size.
    """
    if (curve := host.by_shape.get((kind, _shape_of(collective, host)))) is not None:
        return curve, collective.group_size
    if not any(of_kind == kind for of_kind, _ in host.collectives):
        kind = "all_gather"
    measured = [size for of_kind, size in host.collectives if of_kind == kind]
    size = min(measured, key=lambda size: abs(size - collective.group_size))
    return host.collectives[kind, size], size


def _shape_of(collective: Collective, host: HostFigures) -> str:
    """Return the placement of its group on the measured hosts; "" if they are unknown."""
    ranks = ranks_of(collective.ranks) if host.hosts else [0]
    return group_shape(ranks, host.hosts) if max(ranks) < len(host.hosts) else ""


@dataclass
class _Message:
    """Times at which the ends of a posted message were ready for it, s, by kind ("send", "recv")."""

    num_bytes: int
    ready_s: dict[str, float] = field(default_factory=dict)


class _Exchanges:
    """Sends and receives of all ranks; between two ranks, in one direction, they match by order."""

    def __init__(self) -> None:
        self.posted: Counter[tuple[int, int, str]] = Counter()
        self._messages: dict[tuple[int, int, int], _Message] = {}

    def post(self, rank: int, message: Collective, ready_s: float) -> _Message:
        """Post one ready end of a message; UserError if the other end has another size."""
        assert message.peer is not None
        sender, receiver = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
        place = self.posted[sender, receiver, message.kind]
        self.posted[sender, receiver, message.kind] += 1
        exchange = self._messages.setdefault((sender, receiver, place), _Message(message.payload_bytes))
        if exchange.num_bytes != message.payload_bytes:
            sizes = f"{exchange.num_bytes:,} bytes on one end and {message.payload_bytes:,} on the other"
            raise UserError(f"message {place} from rank {sender} to {receiver} has {sizes}; record the step again")
        exchange.ready_s[message.kind] = ready_s
        return exchange


class TimedEvent(NamedTuple):
    """An event on a stream with its start and end, s from the step's begin."""

    start_s: float
    end_s: float
    what: Operator | Collective


@dataclass(frozen=True)
class TimedStep:
    """A step on the simulated clock.

    Args:
        step_s: until the device and the host are done; of a pipeline those of its last rank.
        host_s: of the host's own work.
        spans: in the order of issue; messages begin when both of their ends are ready.
        awaited: (start, end) of waiting for another rank's end of a message, or for the last rank; in any order.
    """

    step_s: float
    host_s: float
    spans: Sequence[TimedEvent]
    awaited: Sequence[tuple[float, float]] = ()


class Exposed(NamedTuple):
    """Origin of communication during which nothing is computed."""

    mesh_dim: str
    kind: str
    source: str
    owner: str


@dataclass(frozen=True)
class Parts:
    """Parts of a step's time; their sum is the step.

    Args:
        compute_s: some operator runs.
        exposed_s: communication runs and no operator, by its origin.
        idle_s: neither runs, because the host has not issued anything yet.
        bubble_s: neither runs, because another rank of the pipeline is not ready.
        by_kind_s: of compute, seconds of operators per kind, summed over streams.
        communication_s: durations of collectives by mesh dim, summed.
    """

    compute_s: float
    exposed_s: Mapping[Exposed, float]
    idle_s: float
    by_kind_s: Mapping[str, float]
    communication_s: Mapping[str, float]
    bubble_s: float = 0.0


def replay_together(recordings: Sequence[Recording], hardware: Hardware) -> list[TimedStep]:
    """Run the steps of some ranks on one clock: all ranks of a pipeline, or a single rank.

    Raises:
        UserError: a message has no other end, or ranks wait for one another forever.
    """
    if hardware.host is not None:
        if any(of_rank.head.pipeline is not None for of_rank in recordings):
            raise UserError(
                f"hardware file {hardware.name} describes a CPU, without measured messages between stages; use "
                "--hardware with an accelerator"
            )
        return [_replay_on_host(recording.step, hardware.host) for recording in recordings]
    exchanges = _Exchanges()
    steps: dict[int, TimedStep] = {}
    running = [_replay(recording, hardware, exchanges, steps) for recording in recordings]
    while running:
        before = exchanges.posted.total(), len(running)
        running = [rank for rank in running if next(rank, None) is not None]
        if before == (exchanges.posted.total(), len(running)):
            lacking = ", ".join(str(of_rank.head.rank) for of_rank in recordings if of_rank.head.rank not in steps)
            raise UserError(
                f"rank {lacking} waits for a message whose other end is not recorded, or is queued behind such a "
                "message; record the step again, all ranks of its pipeline together"
            )
    last_s = max(timed.step_s for timed in steps.values())
    for rank, timed in steps.items():
        if timed.step_s < last_s:
            steps[rank] = replace(timed, step_s=last_s, awaited=[*timed.awaited, (timed.step_s, last_s)])
    return [steps[recording.head.rank] for recording in recordings]


def _replay(
    recording: Recording, hardware: Hardware, exchanges: _Exchanges, steps: dict[int, TimedStep]
) -> Iterator[bool]:
    """Replay one rank into `steps`; yields whenever it must wait for other ranks."""
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
    """Return the messages that begin and end together with the one at `place`; [] unless it is the first of them."""

    def of(at: int) -> int | None:
        event = events[at] if 0 <= at < len(events) else None
        return event.batch if isinstance(event, Collective) and event.peer is not None else None

    if of(place - 1) == of(place):
        return []
    end = next(at for at in itertools.count(place) if of(at) != of(place))
    return [event for event in events[place:end] if isinstance(event, Collective)]


def _passed_on(
    batch: Sequence[Collective], rank: int, ready_s: float, exchanges: _Exchanges, hardware: Hardware
) -> Generator[bool, None, list[TimedEvent]]:
    """Yield while an end of a rank's messages is missing; return when they, ready together, begin and end."""
    posted = [exchanges.post(rank, message, ready_s) for message in batch]
    while not all(len(exchange.ready_s) > 1 for exchange in posted):
        yield True
    starts = [max(exchange.ready_s.values()) for exchange in posted]  # NCCL sends only when the receiver is ready
    return [
        TimedEvent(start, start + _message_s(message, rank, hardware), message)
        for message, start in zip(batch, starts, strict=True)
    ]


def _replay_on_host(events: Iterable[Event], host: HostFigures) -> TimedStep:
    """Replay sequentially: the host runs the operators itself, and waits for each collective."""
    now = waited = 0.0
    spans = []
    for event in events:
        if isinstance(event, Operator | Collective):
            host_s, seconds = on_host(event, host)
            start = now + host_s
            now, waited = start + seconds, waited + host_s
            if seconds > 0:
                spans.append(TimedEvent(start, now, event))
    return TimedStep(now, waited, spans)


def parts_of(timed: TimedStep) -> Parts:
    """Divide the time of a step into parts."""
    by_kind: dict[str, float] = defaultdict(float)
    communication: dict[str, float] = defaultdict(float)
    exposed: dict[Exposed, float] = defaultdict(float)
    for span in timed.spans:
        if isinstance(span.what, Operator):
            by_kind[span.what.kind] += span.end_s - span.start_s
        else:
            communication[span.what.mesh_dim] += span.end_s - span.start_s
    for span, alone_s in exposed_spans(timed):
        assert isinstance(span.what, Collective)
        exposed[Exposed(span.what.mesh_dim, span.what.kind, span.what.source, span.what.owner)] += alone_s
    compute_s = sum(end - start for start, end in computing_of(timed))
    busy = Cover((span.start_s, span.end_s) for span in timed.spans)
    bubble_s = sum(end - start - busy.seconds((start, end)) for start, end in union(timed.awaited))
    idle_s = timed.step_s - compute_s - sum(exposed.values()) - bubble_s
    return Parts(compute_s, dict(exposed), idle_s, dict(by_kind), dict(communication), bubble_s)


def computing_of(timed: TimedStep) -> list[tuple[float, float]]:
    """Return the times when some operator runs, s, as ascending intervals that do not touch."""
    return union((span.start_s, span.end_s) for span in timed.spans if isinstance(span.what, Operator))


def exposed_spans(timed: TimedStep) -> list[tuple[TimedEvent, float]]:
    """Return the collectives by begin, each with its exposed time, s.

    Of several at once, the exposed one is the one that began first.
    """
    computed, exposed, until = Cover(computing_of(timed)), [], 0.0
    collectives = [span for span in timed.spans if isinstance(span.what, Collective)]
    for span in sorted(collectives, key=lambda span: span.start_s):
        start, alone_s = max(span.start_s, until), 0.0
        if span.end_s > start:
            until = span.end_s
            alone_s = max(span.end_s - start - computed.seconds((start, span.end_s)), 0.0)
        exposed.append((span, alone_s))
    return exposed


def host_assumptions(recording: Recording, host: HostFigures) -> list[str]:
    """Return caveats about a step on such a machine: extrapolated parts, and their share of the step."""
    sentences = []
    if recording.world_size != host.num_ranks:
        sentences.append(
            f"times were measured with {count_text(host.num_ranks, 'rank')} on this machine, and this step has "
            f"{recording.world_size} ranks: an extrapolation; calibrate with as many ranks"
        )
    if any(isinstance(event, Collective) and event.source == DDP for event in recording.step):
        sentences.append("a CPU reduces DDP's buckets during backward, not after it: the step may be shorter than this")
    beyond: dict[str, float] = defaultdict(float)
    total = 0.0
    for event in recording.step:
        if not isinstance(event, Operator | Collective):
            continue
        host_s, seconds = on_host(event, host)
        total += host_s + seconds
        if part := _beyond(event, host):
            beyond[part] += seconds
    return sentences + [
        f"extrapolated: {part} ({100 * seconds / total:.0f} % of the step)"
        for part, seconds in beyond.items()
        if seconds > WORTH_SAYING * total
    ]


def _beyond(event: Operator | Collective, host: HostFigures) -> str:
    if isinstance(event, Operator):
        name, amount = _curve_of(event)
        most = host.operators[name].points[-1][0]
        unit = "bytes" if name == "memory" else "operations"
        return f"{name} of over {most:.3g} {unit}, the most that was measured" if amount > most else ""
    if event.group_size == 1:
        return ""
    curve, size = _curve_of_group(event.kind, event, host)
    shape = _shape_of(event, host)
    if "+" in shape and (event.kind, shape) not in host.by_shape:
        return f"{event.kind} of {shape} ranks on {shape.count('+') + 1} hosts, by groups of {size} neighbours"
    if size != event.group_size or ((event.kind, event.group_size) not in host.collectives and not shape):
        return f"{event.kind} in groups of {event.group_size}, which was not measured, by groups of {size}"
    most = curve.points[-1][0]
    return f"{event.kind} of over {most:.3g} bytes, the most that was measured" if event.payload_bytes > most else ""
