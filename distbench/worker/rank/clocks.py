"""Clocks that a sample is read from: the host's monotonic clock on CPU, events on the current stream on CUDA."""

import time
from collections.abc import Callable

import torch


class HostClock:
    """CLOCK_MONOTONIC, which all processes of one host share: moments of different ranks can be compared."""

    shared_between_ranks = True

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._moments: list[float] = []

    def stamp(self) -> None:
        """Mark this moment."""
        self._moments.append(self._now())

    def read(self) -> list[float]:
        """Seconds of every moment since the last read, in order; forgets them."""
        moments, self._moments = self._moments, []
        return moments


class CudaClock:
    """CUDA events on the current stream. Moments are relative to the first one, so ranks cannot be compared."""

    shared_between_ranks = False

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def stamp(self) -> None:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def read(self) -> list[float]:
        """Seconds between the first event and each, once all of them have happened; forgets them."""
        events, self._events = self._events, []
        if not events:
            return []
        events[-1].synchronize()
        return [events[0].elapsed_time(event) / 1e3 for event in events]


Clock = HostClock | CudaClock
