"""The caching allocator's rules, one by one: every expected number is worked by hand from CUDACachingAllocator.cpp."""

import json

import pytest
from conftest import DATA
from gpu_day import replayed
from processes import Children

from distbench.simulate.allocator import MIB, CachingAllocator, OutOfMemory, replay_memory
from distbench.simulate.recording import Allocated, Event, Freed


def given(*sizes: int, stream: int = 0, **options: int) -> CachingAllocator:
    """An allocator that was asked for blocks 0, 1, ... of these sizes."""
    allocator = CachingAllocator(**options)  # type: ignore[arg-type]
    for number, size in enumerate(sizes):
        allocator.allocate(number, size, stream)
    return allocator


@pytest.mark.parametrize(("requested", "handed_out"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)])
def test_sizes_are_rounded_up_to_512_bytes(requested: int, handed_out: int) -> None:
    assert given(requested).allocated_bytes == handed_out


@pytest.mark.parametrize(
    ("sizes", "reserved_mib"),
    [
        ((512,), 2),  # up to 1 MiB: segments of 2 MiB
        ((MIB, MIB), 2),
        ((MIB, MIB, 512), 4),
        ((MIB + 512,), 20),  # up to 10 MiB: segments of 20 MiB
        ((MIB + 512, 512), 22),  # which small blocks do not share
        ((9 * MIB, 9 * MIB), 20),
        ((9 * MIB, 9 * MIB, 9 * MIB), 40),
        ((10 * MIB,), 10),  # from 10 MiB on: segments of their own, in steps of 2 MiB
        ((10 * MIB + 512,), 12),
        ((13 * MIB, 13 * MIB), 28),
    ],
)
def test_segments_have_the_size_that_their_pool_gives_them(sizes: tuple[int, ...], reserved_mib: int) -> None:
    assert given(*sizes).reserved_bytes == reserved_mib * MIB


def test_a_large_block_is_split_where_more_than_1_mib_is_left() -> None:
    # A segment of 20 MiB: 1 MiB left over stays with the block, 1 MiB and 512 B does not.
    assert given(19 * MIB).allocated_bytes == 20 * MIB
    assert given(19 * MIB - 512).allocated_bytes == 19 * MIB - 512


