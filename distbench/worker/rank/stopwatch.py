"""How a rank spends its time, by activity."""

import contextlib
import time
from collections.abc import Callable, Iterator

ACTIVITIES = ("launch", "imports", "set-up", "warm-up", "timed", "checking")
# Seconds by activity that the process this one was forked from spent on the same job.
SPENT_BEFORE: dict[str, float] = {}


class Stopwatch:
    """Seconds by activity; stretches must not overlap."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.spent_s: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)

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
