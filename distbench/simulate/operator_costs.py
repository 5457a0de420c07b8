"""Times of one operator or collective: on a device by its rates and links, and on the host that issues it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, log2
from statistics import NormalDist
from typing import NamedTuple

from distbench.simulate.compile_float8 import FLOAT8, HALF
from distbench.simulate.hardware_file import Curve, Hardware, HostFigures
from distbench.simulate.matmul_shapes import shape_factor, shape_of
from distbench.simulate.recording import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COPIES,
    MATMUL,
    ON_HOST,
    Allocated,
    Collective,
    Operator,
    Recording,
    ranks_of,
)
from distbench.spec.mesh import group_shape
from distbench.spec.printable_text import count_text

FSDP, DDP = "fsdp", "ddp"
# Time of a hop within the node, divided by that of a hop over the network (ring, LL128: NCCL src/graph/tuning.cc).
NODE_HOP = 1.9 / 4.0
KEY_BLOCK = 512  # keys that attention on CPUs computes at once
# glibc maps new blocks of this size or more page by page (mallopt(3), M_MMAP_THRESHOLD), and reuses smaller blocks.
MAPPED_BYTES = 32 << 20
WORTH_SAYING = 0.01  # smallest extrapolated share of the step that is reported


def operator_s(operator: Operator, hardware: Hardware, fused: int | None = None, world_size: int = 1) -> float:
    """Return an operator's seconds: the longer of the times for its floating point operations and its bytes.

    Args:
        fused: bytes of the fused kernel that includes the operator, 0 if another operator counts the bytes; None for no
            fused kernel.
        world_size: number of devices that wait for one another.
    """
    if operator.kind == ON_HOST:
        return operator.num_bytes / hardware["host_bytes_per_s"]
    if operator.kind in COPIES:
        return hardware["operator_s"] + operator.num_bytes / hardware["copy_bytes_per_s"]
    num_bytes = operator.num_bytes if fused is None else fused
    bytes_s = num_bytes / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
    if operator.kind == MATMUL:
        name = "fp8" if operator.dtype == FLOAT8 else "bf16" if operator.dtype in HALF else "f32"
        flops_s = operator.flops / hardware[f"matmul_{name}_flops"] * slowest(hardware, world_size)
        if hardware["num_units"] and (shape := shape_of(operator)):
            flops_s *= shape_factor(shape, int(hardware["num_units"]), hardware["matmul_fill_bytes"])
        return max(flops_s, bytes_s)
    if operator.kind in (ATTENTION, ATTENTION_BACKWARD):
        # The rate depends on causal or not and forward or backward, and is lower for short sequences.
        queries, keys, is_causal = operator.attention or (0, 0, 1)
        name = "attention_backward" if operator.kind == ATTENTION_BACKWARD else "attention"
        rate = hardware[f"{name}_flops" if is_causal else f"{name}_full_flops"]
        if length := min(queries, keys):
            rate = rate * length / (length + hardware["attention_half_length"])
        return operator.flops / rate * slowest(hardware, world_size)
    return bytes_s + hardware["operator_s"] if num_bytes else 0.0


def slowest(hardware: Hardware, world_size: int) -> float:
    """Return the time of the slowest of `world_size` devices divided by the mean device's.

    All devices wait for the slowest device in every step, so a larger world is slower. Speeds are assumed to be
    normally distributed with the hardware file's spread; the largest of n is estimated by Blom's approximation
    (Statistical Estimates, 1958).
    """
    return 1 + hardware["device_spread"] * _largest_of(world_size)


@lru_cache(maxsize=64)
def _largest_of(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def collective_s(collective: Collective, hardware: Hardware) -> float:
    """Return the seconds of one collective that does not share its links.

    The time is factor x S / busbw as in nccl-tests, with factor 2(n-1)/n for an all-reduce and (n-1)/n for other kinds.
    Within a node, busbw is the rate of the node's links. Across nodes, a ring enters and leaves each node once per
    device of the group on the node, so the devices' network links add up, to at most the node's limit. In an all-to-all
    the
    links do not add up: each rank sends (n - n_here)/n of its bytes over its own network link, and n_here ranks of the
    group share the node. busbw is then the link's bandwidth times (n-1)/(n - n_here) (nccl-tests, issues 130, 267). If
    nodes have different numbers of the group's ranks, the node with the fewest ranks is the slowest.
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
    return link_s(collective.kind, collective.payload_bytes, size, on_nodes, hardware)


