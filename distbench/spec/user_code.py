"""Places of the user's code on a stack: outside of installed packages, Python's library and distbench."""

import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path


def place_in_user_code(frames: Iterable[tuple[str, int | None]], in_packages: bool = False) -> str:
    """Return the place of the innermost frame in the user's files as `file:line`; "" without such a frame.

    Args:
        frames: file and line of each frame, innermost first.
        in_packages: whether to search also installed packages other than torch, for models of libraries.
    """
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
