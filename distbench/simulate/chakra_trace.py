"""Chakra execution traces (mlcommons/chakra, schema 0.0.4) of a simulated step: a file per rank of the mesh.

A trace is a sequence of protobuf messages, each after its length. This file encodes the few fields that are needed
(schema/protobuf/et_def.proto) without a library. Attributes have the names and types that Chakra's feeder reads.

A node depends on the nodes that the clock waits for: earlier work on its stream, events, its communicator's queue, its
direction of copies. If the device waits for the host, nodes of the CPU have the times of the host and of the launch.
The longest path through a rank's nodes therefore takes as long as the simulated step.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distbench.records.machine import slug
from distbench.simulate.clock import TimedEvent
from distbench.simulate.recording import (
    COPIES,
    ON_HOST,
    TO_DEVICE,
    TO_HOST,
    Collective,
    EventRecorded,
    EventWaited,
    Head,
    HostWaited,
    Operator,
    Touched,
    ranks_of,
    ranks_of_pipeline,
)
from distbench.simulate.simulation import Simulation
from distbench.spec.errors import UserError

SCHEMA = "0.0.4"
GROUPS = "comm_groups.json"
# enum NodeType
LOAD, STORE, COMPUTE, SEND, RECEIVE, COLLECTIVE = 2, 3, 4, 5, 6, 7
# enum CollectiveCommType
COMM_TYPES = {
    **{"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4},
    **{"broadcast": 5, "all_to_all": 6, "reduce_scatter": 7},
}
# Field numbers of Node, and of a value in AttributeProto.
ID, NAME, TYPE, DATA_DEPS, START, DURATION, ATTRIBUTE = 1, 2, 3, 5, 6, 7, 10
NAME_OF_ATTRIBUTE = 1
INT32, INT64, UINT64, BOOL, STRING = 7, 9, 13, 27, 29


class _Node(NamedTuple):
    """An encoded node without the attributes that differ between ranks, which `event` determines."""

    encoded: bytes
    event: Collective | None


def chakra_files(simulations: Sequence[Simulation]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of each rank's trace, SCENARIO.RANK.et, and of the communicator groups for ASTRA-sim.

    A rank that was not recorded runs the program of the first recorded rank of its pipeline stage.

    Args:
        simulations: the recorded ranks of one step.

    Raises:
        UserError: Chakra has no type for a collective, or a collective's group is not along mesh dims.
    """
    head, world_size = simulations[0].recording.head, simulations[0].recording.world_size
    programs = {simulation.recording.head.rank: _Program(simulation).nodes for simulation in simulations}
    of_stage = {_stage(head, rank): rank for rank in reversed(programs)}
    groups: dict[tuple[int, ...], str] = {}
    for rank in range(world_size):
        recorded = rank if rank in programs else of_stage[_stage(head, rank)]
        own = _OwnAttributes(rank, rank - recorded, groups)
        nodes = (_delimited(node.encoded + own.of(node.event)) for node in programs[recorded])
        yield f"{slug(head.label)}.{rank}.et", b"".join([_delimited(_field(1, SCHEMA)), *nodes])
    yield GROUPS, (json.dumps({name: ranks for ranks, name in groups.items()}) + "\n").encode()


def _stage(head: Head, rank: int) -> int:
    """Return the rank's place along the mesh dim of the pipeline; 0 without a pipeline."""
    if head.pipeline is None:
        return 0
    return ranks_of_pipeline(head.mesh, head.pipeline.mesh_dim, rank).index(rank)


class _OwnAttributes:
    """Attributes of communication that differ between ranks with the same program."""

    def __init__(self, rank: int, shift: int, groups: dict[tuple[int, ...], str]) -> None:
        self._rank, self._shift, self._groups = rank, shift, groups
        self._of_group: dict[Touched, bytes] = {}

    def of(self, event: Collective | None) -> bytes:
        """Return the encoded name of a collective's group, or the two ranks of a message."""
        if event is None:
            return b""
        if event.peer is not None:
            peer = event.peer + self._shift
            sender, receiver = (self._rank, peer) if event.kind == "send" else (peer, self._rank)
            return _attribute("comm_src", INT32, sender) + _attribute("comm_dst", INT32, receiver)
        loops = tuple(map(tuple, event.ranks))
        if loops not in self._of_group:
            name = self._groups.setdefault(_group(self._rank, loops), str(len(self._groups) + 1))
            self._of_group[loops] = _attribute("pg_name", STRING, name)
        return self._of_group[loops]


