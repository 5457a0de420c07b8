"""The commands of `cli`, one module each. Arguments go to calls, results to text and exit codes; nothing else happens.

Imports stand inside functions: `distbench --help` must not pay for what it does not use.
"""

import contextlib
import time

import click

STARTED_AT = time.time()


def say(sentence: str) -> None:
    """Print to standard error; where that is full, or nobody reads it, the command goes on without a word."""
    with contextlib.suppress(OSError):
        click.echo(sentence, err=True)
