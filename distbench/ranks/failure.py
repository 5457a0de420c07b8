"""Reports of failed ranks: one file per rank, which the parent process reads after the launch."""

import contextlib
import inspect
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distbench.spec.errors import FAILURES, UserError, place_in_user_code
from distbench.spec.file_io import write_whole

MAX_MESSAGE = 500  # characters


class RankFailed(Exception):
    """Only this rank failed, so the launch must end."""


class HostLost(RankFailed):
    """This rank failed because all ranks of another host are gone."""


def report_failure(log_dir: Path, rank: int, kind: str, message: str) -> None:
    """Write `failure-rank<N>.json` atomically; `kind` is one of FAILURES.

    If the file cannot be written, the parent detects that the folder is full or deleted.
    """
    assert kind in FAILURES, kind
    # The ranks of a host share this clock, so it shows which rank failed first. The wall clock may jump.
    record = {"rank": rank, "kind": kind, "message": message, "at": time.monotonic()}
    with contextlib.suppress(OSError):
        write_whole(log_dir / f"failure-rank{rank}.json", json.dumps(record))


def one_line(error: BaseException) -> str:
    """Format an exception as one line: its type and the first line of its message, shortened if long."""
    try:
        first = str(error).strip().partition("\n")[0]
    except Exception as of_its_own:
        first = f"the message cannot be shown, because formatting raises {type(of_its_own).__name__}"
    first = first if len(first) <= MAX_MESSAGE else f"{first[:MAX_MESSAGE]} ... ({len(first):,} characters)"
    # Lone surrogates cannot be written to files or terminals.
    first = first.encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def place_of(function: Callable[..., Any]) -> str:
    """Return the place of a user's function: `file:line`, or its name if the place is unknown."""
    plain = inspect.unwrap(getattr(function, "func", function))
    if code := getattr(plain, "__code__", None):
        return f"{code.co_filename}:{code.co_firstlineno}"
    return getattr(plain, "__qualname__", type(plain).__qualname__)


def raised_at(error: BaseException, in_packages: bool = False) -> str:
    """Return the place in the user's files at which an exception was raised.

    The place is `file:line` of the innermost frame outside installed packages and distbench; "" without such a frame.

    Args:
        in_packages: whether to search also installed packages other than torch, for models of libraries.
    """
    return _own_place(traceback.extract_tb(error.__traceback__), in_packages)


def called_at() -> str:
    """Return the innermost place in the user's files on the current call stack, in the format of `raised_at`."""
    return _own_place(traceback.extract_stack())


def _own_place(frames: traceback.StackSummary, in_packages: bool = False) -> str:
    return place_in_user_code(((frame.filename, frame.lineno) for frame in reversed(frames)), in_packages)


def one_line_and_place(error: BaseException) -> str:
    """Format an exception as one line, with its place in the user's files."""
    place = raised_at(error)
    return f"{one_line(error)} ({place})" if place else one_line(error)


@contextlib.contextmanager
def blamed(what: str, function: Callable[..., Any]) -> Iterator[None]:
    """Convert errors of the user's function, including attempts to exit, to a UserError with file and line.

    If an exception's class has `is_deed`, its text is the predicate of the sentence (as "reads a file").
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        deed = str(error) if getattr(error, "is_deed", False) else f"raises {one_line(error)}"
        raise UserError(f"{what} {deed} ({raised_at(error) or place_of(function)}); fix it") from error