class LinkLoad(NamedTuple):
    """Bytes of a collective that pass each device's link, links that add up, and hops beyond the first two nodes."""

    num_bytes: float
    num_links: float
    num_hops: float


def link_load(kind: str, payload_bytes: float, group_size: int, on_nodes: Sequence[int]) -> LinkLoad:
    """Return the load of a collective in a group of two or more ranks; the rules are as in `collective_s`.

    A ring passes every node and every rank of the group on the node; an all-reduce over many nodes uses a tree.

    Args:
        payload_bytes: nccl-tests' S.
        on_nodes: the group's ranks on each of its nodes.
    """
    turns = 2 if kind == "all_reduce" else 1
    share = 1.0 if kind in ("broadcast", "send", "recv") else turns * (group_size - 1) / group_size
    if len(on_nodes) == 1:
        return LinkLoad(share * payload_bytes, 1.0, 0)
    num_here, further = min(on_nodes), len(on_nodes) - 2
    if kind == "all_to_all":
        return LinkLoad(share * payload_bytes, (group_size - 1) / (group_size - num_here), further)
    if kind == "all_reduce":
        return LinkLoad(share * payload_bytes, num_here, 2 * ceil(log2(further + 2) - 1))
    return LinkLoad(share * payload_bytes, num_here, further * (1 + NODE_HOP * (num_here - 1)))


def link_s(kind: str, payload_bytes: float, group_size: int, on_nodes: Sequence[int], hardware: Hardware) -> float:
    """Return the seconds of a collective by the rules of `collective_s`; arguments as in `link_load`."""
    load = link_load(kind, payload_bytes, group_size, on_nodes)
    if len(on_nodes) == 1:
        return hardware["node_base_s"] + load.num_bytes / hardware["node_bytes_per_s"]
    bandwidth = min(hardware["node_bytes_per_s"], hardware["network_bytes_per_s"] * load.num_links)
    return hardware["network_base_s"] + load.num_hops * hardware["network_hop_s"] + load.num_bytes / bandwidth


def is_rotation(collective: Collective) -> bool:
    """Return whether a collective is a rotation of ring attention: each device sends to one device, over fewer links.

    Ulysses instead exchanges heads and sequence by DTensor, between all devices.
    """
    return collective.source == "cp" and collective.kind == "all_to_all" and not collective.redistribution


