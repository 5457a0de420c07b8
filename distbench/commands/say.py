"""The one way that a command prints what may hold names, texts of ranks or lines of files."""

import click

from distbench.spec.printable import printable


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print lines without what a terminal or a CI system would obey."""
    click.echo(printable(text), err=err, nl=nl)
