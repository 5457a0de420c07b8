"""The direct executor: a redistribution as one exchange (two from some Partials, see `planning.direct_exchange`) in
which each rank receives only the elements that it lacks.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
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


# A tensor in transfer to this rank, None if it arrives in its place in the result; the transfer, None if it is here.
Piece = tuple[torch.Tensor | None, Any]
Place = tuple[slice, ...]


def place_in(box: Box, part: Box) -> Place:
    """Return the index of `part` in a local tensor that holds `box`."""
    return tuple(slice(p[0] - b[0], p[1] - b[0]) for p, b in zip(part, box, strict=True))


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

    All that depends on the exchange alone is computed once, because ranks that share a CPU wait for each other's Python
    code.
    """

    def __init__(
        self, exchange: Exchange, position: int, peers: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self._exchange, self._group = exchange, group
        self._changes_nothing = exchange.changes_nothing
        before, after = as_boxes(np.stack([exchange.before[position], exchange.after[position]]))
        self._source_shape, self._target_shape = shape_of(before), shape_of(after)
        to_others = [transfer for transfer in exchange.transfers if transfer.sender == position]
        from_others = [transfer for transfer in exchange.transfers if transfer.receiver == position]
        # The pieces are ordered by rank in the group. Both ranks of a transfer compute the same order of its pieces.
        sends = [
            (rank, transfer.box)
            for rank, peer in enumerate(peers)
            for transfer in to_others
            if transfer.receiver == peer
        ]
        receives = [
            (rank, exchange.parts[peer], transfer.box)
            for rank, peer in enumerate(peers)
            for transfer in from_others
            if transfer.sender == peer
        ]
        own_rank, self._size = list(peers).index(position), len(peers)
        self._sends = [(rank, place_in(before, box)) for rank, box in sends]
        # Each rank begins with the rank after it, so that all begin with different ranks.
        by_distance = sorted(sends, key=lambda send: (send[0] - own_rank) % self._size)
        self._messages_out = [(rank, box, place_in(before, box)) for rank, box in by_distance]
        # The first part of a box may arrive in the place of the sum of the parts.
        first = {box: part for _, part, box in sorted(receives, key=lambda transfer: transfer[1], reverse=True)}
        self._receives = [(rank, shape_of(box), volume(box)) for rank, _, box in receives]
        self._in_place = [
            place_in(after, box) if first[box] == part and is_contiguous(box, after) else None
            for _, part, box in receives
        ]
        self._aside = [
            volume(box) for (_, _, box), place in zip(receives, self._in_place, strict=True) if place is None
        ]
        kept = overlap(before, after)
        pieces = [(part, box) for _, part, box in receives]
        self._kept: Place | None = None
        if volume(kept):
            # This is the first piece of its part. It is local, and is copied while the other pieces are in transfer.
            self._kept = place_in(before, kept)
            pieces.insert(0, (exchange.parts[position], kept))
        # The parts of a box are added in order, so that replicas of a sum are bitwise equal.
        pieces_of: dict[Box, list[int]] = defaultdict(list)
        for number in sorted(range(len(pieces)), key=lambda number: pieces[number][0]):
            pieces_of[pieces[number][1]].append(number)
        self._results = [(place_in(after, box), numbers) for box, numbers in pieces_of.items()]

    def __call__(self, local: torch.Tensor) -> Transit:
        """Return this rank's part of the exchange."""
        if local.shape != self._source_shape:
            raise ValueError(
                f"the local tensor has shape {tuple(local.shape)}, but the source layout requires {self._source_shape}"
            )
        if self._changes_nothing:
            return local
        exchange = self._exchange
        if exchange.num_averaged > 1 and not (local.is_floating_point() or local.is_complex()):
            raise UserError(f"parts of an average of {local.dtype} cannot be combined; use a floating-point dtype")
        output = local.new_empty(self._target_shape)
        pieces: list[Piece] = []
        leaving: list[Any] = []
        if exchange.transfers and is_accelerator(local.device.type):
            pieces = self._all_to_all(local)
        elif exchange.transfers:
            pieces, leaving = self._messages(local, output)
        yield
        if self._kept is not None:
            pieces.insert(0, (local[self._kept], None))
        for place, numbers in self._results:
            self._put_together([pieces[number] for number in numbers], output, place)
        for work in leaving:
            work.wait()
        return output.div_(exchange.num_averaged) if exchange.num_averaged > 1 else output

    def _messages(self, local: torch.Tensor, output: torch.Tensor) -> tuple[list[Piece], list[Any]]:
        """Return (pieces in transfer to this rank, works that send from here) at once.

        `local` must not be written to while these works run. `irecv` and `isend` would call the same methods of the
        group, after checks that take several times as long.
        """
        group: Any = self._group or dist.group.WORLD
        landings = iter(local.new_empty(sum(self._aside)).split(self._aside)) if self._aside else iter(())
        pieces: list[Piece] = []
        for (rank, shape, _), place in zip(self._receives, self._in_place, strict=True):
            tensor = next(landings).view(shape) if place is None else output[place]
            work = group.recv([_real(tensor)], rank, TAG)
            pieces.append((tensor if place is None else None, work))
        leaving, packed = [], {}
        for rank, box, place in self._messages_out:
            if box not in packed:
                packed[box] = _real(local[place].contiguous())
            leaving.append(group.send([packed[box]], rank, TAG))
        return pieces, leaving

    def _all_to_all(self, local: torch.Tensor) -> list[Piece]:
        """Return the pieces that this rank receives, in one collective of the whole group."""
        flat = [local[place].reshape(-1) for _, place in self._sends]
        sends, receives = [0] * self._size, [0] * self._size
        for (rank, _), part in zip(self._sends, flat, strict=True):
            sends[rank] += part.numel()
        for rank, _, numel in self._receives:
            receives[rank] += numel
        buffer = torch.cat(flat) if flat else local.new_empty(0)
        arrived = local.new_empty(sum(receives))
        work = dist.all_to_all_single(arrived, buffer, receives, sends, self._group, async_op=True)
        tensors = arrived.split([numel for _, _, numel in self._receives])
        return [(tensor.view(shape), work) for (_, shape, _), tensor in zip(self._receives, tensors, strict=True)]

    def _put_together(self, pieces: Sequence[Piece], output: torch.Tensor, place: Place) -> None:
        (first, first_work), *others = pieces
        if first_work is not None:
            first_work.wait()
        if first is None and not others:
            return
        result = output[place]
        so_far = result if first is None else first
        if not others:
            result.copy_(so_far)
        for tensor, work in others:
            if work is not None:
                work.wait()
            REDUCTIONS[self._exchange.reduce_op](so_far, result if tensor is None else tensor, out=result)
            so_far = result


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as messages move it."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
