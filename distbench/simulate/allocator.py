"""A model of torch's caching allocator for accelerators: the reserved memory of a recorded list of allocations.

The rules are from CUDACachingAllocator.cpp (torch 2.11 to 2.13) with its default settings, or with
`expandable_segments:True`; a test compares each rule with cases computed by hand. Not modelled: `max_split_size_mb`,
`roundup_power2_divisions`, `garbage_collection_threshold`, private pools of graphs, and the release of pages within an
expandable segment before memory runs out.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from distbench.simulate.recording import Allocated, Event, Freed

MIB = 1 << 20
ROUND_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 * MIB  # kSmallSize: larger requests come from the large pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: smaller requests share segments of
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
LARGE_ROUND_BYTES = 2 * MIB  # kRoundLarge
Pool = tuple[int, bool]


class OutOfMemory(Exception):
    """The device has no memory for `requested_bytes`, even without cached memory."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(requested_bytes)
        self.requested_bytes = requested_bytes


@dataclass(eq=False)
class _Piece:
    """A part of a segment; its neighbours in memory belong to the same segment."""

    address: int
    num_bytes: int
    pool: Pool
    before: "_Piece | None" = None
    after: "_Piece | None" = None
    is_free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Sort key of best fit: the smallest sufficient block, at the lowest address."""
        return self.num_bytes, self.address


@dataclass
class CachingAllocator:
    """The allocator of one device.

    Args:
        expandable: use one growing segment per pool, as with `expandable_segments:True`.
        capacity_bytes: limit of reserved memory; None for no limit.
    """

    expandable: bool = False
    capacity_bytes: int | None = None
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    num_segments: int = 0
    num_retries: int = 0
    _free: dict[Pool, list[tuple[int, int]]] = field(default_factory=dict)
    _by_address: dict[int, _Piece] = field(default_factory=dict)
    _given: dict[int, _Piece] = field(default_factory=dict)
    _tails: dict[Pool, _Piece] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, number: int, num_bytes: int, stream: int) -> None:
        """Allocate a block of at least `num_bytes` under `number`.

        Raises:
            OutOfMemory: the capacity is exhausted, even after the release of cached memory.
        """
        size = max(-(-num_bytes // ROUND_BYTES), 1) * ROUND_BYTES
        pool = (stream, size <= SMALL_BYTES)
        block = self._best_fit(pool, size) or (self._grown if self.expandable else self._segment)(pool, size)
        self._take(block)
        self._split(block, size)
        self._given[number] = block
        self.allocated_bytes += block.num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, number: int) -> None:
        """Return a block to the pool of its stream, merged with free neighbours."""
        block = self._given.pop(number)
        self.allocated_bytes -= block.num_bytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._absorb(block, neighbour)
        self._put(block)

    def _best_fit(self, pool: Pool, size: int) -> _Piece | None:
        fitting = self._free.get(pool, [])
        place = bisect.bisect_left(fitting, (size, -1))
        if place == len(fitting):
            return None
        piece = self._by_address[fitting[place][1]]
        if piece is self._tails.get(pool) and place + 1 < len(fitting):
            # The end of an expandable segment counts with its maximum size, so any other block that fits is a better
            # fit.
            piece = self._by_address[fitting[place + 1][1]]
        return piece

    def _segment(self, pool: Pool, size: int) -> _Piece:
        """Return a free block that is a new segment, of the size by `get_allocation_size`."""
        segment_bytes = SMALL_SEGMENT_BYTES if pool[1] else LARGE_SEGMENT_BYTES
        if size >= MIN_LARGE_BYTES:
            segment_bytes = -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES
        self._reserve(segment_bytes)
        self.num_segments += 1
        block = _Piece(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        self._put(block)
        return block

    def _grown(self, pool: Pool, size: int) -> _Piece:
        """Return the last block of the pool's one segment, grown by pages (2 MiB or 20 MiB) until large enough."""
        page = SMALL_SEGMENT_BYTES if pool[1] else LARGE_SEGMENT_BYTES
        tail = self._tails.get(pool)
        free_bytes = tail.num_bytes if tail is not None and tail.is_free else 0
        more = -(-(size - free_bytes) // page) * page
        self._reserve(more)
        if tail is None:
            self.num_segments += 1
            # Segments begin further apart than the size of any device's memory, so that segments never meet.
            tail = _Piece(self.num_segments << 50, more, pool)
        elif tail.is_free:
            self._take(tail)
            tail.num_bytes += more
        else:
            tail.after = _Piece(tail.address + tail.num_bytes, more, pool, before=tail)
            tail = tail.after
        self._tails[pool] = tail
        self._put(tail)
        return tail

    def _reserve(self, num_bytes: int) -> None:
        limit = self.capacity_bytes
        if limit is not None and self.reserved_bytes + num_bytes > limit:
            self.num_retries += 1
            self._give_back()
            if self.reserved_bytes + num_bytes > limit:
                raise OutOfMemory(num_bytes)
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self) -> None:
        """Release cached memory: segments that are entirely free, or the free end of an expandable segment."""
        for block in [block for block in self._by_address.values() if block.is_free and block.after is None]:
            if self.expandable:
                self._shrink(block)
            elif block.before is None:
                self._take(block)
                self.reserved_bytes -= block.num_bytes

    def _shrink(self, block: _Piece) -> None:
        page = SMALL_SEGMENT_BYTES if block.pool[1] else LARGE_SEGMENT_BYTES
        start = block.address % (1 << 50)
        kept_bytes = -(-start // page) * page - start  # pages are aligned with the segment
        if kept_bytes >= block.num_bytes:
            return
        self._take(block)
        self.reserved_bytes -= block.num_bytes - kept_bytes
        block.num_bytes = kept_bytes
        if kept_bytes:
            self._put(block)
        elif block.before is not None:
            block.before.after = None
            self._tails[block.pool] = block.before
        else:
            del self._tails[block.pool]

    def _split(self, block: _Piece, size: int) -> None:
        """Split off the remainder as a separate block if `should_split`."""
        left_bytes = block.num_bytes - size
        least = ROUND_BYTES if block.pool[1] or self.expandable else SMALL_BYTES + 1
        if left_bytes < least:
            return
        rest = _Piece(block.address + size, left_bytes, block.pool, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.num_bytes = rest, size
        if self._tails.get(block.pool) is block:
            self._tails[block.pool] = rest
        self._put(rest)

    def _absorb(self, block: _Piece, neighbour: _Piece) -> None:
        """Merge a free neighbour into a block."""
        self._take(neighbour)
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.num_bytes += neighbour.num_bytes
        if self._tails.get(block.pool) is neighbour:
            self._tails[block.pool] = block

    def _put(self, block: _Piece) -> None:
        block.is_free = True
        self._by_address[block.address] = block
        bisect.insort(self._free.setdefault(block.pool, []), block.key)

    def _take(self, block: _Piece) -> None:
        fitting = self._free[block.pool]
        del fitting[bisect.bisect_left(fitting, block.key)]
        del self._by_address[block.address]
        block.is_free = False


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a recording on a device, bytes.

    Args:
        reserved_bytes: peak of the allocator's reserved memory over all steps.
        allocated_bytes: peak of rounded allocations.
        live_bytes: peak of requested bytes.
        alive: bytes alive at the peak of `live_bytes`, by (held, owner).
        num_retries: number of cache releases after a failed allocation.
        out_of_memory: bytes of the failed allocation; None without a failure.
    """

    reserved_bytes: int
    allocated_bytes: int
    live_bytes: int
    alive: dict[tuple[str, str], int]
    num_segments: int
    num_retries: int
    out_of_memory: int | None


def replay_memory(events: Iterable[Event], *, expandable: bool = False, capacity_bytes: int | None = None) -> MemoryUse:
    """Replay every allocation of a recording, without computation."""
    allocator, events = CachingAllocator(expandable, capacity_bytes), list(events)
    failed: int | None = None
    sizes: dict[int, int] = {}
    live = peak = where_peak = 0
    for place, event in enumerate(events):
        if isinstance(event, Allocated):
            sizes[event.block] = event.num_bytes
            live += event.num_bytes
            if live >= peak:
                peak, where_peak = live, place
            if failed is None:
                try:
                    allocator.allocate(event.block, event.num_bytes, event.stream)
                except OutOfMemory as error:
                    failed = error.requested_bytes
        elif isinstance(event, Freed):
            live -= sizes.pop(event.block)
            if failed is None:
                allocator.free(event.block)
    at_peak: dict[int, Allocated] = {}
    for event in events[: where_peak + 1]:
        if isinstance(event, Allocated):
            at_peak[event.block] = event
        elif isinstance(event, Freed):
            del at_peak[event.block]
    alive: dict[tuple[str, str], int] = defaultdict(int)
    for block in at_peak.values():
        alive[block.held, block.owner] += block.num_bytes
    return MemoryUse(
        allocator.peak_reserved_bytes,
        allocator.peak_allocated_bytes,
        peak,
        alive,
        allocator.num_segments,
        allocator.num_retries,
        failed,
    )
