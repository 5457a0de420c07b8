"""`--width`, of every command that prints a table."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def _ask(ctx: click.Context, param: click.Parameter, width: int | None) -> None:
    from distbench.render.screen import ask_width

    ask_width(width)


def width_option(command: F) -> F:
    """Add the option, which the command itself is not given."""
    return click.option(
        "--width",
        type=click.IntRange(60, 200),
        metavar="N",
        expose_value=False,
        callback=_ask,
        help="Characters of a line. [the terminal's; 120 in a file]",
    )(command)