@lru_cache(maxsize=1024)
def ranks_by_node(ranks: tuple[tuple[int, ...], ...], devices_per_node: int) -> tuple[int, ...]:
    """Return the number of a group's ranks on each of its nodes. Ranks are numbered node by node."""
    return tuple(Counter(rank // devices_per_node for rank in ranks_of(ranks)).values())


def message_s(message: Collective, rank: int, hardware: Hardware) -> float:
    """Return the seconds of one message that does not share its links: a fixed part plus a part per byte."""
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
        # The host's own time depends on the issuer: DDP's reducer issues in C++, like an operator. Calls in Python
        # without DTensor's dispatch (spmd_types, experts, ring attention) take about as long as those of FSDP2.
        by_dtensor = "optimizer_redistribution_s" if event.phase == "optimizer" else "redistribution_s"
        others = by_dtensor if event.redistribution else "fsdp_s"
        name = {FSDP: "fsdp_s", DDP: "operator_s"}.get(event.source, others)
        return host[name] * factor, collective_on_host(event, host) * factor
    if not event.num_bytes and not event.flops:
        return 0.0, 0.0
    host_s = host["listed_s"] * num_listed(event) if is_listed(event) else host["operator_s"]
    slower = host["matmul_bf16_factor" if _curve_of(event)[0] == "matmul_bf16" else "operator_factor"]
    return host_s * factor, operator_on_host(event, host) * slower * factor


def page_faults_s(block: Allocated, host: HostFigures) -> float:
    """Return the seconds of the page faults of a new block's first use."""
    return block.num_bytes * host["page_faults_s_per_byte"] if block.num_bytes >= MAPPED_BYTES else 0.0


def operator_on_host(operator: Operator, host: HostFigures) -> float:
    """Return the seconds of an operator alone."""
    name, amount = _curve_of(operator)
    return num_listed(operator) * host.operators[name].seconds(amount) if amount else 0.0


def _curve_of(operator: Operator) -> tuple[str, float]:
    """Return the operator's curve of OPERATOR_CURVES, and its amount."""
    if operator.kind == MATMUL:
        return ("matmul_bf16" if operator.dtype in HALF else "matmul_f32"), operator.flops
    if operator.kind in (ATTENTION, ATTENTION_BACKWARD):
        return operator.kind, operator.flops * _computed_share(operator)
    return "memory", operator.num_bytes / num_listed(operator) if operator.num_bytes else 0.0


def _computed_share(operator: Operator) -> float:
    """Return what attention on a CPU computes per counted operation; 1 is short causal attention, which is measured.

    torch computes whole blocks of keys, so causal attention of at most one block computes twice the operations that
    count, and attention without a mask just these (torch 2.13, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp,
    kvSplitSize).
    """
    queries, _, is_causal = operator.attention or (0, 0, 1)
    if not is_causal:
        return 0.5
    return (1 + min(KEY_BLOCK, queries) / queries) / 2 if queries else 1.0


def num_listed(operator: Operator) -> int:
    """Return the number of tensors in an optimizer's operator, which a host runs one by one; 1 for other operators."""
    return max(len(operator.reads), 1) if is_listed(operator) else 1


def is_listed(operator: Operator) -> bool:
    """Return whether a device runs the operator once for lists of tensors, but a CPU's optimizer once per tensor."""
    return operator.phase == "optimizer" and "_foreach" in operator.name


def collective_on_host(collective: Collective, host: HostFigures) -> float:
    """Return the seconds of a collective; for an unmeasured group size, the nearest measured size is used.

    On CPU, DTensor replaces all-to-alls by all-gathers of the whole tensor.
    """
    kind, payload = collective.kind, float(collective.payload_bytes)
    if kind == "all_to_all" and collective.redistribution:
        kind, payload = "all_gather", payload * collective.group_size
    curve, size = _curve_of_group(kind, collective, host)
    share = (collective.group_size - 1) / collective.group_size / ((size - 1) / size)
    return curve.seconds(payload) * share


def _curve_of_group(kind: str, collective: Collective, host: HostFigures) -> tuple[Curve, int]:
    """Return the curve of a kind (an all-gather's if it was not measured), and its group size.

    Groups with the same placement on hosts are used if measured, else groups of the nearest size.
    """
    if (curve := host.by_shape.get((kind, _shape_of(collective, host)))) is not None:
        return curve, collective.group_size
    if not any(of_kind == kind for of_kind, _ in host.collectives):
        kind = "all_gather"
    measured = [size for of_kind, size in host.collectives if of_kind == kind]
    size = min(measured, key=lambda size: abs(size - collective.group_size))
    return host.collectives[kind, size], size


def _shape_of(collective: Collective, host: HostFigures) -> str:
    """Return the placement of a collective's group on the measured hosts; "" for unknown hosts."""
    ranks = ranks_of(collective.ranks) if host.hosts else [0]
    return group_shape(ranks, host.hosts) if max(ranks) < len(host.hosts) else ""


def host_assumptions(recording: Recording, host: HostFigures) -> list[str]:
    """Return caveats about a step on a host: extrapolated parts, and their share of the step."""
    sentences = []
    if recording.world_size != host.num_ranks:
        sentences.append(
            f"times were measured with {count_text(host.num_ranks, 'rank')} on this machine, but this step has "
            f"{recording.world_size} ranks, an extrapolation; calibrate with as many ranks"
        )
    if any(isinstance(event, Collective) and event.source == DDP for event in recording.step):
        sentences.append(
            "the measured step may be shorter, because a CPU reduces DDP's buckets during backward, not after"
        )
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
        return f"{name} above {most:.3g} {unit}, the largest measured amount" if amount > most else ""
    if event.group_size == 1:
        return ""
    curve, size = _curve_of_group(event.kind, event, host)
    shape = _shape_of(event, host)
    if "+" in shape and (event.kind, shape) not in host.by_shape:
        return f"{event.kind} of {shape} ranks on {shape.count('+') + 1} hosts, from groups of {size} neighbours"
    if size != event.group_size or ((event.kind, event.group_size) not in host.collectives and not shape):
        return f"{event.kind} in unmeasured groups of {event.group_size}, from groups of {size}"
    most = curve.points[-1][0]
    return f"{event.kind} above {most:.3g} bytes, the largest measured payload" if event.payload_bytes > most else ""
