"""The errors that a user can fix. The CLI prints such an error's message and exits with 2; the CLI catches no other
error."""

import difflib
from collections.abc import Iterable

# Exit codes: a user's error, a failure of distbench, an interruption by the user.
USER_ERROR, UNFORESEEN, INTERRUPTED = 2, 70, 130
# Begins the message of a run with a plan that does not fit its model or mesh.
PLAN_PROBLEMS = "the plan cannot work"
# Causes of a rank's failure, in its failure file: a user's error, a full disk, an exception, a lost host, another
# rank's end.
FAILURES = ("user", "storage", "raised", "lost", "gone")


class UserError(Exception):
    """A problem that the user can fix. The message states the given value, the allowed values and the next step."""


class StorageFailed(Exception):
    """The results or log folder is full or was deleted. Earlier files remain."""


def nearest(given: str, allowed: Iterable[str], count: int = 3) -> str:
    """Return up to `count` names of `allowed` that are close to `given`, as text; if no name is close, a shortened list
    of all."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=count, cutoff=0.5)
    if close:
        return "nearest: " + ", ".join(close)
    if not names:
        return "none exist"
    first_names = ", ".join(names[:8])
    return f"available: {first_names}" + (", ..." if len(names) > 8 else "")
