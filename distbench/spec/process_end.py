"""How a process ended, in words: the signal, and what it printed last."""

import signal
from collections.abc import Sequence

MAX_WORDS = 300


def ended_text(code: int, complaints: Sequence[str]) -> str:
    """`ended by SIGABRT (its last words: ...)`, of a process that a signal ended.

    Args:
        code: its exit code, negative, as `subprocess` and `multiprocessing` have it.
        complaints: lines of its standard error.
    """
    words = last_words(complaints)
    return f"ended by {signal_name(-code)}" + (f" (its last words: {words})" if words else "")


def last_words(complaints: Sequence[str]) -> str:
    """The last line that is not blank, cut where it is long; empty where there is none."""
    said = [line.strip() for line in complaints if line.strip()]
    return said[-1][:MAX_WORDS] if said else ""


def signal_name(number: int) -> str:
    """`SIGABRT`, or `signal 35`: most real-time signals have no name."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
