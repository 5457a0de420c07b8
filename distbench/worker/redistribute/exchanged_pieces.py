"""How the pieces of an exchange get from rank to rank: as messages of their own on CPU, elsewhere in one all-to-all.

gloo's all-to-all takes everything out of one buffer and puts it into another, and sends to every rank, also where there
is nothing to send. A message leaves from where a piece lies in the local tensor, and arrives where it shall lie in the
result, wherever it is contiguous there. NCCL's all-to-all is a single kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distbench.planning.direct_exchange import Exchange, is_contiguous, volume
from distbench.planning.states import Box

# So that no message of the user's is taken for one of these.
TAG = 0xD15


@dataclass
class Piece:
    """A box of one part of a reduction, here or on its way here."""

    part: int
    box: Box
    tensor: torch.Tensor
    work: Any = None

    def arrived(self) -> torch.Tensor:
        """The tensor, once it is here."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Pieces:
    """What one rank sends and receives in an exchange.

    Args:
        exchange: what is exchanged.
        position: this rank's flat position on the mesh.
        peers: the position of each rank of the group.
        group: of exactly the mesh's ranks; None for the default one.
    """

    def __init__(
        self, exchange: Exchange, position: int, peers: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self._group, self._before = group, exchange.source_boxes[position]
        self._after = exchange.target_boxes[position]
        to_others = [transfer for transfer in exchange.transfers if transfer.sender == position]
        from_others = [transfer for transfer in exchange.transfers if transfer.receiver == position]
        # By rank in the group, and what two ranks exchange in the order that both know.
        self._sends = [(rank, one.box) for rank, peer in enumerate(peers) for one in to_others if one.receiver == peer]
        self._receives = [
            (rank, exchange.parts[peer], one.box)
            for rank, peer in enumerate(peers)
            for one in from_others
            if one.sender == peer
        ]
        self._rank, self._size = list(peers).index(position), len(peers)
        # Of the parts of a box, the first may arrive where their sum shall be.
        first = {box: part for _, part, box in sorted(self._receives, key=lambda one: one[1], reverse=True)}
        self._in_place = [first[box] == part and is_contiguous(box, self._after) for _, part, box in self._receives]

    def messages(self, local: torch.Tensor, output: torch.Tensor) -> tuple[list[Piece], list[Any]]:
        """(what is on its way here, some of it into `output`, what is on its way from here); returns at once.

        `local` must not be written to before the latter has ended.
        """
        aside = [box for (_, _, box), in_place in zip(self._receives, self._in_place, strict=True) if not in_place]
        landings = iter(local.new_empty(sum(map(volume, aside))).split([volume(box) for box in aside]))
        pieces = []
        for (rank, part, box), in_place in zip(self._receives, self._in_place, strict=True):
            tensor = part_of_box(output, self._after, box) if in_place else next(landings).view(shape_of(box))
            work = dist.irecv(tensor, group=self._group, tag=TAG, group_src=rank)
            pieces.append(Piece(part, box, tensor, work))
        leaving, packed = [], {}
        # Each rank begins with the rank after it, so that no rank is everybody's first.
        for rank, box in sorted(self._sends, key=lambda one: (one[0] - self._rank) % self._size):
            if box not in packed:
                packed[box] = part_of_box(local, self._before, box).contiguous()
            leaving.append(dist.isend(packed[box], group=self._group, tag=TAG, group_dst=rank))
        return pieces, leaving

    def all_to_all(self, local: torch.Tensor) -> list[Piece]:
        """What this rank receives, in one collective of the whole group."""
        flat = [part_of_box(local, self._before, box).reshape(-1) for _, box in self._sends]
        sends, receives = [0] * self._size, [0] * self._size
        for rank, box in self._sends:
            sends[rank] += volume(box)
        for rank, _, box in self._receives:
            receives[rank] += volume(box)
        buffer = torch.cat(flat) if flat else local.new_empty(0)
        arrived = local.new_empty(sum(receives))
        dist.all_to_all_single(arrived, buffer, receives, sends, self._group)
        tensors = arrived.split([volume(box) for _, _, box in self._receives])
        return [
            Piece(part, box, tensor.view(shape_of(box)))
            for (_, part, box), tensor in zip(self._receives, tensors, strict=True)
        ]


def part_of_box(local: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of `part` in a local tensor that holds `box`."""
    return local[tuple(slice(p[0] - b[0], p[1] - b[0]) for p, b in zip(part, box, strict=True))]


def shape_of(box: Box) -> tuple[int, ...]:
    """Elements along each tensor dim."""
    return tuple(stop - start for start, stop in box)
