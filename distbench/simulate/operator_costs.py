"""How long an operator or a collective takes on a hardware file, or where the host runs it itself."""

from collections import Counter
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from distbench.simulate.hardware_file import Curve, Hardware, HostFigures
from distbench.simulate.recording import ATTENTION, ATTENTION_BACKWARD, MATMUL, Collective, Operator, Recording, Touched
from distbench.spec.mesh import group_shape
from distbench.spec.printable_text import count_text

# How long an operator takes on a hardware file's device, which runs with others that are not equally fast.

FLOAT8 = "float8"


def operator_s(operator: Operator, hardware: Hardware, fused: int | None = None, world_size: int = 1) -> float:
    """Seconds that an operator runs: its floating point operations, or its bytes, whichever take longer.

    Args:
        fused: bytes of the one kernel that it became with others, 0 where another one stands for it; None for its own.
        world_size: of the devices that wait for one another.
    """
    num_bytes = operator.num_bytes if fused is None else fused
    bytes_s = num_bytes / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
    if operator.kind == MATMUL:
        return max(operator.flops / _matmul_rate(operator, hardware) * slowest(hardware, world_size), bytes_s)
    if operator.kind in (ATTENTION, ATTENTION_BACKWARD):
        return operator.flops / _attention_rate(operator, hardware) * slowest(hardware, world_size)
    return bytes_s + hardware["operator_s"] if num_bytes else 0.0


def slowest(hardware: Hardware, world_size: int) -> float:
    """How much longer the slowest of so many devices computes than the mean one.

    All wait for it in every step, so a larger world is slower. Speeds are taken as normally distributed with the
    hardware file's spread, and the largest of n as Blom's approximation has it (Statistical Estimates, 1958).
    """
    return 1 + hardware["device_spread"] * _largest_of(world_size)


