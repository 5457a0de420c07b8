"""Times one call: warm-up, a barrier outside the clock, stamps round the call, the slowest rank of each sample.

Every rank runs the same number of iterations, because every rank decides from the same gathered stamps. On accelerators
a barrier of the hosts is not enough: how far apart they leave it, and how long each takes to launch, would be in each
sample. There, calls that communicate start behind a collective of their devices (`DeviceStart`).
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
# On accelerators three iterations are few for clocks to rise, channels to open and heuristics to settle.
WARM_UP_S, WARM_UP_MAX = 0.1, 200
MAX_DELAYS = 64


@dataclass
class Samples:
    """What measuring gave; the same on every rank."""

    samples_s: list[float]  # seconds of each sample on its slowest rank
    phases_s: dict[str, list[float]]  # phase name to seconds of each sample on that phase's slowest rank
    rank_median_s: list[float]  # each rank's median
    stop_reason: str  # "steady", "max_samples" or "max_case_s"; "passes" where a pass plan said how many
    # Median time between the first and the last rank's start; None where clocks are not shared
    entry_skew_s: float | None = None
    # Median time from the last rank in to the last rank out; where clocks are not shared, of the rank that took least,
    # which is the last one in
    isolated_s: float | None = None

    def to_record(self, with_ranks: bool = False) -> dict[str, Any]:
        """The fields of a further pass's line in the run file."""
        names = ("samples_s", "phases_s", "stop_reason", *(("rank_median_s",) if with_ranks else ()))
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class StampSeries:
    """This rank's stamps of a stretch, shape (iterations, moments), and the names of the phases that they end."""

    stamps: torch.Tensor
    phases: tuple[str, ...]


