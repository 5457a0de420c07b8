"""The direct executor: a redistribution as one exchange (two from some Partials, see `planning.direct_exchange`) in
which each rank receives only the elements that it lacks.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distbench.planning.direct_exchange import Exchange, as_boxes, is_contiguous, overlap, plan_direct, volume
from distbench.planning.placement_states import Box, State, parse_state
from distbench.spec.devices import is_accelerator
from distbench.spec.errors import UserError

# Keeps these messages apart from the user's.
TAG = 0xD15

# One rank's part of a step: a generator that stops while its communication is in progress, and returns the result.
Transit = Generator[None, None, torch.Tensor]


def finished(transit: Transit) -> torch.Tensor:
    """Run a transit to its end; return its result."""
    while True:
        try:
            next(transit)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


@dataclass
class Piece:
    """A box of one part of a reduction, on this rank or in transfer to it."""

    part: int
    box: Box
    tensor: torch.Tensor
    work: Any = None

    def arrived(self) -> torch.Tensor:
        """Return the tensor after its transfer has ended."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def part_of_box(local: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return the view of `part` in a local tensor that holds `box`."""
    return local[tuple(slice(p[0] - b[0], p[1] - b[0]) for p, b in zip(part, box, strict=True))]


def shape_of(box: Box) -> tuple[int, ...]:
    """Number of elements along each tensor dim."""
    return tuple(stop - start for start, stop in box)


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
    """A redistribution on one rank, planned once and run repeatedly; NotHandled if the target has a partial.

    `source` and `target` are layouts in torch's notation, such as "S(0)R" (S(tensor dim), R or P(sum) per mesh dim).
    `ranks` is the global rank at each mesh coordinate, a tensor of the mesh's shape (`DeviceMesh.mesh`). The group must
    consist of exactly these ranks; None is the default group. `seconds_of` must predict equal times on all ranks; only
    sources with partials need predictions.
    """

    def __init__(
        self,
        source: State | str,
        target: State | str,
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
        before, after = (
            parse_state(layout, len(shape)) if isinstance(layout, str) else layout for layout in (source, target)
        )
        self.stages = plan_direct(before, after, tuple(shape), tuple(ranks.shape), seconds_of)
        # Splits are ordered by rank in the group, boxes by position on the mesh, and a mesh may order its ranks
        # differently.
        peers = [flat.index(rank) for rank in members]
        self._runs = [ExchangeOnRank(exchange, self.position, peers, group) for _, exchange in self.stages]

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchanges, in order."""
        return [exchange for _, exchange in self.stages]

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives."""
        return sum(exchange.received[self.position] for exchange in self.exchanges)

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard under the target layout; every rank of the group must call it.

        The result is `local` itself if nothing changes on any rank. Raises ValueError if `local` does not have the
        source layout's shape on this rank, and UserError if it holds integer parts of an average.
        """
        for run in self._runs:
            local = finished(run(local))
        return local


class ExchangeOnRank:
    """One exchange on one rank, at this flat position on the mesh; `peers` has an entry per rank of the group.

    On CPU its pieces are separate messages, elsewhere one all-to-all, a single kernel of NCCL. gloo's all-to-all copies
    through two buffers, and sends to every rank, even if there is nothing to send. Messages leave from the local tensor
    and arrive in the result, wherever the piece is contiguous there.
    """

    def __init__(
        self, exchange: Exchange, position: int, peers: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self._exchange, self._group, self._part = exchange, group, exchange.parts[position]
        self._before, self._after = as_boxes(np.stack([exchange.before[position], exchange.after[position]]))
        self._kept = overlap(self._before, self._after)
        to_others = [transfer for transfer in exchange.transfers if transfer.sender == position]
        from_others = [transfer for transfer in exchange.transfers if transfer.receiver == position]
        # The pieces are ordered by rank in the group. Both ranks of a transfer compute the same order of its pieces.
        self._sends = [
            (rank, transfer.box)
            for rank, peer in enumerate(peers)
            for transfer in to_others
            if transfer.receiver == peer
        ]
        self._receives = [
            (rank, exchange.parts[peer], transfer.box)
            for rank, peer in enumerate(peers)
            for transfer in from_others
            if transfer.sender == peer
        ]
        self._rank, self._size = list(peers).index(position), len(peers)
        # The first part of a box may arrive in the place of the sum of the parts.
        first = {box: part for _, part, box in sorted(self._receives, key=lambda transfer: transfer[1], reverse=True)}
        self._in_place = [first[box] == part and is_contiguous(box, self._after) for _, part, box in self._receives]

    def __call__(self, local: torch.Tensor) -> Transit:
        """Return this rank's part of the exchange."""
        if tuple(local.shape) != shape_of(self._before):
            raise ValueError(
                f"the local tensor has shape {tuple(local.shape)}, but the source layout requires "
                f"{shape_of(self._before)}"
            )
        exchange = self._exchange
        if exchange.changes_nothing:
            return local
        if exchange.num_averaged > 1 and not (local.is_floating_point() or local.is_complex()):
            raise UserError(f"parts of an average of {local.dtype} cannot be combined; use a floating-point dtype")
        output = local.new_empty(shape_of(self._after))
        pieces: list[Piece] = []
        leaving: list[Any] = []
        if exchange.transfers and is_accelerator(local.device.type):
            pieces = self._all_to_all(local)
        elif exchange.transfers:
            pieces, leaving = self._messages(local, output)
        yield
        if volume(self._kept):
            # This is the first piece of its part. It is local, and is copied while the other pieces are in transfer.
            pieces.insert(0, Piece(self._part, self._kept, part_of_box(local, self._before, self._kept)))
        parts_of: dict[Box, list[Piece]] = defaultdict(list)
        # The parts are added in order, so that replicas of a sum are bitwise equal.
        for piece in sorted(pieces, key=lambda piece: piece.part):
            parts_of[piece.box].append(piece)
        for box, parts in parts_of.items():
            self._put_together(parts, part_of_box(output, self._after, box))
        for work in leaving:
            work.wait()
        return output.div_(exchange.num_averaged) if exchange.num_averaged > 1 else output

    def _messages(self, local: torch.Tensor, output: torch.Tensor) -> tuple[list[Piece], list[Any]]:
        """Return (pieces in transfer to this rank, some into `output`, and works that send from here) at once.

        `local` must not be written to while these works run.
        """
        aside = [box for (_, _, box), in_place in zip(self._receives, self._in_place, strict=True) if not in_place]
        landings = iter(local.new_empty(sum(map(volume, aside))).split([volume(box) for box in aside]))
        pieces = []
        for (rank, part, box), in_place in zip(self._receives, self._in_place, strict=True):
            tensor = part_of_box(output, self._after, box) if in_place else next(landings).view(shape_of(box))
            work = dist.irecv(tensor, group=self._group, tag=TAG, group_src=rank)
            pieces.append(Piece(part, box, tensor, work))
        leaving, packed = [], {}
        # Each rank begins with the rank after it, so that all begin with different ranks.
        for rank, box in sorted(self._sends, key=lambda send: (send[0] - self._rank) % self._size):
            if box not in packed:
                packed[box] = part_of_box(local, self._before, box).contiguous()
            leaving.append(dist.isend(packed[box], group=self._group, tag=TAG, group_dst=rank))
        return pieces, leaving

    def _all_to_all(self, local: torch.Tensor) -> list[Piece]:
        """Return the pieces that this rank receives, in one collective of the whole group."""
        flat = [part_of_box(local, self._before, box).reshape(-1) for _, box in self._sends]
        sends, receives = [0] * self._size, [0] * self._size
        for rank, box in self._sends:
            sends[rank] += volume(box)
        for rank, _, box in self._receives:
            receives[rank] += volume(box)
        buffer = torch.cat(flat) if flat else local.new_empty(0)
        arrived = local.new_empty(sum(receives))
        work = dist.all_to_all_single(arrived, buffer, receives, sends, self._group, async_op=True)
        tensors = arrived.split([volume(box) for _, _, box in self._receives])
        return [
            Piece(part, box, tensor.view(shape_of(box)), work)
            for (_, part, box), tensor in zip(self._receives, tensors, strict=True)
        ]

    def _put_together(self, parts: list[Piece], where: torch.Tensor) -> None:
        first, *others = parts
        so_far = first.arrived()
        for piece in others:
            REDUCTIONS[self._exchange.reduce_op](so_far, piece.arrived(), out=where)
            so_far = where
        if not others and so_far.data_ptr() != where.data_ptr():
            where.copy_(so_far)
