"""How a command prints: sentences, untrusted text, and what a gate found in every form."""

import contextlib
import errno
import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from distbench.cli.options import option, write
from distbench.spec.errors import UserError
from distbench.spec.printable_text import printable

# How long the process that printed a sentence keeps its name: ranks that start or fail a little later find it.
STAYS_S = 1.0


def say_lines(lines: Iterable[str], indent: str = "    ") -> None:
    """Print sentences within the width of the screen, broken at spaces; what stands in columns only where all fit."""
    from distbench.show.terminal import width_here, wrap

    all_lines, width = list(lines), width_here()
    if max(map(len, all_lines), default=0) > width:
        all_lines = [part for line in all_lines for part in wrap(re.sub(r"(?<=\S) {2,}", "  ", line), width, indent)]
    say("\n".join(all_lines))


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


def say_once(text: str) -> None:
    """Print a sentence on standard error, unless another rank of this launch on this host has just printed it.

    The rank that prints it holds a name, an abstract socket of Linux, which goes with the process. Elsewhere every rank
    prints it.
    """
    from distbench.launch.rendezvous import joined_ranks

    try:
        joined = joined_ranks(os.environ)
    except UserError:
        joined = None
    if joined is None or joined.world_size == 1:
        return say(text, err=True)
    launch_text = f"{joined.launch or joined.address} {text}"
    with socket.socket(socket.AF_UNIX) as name_socket:
        try:
            name_socket.bind(f"\0distbench-{hashlib.sha256(launch_text.encode()).hexdigest()[:32]}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            return say(text, err=True)
        say(text, err=True)
        # Whatever ends this process now, it has said what there is to say.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(STAYS_S)
    return None


# Each has a function in judge/gate_text.py and in judge/communication_signature.py.
FORMS = ("table", "markdown", "json", "junit", "github")


@dataclass(frozen=True)
class OutputOptions:
    """In which forms a verdict is printed and written."""

    form: str = option("--format", default="table", type=click.Choice(FORMS), help="What to print. [table]")
    write_to: tuple[str, ...] = option(
        "--write", default=(), multiple=True, metavar="FORMAT=FILE", help="Also write this format to a file."
    )
    github: bool = option(
        "--github",
        default=False,
        is_flag=True,
        help="Also print annotations, and append Markdown to the step summary.",
    )

    def files(self) -> list[tuple[str, Path]]:
        """`["junit=gate.xml"]` to forms and files; a UserError for a text that is not FORMAT=FILE."""
        files = []
        for text in self.write_to:
            form, equals, path = text.partition("=")
            if not equals or form not in FORMS or not path:
                raise UserError(f"--write {text!r} is not FORMAT=FILE with a format of {', '.join(FORMS)}")
            files.append((form, Path(path)))
        return files

    def show(self, render: Callable[[str], str]) -> None:
        """Print and write what `render` returns for each form that was asked for."""
        files = self.files()
        _print(render(self.form), self.form)
        for form, path in files:
            write(path, render(form) + "\n")
        if not self.github:
            return
        if self.form != "github":
            _print(render("github"), "github")
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            write(Path(summary), render("markdown") + "\n", "a")


def _print(text: str, form: str) -> None:
    """Annotations are commands to GitHub; no other form may hold any."""
    if form == "github":
        click.echo(text)
    else:
        say(text)
