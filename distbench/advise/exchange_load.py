"""The direct plan's all-to-all: what the busiest rank sends and receives, over which mesh dims, and for how long."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from distbench.advise.question import Setting
from distbench.costmodel.lines import ALL_TO_ALL, DIRECT, Line
from distbench.planning import Exchange
from distbench.planning.direct_exchange import volume


@dataclass(frozen=True)
class Load:
    """What the busiest rank has to do; each number may be another rank's.

    Args:
        sent_bytes: that a rank sends.
        received_bytes: that a rank receives.
        crossing_bytes: for each mesh dim, what a rank sends or receives, whichever is more, to or from ranks for which
            it is the outermost mesh dim that differs: the slowest link between the two.
        written_bytes: the largest target of any rank, kept parts included.
    """

    sent_bytes: int
    received_bytes: int
    crossing_bytes: tuple[int, ...]
    written_bytes: int


def load_of(setting: Setting, exchange: Exchange) -> Load:
    """The load of one exchange."""
    cells = list(product(*(range(size) for size in setting.problem.mesh_shape)))
    # (outermost mesh dim that differs; sent, received; rank)
    elements = np.zeros((len(setting.mesh), 2, len(cells)), dtype=np.int64)
    for transfer in exchange.transfers:
        ends = zip(cells[transfer.sender], cells[transfer.receiver], strict=True)
        outermost = next(number for number, (a, b) in enumerate(ends) if a != b)
        elements[outermost, (0, 1), (transfer.sender, transfer.receiver)] += volume(transfer.box)
    loads = elements * setting.problem.itemsize
    sent, received = loads.sum(axis=0).max(axis=1).tolist()
    written = max(map(volume, exchange.target_boxes)) * setting.problem.itemsize
    return Load(sent, received, tuple(loads.max(axis=(1, 2)).tolist()), written)


def direct_line(setting: Setting) -> Line | None:
    """The profile's line for this all-to-all over the whole mesh; None where it was not measured."""
    if setting.profile is None:
        return None
    return setting.profile.line(DIRECT, "x".join(setting.mesh), setting.num_ranks)


def exchange_seconds(setting: Setting, load: Load, num_copies: int) -> tuple[float, float | None]:
    """(predicted seconds, the share by which they may be off, None without a profile) of one all-to-all with splits.

    By the profile's own line for it, over what the busiest rank sends or receives and how often that much is written,
    where there is one. Else as one all-to-all after the other over each mesh dim that it crosses: an upper estimate
    where links of different mesh dims work at the same time.

    Args:
        setting: the mesh and the cost model.
        load: what crosses which mesh dim.
        num_copies: how many of the two layouts shard a tensor dim that is not the first.
    """
    if line := direct_line(setting):
        busiest = max(load.sent_bytes, load.received_bytes)
        return line.seconds(busiest, load.written_bytes / busiest), line.expected_error
    total, off = 0.0, 0.0
    for mesh_dim, num_bytes in enumerate(load.crossing_bytes):
        if num_bytes:
            size = setting.problem.mesh_shape[mesh_dim]
            # A line is over the whole buffer, a rank's own part included, which does not travel.
            payload = num_bytes * size / (size - 1)
            seconds = setting.model.seconds(ALL_TO_ALL, mesh_dim, payload, num_copies)
            total += seconds
            off += seconds * (setting.error(ALL_TO_ALL, mesh_dim) or 0.0)
    if setting.profile is None:
        return total, None
    return total, off / total if total else 0.0
