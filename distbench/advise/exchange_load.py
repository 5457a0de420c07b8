"""The direct plan's all-to-all: what the busiest rank sends and receives, over which mesh dims, and for how long."""

from collections import Counter
from dataclasses import dataclass
from itertools import product

from distbench.advise.question import Setting, num_ranks
from distbench.costmodel.lines import Line
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
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    crossing: list[Counter[tuple[str, int]]] = [Counter() for _ in setting.mesh]
    for transfer in exchange.transfers:
        num_bytes = volume(transfer.box) * setting.problem.itemsize
        sent[transfer.sender] += num_bytes
        received[transfer.receiver] += num_bytes
        ends = zip(cells[transfer.sender], cells[transfer.receiver], strict=True)
        outermost = next(number for number, (a, b) in enumerate(ends) if a != b)
        crossing[outermost]["out", transfer.sender] += num_bytes
        crossing[outermost]["in", transfer.receiver] += num_bytes
    written = max(map(volume, exchange.target_boxes)) * setting.problem.itemsize
    return Load(_most(sent), _most(received), tuple(_most(counts) for counts in crossing), written)


def _most(counts: "Counter[int] | Counter[tuple[str, int]]") -> int:
    return max(counts.values(), default=0)


def direct_line(setting: Setting) -> Line | None:
    """The profile's line for this all-to-all over the whole mesh; None where it was not measured."""
    if setting.profile is None:
        return None
    return setting.profile.line("direct", "x".join(setting.mesh), num_ranks(setting))


def exchange_seconds(setting: Setting, load: Load, num_copies: int) -> tuple[float, float | None]:
    """(predicted seconds, the share by which they may be off, None without a profile) of one all-to-all with splits.

    By the profile's own line for it, over what the busiest rank sends or receives and how often that much is written,
    where there is one. Else as one all-to-all after the other over each mesh dim that it crosses: an upper estimate
    where links of different mesh dims work at the same time.

    Args:
        setting: the mesh and the cost model.
        load: what crosses which mesh dim.
        num_copies: how many of the two layouts cut a tensor dim that is not the first.
    """
    if line := direct_line(setting):
        busiest = max(load.sent_bytes, load.received_bytes)
        return line.seconds(busiest, load.written_bytes / busiest), line.expected_error  # type: ignore[arg-type]
    parts = []
    for mesh_dim, num_bytes in enumerate(load.crossing_bytes):
        if num_bytes:
            size = setting.problem.mesh_shape[mesh_dim]
            # A line is over the whole buffer, a rank's own part included, which does not travel.
            payload = num_bytes * size / (size - 1)
            seconds = setting.model.seconds("all_to_all", mesh_dim, payload, num_copies)
            parts.append((seconds, setting.error("all_to_all", mesh_dim)))
    total = sum(seconds for seconds, _ in parts)
    if setting.profile is None:
        return total, None
    return total, sum(seconds * (error or 0.0) for seconds, error in parts) / total if total else 0.0
