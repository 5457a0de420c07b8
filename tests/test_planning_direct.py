"""The exchange of the direct executor, as data: complete, minimal, balanced, and nothing where nothing is lacking."""

import random

import numpy as np
import pytest

from benchmarks.random_states import random_state
from distbench.planning import NotHandled, State, parse_state
from distbench.planning.direct_exchange import plan_exchange


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


def test_partial_is_refused() -> None:
    with pytest.raises(NotHandled, match="Partial"):
        plan_exchange(parse_state("P(sum)", 1), parse_state("R", 1), (4,), (2,))
