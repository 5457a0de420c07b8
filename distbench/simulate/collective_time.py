"""How long a collective takes on a hardware file's links: a fixed part by the nodes it spans, and its bytes."""

from collections import Counter
from functools import lru_cache

from distbench.simulate.hardware.hardware_file import Hardware
from distbench.simulate.recording import Collective, Touched


def collective_s(collective: Collective, hardware: Hardware) -> float:
    """Seconds of one collective that has its links to itself.

    Bytes over bus bandwidth, as nccl-tests defines it: factor x S / busbw, with 2(n-1)/n for an all-reduce and (n-1)/n
    for the others. Within a node that is the node's links. Across nodes a ring enters and leaves each node once for
    every device of the group that is there, so their network links add up, to no more than the node's own. In an
    all-to-all they do not: each rank sends (n - n_here)/n of its bytes over its own network link, where n_here ranks of
    the group share its node. Bus bandwidth is then the link's times (n-1)/(n - n_here) (nccl-tests, issues 130, 267).
    Where nodes have different numbers of the group's ranks, the node with the fewest is the slowest.
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
    """Whether ring attention passes a block on: each device sends to one other, which fewer links carry.

    Ulysses exchanges heads and sequence by DTensor, each device with all others.
    """
    return collective.source == "cp" and collective.kind == "all_to_all" and not collective.redistribution


@lru_cache(maxsize=1024)
def ranks_by_node(ranks: tuple[tuple[int, ...], ...], devices_per_node: int) -> tuple[int, ...]:
    """Return how many ranks of a group each node has that the group spans. Ranks are numbered node by node."""
    return tuple(Counter(rank // devices_per_node for rank in ranks_of(ranks)).values())


def ranks_of(loops: Touched) -> list[int]:
    """The ranks of `Collective.ranks`."""
    if loops and all(count == 1 for count, _ in loops):
        return [rank for _, rank in loops]
    found = [0]
    for count, stride in loops:
        found = [base + at * stride for base in found for at in range(count)]
    return found
