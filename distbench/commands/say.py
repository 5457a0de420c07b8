"""The one way that a command prints: sentences, and what may hold names, texts of ranks or lines of files."""

import contextlib
import re
import sys
from collections.abc import Iterable

import click

from distbench.spec.printable import printable


def say_lines(lines: Iterable[str], indent: str = "    ", err: bool = False) -> None:
    """Print sentences within the width of the screen, broken at spaces; what stands in columns only where all fit."""
    from distbench.render.screen import width_here
    from distbench.render.terminal import wrap

    kept, width = list(lines), width_here()
    if max(map(len, kept), default=0) > width:
        kept = [part for line in kept for part in wrap(re.sub(r"(?<=\S) {2,}", "  ", line), width, indent)]
    say("\n".join(kept), err)


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print lines without what a terminal or a CI system would obey.

    Where standard error (`err`) is full, or nobody reads it, the command goes on without a word.
    """
    with contextlib.suppress(*([OSError] if err else [])):
        click.echo(printable(_for_screen(text) if err else text), err=err, nl=nl)


def _for_screen(text: str) -> str:
    """Sentences broken at spaces where standard error is a terminal; in a log each keeps its line."""
    from distbench.render.screen import width_of

    width = width_of(sys.stderr)
    if width is None or max(map(len, text.split("\n"))) <= width:
        return text
    from distbench.render.terminal import wrap

    return "\n".join(part for line in text.split("\n") for part in wrap(line, width, "  "))
