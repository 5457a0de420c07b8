"""Display of progress while ranks work: a live bar on a terminal, otherwise a plain line every few seconds, or
nothing."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from distbench.spec.printable_text import clean, count_text, printable

PLAIN_EVERY_S = 10.0
LONGEST_ID = 120


class Display:
    """Display of one scenario's progress. This base class shows nothing."""

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of the ranks; records/progress_events.py lists the events."""


class Plain(Display):
    """Display for logs: one line every few seconds. `now` returns seconds of a monotonic clock."""

    def __init__(self, scenario: str, stream: TextIO, now: Any = time.monotonic) -> None:
        self._scenario, self._stream, self._now = scenario, stream, now
        self._start = self._last = now()
        self._done = self._total = 0

    def event(self, event: dict[str, Any]) -> None:
        """Count the event, and print a line if the previous line is old enough."""
        if event["event"] == "caution":
            self._line(f"warning: {event['text']}")
        if event["event"] == "note":
            self._line(event["text"])
        # Relaunched ranks send the same plan again; a sweep adds cases.
        if event["event"] == "plan" and event["num_cases"] > self._total:
            if not self._total:
                self._start = self._now()
                self._line(count_text(event["num_cases"], "case"))
            self._total = event["num_cases"]
        if event["event"] == "done":
            self._done += 1
            if event["status"] != "ok":
                self._line(f"{event['id']}: {event['status']}")
            elif self._now() - self._last >= PLAIN_EVERY_S:
                left_s = (self._now() - self._start) / self._done * (self._total - self._done)
                self._line(f"{self._done} of {count_text(self._total, 'case')}, about {left_s:.0f} s left")
        if event["event"] == "pass" and self._now() - self._last >= PLAIN_EVERY_S:
            self._line(f"pass {event['number'] + 1} of at most {event['num_passes']}")

    def _line(self, text: str) -> None:
        self._last = self._now()
        # A full log, or a closed pipe, must not stop the run.
        with contextlib.suppress(OSError):
            print(printable(f"{self._scenario}: {text}"), file=self._stream, flush=True)


class Live(Display):
    """Display for terminals: a bar over the scenario's cases, the running case and its samples, and the time left."""

    def __init__(self, scenario: str, progress: Any) -> None:
        self._progress, self._scenario = progress, scenario
        self._counts_turns = False
        self._task = progress.add_task(f"{scenario}: starting ranks", total=None, samples="")

    def event(self, event: dict[str, Any]) -> None:
        """Update the bar and the text after it."""
        match event["event"]:
            case "caution":
                self._progress.console.print(f"warning: {clean(event['text'])}", markup=False, highlight=False)
            case "note":
                self._progress.console.print(clean(event["text"]), markup=False, highlight=False)
            case "plan" if event["num_cases"] > (self._progress.tasks[self._task].total or 0):
                self._progress.update(self._task, total=event["num_cases"])
            case "case":
                text = f"{self._scenario}: {clean(event['id'].partition('/')[2][:LONGEST_ID])}"
                self._progress.update(self._task, description=text, samples="")
            case "samples":
                self._progress.update(self._task, samples=count_text(event["count"], "sample"))
            case "pass":
                self._counts_turns, total = True, event["num_passes"] * event["num_cases"]
                self._progress.update(self._task, total=total, completed=event["number"] * event["num_cases"])
            case "done" | "turn":
                # The number of samples is unknown for a pair of planners that alternate.
                if event["event"] == "done" or self._counts_turns:
                    self._progress.advance(self._task)
            case "end":
                # Skipped planned cases, and cases measured before the run was resumed, do not count.
                took = self._progress.tasks[self._task].completed
                self._progress.update(self._task, description=self._scenario, samples="", total=took)


def progress_on(console: Any) -> Any:
    """Return a rich Progress with bar, count, time left and case, on a rich Console, or on standard error for None.

    The case's name is cut at the screen's edge, so the other columns remain visible.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    text_column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description}  {task.fields[samples]}", markup=False, table_column=text_column),
    )
    return Progress(*columns, console=console or Console(stderr=True), refresh_per_second=2, expand=True)


@contextlib.contextmanager
def display_for(scenario: str, quiet: bool) -> Iterator[Display]:
    """Return the display for this standard error: a bar, lines, or nothing with `quiet`."""
    if quiet or sys.stderr is None:
        yield Display()
    elif not sys.stderr.isatty():
        yield Plain(scenario, sys.stderr)
    else:
        progress = progress_on(None)
        # The terminal may be gone.
        with contextlib.suppress(OSError):
            progress.start()
        try:
            yield Live(scenario, progress)
        finally:
            with contextlib.suppress(OSError):
                progress.stop()
