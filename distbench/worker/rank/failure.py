"""How a rank that cannot go on reports why: a file of its own that the parent reads when the launch has ended."""

import contextlib
import json
import time
from pathlib import Path

MAX_MESSAGE = 500  # characters


class RankFailed(Exception):
    """This rank failed where the others did not; the launch must end."""


class HostLost(RankFailed):
    """This rank failed because no rank of another host is there any more."""


def report_failure(log_dir: Path, rank: int, kind: str, message: str) -> None:
    """Write `failure-rank<N>.json`; `kind` is "user" for what the user can fix, "storage" for a full disk, "lost" for
    ranks of another host that are gone, else "raised". Where not even that can be written, the parent sees for itself
    that its folder is full or gone."""
    # By this clock the ranks of a host tell who failed first; the wall clock may jump.
    record = {"rank": rank, "kind": kind, "message": message, "at": time.monotonic()}
    with contextlib.suppress(OSError):
        (log_dir / f"failure-rank{rank}.json").write_text(json.dumps(record), encoding="utf-8")


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of its message, or the beginning of a long one."""
    try:
        first = str(error).strip().partition("\n")[0]
    except Exception as of_its_own:
        first = f"its message cannot be shown, that raises {type(of_its_own).__name__}"
    first = first if len(first) <= MAX_MESSAGE else f"{first[:MAX_MESSAGE]} ... ({len(first):,} characters)"
    # Half a character can be written to no file and no terminal.
    first = first.encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
