"""The exchange of the direct executor, as data: complete, minimal, balanced, and nothing where nothing is lacking."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.random_states import random_state
from distbench.planning.direct_exchange import Exchange, is_contiguous, plan_direct, plan_exchange
from distbench.planning.placement_states import Box, NotHandled, State, parse_state


def elements(state: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> list[set[int]]:
    """Offsets that each flat mesh position holds, by cutting an index array chunk by chunk."""
    held = []
    for cell in np.ndindex(*mesh_shape):
        part = np.arange(int(np.prod(shape))).reshape(shape)
        for tensor_dim, order in enumerate(state.orders):
            for mesh_dim in order:
                length = part.shape[tensor_dim]
                step = -(-length // mesh_shape[mesh_dim])
                rows = [i for i in range(length) if step and i // step == cell[mesh_dim]]
                part = part.take(rows, axis=tensor_dim)
        held.append(set(part.ravel().tolist()))
    return held


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 4), (3, 2), (2, 2, 2)])
@pytest.mark.long
def test_each_rank_receives_exactly_what_it_lacks(mesh_shape: tuple[int, ...]) -> None:
    rng = random.Random(str(mesh_shape))
    for _ in range(150):
        tensor_ndim = rng.randrange(1, 4)
        shape = tuple(rng.randrange(1, 8) for _ in range(tensor_ndim))
        source, target = (random_state(rng, len(mesh_shape), tensor_ndim) for _ in range(2))
        exchange = plan_exchange(source, target, shape, mesh_shape)
        before, after = elements(source, shape, mesh_shape), elements(target, shape, mesh_shape)
        offsets = np.arange(int(np.prod(shape))).reshape(shape)
        arrived: list[list[int]] = [[] for _ in before]
        for transfer in exchange.transfers:
            moved = offsets[tuple(slice(*interval) for interval in transfer.box)].ravel().tolist()
            assert set(moved) <= before[transfer.sender]
            arrived[transfer.receiver] += moved
        for position, got in enumerate(arrived):
            assert sorted(got) == sorted(after[position] - before[position])
            assert exchange.received[position] == len(after[position] - before[position])


def test_no_transfers_where_the_target_is_local() -> None:
    for source, target in (("RR", "S(0)S(1)"), ("S(0)R", "S(0)S(0)"), ("S(0)S(1)", "S(0)S(1)"), ("S(1)R", "S(1)S(0)")):
        exchange = plan_exchange(parse_state(source, 2), parse_state(target, 2), (7, 5), (2, 4))
        assert exchange.transfers == ()


def test_replicas_share_the_sending() -> None:
    # Each half is held by 4 ranks and lacked by 4 others: every rank sends one half, to its own counterpart.
    exchange = plan_exchange(parse_state("S(0)R", 1), parse_state("RR", 1), (8,), (2, 4))
    assert [exchange.sent[position] for position in range(8)] == [4] * 8
    assert {(transfer.sender, transfer.receiver) for transfer in exchange.transfers} >= {(0, 4), (4, 0)}


def test_known_case_moves_one_shard_of_64_where_torch_moves_a_quarter() -> None:
    # FINDINGS: 4x4x4, S0S0S0 -> S1S1S1 receives 0.015 of the tensor: 63/64 of a 1/64 shard.
    exchange = plan_exchange(parse_state("S(0)S(0)S(0)", 2), parse_state("S(1)S(1)S(1)", 2), (64, 64), (4, 4, 4))
    assert {exchange.received[position] for position in range(64)} == {63}


def test_a_piece_comes_from_the_replica_with_least_to_send_then_from_the_nearest_one() -> None:
    def moved(source: str, target: str, length: int, mesh_shape: tuple[int, ...]) -> list[tuple[int, int, Box]]:
        states = (parse_state(text, 1) for text in (source, target))
        transfers = plan_exchange(*states, (length,), mesh_shape).transfers
        return [(one.sender, one.receiver, one.box) for one in transfers]

    # Each half has 4 replicas and 4 receivers: every rank sends once, to its own counterpart.
    assert moved("S(0)RR", "RRR", 8, (2, 2, 2)) == [
        ((rank + 4) % 8, rank, ((0, 4),) if rank >= 4 else ((4, 8),)) for rank in range(8)
    ]
    # Ranks 0 and 2 hold (0, 2), ranks 1 and 3 (2, 3). Ranks 1 and 3 lack (0, 2), rank 2 wants (2, 3) and holds none of
    # it: of ranks 1 and 3, which have nothing else to send, rank 3 shares the outer coordinate with it.
    assert moved("RS(0)", "S(0)R", 3, (2, 2)) == [(0, 1, ((0, 2),)), (3, 2, ((2, 3),))]


def test_a_target_with_partial_and_reductions_that_do_not_commute_are_refused() -> None:
    for source, target in (("R", "P(sum)"), ("P(sum)", "P(sum)")):
        with pytest.raises(NotHandled, match="the target must not have Partial"):
            plan_exchange(parse_state(source, 1), parse_state(target, 1), (4,), (2,))
    with pytest.raises(NotHandled, match="but max and sum do not commute"):
        plan_exchange(parse_state("P(sum)P(max)", 1), parse_state("RR", 1), (4,), (2, 2))


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4), (3, 2), (2, 2, 2)])
def test_each_rank_receives_every_part_of_its_target_but_its_own(mesh_shape: tuple[int, ...]) -> None:
    rng = random.Random(str(mesh_shape))
    cells = list(np.ndindex(*mesh_shape))
    for _ in range(100):
        tensor_ndim = rng.randrange(1, 4)
        shape = tuple(rng.randrange(1, 8) for _ in range(tensor_ndim))
        source = random_state(rng, len(mesh_shape), tensor_ndim, ["sum"])
        target = random_state(rng, len(mesh_shape), tensor_ndim)
        exchange = plan_exchange(source, target, shape, mesh_shape)
        before, after = elements(source, shape, mesh_shape), elements(target, shape, mesh_shape)
        # An element of a part is known by the coordinates of those who hold that part, and its offset.
        parts = [tuple(cell[mesh_dim] for mesh_dim, _ in source.partials) for cell in cells]
        offsets = np.arange(int(np.prod(shape))).reshape(shape)
        arrived: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in cells]
        for transfer in exchange.transfers:
            moved = offsets[tuple(slice(*interval) for interval in transfer.box)].ravel().tolist()
            assert set(moved) <= before[transfer.sender]
            arrived[transfer.receiver] += [(parts[transfer.sender], offset) for offset in moved]
        for position, got in enumerate(arrived):
            wanted = {(part, offset) for part in set(parts) for offset in after[position]}
            assert sorted(got) == sorted(wanted - {(parts[position], offset) for offset in before[position]})


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        (((0, 2), (0, 4)), True),
        (((1, 3), (0, 4)), True),
        (((1, 2), (1, 3)), True),
        (((0, 2), (1, 3)), False),
        (((0, 4), (0, 4)), True),
    ],
)
def test_what_lies_in_one_piece(part: Box, whole: bool) -> None:
    lies = np.zeros((4, 4), dtype=bool)
    lies[tuple(slice(*interval) for interval in part)] = True
    offsets = np.flatnonzero(lies)
    assert (offsets[-1] - offsets[0] + 1 == len(offsets)) == whole
    # The box itself begins somewhere in a larger tensor.
    moved = tuple((start + 10, stop + 10) for start, stop in part)
    assert is_contiguous(moved, ((10, 14), (10, 14))) == whole


def test_what_is_copied_or_added() -> None:
    def load(source: str, target: str) -> tuple[int, float, int]:
        return plan_exchange(parse_state(source, 2), parse_state(target, 2), (8, 8), (4,)).load()

    # Rows are sent as they lie and arrive where they shall be; a rank copies its own 16 elements, of 48 received.
    assert load("S(0)", "R") == (48, pytest.approx(16 / 48), 3)
    # Columns are put in their places.
    assert load("S(1)", "R") == (48, pytest.approx(64 / 48), 3)
    # 3 blocks of 4 are packed, or unpacked, and one kept; the other side is one piece.
    assert load("S(0)", "S(1)") == (12, pytest.approx(16 / 12), 3)
    # Of each of 4 parts 3 are added.
    assert load("P(sum)", "S(0)") == (48, pytest.approx(1.0), 3)
    assert load("R", "S(0)") == (0, 0.0, 0)


def test_one_exchange_or_a_reduce_scatter_first_whichever_is_faster() -> None:
    def stages(target: str, seconds_of: Callable[[Exchange], float] | None = None) -> list[str]:
        plan = plan_direct(parse_state("P(sum)R", 1), parse_state(target, 1), (64,), (4, 2), seconds_of)
        return [str(state) for state, _ in plan]

    # To a shard of each rank all goes at once; a replica of everything would be received from 4 ranks each.
    assert stages("S(0)S(0)") == ["S(0)S(0)"]
    # Of 64 elements 48 and 48 if replicas of a part stay replicas, 24 and 56 if each rank sums a share of its own.
    assert stages("RR") == ["S(0)S(0)", "RR"]
    assert stages("RR", lambda exchange: 1.0) == ["RR"]
