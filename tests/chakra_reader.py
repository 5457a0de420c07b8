"""Reads Chakra traces by their schema, and replays them by their dependencies alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Message to (field number, name, type of protobuf), from mlcommons/chakra, schema/protobuf/et_def.proto.
SCHEMA = {
    "GlobalMetadata": [(1, "version", "string")],
    "AttributeProto": [
        *[(1, "name", "string"), (7, "int32_val", "int32"), (9, "int64_val", "int64"), (13, "uint64_val", "uint64")],
        *[(27, "bool_val", "bool"), (29, "string_val", "string")],
    ],
    "Node": [
        *[(1, "id", "uint64"), (2, "name", "string"), (3, "type", "uint64"), (5, "data_deps", "uint64s")],
        *[(6, "start_time_micros", "uint64"), (7, "duration_micros", "uint64"), (10, "attr", "AttributeProto")],
    ],
}
# Types of attributes in Chakra's feeder (src/feeder/et_feeder_node.cpp) and generator.
TYPES = {
    **{"is_cpu_op": "bool_val", "num_ops": "int64_val", "tensor_size": "uint64_val", "comm_type": "int64_val"},
    **{"comm_size": "int64_val", "pg_name": "string_val"},
    **dict.fromkeys(("comm_src", "comm_dst", "comm_tag"), "int32_val"),
}
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
NODE_TYPES = {
    **{"MEM_LOAD_NODE": 2, "MEM_STORE_NODE": 3, "COMP_NODE": COMPUTE},
    **{"COMM_SEND_NODE": SEND, "COMM_RECV_NODE": RECEIVE, "COMM_COLL_NODE": COLLECTIVE},
}
ALL_GATHER, ALL_REDUCE = 2, 0


class Node(NamedTuple):
    id: int
    name: str
    type: int
    deps: Sequence[int]
    start_us: int
    duration_us: int
    attributes: Mapping[str, Any]


def varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[place] & 127) << shift
        shift, place = shift + 7, place + 1
        if data[place - 1] < 128:
            return value, place


def messages_of(data: bytes) -> list[bytes]:
    """As Chakra's protolib.decodeMessage reads them: a length, and so many bytes."""
    messages, place = [], 0
    while place < len(data):
        size, place = varint(data, place)
        messages.append(data[place : place + size])
        place += size
    assert place == len(data)
    return messages


def decoded(data: bytes, kind: str) -> dict[str, list[Any]]:
    fields = {number: (name, form) for number, name, form in SCHEMA[kind]}
    values: dict[str, list[Any]] = {name: [] for name, _ in fields.values()}
    place = 0
    while place < len(data):
        tag, place = varint(data, place)
        name, form = fields[tag >> 3]
        value, place = varint(data, place)
        assert tag & 7 == (2 if form in ("string", "uint64s", *SCHEMA) else 0)
        if tag & 7 == 2:
            content, place = data[place : place + value], place + value
            if form == "uint64s":
                at = 0
                while at < len(content):
                    number, at = varint(content, at)
                    values[name].append(number)
                continue
            value = content.decode() if form == "string" else decoded(content, form)
        values[name].append(value)
    return values


def nodes_of(data: bytes) -> list[Node]:
    header, *messages = messages_of(data)
    assert decoded(header, "GlobalMetadata") == {"version": ["0.0.4"]}
    nodes = []
    for number, fields in enumerate(decoded(each, "Node") for each in messages):
        attributes = {}
        for attribute in fields["attr"]:
            [name] = attribute.pop("name")
            [(form, [value])] = [(form, values) for form, values in attribute.items() if values]
            assert TYPES[name] == form
            attributes[name] = value
        [name], [kind], [start_us], [duration_us] = (
            fields[field] for field in ("name", "type", "start_time_micros", "duration_micros")
        )
        assert fields["id"] == [number] and all(needed < number for needed in fields["data_deps"])  # no cycles
        nodes.append(Node(number, name, kind, fields["data_deps"], start_us, duration_us, attributes))
    return nodes


def replayed(ranks: Sequence[Sequence[Node]]) -> list[list[tuple[int, int]]]:
    """(start, end) in us of each node of each rank, by dependencies and durations; ends of a message start together."""
    times: list[list[tuple[int, int]]] = [[] for _ in ranks]
    ready_us: dict[tuple[int, ...], dict[int, int]] = {}
    is_new = True
    while is_new:
        is_new = False
        for at, nodes in enumerate(ranks):
            while len(times[at]) < len(nodes):
                node = nodes[len(times[at])]
                start_us = max((times[at][needed][1] for needed in node.deps), default=0)
                if node.type in (SEND, RECEIVE):
                    # The messages of a batch are ready together, so the later ones of it are looked at, too.
                    for other in nodes[node.id :]:
                        if other.type not in (SEND, RECEIVE) or other.deps != node.deps:
                            break
                        ends = (other.attributes[name] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                        ready_us.setdefault(tuple(ends), {})[other.type] = start_us
                    ends = (node.attributes[name] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                    if len(both := ready_us[tuple(ends)]) < 2:
                        break
                    start_us = max(both.values())
                times[at].append((start_us, start_us + node.duration_us))
                is_new = True
    assert [len(of_rank) for of_rank in times] == [len(nodes) for nodes in ranks]
    return times


def check_times(ranks: Sequence[Sequence[Node]]) -> int:
    """Compare every start with the replay by dependencies alone; the end of the last node, in us."""
    for nodes, times in zip(ranks, replayed(ranks), strict=True):
        assert [(node.start_us, node.start_us + node.duration_us) for node in nodes] == times
    return max(end_us for times in replayed(ranks) for _, end_us in times)
