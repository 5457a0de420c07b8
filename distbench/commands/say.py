"""The one way that a command prints: sentences, and what may hold names, texts of ranks or lines of files."""

import contextlib
from collections.abc import Iterable

import click

from distbench.spec.printable import printable


def say_lines(lines: Iterable[str], indent: str = "    ", err: bool = False) -> None:
    """Print sentences within the width of the screen, broken at spaces."""
    from distbench.render.screen import width_here
    from distbench.render.terminal import wrap

    say("\n".join(part for line in lines for part in wrap(line, width_here(), indent)), err)


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print lines without what a terminal or a CI system would obey.

    Where standard error (`err`) is full, or nobody reads it, the command goes on without a word.
    """
    with contextlib.suppress(*([OSError] if err else [])):
        click.echo(printable(text), err=err, nl=nl)
