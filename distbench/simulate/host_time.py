"""What an operator or a collective takes where the host runs it itself, by what was measured on the machine."""

from typing import NamedTuple

from distbench.simulate.collective_time import ranks_of
from distbench.simulate.hardware.host_figures import Curve, HostFigures
from distbench.simulate.recording import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MATMUL,
    Collective,
    Operator,
    Recording,
)
from distbench.spec.levels import group_shape
from distbench.spec.printable import count_text

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
        own = host[OF_HOST.get(event.source, "redistribution_s")]
        return OnHost(own * factor, collective_on_host(event, host) * factor)
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


def said_of_host(recording: Recording, host: HostFigures) -> list[str]:
    """What a reader must know of a step on such a machine: what is extrapolated, and by how much of the step."""
    said = []
    if recording.world_size != host.num_ranks:
        said.append(
            f"its times are those of {count_text(host.num_ranks, 'rank')} that share this machine, and this step has "
            f"{recording.world_size}: a guess; calibrate with as many ranks"
        )
    if any(isinstance(event, Collective) and event.source == DDP for event in recording.step):
        said.append("a CPU reduces DDP's buckets beside backward, not after it: the step may be shorter than this")
    beyond: dict[str, float] = {}
    total = 0.0
    for event in recording.step:
        if not isinstance(event, Operator | Collective):
            continue
        took = on_host(event, host)
        total += took.host_s + took.seconds
        if what := _beyond(event, host):
            beyond[what] = beyond.get(what, 0.0) + took.seconds
    for what, seconds in beyond.items():
        if seconds > WORTH_SAYING * total:
            said.append(f"extrapolated: {what} ({100 * seconds / total:.0f} % of the step)")
    return said


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
