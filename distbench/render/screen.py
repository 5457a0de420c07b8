"""How wide the screen is that text goes to; `--width` says it where it is given."""

import os
import sys
from typing import TextIO

MIN_WIDTH, MAX_WIDTH = 60, 200
# A file shall look the same wherever it was written.
PIPED_WIDTH = 120
_asked: list[int] = []


def cells(text: str) -> int:
    """How many places of a terminal it takes: Chinese characters and emoji take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def first_cells(text: str, width: int) -> str:
    """Its beginning that takes at most so many places."""
    end = min(len(text), max(width, 0))
    while cells(text[:end]) > width:
        end -= 1
    return text[:end]


def ask_width(width: int | None) -> None:
    """Take this width from now on; None for the screen's own."""
    _asked[:] = [] if width is None else [width]


def width_here() -> int:
    """Characters of a line: what `--width` asked for, else the terminal's (60 to 200), else 120."""
    return width_of(sys.stdout) or (_asked[0] if _asked else PIPED_WIDTH)


def width_of(stream: TextIO | None) -> int | None:
    """Characters of a line where the stream is a terminal, as `width_here` has them; None where it is none."""
    if stream is None or not stream.isatty():
        return None
    if _asked:
        return _asked[0]
    try:
        columns = int(os.environ.get("COLUMNS", "")) or PIPED_WIDTH
    except ValueError:
        try:
            columns = os.get_terminal_size(stream.fileno()).columns or PIPED_WIDTH
        except (OSError, ValueError):
            columns = PIPED_WIDTH
    return min(max(columns, MIN_WIDTH), MAX_WIDTH)
