"""What a gate found, printed and written in the forms that people and CI systems read; `gate` and `ab` share it."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from distbench.commands.files import write
from distbench.commands.say import say
from distbench.spec.errors import UserError

# Each has a function in gate/machine_forms.py and in signature/difference_text.py.
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


def put_out(render: Callable[[str], str], form: str, targets: Sequence[tuple[str, Path]], github: bool) -> None:
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
