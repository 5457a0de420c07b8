"""How wide the screen is that text goes to; `--width` says it where it is given."""

import shutil
import sys

MIN_WIDTH, MAX_WIDTH = 60, 200
# A file shall look the same wherever it was written.
PIPED_WIDTH = 120
_asked: list[int] = []


def ask_width(width: int | None) -> None:
    """Take this width from now on; None for the screen's own."""
    _asked[:] = [] if width is None else [width]


def width_here() -> int:
    """Characters of a line: what `--width` asked for, else the terminal's (60 to 200), else 120."""
    if _asked:
        return _asked[0]
    if sys.stdout is None or not sys.stdout.isatty():
        return PIPED_WIDTH
    return min(max(shutil.get_terminal_size((PIPED_WIDTH, 24)).columns, MIN_WIDTH), MAX_WIDTH)
