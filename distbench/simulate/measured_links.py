"""The collective part of a hardware file, fitted to measured collectives; all other figures are from a base."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distbench.planning.cost_profile import COLLECTIVES, Line, Sample, fit_line
from distbench.planning.measured_collectives import BROADCAST, SEND_RECV, Group, Timing, fitted_and_held_out
from distbench.show.blocks import Block, Table
from distbench.show.units import NOTHING, bandwidth_text, percent_text, time_text
from distbench.simulate.hardware_file import Curve, Hardware, hardware_of, hardware_record
from distbench.simulate.measured_hardware import rising, rounded, save_hardware, short
from distbench.simulate.operator_costs import link_load, link_s
from distbench.spec.errors import UserError
from distbench.spec.mesh import brief_shape
from distbench.spec.printable_text import count_text

BASE = "--base"
WITHIN, ACROSS, PEER, RING = "node", "network", "peer", "ring"
MEASURED = "-measured"  # at the end of the file's name
# Figures of a level, each with the cost of a line from which it follows. Rates are reciprocals of costs.
LEVELS: Mapping[str, Mapping[str, str]] = {
    WITHIN: {"node_bytes_per_s": "per_byte_s", "node_base_s": "base_s"},
    ACROSS: {"network_bytes_per_s": "per_byte_s", "network_base_s": "base_s", "network_hop_s": "per_message_s"},
    PEER: {"peer_bytes_per_s": "per_byte_s"},
    RING: {"ring_bytes_per_s": "per_byte_s"},
}


class GroupTimes(NamedTuple):
    """The times of one group, some of them held out to validate the fit."""

    group: Group
    fitted: list[Sample]
    held_out: list[Sample]
    files: tuple[str, ...]


def base_hardware(name: str) -> tuple[dict[str, Any], Hardware]:
    """Return the record and the machine of a hardware file; raise UserError as `load_hardware` does."""
    record, where = hardware_record(name, BASE)
    return record, hardware_of(record, where)


def copies_on(base: Hardware) -> tuple[float, str]:
    """Return the seconds per copied byte on a base, which reads and writes the byte, and their source."""
    return 2 / (base["memory_bytes_per_s"] * base["memory_share"]), f"memory rate of hardware file {base.name}"


def write_links(
    path: Path,
    record: dict[str, Any],
    base: Hardware,
    timings: Sequence[Timing],
    devices_per_node: int | None,
    num_ranks: int,
) -> list[Block]:
    """Write the base with measured links, and return tables of its figures and their errors.

    Args:
        record: of `base`, as from `base_hardware`; it is changed.
        devices_per_node: replaces the number of the base; None keeps that number.
        num_ranks: number of ranks of the largest run.

    Raises:
        UserError: no collective can be fitted, the base contradicts the files, or a figure is out of range.
    """
    groups = _groups(timings)
    if not groups:
        raise UserError(
            "no file has a collective alone, in groups on known hosts; measure with distbench run collectives"
        )
    files = ", ".join(dict.fromkeys(file for times in groups for file in times.files))
    record["name"] = base.name.removesuffix(MEASURED)[: 100 - len(MEASURED)] + MEASURED
    record["summary"] = f"{base.summary}; links measured: {files}"
    if base.host is not None:
        rows = _replace_curves(record, base, groups, num_ranks)
        save_hardware(path, record)
        return [_error_table(f"{record['name']}: curves of collectives", rows)]
    if devices_per_node is not None:
        source = "given by --devices-per-node"
        record["figures"]["devices_per_node"] = {"value": devices_per_node, "basis": "measured", "source": source}
    _require_nodes(groups, devices_per_node or base.devices_per_node, base.name)
    measured = _replace_figures(record, base, groups)
    hardware = save_hardware(path, record)
    rows = [_error_row(times, partial(_link_s, times.group, hardware)) for times in groups]
    return [_figure_table(hardware, base, measured), _error_table("simulated with these figures", rows)]


def _groups(timings: Sequence[Timing]) -> list[GroupTimes]:
    by_group: dict[Group, list[Timing]] = {}
    for timing in timings:
        if not timing.is_step and _is_simulated(timing.group):
            by_group.setdefault(timing.group._replace(mesh_dim=""), []).append(timing)
    return [
        GroupTimes(group, *fitted_and_held_out(of_group), tuple(dict.fromkeys(timing.file for timing in of_group)))
        for group, of_group in sorted(by_group.items(), key=lambda item: (item[0].op, item[0].size))
    ]


def _is_simulated(group: Group) -> bool:
    """Return whether a figure follows from the group; messages across nodes have no figure of their own."""
    return bool(group.on_hosts) and (group.op in (*COLLECTIVES, BROADCAST) or len(group.on_hosts) == 1)


def _require_nodes(groups: Sequence[GroupTimes], devices_per_node: int, base_name: str) -> None:
    """Raise UserError if a group has more ranks on a host than the base has devices per node."""
    for times in groups:
        if (most := max(times.group.on_hosts)) > devices_per_node:
            problem = f"{times.files[0]} has {count_text(most, 'rank')} on one host, but {base_name} has"
            raise UserError(
                f"{problem} {devices_per_node} devices per node; give --devices-per-node {most}, or another base"
            )


# An accelerator: figures of the links.


def _level_of(group: Group) -> str:
    if group.op == SEND_RECV:
        return PEER if group.size == 2 else RING
    return WITHIN if len(group.on_hosts) == 1 else ACROSS


def _replace_figures(record: dict[str, Any], base: Hardware, groups: Sequence[GroupTimes]) -> set[str]:
    """Replace the figures of each measured level, and return their names."""
    names: set[str] = set()
    for level, figures in LEVELS.items():
        of_level = [times for times in groups if _level_of(times.group) == level]
        if not of_level:
            continue
        files = ", ".join(dict.fromkeys(file for times in of_level for file in times.files))
        line = _fit(level, of_level, files)
        ops = ", ".join(dict.fromkeys(times.group.op for times in of_level))
        source = (
            f"distbench calibrate --from {files}: line fitted to {count_text(len(line.samples), 'time')} of {ops}, "
            f"median error {percent_text(line.error)}"
        )
        costs = {name: getattr(line, cost) for name, cost in figures.items()}
        hops = {point[3] for point in line.samples}
        if hops == {0}:  # two nodes at most
            costs.pop("network_hop_s", None)
        elif len(hops) == 1:
            costs |= _split(line, hops.pop(), base)
            source += f"; base and hop were measured together and are divided as in {base.name}"
        for name, cost in costs.items():
            value = short(1 / cost if name.endswith("bytes_per_s") else cost)
            record["figures"][name] = {"value": value, "basis": "measured", "source": source}
        names |= costs.keys()
    return names


def _fit(level: str, of_level: Sequence[GroupTimes], files: str) -> Line:
    samples = [_on_link(times.group, sample) for times in of_level for sample in times.fitted]
    try:
        line = fit_line("times", level, 1, samples, is_straight=True)
    except ValueError as error:
        raise UserError(f"{files} cannot be fitted ({error}); measure more sizes") from error
    if not line.per_byte_s:
        raise UserError(f"{files}: times do not increase with the size, so there is no bandwidth; measure larger sizes")
    return line


def _split(line: Line, num_hops: float, base: Hardware) -> dict[str, float]:
    """Return base and hop of times that all have as many hops, in the base's proportion."""
    fixed_s = line.base_s + num_hops * line.per_message_s
    of_base = base["network_base_s"] + num_hops * base["network_hop_s"]
    factor = fixed_s / of_base if of_base else 1.0
    return {name: factor * base[name] for name in ("network_base_s", "network_hop_s")}