def _group(rank: int, loops: Touched) -> tuple[int, ...]:
    """Return the global ranks of a rank's group.

    >>> _group(13, [(4, 8)])
    (5, 13, 21, 29)
    """
    if all(count == 1 for count, _ in loops):
        raise UserError(
            f"the group of ranks {', '.join(str(offset) for _, offset in loops)} is not along mesh dims, so the groups "
            "of other ranks are unknown; leave out --chakra"
        )
    first = rank - sum(rank // stride % count * stride for count, stride in loops)
    return tuple(first + offset for offset in ranks_of(loops))


class _Program:
    """The nodes of a recorded rank, in the order of issue; each depends on earlier nodes."""

    def __init__(self, simulation: Simulation) -> None:
        self.nodes: list[_Node] = []
        self._ends_us: list[int] = []
        self._on_cpu = simulation.hardware.host is not None
        self._launch_s = 0.0 if self._on_cpu else simulation.hardware["launch_s"]
        # Numbers of the nodes after which a stream, a queue, the host or a batch of messages continues.
        self._streams: dict[int, set[int]] = defaultdict(set)
        self._queues: dict[object, set[int]] = defaultdict(set)
        self._host: set[int] = set()
        self._before_batch: set[int] = set()
        self._tags: Counter[tuple[int, str]] = Counter()
        happened: dict[int, set[int]] = defaultdict(set)
        spans, awaited = iter(simulation.timed.spans), iter(simulation.timed.awaited)
        span, last_batch = next(spans, None), None
        for event in simulation.recording.step:
            batch = event.batch if isinstance(event, Collective) and event.peer is not None else None
            if isinstance(event, EventRecorded):
                happened[event.event] = {*self._streams[event.stream]}
            elif isinstance(event, EventWaited):
                self._streams[event.stream] |= happened[event.event]
            elif isinstance(event, HostWaited):
                self._host |= self._streams[event.stream]
            elif (
                isinstance(event, Operator | Collective) and span is not None and span.what is event
            ):  # Operators without a duration have no span.
                if isinstance(event, Operator):
                    self._add_operator(event, span)
                elif batch is not None:
                    self._add_message(event, span, next(awaited)[0], batch != last_batch)
                elif event.group_size > 1:  # A group of one rank moves nothing.
                    self._add_collective(event, span)
                span = next(spans, None)
            last_batch = batch

    def _add_operator(self, operator: Operator, span: TimedEvent) -> None:
        is_on_host = operator.kind == ON_HOST
        attributes = [
            _attribute("is_cpu_op", BOOL, is_on_host or self._on_cpu),
            # Without an operation, ASTRA-sim's roofline would take no time for the bytes.
            _attribute("num_ops", INT64, max(operator.flops, 1)),
            _attribute("tensor_size", UINT64, operator.num_bytes),
        ]
        kind = {TO_DEVICE: LOAD, TO_HOST: STORE}.get(operator.kind, COMPUTE)
        name = f"{operator.name} {operator.owner}".rstrip()
        if is_on_host:
            needed = self._host | self._issued(self._host, span.start_s, 0.0)
            self._host = {self._add(name, kind, needed, span[:2], attributes)}
        else:
            self._add_work(name, kind, operator.kind if operator.kind in COPIES else None, span, attributes)

    def _add_collective(self, collective: Collective, span: TimedEvent) -> None:
        if collective.kind not in COMM_TYPES:
            raise UserError(f"Chakra has no type for {collective.kind} ({collective.op}); leave out --chakra")
        # Chakra's size is that of one rank's input.
        parts = collective.group_size if collective.kind == "all_gather" else 1
        attributes = [
            _attribute("is_cpu_op", BOOL, False),
            _attribute("comm_type", INT64, COMM_TYPES[collective.kind]),
            _attribute("comm_size", INT64, collective.payload_bytes // parts),
        ]
        name = f"{collective.kind} {collective.mesh_dim} {collective.owner}".rstrip()
        self._add_work(name, COLLECTIVE, tuple(map(tuple, collective.ranks)), span, attributes, collective)

    def _add_work(
        self,
        name: str,
        kind: int,
        queue: object,
        span: TimedEvent,
        attributes: Sequence[bytes],
        own: Collective | None = None,
    ) -> None:
        """Add work on a stream, and in a queue unless `queue` is None."""
        stream = 0 if self._on_cpu else span.what.stream
        needed = self._streams[stream] | (self._queues[queue] if queue is not None else set())
        number = self._add(
            name, kind, needed | self._issued(needed, span.start_s, self._launch_s), span[:2], attributes, own
        )
        self._streams[stream] = {number}
        if queue is not None:
            self._queues[queue] = {number}
        if self._on_cpu:
            self._host = {number}  # the host waits for each operator

    def _add_message(self, message: Collective, span: TimedEvent, ready_s: float, is_first: bool) -> None:
        """Add a message for which this rank is ready at `ready_s`. Messages of one batch start together."""
        assert message.peer is not None
        after = self._streams[message.stream]
        if is_first:
            self._before_batch = {*after}
            self._before_batch |= self._issued(self._before_batch, ready_s, self._launch_s)
            after.clear()
        tag = self._tags[message.peer, message.kind]
        self._tags[message.peer, message.kind] += 1
        attributes = [
            _attribute("is_cpu_op", BOOL, False),
            _attribute("comm_size", INT64, message.payload_bytes),
            _attribute("comm_tag", INT32, tag),
        ]
        kind, name = (SEND if message.kind == "send" else RECEIVE), f"{message.kind} {message.mesh_dim}"
        after.add(self._add(name, kind, self._before_batch, span[:2], attributes, message))

    def _issued(self, needed: set[int], ready_s: float, launch_s: float) -> set[int]:
        """Return a new node of the host if work is ready later than the nodes that it needs. Otherwise return no node.

        The host continues after its node, and the device `launch_s` later.
        """
        if round(1e6 * ready_s) <= self._end_us(needed):
            return set()
        attributes = [_attribute("is_cpu_op", BOOL, True)]
        begin_s = 1e-6 * self._end_us(self._host)
        issued_s = max(ready_s - launch_s, begin_s)
        self._host = {self._add("host", COMPUTE, self._host, (begin_s, issued_s), attributes)}
        if not launch_s:
            return self._host
        return {self._add("launch", COMPUTE, self._host, (issued_s, ready_s), attributes)}

    def _end_us(self, numbers: Iterable[int]) -> int:
        return max((self._ends_us[number] for number in numbers), default=0)

    def _add(
        self,
        name: str,
        kind: int,
        needed: set[int],
        times_s: tuple[float, float],
        attributes: Sequence[bytes],
        own: Collective | None = None,
    ) -> int:
        """Return the number of a new node. Its duration is a difference of rounded times, so that rounding errors do
        not accumulate.
        """
        start_us, end_us = (round(1e6 * seconds) for seconds in times_s)
        number = len(self.nodes)
        fields = [_field(ID, number), _field(NAME, name), _field(TYPE, kind)]
        fields += [_field(DATA_DEPS, b"".join(map(_varint, sorted(needed))))] if needed else []
        fields += [_field(START, start_us), _field(DURATION, end_us - start_us), *attributes]
        self.nodes.append(_Node(b"".join(fields), own))
        self._ends_us.append(end_us)
        return number


def _attribute(name: str, value_field: int, value: int | str) -> bytes:
    return _field(ATTRIBUTE, _field(NAME_OF_ATTRIBUTE, name) + _field(value_field, value))


def _field(number: int, value: int | str | bytes) -> bytes:
    """Encode a varint, or a text or bytes with its length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _delimited(value.encode() if isinstance(value, str) else value)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _varint(value: int) -> bytes:
    """Encode a whole number >= 0 in groups of 7 bits, lowest first.

    >>> _varint(300).hex()
    'ac02'
    """
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
