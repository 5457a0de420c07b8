"""Generates the home page from README.md, and tables of commands, scenarios and torch options. mkdocs.yml names it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from distbench.cli.main import main
from distbench.spec import list_entries
from distbench.spec.mesh import format_mesh

WIDTH = 80  # characters; longer lines are cut on a small screen


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page, with the generated part where it has one."""
    if page.file.src_uri == "index.md":
        return _home()
    added = {
        "commands.md": lambda: _sections(main, None),
        "scenarios.md": _scenarios,
        "parallelism-options.md": _torch_options,
    }.get(page.file.src_uri)
    return markdown + "".join(added()) if added else markdown


def _home() -> str:
    """Return the README, whose links lead to pages of the site where it has them."""
    text = (Path(__file__).parent.parent / "README.md").read_text().replace("](docs/", "](")
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changes.md)")
    return re.sub(r"\[([\w.]+)\]\((SECURITY.md|CITATION.cff)\)", r"\1", text)


def _scenarios() -> Iterator[str]:
    yield "\n| scenario | shows | mesh | tags |\n|---|---|---|---|\n"
    for entry in list_entries():
        mesh = format_mesh(entry.mesh).replace(",", ", ")  # a narrow column
        yield f"| {entry.name} | {entry.summary} | {mesh} | {', '.join(entry.tags)} |\n"


def _torch_options() -> Iterator[str]:
    lists = tomllib.loads((Path(__file__).parent / "torch_options.toml").read_text())
    for title, key, column in (("Set by a plan or a scenario", "set", "field"), ("Left out", "left_out", "instead")):
        yield f"\n### {title}\n\n| torch | options | since | {column} |\n|---|---|---|---|\n"
        for row in lists[key]:
            options = " ".join(f"`{option}`" for option in row["options"])
            yield f"| `{row['torch']}` | {options} | {row.get('since', '')} | {row[column]} |\n"


def _sections(command: click.Command, parent: click.Context | None) -> Iterator[str]:
    name = str(command.name) if parent else "distbench"
    context = command.context_class(
        command, parent=parent, info_name=name, terminal_width=WIDTH, **command.context_settings
    )
    yield f"\n## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    for subcommand in getattr(command, "commands", {}).values():
        if not subcommand.hidden:
            yield from _sections(subcommand, context)