def _on_link(group: Group, sample: Sample) -> Sample:
    """Return a sample by the bytes on each device's link, with the hops as messages."""
    if group.op == SEND_RECV:
        return sample
    load = link_load(group.op, sample.payload_bytes, group.size, group.on_hosts)
    return Sample(load.num_bytes / load.num_links, 0, sample.seconds, load.num_hops)


def _link_s(group: Group, hardware: Hardware, sample: Sample) -> float:
    if group.op == SEND_RECV:
        rate = hardware["peer_bytes_per_s" if group.size == 2 else "ring_bytes_per_s"]
        return hardware["node_base_s"] + sample.payload_bytes / rate
    return link_s(group.op, sample.payload_bytes, group.size, group.on_hosts, hardware)


# A CPU machine: curves of the host.


def _replace_curves(
    record: dict[str, Any], base: Hardware, groups: Sequence[GroupTimes], num_ranks: int
) -> list[tuple[str, ...]]:
    """Replace the curves of each measured group, and return rows of errors of curves without the held-out sizes."""
    assert base.host is not None
    if num_ranks != base.host.num_ranks:
        problem = f"the largest run has {count_text(num_ranks, 'rank')}, but {BASE} {base.name} was measured with"
        raise UserError(
            f"{problem} {base.host.num_ranks}, which shared the cores; give runs or a base of as many ranks"
        )
    curves = {(line["kind"], line["group_size"], line.get("hosts", "")): line for line in record["host"]["collectives"]}
    rows = []
    for times in groups:
        group = times.group
        if group.op == SEND_RECV:
            continue
        hosts = group.shape if base.host.hosts else ""
        if len(group.on_hosts) > 1 and not hosts:
            raise UserError(f"{times.files[0]} has groups on several hosts, but {BASE} {base.name} describes one host")
        curve = Curve(tuple(_points(times.fitted)), has_floor=True)
        rows.append(_error_row(times, partial(_curve_s, curve)))
        line = {"kind": group.op, "group_size": group.size, **({"hosts": hosts} if hosts else {})}
        curves[group.op, group.size, hosts] = line | {"points": rounded(_points([*times.fitted, *times.held_out]))}
    record["host"]["collectives"] = [*curves.values()]
    return rows


