"""Signals that ask a command to stop, taken as Ctrl-C: what it has begun is cleaned up."""

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stopped_as_interrupt() -> Iterator[None]:
    """The first SIGTERM or SIGHUP raises KeyboardInterrupt; later ones are ignored while it cleans up.

    A signal that this process was started to ignore (SIGHUP under nohup) stays ignored.
    """

    def interrupt(signum: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {each: signal.getsignal(each) for each in STOPPING if signal.getsignal(each) is not signal.SIG_IGN}
    try:
        for each in previous:
            signal.signal(each, interrupt)
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
