"""Shards, sources and expected results, against values written out by hand."""

from functools import reduce
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from distbench.cases.collective import OPERATIONS, expected, sizes_of, tag, tag_period
from distbench.redistribute.expected_shards import (
    chunk_of,
    parse_placement,
    part_of,
    rounding_of,
    shard_in_order,
    shard_of,
    strided_shard_of,
    tagged,
)
from distbench.redistribute.planners import wire_bytes
from distbench.spec import UserError
from distbench.torch_private import PathStep

FULL = torch.arange(20.0).reshape(5, 4)


def test_uneven_chunks_are_ceil_sized_and_the_last_may_be_short_or_empty() -> None:
    assert [chunk_of(FULL, 0, 4, index).shape[0] for index in range(4)] == [2, 2, 1, 0]


def test_nested_shards_go_from_left_to_right() -> None:
    # 5 rows over 2: rows 0-2 and 3-4; again over 2: 0-1 and 2, then 3 and 4.
    rows = [shard_of(FULL, [Shard(0), Shard(0)], (2, 2), (i, j))[:, 0].tolist() for i in range(2) for j in range(2)]
    assert rows == [[0.0, 4.0], [8.0], [12.0], [16.0]]


def test_a_strided_shard_comes_after_the_plain_one() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    full = torch.arange(8.0)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    # torch's own example for FSDP2 over TP: ranks (0,0) (0,1) (1,0) (1,1) hold rows 0-1, 4-5, 2-3, 6-7.
    held = [shard_of(full, placements, (2, 2), (i, j)).tolist() for i in range(2) for j in range(2)]
    assert held == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_partial_sources_add_up_to_the_tensor_over_every_partial_mesh_dim() -> None:
    full = tagged((3, 5), torch.float32)
    parts = [part_of(full, [Partial(), Partial()], (2, 3), (i, j)) for i in range(2) for j in range(3)]
    assert torch.equal(sum(parts), full)
    assert len({tuple(part.flatten().tolist()) for part in parts}) == 6, "equal parts would hide a missing rank"


