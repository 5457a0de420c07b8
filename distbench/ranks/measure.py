"""Measurement of one call: warm-up, an untimed barrier, stamps around the call, and the slowest rank per sample.

Every rank runs the same number of iterations, because all ranks decide from the same gathered stamps. On accelerators,
a barrier of the hosts is not enough: each sample would contain the skew after the barrier and each host's launch time.
Therefore communicating calls start after a collective of the devices (`DeviceStart`).
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from distbench.ranks.device import Clock, EventClock, delay, synchronize
from distbench.spec import Settings
from distbench.statistics.intervals import is_steady, median

Stamp = Callable[[], None]
Call = Callable[[Stamp], object]
BATCH_S = 0.05
BATCH_MIN, BATCH_MAX = 5, 200
# On accelerators, clocks, channels and heuristics need more than three iterations to become steady.
WARM_UP_S, WARM_UP_MAX = 0.1, 200
MAX_DELAYS = 64


@dataclass
class Samples:
    """The result of a measurement; equal on all ranks."""

    samples_s: list[float]  # seconds of each sample on its slowest rank
    phases_s: dict[str, list[float]]  # phase name to seconds of each sample on that phase's slowest rank
    rank_median_s: list[float]  # each rank's median
    stop_reason: str  # "steady", "max_samples" or "max_case_s"; "passes" if a pass plan set the number
    # Median seconds between the first and the last rank's start; None if clocks are not shared
    entry_skew_s: float | None = None
    # Median seconds from the last rank's start to the last rank's end. If clocks are not shared, this is the time of
    # the fastest rank, which starts last.
    isolated_s: float | None = None

    def to_record(self, with_ranks: bool = False) -> dict[str, Any]:
        """Return the fields of a further pass's line in the run file."""
        names = ("samples_s", "phases_s", "stop_reason", *(("rank_median_s",) if with_ranks else ()))
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class StampSeries:
    """This rank's stamps of one series of iterations, shape (iterations, moments), and the names of the phases that end
    there."""

    stamps: torch.Tensor
    phases: tuple[str, ...]


