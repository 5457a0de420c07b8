"""Signals that ask a command to stop: taken as Ctrl-C, or noted for a loop that looks at them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stopped_as_interrupt() -> Iterator[None]:
    """The first signal that asks to stop raises KeyboardInterrupt; later ones are ignored while it cleans up.

    A signal that this process was started to ignore (SIGHUP under nohup) stays ignored. Within itself it does nothing.
    """
    with _handled(_interrupt):
        yield


def end_by_interrupt() -> None:
    """The same for the rest of this process: what comes after the first signal is ignored up to its very end."""
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
    """Whether a signal has asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False

    def note(self, signum: int, frame: object) -> None:
        """A signal's handler."""
        self.asked = True


@contextlib.contextmanager
def noted_stop() -> Iterator[Stop]:
    """Signals that ask to stop interrupt nothing, in whatever order and number they come: a loop looks at them.

    One that this process was started to ignore stays ignored. After one that was noted, those that would have raised
    KeyboardInterrupt are ignored, as after the first of these.
    """
    stop = Stop()
    with _handled(stop.note):
        yield stop
    if stop.asked:
        _ignore_interrupts()


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    unchanged = (signal.SIG_IGN, handler, None)
    # Python takes signals on its main thread only, so that another thread cannot handle any.
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
