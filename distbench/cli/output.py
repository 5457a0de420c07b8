"""How a command prints: sentences, untrusted text, and what a gate found in every form."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from distbench.cli.options import write
from distbench.spec.errors import UserError
from distbench.spec.safe_text import printable

# The one way that a command prints: sentences, and what may hold names, texts of ranks or lines of files.


def say_lines(lines: Iterable[str], indent: str = "    ", err: bool = False) -> None:
    """Print sentences within the width of the screen, broken at spaces; what stands in columns only where all fit."""
    from distbench.show.terminal import width_here, wrap

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
    from distbench.show.terminal import width_of

    width = width_of(sys.stderr)
    if width is None or max(map(len, text.split("\n"))) <= width:
        return text
    from distbench.show.terminal import wrap

    return "\n".join(part for line in text.split("\n") for part in wrap(line, width, "  "))


# Each has a function in judge/gate_text.py and in judge/signature.py.
FORMS = ("table", "markdown", "json", "junit", "github")
F = TypeVar("F", bound=Callable[..., Any])


def options(command: F) -> F:
    """The options that say where it goes: parameters `form`, `write_to` and `github`."""
    for option in (
        click.option("--github", is_flag=True, help="Also print annotations, and append Markdown to the step summary."),
        click.option(
            "--write", "write_to", multiple=True, metavar="FORMAT=FILE", help="Also write this format to a file."
        ),
        click.option("--format", "form", type=click.Choice(FORMS), default="table", help="What to print. [table]"),
    ):
        command = option(command)
    return command


def targets_of(texts: Sequence[str]) -> list[tuple[str, Path]]:
    """`["junit=gate.xml"]` to forms and files; a UserError for a text that is none."""
    targets = []
    for text in texts:
        form, equals, path = text.partition("=")
        if not equals or form not in FORMS or not path:
            raise UserError(f"--write {text!r} is not FORMAT=FILE with a format of {', '.join(FORMS)}")
        targets.append((form, Path(path)))
    return targets


def print_and_write(render: Callable[[str], str], form: str, targets: Sequence[tuple[str, Path]], github: bool) -> None:
    """Print and write what was found, in each form that was asked for."""
    _print(render(form), form)
    for one, path in targets:
        write(path, render(one) + "\n")
    if not github:
        return
    if form != "github":
        _print(render("github"), "github")
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        write(Path(summary), render("markdown") + "\n", "a")


def _print(text: str, form: str) -> None:
    """Annotations are commands to GitHub; all else must hold none."""
    if form == "github":
        click.echo(text)
    else:
        say(text)
