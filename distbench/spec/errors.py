"""The error that a user can fix. The CLI prints its message and exits with 2; it catches no other error."""

import difflib
from collections.abc import Iterable

# Exit codes: the user can fix it; distbench itself failed; the user stopped it.
USER_ERROR, UNFORESEEN, INTERRUPTED = 2, 70, 130
# Begins the message of a run whose plan does not fit its model or mesh.
PLAN_PROBLEMS = "the plan cannot work"
# Why a rank failed, in the file that it leaves: a user's error, a full disk, an exception, a lost host, another rank's
# end.
FAILURES = ("user", "storage", "raised", "lost", "gone")


class UserError(Exception):
    """A problem that the user can fix. The message states the given value, the allowed values and the next step."""


class StorageFailed(Exception):
    """The results or log folder is full or gone. Everything written before is kept."""


def nearest(given: str, allowed: Iterable[str], count: int = 3) -> str:
    """Up to `count` names of `allowed` closest to `given`, as text; all of them, shortened, when none is close."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=count, cutoff=0.5)
    if close:
        return "nearest: " + ", ".join(close)
    if not names:
        return "none exist"
    first_names = ", ".join(names[:8])
    return f"available: {first_names}" + (", ..." if len(names) > 8 else "")
