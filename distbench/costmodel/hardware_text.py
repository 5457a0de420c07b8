"""A measured hardware file as tables."""

from typing import NamedTuple

from distbench.render.blocks import Table, table_of
from distbench.render.terminal import text_of
from distbench.render.units import NOTHING, size_text, time_text
from distbench.simulate.hardware.hardware_file import Hardware
from distbench.simulate.hardware.host_figures import Curve, HostFigures

CALLED = {
    "matmul_f32": "matmul, f32",
    "matmul_bf16": "matmul, bf16",
    "memory": "elementwise, f32",
    "attention": "attention, f32",
    "attention_backward": "attention's backward, f32",
}
HOST = {
    "operator_s": "an operator, its module and its autograd node",
    "fsdp_s": "a collective of FSDP2, its hooks and copies",
    "redistribution_s": "a collective of DTensor, its dispatch",
    "listed_s": "a tensor of the optimizer's lists",
}


class _Row(NamedTuple):
    name: str
    curve: Curve
    is_rate_of_operations: bool


def hardware_text(hardware: Hardware) -> str:
    """What was measured, as text."""
    assert hardware.host is not None
    return text_of([_curves(hardware, hardware.host), _host(hardware.host)])


def _curves(hardware: Hardware, host: HostFigures) -> Table:
    rows = [_Row(CALLED[name], curve, name != "memory") for name, curve in host.operators.items()]
    # On one host by the group's size, on several by how many of its ranks each of them has.
    collectives = sorted((host.by_shape or host.collectives).items())
    rows += [_Row(f"{kind} in groups of {group}", curve, False) for (kind, group), curve in collectives]
    columns = (
        ("<measured", lambda row: row.name),
        ("smallest", lambda row: _amount(row, 0)),
        ("takes", lambda row: time_text(row.curve.points[0][1])),
        ("largest", lambda row: _amount(row, -1)),
        ("takes", lambda row: time_text(row.curve.points[-1][1])),
        ("best rate", _rate),
    )
    notes = [f"each on all {host.num_ranks} ranks at once, the slowest rank's time"]
    return table_of(f"{hardware.name}: {hardware.summary}", columns, rows, notes, [len(CALLED)])


def _amount(row: _Row, place: int) -> str:
    amount = row.curve.points[place][0]
    return f"{amount / 1e6:,.1f} MFLOP" if row.is_rate_of_operations else size_text(int(amount))


def _rate(row: _Row) -> str:
    best = max(amount / seconds for amount, seconds in row.curve.points)
    return f"{best / 1e9:,.1f} {'GFLOP/s' if row.is_rate_of_operations else 'GB/s'}"


def _host(host: HostFigures) -> Table:
    rows = [(said, time_text(host[name]) if host[name] else NOTHING) for name, said in HOST.items()]
    factor = f"{host['operator_factor']:.2f}"
    notes = [f"in whole steps operators take {factor} times as long as alone: the file's last factor"]
    return Table("the host's own time", ("<of", "time"), rows, notes)
