"""Signals that stop a command, handled as Ctrl-C or recorded for a polling loop."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stopped_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first stop signal, and ignore later stop signals during cleanup.

    A signal that this process ignores from its start (SIGHUP under nohup) remains ignored. A nested call has no effect.
    """
    with _handled(_interrupt):
        yield


def end_by_interrupt() -> None:
    """Ignore signals after the first signal until this process ends."""
    for signal_number in STOPPING:
        if signal.getsignal(signal_number) not in (signal.SIG_IGN, None):
            signal.signal(signal_number, _interrupt)


def _interrupt(signum: int, frame: object) -> None:
    _ignore_interrupts()
    raise KeyboardInterrupt


def _ignore_interrupts() -> None:
    for signal_number in STOPPING:
        if signal.getsignal(signal_number) is _interrupt:
            signal.signal(signal_number, signal.SIG_IGN)


class Stop:
    """A record of a stop signal that this process has received."""

    def __init__(self) -> None:
        self.is_requested = False

    def note(self, signum: int, frame: object) -> None:
        """Handle a signal."""
        self.is_requested = True


@contextlib.contextmanager
def noted_stop() -> Iterator[Stop]:
    """Record stop signals for a loop that polls the result. The signals do not interrupt the loop.

    A signal that this process ignores from its start remains ignored. After a recorded signal, signals that would raise
    KeyboardInterrupt are also ignored.
    """
    stop = Stop()
    with _handled(stop.note):
        yield stop
    if stop.is_requested:
        _ignore_interrupts()


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    unchanged = (signal.SIG_IGN, handler, None)
    # Python handles signals on its main thread only.
    in_main = threading.current_thread() is threading.main_thread()
    previous = {
        signal_number: before
        for signal_number in STOPPING
        if in_main and (before := signal.getsignal(signal_number)) not in unchanged
    }
    try:
        for signal_number in previous:
            signal.signal(signal_number, handler)
        yield
    finally:
        for signal_number, before in previous.items():
            signal.signal(signal_number, before)
