"""Adds to the page "Commands" what `distbench COMMAND --help` prints. mkdocs.yml names this file."""

from collections.abc import Iterator
from typing import Any

import click

from distbench.cli.main import main

PAGE = "commands.md"
WIDTH = 80  # characters; longer lines are cut on a small screen


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page's text, with a section per command where it is the page of commands."""
    return markdown + "".join(_sections(main, None)) if page.file.src_uri == PAGE else markdown


def _sections(command: click.Command, parent: click.Context | None) -> Iterator[str]:
    name = str(command.name) if parent else "distbench"
    context = command.context_class(
        command, parent=parent, info_name=name, terminal_width=WIDTH, **command.context_settings
    )
    yield f"\n## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    for subcommand in getattr(command, "commands", {}).values():
        if not subcommand.hidden:
            yield from _sections(subcommand, context)