class RankGroup:
    """What measuring needs of the other ranks: start together, and see each other's stamps."""

    def __init__(self, control: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = control
        self.device = device
        self.world_size = dist.get_world_size(control)

    def wait_for_all(self) -> None:
        """Return when every rank has called this and the device is idle."""
        synchronize(self.device)
        dist.barrier(self._group)

    def gather(self, stamps: torch.Tensor) -> torch.Tensor:
        """Every rank's stamps, one more dimension in front: shape (ranks, ...)."""
        gathered = [torch.empty_like(stamps) for _ in range(self.world_size)]
        dist.all_gather(gathered, stamps, group=self._group)
        return torch.stack(gathered)


class DeviceStart:
    """Has the devices of a group start a call together, when each host has launched all of it.

    A fill keeps the device busy meanwhile, as many times as the launch before took; then one element is reduced over
    the group, and what follows begins within some microseconds on all of its devices. Caches then hold nothing of the
    call's buffers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._element = torch.zeros(1, device=device)
        self._delay_s = _delay_s(device)
        self.num_delays = 1

    def __call__(self) -> None:
        """Enqueue the start; the host does not wait."""
        delay(self._device, self.num_delays)
        dist.all_reduce(self._element, group=self._group)

    def took(self, launch_s: float) -> None:
        """The host took `launch_s` to launch the start and the call: the next time the device waits twice as long."""
        self.num_delays = min(max(math.ceil(2 * launch_s / self._delay_s), 1), MAX_DELAYS)


def _delay_s(device: torch.device) -> float:
    """Seconds that a device takes for one delay; the second of two, as the first one also makes room for it."""
    clock = EventClock(device)
    delay(device, 1)
    clock.stamp()
    delay(device, 1)
    clock.stamp()
    return max(clock.read()[-1], 1e-6)


@dataclass(frozen=True)
class Meter:
    """Measures calls with one clock and one set of settings."""

    ranks: RankGroup  # the ranks that take part
    clock: Clock  # where moments are read from
    settings: Settings  # when to stop
    shared_clock: bool  # whether all ranks' moments are on one time line
    # Called on every rank after each batch with the number of samples so far
    on_batch: Callable[[int], None] = lambda count: None
    start: DeviceStart | None = None  # has the ranks' devices start together, after the ranks have
    _starts: dict[Any, DeviceStart] = field(default_factory=dict)

    def started_on(self, group: dist.ProcessGroup | None) -> "Meter":
        """The meter for a call over a group: on accelerators its devices start each sample together; None: hosts do."""
        if group is None or not isinstance(self.clock, EventClock):
            return self
        if group not in self._starts:
            self._starts[group] = DeviceStart(group, self.ranks.device)
        return replace(self, start=self._starts[group])

    def warm_up(self, call: Call, iterations: int | None = None) -> float:
        """Run warm-up iterations of this very call; seconds that an iteration takes on the slowest rank.

        On accelerators, where nobody says how many, for at least WARM_UP_S.
        """
        stamps = self._iterate(call, iterations or self.settings.warmup_iterations)
        if iterations is None and isinstance(self.clock, EventClock):
            slowest = _durations(stamps).max(dim=0).values
            more = int((WARM_UP_S - float(slowest.sum())) / max(float(slowest[-1]), 1e-7))
            if more > 0:
                stamps = self._iterate(call, min(more, WARM_UP_MAX))
        return float(_durations(stamps)[:, -1].max()) / self.settings.iterations_per_sample

    def touch(self, call: Call) -> None:
        """One iteration that nobody looks at, of a call that was warmed up before others ran."""
        self.ranks.wait_for_all()
        call(self.clock.stamp)

    def measure(
        self, call: Call, phases: tuple[str, ...], estimate_s: float, limits: Settings | None = None
    ) -> Samples:
        """Sample until the samples of this stretch agree on their median, or a cap of `limits` is reached.

        `phases` are in the order of the stamps of `call`; `estimate_s` is what `warm_up` returned.
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
        """So many samples of a stretch of which no rank has to decide anything: `see` tells what they are."""
        return StampSeries(self._own_stamps(call, count), phases)

    def see(self, stretches: Sequence[StampSeries], reason: str) -> list[Samples]:
        """What every rank took since the last time, in order, the stamps of all stretches gathered at once."""
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
        self.clock.read()  # a case that raised may have left moments behind
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
            # A phase that is named twice (one a micro-batch) is the sum of its turns.
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
    """The stamp of a call that is not timed."""


def _durations(stamps: torch.Tensor) -> torch.Tensor:
    return stamps[:, :, -1] - stamps[:, :, 0]


def stop_reason(samples: list[float], timed_s: float, settings: Settings) -> str | None:
    """Why sampling ends after these samples (seconds) and seconds of timed iterations, or None to go on.

    "steady" is no statement of how well the median is known: samples of one stretch depend on each other, and another
    stretch has another level. The order statistics that would bound the median of independent samples are near.
    """
    if len(samples) < settings.min_samples:
        return None
    if is_steady(samples, settings.target_ci):
        return "steady"
    if len(samples) >= settings.max_samples:
        return "max_samples"
    return "max_case_s" if timed_s >= settings.max_case_s else None


ACTIVITIES = ("launch", "imports", "set-up", "warm-up", "timed", "checking")
# Seconds by activity that the process this one was forked from spent on the same job.
SPENT_BEFORE: dict[str, float] = {}


class Stopwatch:
    """Seconds by activity; stretches must not overlap."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s: float | None = None
        self.spent_s: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)

    def begin_measuring(self) -> None:
        """From now on cases are opened, measured and closed."""
        self._began_s = self._now()

    @property
    def measuring_s(self) -> float:
        """Seconds since `begin_measuring`; 0 before."""
        return 0.0 if self._began_s is None else self._now() - self._began_s

    def add(self, activity: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self.spent_s[activity] = self.spent_s.get(activity, 0.0) + seconds

    @contextlib.contextmanager
    def on(self, activity: str) -> Iterator[None]:
        """Count the time of a `with` block."""
        start = self._now()
        try:
            yield
        finally:
            self.add(activity, self._now() - start)