@pytest.mark.parametrize(
    ("op", "reduced"),
    [
        ("sum", lambda parts: parts.sum(0)),
        ("avg", lambda parts: parts.mean(0)),
        ("max", lambda parts: parts.amax(0)),
        ("min", lambda parts: parts.amin(0)),
    ],
)
def test_parts_of_every_reduce_op_reduce_to_the_tensor_and_none_can_be_left_out(op: str, reduced: Any) -> None:
    full = tagged((3, 5), torch.float32)
    cells = [(i, j, k) for i in range(2) for j in range(3) for k in range(2)]
    placements = [Partial(op), Shard(0), Partial(op)]
    parts = torch.stack([part_of(full, placements, (2, 3, 2), cell) for cell in cells if cell[1] == 0])
    assert torch.equal(reduced(parts), full)
    for left_out in range(4):
        kept = torch.stack([part for number, part in enumerate(parts) if number != left_out])
        assert not torch.equal(reduced(kept), full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("num_parts", [2, 3, 8, 9, 16, 32])
def test_no_two_of_many_ranks_contribute_the_same_and_a_right_reduction_is_right(
    num_parts: int, op: str, dtype: torch.dtype
) -> None:
    """In every order in which a backend may add, whether it divides an average before or after."""
    full, sides = tagged((7, 11), dtype), ([Partial(op)], [Replicate()])
    parts = [part_of(full, sides[0], (num_parts,), (rank,)) for rank in range(num_parts)]
    assert len({tuple(part.flatten().tolist()) for part in parts}) == num_parts
    rounding = rounding_of(*sides, (num_parts,), dtype)
    assert (rounding == 0) == (op != "avg" or num_parts.bit_count() == 1)
    for order in (parts, parts[::-1], parts[::2] + parts[1::2]):
        if op in ("max", "min"):
            assert torch.equal(reduce(getattr(torch, f"{op}imum"), order), full)
        elif op == "sum":
            assert torch.equal(reduce(torch.add, order), full)
        else:
            for mean in (reduce(torch.add, order) / num_parts, reduce(torch.add, [part / num_parts for part in order])):
                assert torch.equal(mean, full) if not rounding else torch.allclose(mean, full, rtol=0, atol=rounding)
    if op not in ("max", "min"):
        assert all(part.any() for part in parts), "a part of zeros could be left out"


def test_more_ranks_than_a_dtype_holds_sums_of_are_allowed_their_rounding() -> None:
    sides = [Partial()], [Replicate()]
    assert rounding_of(*sides, (64,), torch.float32) == 0 < rounding_of(*sides, (64,), torch.bfloat16)
    # What torch makes of a replica are thirds.
    assert rounding_of([Replicate()], [Partial()], (4,), torch.float32) == 0
    assert 0 < rounding_of([Replicate()], [Partial()], (3,), torch.float32) < 1e-4


def test_shards_in_an_order_of_their_own() -> None:
    # 5 rows, the second mesh dim first: 0-2 and 3-4; then the first mesh dim: 0-1 and 2, 3 and 4.
    rows = [shard_in_order(FULL, [(1, 0), ()], (2, 2), (i, j))[:, 0].tolist() for i in range(2) for j in range(2)]
    assert rows == [[0.0, 4.0], [12.0], [8.0], [16.0]]


def test_a_strided_shard_takes_its_chunk_of_each_piece() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    full = torch.arange(12)
    # Three pieces of four; of each the first or the second half.
    held = [strided_shard_of(full, [_StridedShard(0, split_factor=3)], (2,), (i,)).tolist() for i in range(2)]
    assert held == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_placements_are_parsed_or_refused() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    assert [parse_placement(text) for text in ("R", "S(2)", "P(sum)")] == [Replicate(), Shard(2), Partial("sum")]
    assert parse_placement("_S(1,4)") == _StridedShard(1, split_factor=4)
    for text in ("S", "S(x)", "P", "", "S(-1)", "_S(0)", "_S(0,x)"):
        with pytest.raises(UserError, match="unknown"):
            parse_placement(text)


@pytest.mark.parametrize("op", sorted(OPERATIONS))
@pytest.mark.parametrize("group_size", [2, 3, 4, 8])
def test_a_local_copy_never_looks_like_the_collective(op: str, group_size: int) -> None:
    sizes = sizes_of(op, 1024, "f32", group_size)
    for rank in range(group_size):
        wanted = expected(op, rank, sizes, group_size, torch.float32)
        mine = tag(op, rank, sizes.given, group_size, torch.float32)
        copies = [mine.repeat(group_size)[: sizes.got], mine[: sizes.got]]
        alone = any(copy.shape == wanted.shape and torch.equal(copy, wanted) for copy in copies)
        assert alone == (op in ("broadcast", "scatter") and rank == 0)


def test_expected_results_of_two_ranks_by_hand() -> None:
    def tags(op: str, rank: int) -> list[float]:
        period = tag_period(op, 2)
        return [float((offset + 3 * rank) % period) for offset in range(4)]

    sizes = sizes_of("all_reduce", 16, "f32", 2)
    assert sizes.total == 4
    both = [a + b for a, b in zip(tags("all_reduce", 0), tags("all_reduce", 1), strict=True)]
    assert expected("all_reduce", 1, sizes, 2, torch.float32).tolist() == both
    assert expected("reduce_scatter", 1, sizes, 2, torch.float32).tolist() == both[2:]
    a, b = tags("all_to_all", 0), tags("all_to_all", 1)
    assert expected("all_to_all", 0, sizes, 2, torch.float32).tolist() == [*a[:2], *b[:2]]
    assert expected("all_to_all", 1, sizes, 2, torch.float32).tolist() == [*a[2:], *b[2:]]
    assert expected("all_gather", 0, sizes, 2, torch.float32).tolist() == [*a[:2], *b[:2]]
    assert expected("broadcast", 1, sizes, 2, torch.float32).tolist() == a


@pytest.mark.parametrize("group_size", [2, 4, 8, 16, 32])
def test_sums_of_tags_are_exact_in_bfloat16(group_size: int) -> None:
    top = group_size * (tag_period("all_reduce", group_size) - 1)
    assert torch.tensor(float(top)).bfloat16().item() == top or top <= 256


@pytest.mark.parametrize(
    ("op", "given", "got"), [("all_gather", 64, 256), ("reduce_scatter", 256, 64), ("all_to_all", 256, 256)]
)
def test_sizes_are_those_of_nccl_tests(op: str, given: int, got: int) -> None:
    sizes = sizes_of(op, 1024, "f32", 4)
    assert (sizes.total, sizes.given, sizes.got) == (256, given, got)


def test_wire_bytes_of_a_path_by_hand() -> None:
    # A (4, 8) float32 tensor, 128 bytes. all_gather of halves: each of 2 ranks sends its 64 bytes. all_to_all of 64
    # local bytes: half of them leave. all_reduce of 128 bytes on 2 ranks: 2 x 1/2 x 128.
    assert wire_bytes([PathStep("all_gather", 2, 32)], 4) == 64
    assert wire_bytes([PathStep("all_to_all", 2, 32)], 4) == 32
    assert wire_bytes([PathStep("all_reduce", 2, 32)], 4) == 128
    assert wire_bytes([PathStep("reduce_scatter", 4, 32), PathStep(None, 4, 32)], 4) == 96