class RankGroup:
    """Interface of the measurement to other ranks: common starts, and exchange of stamps."""

    def __init__(self, control: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = control
        self.device = device
        self.world_size = dist.get_world_size(control)

    def wait_for_all(self) -> None:
        """Wait until every rank has called this and the device is idle."""
        synchronize(self.device)
        dist.barrier(self._group)

    def gather(self, stamps: torch.Tensor) -> torch.Tensor:
        """Return the stamps of all ranks, with a leading tensor dim for the rank: shape (ranks, ...)."""
        gathered = [torch.empty_like(stamps) for _ in range(self.world_size)]
        dist.all_gather(gathered, stamps, group=self._group)
        return torch.stack(gathered)


class DeviceStart:
    """A common start of a call on the devices of a group, after each host has launched the whole call.

    Meanwhile, a repeated fill keeps the device busy for twice the previous launch time. Then one element is reduced
    over the group, and the call starts within some microseconds on all devices of the group. The fill also evicts the
    call's buffers from the caches.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._element = torch.zeros(1, device=device)
        self._delay_s = _delay_s(device)
        self.num_delays = 1

    def __call__(self) -> None:
        """Enqueue the start without waiting on the host."""
        delay(self._device, self.num_delays)
        dist.all_reduce(self._element, group=self._group)

    def took(self, launch_s: float) -> None:
        """Set the duration of the next fill to twice `launch_s`, the host's time to launch the start and the call."""
        self.num_delays = min(max(math.ceil(2 * launch_s / self._delay_s), 1), MAX_DELAYS)


def _delay_s(device: torch.device) -> float:
    """Return a device's seconds for one delay. The first of two delays is discarded, because it also allocates
    memory.
    """
    clock = EventClock(device)
    delay(device, 1)
    clock.stamp()
    delay(device, 1)
    clock.stamp()
    return max(clock.read()[-1], 1e-6)


@dataclass(frozen=True)
class Meter:
    """A meter for calls, with one clock and one set of settings."""

    ranks: RankGroup  # the ranks that participate
    clock: Clock  # clock of the stamps
    settings: Settings  # limits of sampling
    shared_clock: bool  # whether all ranks share one clock
    # Called on every rank after each batch, with the number of samples taken
    on_batch: Callable[[int], None] = lambda count: None
    start: DeviceStart | None = None  # common start of the devices, after the common start of the ranks
    _starts: dict[Any, DeviceStart] = field(default_factory=dict)

    def started_on(self, group: dist.ProcessGroup | None) -> "Meter":
        """Return a meter with a common start of samples on the devices of a group; with None, on the hosts."""
        if group is None or not isinstance(self.clock, EventClock):
            return self
        if group not in self._starts:
            self._starts[group] = DeviceStart(group, self.ranks.device)
        return replace(self, start=self._starts[group])

    def warm_up(self, call: Call, iterations: int | None = None) -> float:
        """Run warm-up iterations of a call; return an iteration's seconds on the slowest rank.

        On accelerators without a given number of iterations, the warm-up takes at least WARM_UP_S seconds.
        """
        stamps = self._iterate(call, iterations or self.settings.warmup_iterations)
        if iterations is None and isinstance(self.clock, EventClock):
            slowest = _durations(stamps).max(dim=0).values
            more = int((WARM_UP_S - float(slowest.sum())) / max(float(slowest[-1]), 1e-7))
            if more > 0:
                stamps = self._iterate(call, min(more, WARM_UP_MAX))
        return float(_durations(stamps)[:, -1].max()) / self.settings.iterations_per_sample

    def touch(self, call: Call) -> None:
        """Run one discarded iteration of a call, if other calls ran since its warm-up."""
        self.ranks.wait_for_all()
        call(self.clock.stamp)

    def measure(
        self, call: Call, phases: tuple[str, ...], estimate_s: float, limits: Settings | None = None
    ) -> Samples:
        """Take samples until the median of this series is steady, or a limit of `limits` is reached.

        `phases` are in the order of the stamps of `call`; `estimate_s` is the result of `warm_up`.
        """
        settings = limits or self.settings
        batches: list[torch.Tensor] = []
        timed_s, samples, reason = 0.0, torch.empty(0), None
        while reason is None:
            count = _batch_size(settings, estimate_s, len(samples), timed_s)
            batches.append(self._iterate(call, count))
            slowest = _durations(batches[-1]).max(dim=0).values
            samples = torch.cat([samples, slowest / settings.iterations_per_sample])
            timed_s += float(slowest.sum())
            reason = stop_reason(samples.tolist(), timed_s, settings)
            self.on_batch(len(samples))
        return self._summary(torch.cat(batches, dim=1), phases, reason)

    def take(self, call: Call, phases: tuple[str, ...], count: int) -> StampSeries:
        """Take exactly `count` samples; `see` evaluates these samples."""
        return StampSeries(self._own_stamps(call, count), phases)

    def see(self, stretches: Sequence[StampSeries], reason: str) -> list[Samples]:
        """Return the samples of all given series over all ranks, in order, with one gather."""
        gathered = self.ranks.gather(torch.cat([stretch.stamps.flatten() for stretch in stretches]))
        parts = gathered.split([stretch.stamps.numel() for stretch in stretches], dim=1)
        return [
            self._summary(part.reshape(-1, *stretch.stamps.shape), stretch.phases, reason)
            for part, stretch in zip(parts, stretches, strict=True)
        ]

    def _iterate(self, call: Call, count: int) -> torch.Tensor:
        return self.ranks.gather(self._own_stamps(call, count))

    def _own_stamps(self, call: Call, count: int) -> torch.Tensor:
        rows = []
        repeats = range(self.settings.iterations_per_sample)
        stamp = self.clock.stamp
        self.clock.read()  # drop the moments of a case that raised
        for _ in range(count):
            self.ranks.wait_for_all()
            launching = time.monotonic()
            if self.start is not None:
                self.start()
            stamp()
            for _ in repeats:
                call(stamp)
            stamp()
            if self.start is not None:
                self.start.took(time.monotonic() - launching)
            rows.append(self.clock.read())
        return torch.tensor(rows, dtype=torch.float64)

    def _summary(self, stamps: torch.Tensor, phases: tuple[str, ...], reason: str) -> Samples:
        repeats = self.settings.iterations_per_sample
        durations = _durations(stamps) / repeats
        parts = stamps.diff(dim=2)[:, :, :-1]
        phases_s = {}
        for name in dict.fromkeys(phases):
            # A phase with several stamps (one per micro-batch) has the sum of their times.
            turns = [turn for turn in range(parts.shape[2]) if phases[turn % len(phases)] == name]
            phases_s[name] = (parts[:, :, turns].sum(dim=2).max(dim=0).values / repeats).tolist()
        rank_median_s = [median(row) for row in durations.tolist()]
        result = Samples(durations.max(dim=0).values.tolist(), phases_s, rank_median_s, reason)
        if self.shared_clock:
            starts, ends = stamps[:, :, 0], stamps[:, :, -1]
            last_in = starts.max(dim=0).values
            result.entry_skew_s = median((last_in - starts.min(dim=0).values).tolist())
            result.isolated_s = median((ends.max(dim=0).values - last_in).tolist())
        elif self.start is not None:
            result.isolated_s = median(durations.min(dim=0).values.tolist())
        return result


def _batch_size(settings: Settings, estimate_s: float, num_taken: int, timed_s: float) -> int:
    sample_s = max(estimate_s, 1e-7) * settings.iterations_per_sample
    count = min(max(int(BATCH_S / sample_s), BATCH_MIN), BATCH_MAX)
    num_needed = max(settings.min_samples - num_taken, 0)
    affordable = max(int((settings.max_case_s - timed_s) / sample_s), num_needed, 1)
    return min(count, affordable, settings.max_samples - num_taken)


def no_stamp() -> None:
    """A stamp function for untimed calls, which does nothing."""


def _durations(stamps: torch.Tensor) -> torch.Tensor:
    return stamps[:, :, -1] - stamps[:, :, 0]


def stop_reason(samples: list[float], timed_s: float, settings: Settings) -> str | None:
    """Return the reason to stop sampling after these samples and seconds of timed iterations, or None to continue.

    "steady" means that the order statistics which bound the median of independent samples are close. The distance
    between the two does not bound the error of the median: samples of a series are not independent, and later series
    drift.
    """
    if len(samples) < settings.min_samples:
        return None
    if is_steady(samples, settings.target_ci):
        return "steady"
    if len(samples) >= settings.max_samples:
        return "max_samples"
    return "max_case_s" if timed_s >= settings.max_case_s else None


ACTIVITIES = ("launch", "imports", "set-up", "warm-up", "timed", "checking")
# Activity to seconds that the parent process spent on the same job before the fork.
SPENT_BEFORE: dict[str, float] = {}


class Stopwatch:
    """A stopwatch with seconds per activity; intervals must not overlap."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s: float | None = None
        self.spent_s: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)

    def begin_measuring(self) -> None:
        """Mark the start of opening, measuring and closing cases."""
        self._began_s = self._now()

    @property
    def measuring_s(self) -> float:
        """Seconds since `begin_measuring`; 0 before."""
        return 0.0 if self._began_s is None else self._now() - self._began_s

    def add(self, activity: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to an activity."""
        self.spent_s[activity] = self.spent_s.get(activity, 0.0) + seconds

    @contextlib.contextmanager
    def on(self, activity: str) -> Iterator[None]:
        """Add the time of a `with` block to an activity."""
        start = self._now()
        try:
            yield
        finally:
            self.add(activity, self._now() - start)