@lru_cache(maxsize=64)
def _largest_of(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _matmul_rate(operator: Operator, hardware: Hardware) -> float:
    if operator.dtype == FLOAT8:
        return hardware["matmul_fp8_flops"]
    return hardware["matmul_bf16_flops" if operator.dtype in ("bf16", "f16") else "matmul_f32_flops"]


def _attention_rate(operator: Operator, hardware: Hardware) -> float:
    """By shape: causal or not, forward or backward, and slower where sequences are short."""
    queries, keys, is_causal = operator.attention or (0, 0, 1)
    name = "attention_backward" if operator.kind == ATTENTION_BACKWARD else "attention"
    rate = hardware[f"{name}_flops" if is_causal else f"{name}_full_flops"]
    length = min(queries, keys)
    return rate * length / (length + hardware["attention_half_length"]) if length else rate


# How long a collective takes on a hardware file's links: a fixed part by the nodes it spans, and its bytes.


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
    ranks = [0]
    for count, stride in loops:
        ranks = [base + at * stride for base in ranks for at in range(count)]
    return ranks


FSDP, DDP = "fsdp", "ddp"
# The host's own time for a collective, by who issues it: DDP's reducer does so in C++, like an operator.
OF_HOST = {FSDP: "fsdp_s", DDP: "operator_s"}
# Of a share of the step that is extrapolated, what is worth a sentence.
WORTH_SAYING = 0.01


class OnHost(NamedTuple):
    """Seconds of one event: of the host's own work before it, and of the event itself."""

    host_s: float
    seconds: float


def on_host(event: Operator | Collective, host: HostFigures) -> OnHost:
    """What the event takes, the file's factors included; both 0 for what does nothing."""
    factor = host["step_factor"]
    if isinstance(event, Collective):
        if event.group_size == 1:
            return OnHost(0.0, 0.0)
        seconds = host[OF_HOST.get(event.source, "redistribution_s")]
        return OnHost(seconds * factor, collective_on_host(event, host) * factor)
    if not event.num_bytes and not event.flops:
        return OnHost(0.0, 0.0)
    return OnHost(_host_s(event, host) * factor, operator_on_host(event, host) * host["operator_factor"] * factor)


def operator_on_host(operator: Operator, host: HostFigures) -> float:
    """Seconds of an operator by itself."""
    name, amount = curve_of(operator)
    return num_listed(operator) * host.operators[name].seconds(amount) if amount else 0.0


def curve_of(operator: Operator) -> tuple[str, float]:
    """Which of OPERATOR_CURVES an operator is on, and where."""
    if operator.kind == MATMUL:
        return ("matmul_bf16" if operator.dtype in ("bf16", "f16") else "matmul_f32"), operator.flops
    if operator.kind in (ATTENTION, ATTENTION_BACKWARD):
        return operator.kind, operator.flops
    return "memory", operator.num_bytes / num_listed(operator) if operator.num_bytes else 0.0


def num_listed(operator: Operator) -> int:
    """Tensors in the lists of an operator of the optimizer, which a host goes through one by one; 1 for others."""
    return max(len(operator.reads), 1) if is_listed(operator) else 1


def is_listed(operator: Operator) -> bool:
    """Whether a device would run it once for lists of tensors, and torch's optimizers on CPU once for each."""
    return operator.phase == "optimizer" and "_foreach" in operator.name


def _host_s(operator: Operator, host: HostFigures) -> float:
    return host["listed_s"] * num_listed(operator) if is_listed(operator) else host["operator_s"]


def collective_on_host(collective: Collective, host: HostFigures) -> float:
    """Seconds of a collective; one of a group size that was not measured goes by the nearest one that was.

    On CPU DTensor runs its all-to-alls as all-gathers of the whole tensor.
    """
    kind, payload = collective.kind, float(collective.payload_bytes)
    if kind == "all_to_all" and collective.redistribution:
        kind, payload = "all_gather", payload * collective.group_size
    curve, size = curve_of_group(kind, collective, host)
    share = (collective.group_size - 1) / collective.group_size / ((size - 1) / size)
    return curve.seconds(payload) * share


def curve_of_group(kind: str, collective: Collective, host: HostFigures) -> tuple[Curve, int]:
    """The curve of a kind for a group as it lies on hosts, where such groups were measured; else `nearest_curve`."""
    if (curve := host.by_shape.get((kind, shape_of(collective, host)))) is not None:
        return curve, collective.group_size
    return nearest_curve(kind, collective.group_size, host)


def shape_of(collective: Collective, host: HostFigures) -> str:
    """How its group lies on the hosts that were measured; empty where they do not say."""
    ranks = ranks_of(tuple(map(tuple, collective.ranks))) if host.hosts else [0]
    return group_shape(ranks, host.hosts) if max(ranks) < len(host.hosts) else ""


def nearest_curve(kind: str, group_size: int, host: HostFigures) -> tuple[Curve, int]:
    """The curve of a kind (an all-gather's for one that was not measured), and the group size that it is of."""
    measured = [size for of_kind, size in host.collectives if of_kind == kind]
    if not measured:
        kind = "all_gather"
        measured = [size for of_kind, size in host.collectives if of_kind == kind]
    size = min(measured, key=lambda size: abs(size - group_size))
    return host.collectives[kind, size], size


def host_assumptions(recording: Recording, host: HostFigures) -> list[str]:
    """What a reader must know of a step on such a machine: what is extrapolated, and by how much of the step."""
    sentences = []
    if recording.world_size != host.num_ranks:
        sentences.append(
            f"its times are those of {count_text(host.num_ranks, 'rank')} that share this machine, and this step has "
            f"{recording.world_size}: a guess; calibrate with as many ranks"
        )
    if any(isinstance(event, Collective) and event.source == DDP for event in recording.step):
        sentences.append("a CPU reduces DDP's buckets beside backward, not after it: the step may be shorter than this")
    beyond: dict[str, float] = {}
    total = 0.0
    for event in recording.step:
        if not isinstance(event, Operator | Collective):
            continue
        took = on_host(event, host)
        total += took.host_s + took.seconds
        if part := _beyond(event, host):
            beyond[part] = beyond.get(part, 0.0) + took.seconds
    for part, seconds in beyond.items():
        if seconds > WORTH_SAYING * total:
            sentences.append(f"extrapolated: {part} ({100 * seconds / total:.0f} % of the step)")
    return sentences


def _beyond(event: Operator | Collective, host: HostFigures) -> str:
    if isinstance(event, Operator):
        name, amount = curve_of(event)
        most = host.operators[name].most
        unit = "bytes" if name == "memory" else "operations"
        return f"{name} of over {most:.3g} {unit}, the most that was measured" if amount > most else ""
    if event.group_size == 1:
        return ""
    curve, size = curve_of_group(event.kind, event, host)
    shape = shape_of(event, host)
    if "+" in shape and (event.kind, shape) not in host.by_shape:
        return f"{event.kind} of {shape} ranks on {shape.count('+') + 1} hosts, by groups of {size} neighbours"
    if size != event.group_size or ((event.kind, event.group_size) not in host.collectives and not shape):
        return f"{event.kind} in groups of {event.group_size}, which was not measured, by groups of {size}"
    is_beyond = event.payload_bytes > curve.most
    return f"{event.kind} of over {curve.most:.3g} bytes, the most that was measured" if is_beyond else ""
