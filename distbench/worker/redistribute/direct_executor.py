"""The direct executor: a redistribution as one all-to-all with splits, each rank receiving only what it lacks.

From Partial it is one, or two: see `planning.direct_exchange`. Gradients of what it returns are moved by another one,
from the target back to the source with each Partial a replica, as DTensor has it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from distbench.planning.direct_exchange import Exchange, overlap, plan_direct, volume
from distbench.planning.states import Box, State

REDUCTIONS: dict[str | None, Callable[..., object]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class DirectRedistribution:
    """One pair on one rank, planned once and run as often as wanted; NotHandled where the target has a partial.

    `ranks` is the global rank at each mesh coordinate, a tensor of the mesh's shape (`DeviceMesh.mesh`). The group must
    consist of exactly these ranks, this one among them; None is the default group. `seconds_of` predicts an exchange,
    the same on every rank; it matters only to a source with partials.
    """

    def __init__(
        self,
        source: State,
        target: State,
        shape: Sequence[int],
        ranks: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        seconds_of: Callable[[Exchange], float] | None = None,
    ) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        flat = [int(rank) for rank in ranks.flatten()]
        if sorted(members) != sorted(flat) or dist.get_rank() not in flat:
            raise ValueError("the direct redistribution needs a process group of exactly the mesh's ranks")
        self.position = flat.index(dist.get_rank())
        self.stages = plan_direct(source, target, tuple(shape), tuple(ranks.shape), seconds_of)
        # Splits go by rank in the group, boxes by position on the mesh: a mesh may order its ranks differently.
        peers = [flat.index(rank) for rank in members]
        self._runs = [_Run(exchange, self.position, peers, group) for _, exchange in self.stages]

    @property
    def exchanges(self) -> list[Exchange]:
        """What is exchanged, in order."""
        return [exchange for _, exchange in self.stages]

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives."""
        return sum(exchange.received[self.position] for exchange in self.exchanges)

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's shard under the target layout; every rank of the group must call it.

        That is `local` itself where nothing changes on any rank; ValueError where it has another shape than the source
        layout gives this rank, or holds parts of an average and integers.
        """
        for run in self._runs:
            local = run(local)
        return local


class _Run:
    """One exchange on one rank."""

    def __init__(self, exchange: Exchange, position: int, peers: list[int], group: dist.ProcessGroup | None) -> None:
        self.exchange, self.group, self.part = exchange, group, exchange.parts[position]
        self.before, self.after = exchange.source_boxes[position], exchange.target_boxes[position]
        sends, receives = _pieces(exchange, position, peers)
        self._send_splits = [sum(map(volume, boxes)) for boxes in sends]
        self._receive_splits = [sum(map(volume, boxes)) for boxes in receives]
        self._sent = [box for boxes in sends for box in boxes]
        self._received = [
            (exchange.parts[peer], box) for peer, boxes in zip(peers, receives, strict=True) for box in boxes
        ]

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if tuple(local.shape) != _shape_of(self.before):
            raise ValueError(
                f"the local tensor is {tuple(local.shape)}, the source layout says {_shape_of(self.before)}"
            )
        if self.exchange.changes_nothing:
            return local
        if self.exchange.num_averaged > 1 and not local.is_floating_point():
            raise ValueError(f"parts of an average of {local.dtype} cannot be put together; use a floating-point dtype")
        pieces = []
        kept = overlap(self.before, self.after)
        if volume(kept):
            pieces.append((self.part, kept, _part(local, self.before, kept)))
        if self.exchange.transfers:
            pieces += self._arrived(local)
        output = local.new_empty(_shape_of(self.after))
        # In the order of the parts, so that ranks that hold replicas of a sum hold the same bits.
        for part, box, piece in sorted(pieces, key=lambda entry: entry[0]):
            where = _part(output, self.after, box)
            if part == 0:
                where.copy_(piece)
            else:
                REDUCTIONS[self.exchange.reduce_op](where, piece, out=where)
        return output.div_(self.exchange.num_averaged) if self.exchange.num_averaged > 1 else output

    def _arrived(self, local: torch.Tensor) -> list[tuple[int, Box, torch.Tensor]]:
        flat = [_part(local, self.before, box).reshape(-1) for box in self._sent]
        buffer = torch.cat(flat) if flat else local.new_empty(0)
        arrived = local.new_empty(sum(self._receive_splits))
        dist.all_to_all_single(arrived, buffer, self._receive_splits, self._send_splits, self.group)
        pieces = arrived.split([volume(box) for _, box in self._received])
        return [
            (part, box, piece.view(_shape_of(box))) for (part, box), piece in zip(self._received, pieces, strict=True)
        ]


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
