"""One all-to-all over the whole mesh instead of a path: who sends which box of the tensor to whom."""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from distbench.planning.states import Box, NotHandled, State, box_of


@dataclass(frozen=True)
class Transfer:
    """A box of the full tensor on its way from one flat mesh position (row-major) to another."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Exchange:
    """All transfers of a redistribution, the same on every rank.

    Args:
        transfers: by receiver, then by where the box lies in the tensor. None: the target is already local everywhere.
        source_boxes: what each flat mesh position holds before; `target_boxes`: after.
    """

    transfers: tuple[Transfer, ...]
    source_boxes: tuple[Box, ...]
    target_boxes: tuple[Box, ...]

    @cached_property
    def received(self) -> list[int]:
        """Elements that each position receives."""
        found = [0] * len(self.target_boxes)
        for transfer in self.transfers:
            found[transfer.receiver] += volume(transfer.box)
        return found

    @cached_property
    def sent(self) -> list[int]:
        """Elements that each position sends."""
        found = [0] * len(self.source_boxes)
        for transfer in self.transfers:
            found[transfer.sender] += volume(transfer.box)
        return found

    def load(self) -> tuple[int, float]:
        """(elements that the busiest position sends or receives, how often that many the fullest writes to its target).

        Its time depends on these; the second is 0 where nobody sends.
        """
        busiest = max(*self.sent, *self.received)
        return busiest, max(map(volume, self.target_boxes)) / busiest if busiest else 0.0


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def overlap(box: Box, other: Box) -> Box:
    """What two boxes share; of volume 0 where they share nothing."""
    starts = [max(a[0], b[0]) for a, b in zip(box, other, strict=True)]
    stops = [min(a[1], b[1]) for a, b in zip(box, other, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


@lru_cache(maxsize=1024)
def plan_exchange(source: State, target: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Exchange:
    """Who sends what: each rank receives its target minus its source, each element once.

    The source boxes tile the tensor, and each is held by the same number of ranks, its replicas. What a receiver lacks
    of a tile comes from one replica: the one with least to send so far, largest boxes first (Graham 1969), then the one
    that shares most outer mesh coordinates with the receiver, then the first.

    Raises:
        NotHandled: either side has a partial; adding parts up is no exchange.
    """
    if source.partials or target.partials:
        raise NotHandled("an exchange moves values and adds nothing up: neither side may have Partial")
    cells = list(product(*(range(size) for size in mesh_shape)))
    source_boxes = tuple(box_of(source, shape, mesh_shape, cell) for cell in cells)
    target_boxes = tuple(box_of(target, shape, mesh_shape, cell) for cell in cells)
    holders: dict[Box, list[int]] = defaultdict(list)
    for position, box in enumerate(source_boxes):
        if volume(box):
            holders[box].append(position)
    transfers = []
    for tile, replicas in holders.items():
        lacking = [
            (piece, receiver)
            for receiver, wanted in enumerate(target_boxes)
            if source_boxes[receiver] != tile and volume(piece := overlap(tile, wanted))
        ]
        transfers += _assigned(lacking, replicas, cells)
    transfers.sort(key=lambda transfer: (transfer.receiver, transfer.box))
    return Exchange(tuple(transfers), source_boxes, target_boxes)


def _assigned(lacking: list[tuple[Box, int]], replicas: list[int], cells: list[tuple[int, ...]]) -> list[Transfer]:
    load = dict.fromkeys(replicas, 0)
    found = []
    for box, receiver in sorted(lacking, key=lambda piece: (-volume(piece[0]), piece[1])):
        sender = min(replicas, key=lambda rank: (load[rank], -_shared_outer(cells[rank], cells[receiver]), rank))
        load[sender] += volume(box)
        found.append(Transfer(sender, receiver, box))
    return found


def _shared_outer(cell: tuple[int, ...], other: tuple[int, ...]) -> int:
    shared = 0
    while shared < len(cell) and cell[shared] == other[shared]:
        shared += 1
    return shared
