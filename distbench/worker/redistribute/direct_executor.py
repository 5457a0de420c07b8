"""The direct executor: a redistribution as one all-to-all with splits, each rank receiving only what it lacks."""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distbench.planning.direct_exchange import Exchange, overlap, plan_exchange, volume
from distbench.planning.states import Box, State


class DirectRedistribution:
    """One pair on one rank, planned once and run as often as wanted; NotHandled where a side has a partial.

    `ranks` is the global rank at each mesh coordinate, a tensor of the mesh's shape (`DeviceMesh.mesh`). The group must
    consist of exactly these ranks, this one among them; None is the default group.
    """

    def __init__(
        self,
        source: State,
        target: State,
        shape: Sequence[int],
        ranks: torch.Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        flat = [int(rank) for rank in ranks.flatten()]
        if sorted(members) != sorted(flat) or dist.get_rank() not in flat:
            raise ValueError("the direct redistribution needs a process group of exactly the mesh's ranks")
        self.group, self.position = group, flat.index(dist.get_rank())
        self.exchange = plan_exchange(source, target, tuple(shape), tuple(ranks.shape))
        # Splits go by rank in the group, boxes by position on the mesh: a mesh may order its ranks differently.
        peers = [flat.index(rank) for rank in members]
        self._sends, self._receives = _pieces(self.exchange, self.position, peers)
        self._send_splits = [sum(map(volume, boxes)) for boxes in self._sends]
        self._receive_splits = [sum(map(volume, boxes)) for boxes in self._receives]

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives."""
        return self.exchange.received[self.position]

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's shard under the target layout; every rank of the group must call it.

        That is `local` itself where nothing changes on any rank; ValueError where it has another shape than the source
        layout gives this rank.
        """
        before, after = self.exchange.source_boxes[self.position], self.exchange.target_boxes[self.position]
        if tuple(local.shape) != _shape_of(before):
            raise ValueError(f"the local tensor is {tuple(local.shape)}, the source layout says {_shape_of(before)}")
        if self.exchange.source_boxes == self.exchange.target_boxes:
            return local
        output = local.new_empty(_shape_of(after))
        kept = overlap(before, after)
        if volume(kept):
            _part(output, after, kept).copy_(_part(local, before, kept))
        if self.exchange.transfers:
            self._exchange(local, before, output, after)
        return output

    def _exchange(self, local: torch.Tensor, before: Box, output: torch.Tensor, after: Box) -> None:
        flat = [_part(local, before, box).reshape(-1) for boxes in self._sends for box in boxes]
        buffer = torch.cat(flat) if flat else local.new_empty(0)
        arrived = local.new_empty(sum(self._receive_splits))
        dist.all_to_all_single(arrived, buffer, self._receive_splits, self._send_splits, self.group)
        received = list(itertools.chain.from_iterable(self._receives))
        for box, piece in zip(received, arrived.split(list(map(volume, received))), strict=True):
            _part(output, after, box).copy_(piece.view(_shape_of(box)))


def _pieces(exchange: Exchange, position: int, peers: list[int]) -> tuple[list[list[Box]], list[list[Box]]]:
    """The boxes a position sends to, and receives from, each peer, in the order that both sides know."""
    sends: dict[int, list[Box]] = {peer: [] for peer in peers}
    receives: dict[int, list[Box]] = {peer: [] for peer in peers}
    for transfer in exchange.transfers:
        if transfer.sender == position:
            sends[transfer.receiver].append(transfer.box)
        if transfer.receiver == position:
            receives[transfer.sender].append(transfer.box)
    return [sends[peer] for peer in peers], [receives[peer] for peer in peers]


def _part(local: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of `part` in a local tensor that holds `box`."""
    return local[tuple(slice(p[0] - b[0], p[1] - b[0]) for p, b in zip(part, box, strict=True))]


def _shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
