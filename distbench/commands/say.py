"""The one way that a command prints sentences."""

import contextlib

import click


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print lines; where standard error (`err`) is full, or nobody reads it, the command goes on without a word."""
    with contextlib.suppress(*([OSError] if err else [])):
        click.echo(text, err=err, nl=nl)
