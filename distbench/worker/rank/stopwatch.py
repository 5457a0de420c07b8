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