def _curve_s(curve: Curve, sample: Sample) -> float:
    return curve.seconds(sample.payload_bytes)


def _points(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Return the median seconds by payload, ascending."""
    by_payload: dict[float, list[float]] = {}
    for sample in samples:
        by_payload.setdefault(sample.payload_bytes, []).append(sample.seconds)
    return rising([(payload, statistics.median(seconds)) for payload, seconds in by_payload.items()])


# Tables.


def _figure_table(hardware: Hardware, base: Hardware, measured: set[str]) -> Table:
    rows = []
    for name in (name for figures in LEVELS.values() for name in figures):
        values = [_value_text(name, machine[name]) for machine in (base, hardware)]
        rows.append((name, values[0], values[1] if name in measured else NOTHING))
    notes = [f"all other links are from {base.name}, {hardware.devices_per_node} devices per node"]
    return Table(hardware.name, ("<figure", base.name, "measured"), rows, notes)


def _value_text(name: str, value: float) -> str:
    return f"{bandwidth_text(value / 1e9).strip()} GB/s" if name.endswith("bytes_per_s") else time_text(value)


def _error_row(times: GroupTimes, seconds_of: Callable[[Sample], float]) -> tuple[str, ...]:
    fitted, held_out = (
        [abs(seconds_of(sample) / sample.seconds - 1) for sample in samples]
        for samples in (times.fitted, times.held_out)
    )
    of_held_out = percent_text(statistics.median(held_out)) if held_out else NOTHING
    of_fitted = percent_text(statistics.median(fitted)), percent_text(max(fitted))
    return (times.group.op, brief_shape(times.group.shape), str(len(fitted + held_out)), *of_fitted, of_held_out)


def _error_table(title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    notes = ["errors: |predicted / measured - 1|, median and worst over fitted sizes, median over held-out sizes"]
    return Table(title, ("<collective", "<hosts", "times", "fit error", "worst", "held out"), rows, notes)
