"""The errors that a user can fix, and their place in the user's code. The CLI prints such an error's message and exits
with 2; the CLI catches no other error."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

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
    import difflib

    close = difflib.get_close_matches(given, names, n=count, cutoff=0.5)
    if close:
        return "nearest: " + ", ".join(close)
    if not names:
        return "none exist"
    first_names = ", ".join(names[:8])
    return f"available: {first_names}" + (", ..." if len(names) > 8 else "")


def place_in_user_code(frames: Iterable[tuple[str, int | None]], in_packages: bool = False) -> str:
    """Return the place of the innermost frame in the user's files as `file:line`; "" without such a frame.

    Args:
        frames: file and line of each frame, innermost first.
        in_packages: whether to search also installed packages other than torch, for models of libraries.
    """
    import sysconfig

    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own_package = Path(__file__).parents[1]
    # torch on PYTHONPATH is outside the folders of installed packages.
    torch = find_spec("torch")
    skipped = (*(torch.submodule_search_locations or () if torch else ()), str(own_package), "<")
    for file, line in frames:
        is_package = "site-packages" in file
        is_installed = (is_package and not in_packages) or (not is_package and file.startswith(installed))
        is_skipped = is_installed or file.startswith(skipped)
        if not is_skipped or file.startswith(str(own_package / "scenarios")):
            return f"{file}:{line}"
    return ""