def test_a_small_block_is_split_where_512_bytes_are_left() -> None:
    allocator = given(2 * MIB // 4 * 2 - 512, MIB)
    assert allocator.allocated_bytes == 2 * MIB - 512 and allocator.reserved_bytes == 2 * MIB
    allocator.allocate(2, 512, 0)
    assert allocator.reserved_bytes == 2 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = given(30 * MIB, 12 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 12 * MIB, 0)
    allocator.allocate(3, 30 * MIB, 0)
    assert allocator.reserved_bytes == 42 * MIB  # had the larger one been split, there would be no room for this


def test_a_block_larger_than_asked_for_is_taken_and_split() -> None:
    allocator = given(30 * MIB)
    allocator.free(0)
    allocator.allocate(1, 12 * MIB, 0)
    allocator.allocate(2, 18 * MIB, 0)
    assert allocator.reserved_bytes == 30 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_are_merged_whatever_the_order(order: tuple[int, ...]) -> None:
    allocator = given(6 * MIB, 6 * MIB, 6 * MIB)  # of one segment of 20 MiB, 2 MiB left
    for number in order:
        allocator.free(number)
    allocator.allocate(3, 20 * MIB, 0)
    assert allocator.reserved_bytes == 20 * MIB and allocator.allocated_bytes == 20 * MIB


def test_segments_are_not_merged() -> None:
    allocator = given(10 * MIB, 10 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 20 * MIB, 0)
    assert allocator.reserved_bytes == 40 * MIB


def test_streams_share_nothing() -> None:
    allocator = given(30 * MIB)
    allocator.free(0)
    allocator.allocate(1, 30 * MIB, stream=7)
    assert allocator.reserved_bytes == 60 * MIB and allocator.peak_allocated_bytes == 30 * MIB


def test_expandable_segments_grow_by_pages_and_split_to_512_bytes() -> None:
    allocator = given(11 * MIB, expandable=True)
    assert allocator.reserved_bytes == 20 * MIB and allocator.allocated_bytes == 11 * MIB
    allocator.allocate(1, 11 * MIB, 0)  # 9 MiB are free at the end: one more page of 20 MiB
    assert allocator.reserved_bytes == 40 * MIB and allocator.num_segments == 1
    allocator.allocate(2, 18 * MIB, 0)
    assert allocator.reserved_bytes == 40 * MIB
    for number in range(3):
        allocator.free(number)
    allocator.allocate(3, 59 * MIB, 0)  # 40 MiB are free: one more page
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(4, 512, 0)
    assert allocator.reserved_bytes == 62 * MIB and allocator.num_segments == 2


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    """get_free_block: the end counts as large as it can grow to, so a larger block elsewhere is the better fit."""
    allocator = given(30 * MIB, MIB + 512, 11 * MIB, expandable=True)  # 42 MiB and 512 B: of 60 MiB the end is free
    allocator.free(0)
    allocator.allocate(3, 15 * MIB, 0)  # fits into the end (18 MiB less 512 B), and goes into the 30 MiB
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(4, 17 * MIB, 0)
    assert allocator.reserved_bytes == 60 * MIB  # the end was kept for this
    allocator.allocate(5, 15 * MIB, 0)
    assert allocator.reserved_bytes == 60 * MIB


@pytest.mark.parametrize(("requested", "reserved_mib"), [(11 * MIB - 512, 12), (11 * MIB, 32)])
def test_what_is_left_over_of_a_free_large_block_is_a_block_above_1_mib(requested: int, reserved_mib: int) -> None:
    """should_split: 1 MiB and 512 B left over are given to the next, 1 MiB are not."""
    allocator = given(12 * MIB)
    allocator.free(0)
    allocator.allocate(1, requested, 0)
    allocator.allocate(2, MIB + 512, 0)
    assert allocator.reserved_bytes == reserved_mib * MIB


def test_small_blocks_of_a_stream_do_not_go_into_another_ones_segment() -> None:
    allocator = given(512)
    allocator.allocate(1, 512, 5)
    assert allocator.reserved_bytes == 4 * MIB and allocator.num_segments == 2


def test_what_is_freed_is_not_given_back_to_the_device() -> None:
    allocator = given(30 * MIB, 512)
    allocator.free(0)
    allocator.free(1)
    assert allocator.reserved_bytes == 32 * MIB and allocator.allocated_bytes == 0
    allocator.allocate(2, 31 * MIB, 0)  # too large for the free 30 MiB, which only running out of memory would release
    assert allocator.reserved_bytes == 64 * MIB and allocator.num_retries == 0


def test_memory_that_nothing_can_free_is_an_error_that_says_what_is_reserved() -> None:
    with pytest.raises(OutOfMemory) as raised:
        given(30 * MIB, 20 * MIB, capacity_bytes=40 * MIB)
    assert raised.value.requested_bytes == 20 * MIB


def test_what_is_cached_is_given_back_before_memory_runs_out() -> None:
    allocator = given(30 * MIB, 8 * MIB, capacity_bytes=60 * MIB)
    assert allocator.reserved_bytes == 50 * MIB
    allocator.free(0)
    allocator.allocate(2, 36 * MIB, 0)
    # The segment of 30 MiB was given back; that of 20 MiB, which is in use, was not.
    assert allocator.reserved_bytes == 56 * MIB and allocator.num_retries == 1
    assert allocator.peak_reserved_bytes == 56 * MIB
    with pytest.raises(OutOfMemory) as raised:
        allocator.allocate(3, 14 * MIB, 0)
    assert raised.value.requested_bytes == 14 * MIB


def test_an_expandable_segment_gives_back_its_free_end() -> None:
    allocator = given(15 * MIB, 30 * MIB, expandable=True, capacity_bytes=60 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(1)
    allocator.allocate(2, 30 * MIB, 3)
    # Of [15, 60) MiB the pages from 20 on are given back; the other stream takes two.
    assert allocator.reserved_bytes == 60 * MIB and allocator.num_retries == 1
    allocator.free(0)
    allocator.allocate(4, 19 * MIB, 0)
    assert allocator.reserved_bytes == 60 * MIB


def test_a_replay_says_what_is_alive_where_the_most_is() -> None:
    def block(number: int, mib: int, held: str, owner: str = "") -> Event:
        return Allocated(number, mib * MIB, 0, held, owner)

    events: list[Event] = [
        block(0, 4, "parameters"),
        block(1, 40, "backward", "a"),
        Freed(1),
        block(2, 30, "activations", "layers.0"),
        block(3, 12, "activations", "layers.1"),
        Freed(2),
        block(4, 2, "fsdp"),
    ]
    used = replay_memory(events)
    assert used.live_bytes == 46 * MIB
    assert used.alive == {
        ("parameters", ""): 4 * MIB,
        ("activations", "layers.0"): 30 * MIB,
        ("activations", "layers.1"): 12 * MIB,
    }
    # 20 MiB for the first; 40 of its own, split into 30 and 10; 12 fit beside the first.
    assert used.reserved_bytes == 60 * MIB and used.out_of_memory is None
    assert replay_memory(events, capacity_bytes=50 * MIB).out_of_memory == 40 * MIB


@pytest.mark.gpu
def test_a_real_step_reserves_what_the_replay_says(children: Children) -> None:
    """What torch's allocator of a CUDA device was asked for in three steps, replayed: reserved memory within 1 %."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("the accelerator here is another one, and keeps no such history")
    done = children.python(DATA / "cuda_memory_history.py", timeout=300)
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout.splitlines()[-1])
    used = replayed(message)
    assert len(message["events"]) > 100
    assert used.live_bytes == pytest.approx(message["max_requested_bytes"], rel=0.01)
    assert used.reserved_bytes == pytest.approx(message["max_reserved_bytes"], rel=0.01)
