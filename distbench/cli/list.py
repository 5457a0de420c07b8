"""`distbench list`: the scenarios as a table, and one scenario in full."""

import ast
import datetime
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from distbench.cli.options import PATH, format_option, refuse_with, refuse_without, scenario_names, width_option
from distbench.cli.output import say
from distbench.show.terminal import width_here
from distbench.spec import Entry, find, format_mesh, list_entries
from distbench.spec.printable_text import clean, count_text

INDENT = "    "
LABEL_WIDTH = 12


@click.command("list")
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO...]", shell_complete=scenario_names)
@format_option("table", "json")
@click.option("--runs", type=PATH, default=Path("results"), help="Where runs were written.")
@width_option
def list_command(scenarios: tuple[str, ...], form: str, runs: Path) -> None:
    """List the shipped scenarios: mesh, tags and what each measures.

    A SCENARIO is shown in full: its axes and their values, its parameters, what it measures, and how long it took here
    the last time.

    \b
    Examples:
      distbench list
      distbench list cp_attention
    """
    if not scenarios:
        refuse_without("a SCENARIO", "runs")
    if form == "json":
        refuse_with("--format json", "runs")
    entries = [entry for target in scenarios for entry in find(target)] if scenarios else list_entries()
    if form == "json":
        fields = ("name", "mesh", "tags", "axes", "params", "summary")
        records = [{name: getattr(entry, name) for name in fields} | {"file": str(entry.file)} for entry in entries]
        click.echo(json.dumps(records, indent=1))
    elif scenarios:
        say("\n\n".join("\n".join(lines_of(entry, runs)) for entry in entries))
    else:
        say(scenario_table(entries))


def scenario_table(entries: Sequence[Entry]) -> str:
    """For each scenario its name, mesh and tags in columns, and below what it measures.

    Laid out here, not by rich: to import that takes longer than all else that `list` does.
    """
    rows = [
        tuple(map(clean, (scenario.name, format_mesh(scenario.mesh), ", ".join(scenario.tags)))) for scenario in entries
    ]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    width, lines = width_here(), []
    for entry, row in zip(entries, rows, strict=True):
        cells = [cell.ljust(most) for cell, most in zip(row, widths, strict=True)]
        while len("  ".join(cells).rstrip()) > width and len(cells) > 1:
            cells.pop()
        lines.append("  ".join(cells).rstrip())
        wrapper = textwrap.TextWrapper(width, INDENT, INDENT, break_on_hyphens=False)
        lines += wrapper.wrap(clean(entry.summary))
    return "\n".join(lines)


def lines_of(entry: Entry, out: Path) -> list[str]:
    """For a terminal; `out` is the results folder."""
    rows: list[tuple[str, str]] = [("mesh", _mesh(entry)), ("tags", ", ".join(entry.tags) or "-")]
    rows += [("axes" if not place else "", text) for place, text in enumerate(_values(entry.axes))]
    other_params = {name: value for name, value in entry.params.items() if name not in entry.axes}
    rows += [("parameters" if not place else "", text) for place, text in enumerate(_values(other_params))]
    if entry.quick:
        rows.append(("with --quick", ", ".join(f"{name}={value!r}" for name, value in entry.quick.items())))
    rows += [("file", str(entry.file)), ("last time", _last_time(entry, out))]
    row_lines = [line for label, text in rows for line in _wrapped(label, text)]
    return [entry.name, *(line for text in _docstring(entry).splitlines() for line in _told(text)), "", *row_lines]


def _wrapped(label: str, text: str) -> list[str]:
    """One row, continued under itself where the terminal ends."""
    indent = " " * (LABEL_WIDTH + 4 + (text.find(" = ") + 3 if " = " in text else 0))
    row = f"  {label:<{LABEL_WIDTH}}  {text}"
    return textwrap.wrap(row, width_here(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _told(line: str) -> list[str]:
    wrapper = textwrap.TextWrapper(width_here(), "  ", "    ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(line) or [""]


def _mesh(entry: Entry) -> str:
    quick = f" (with --quick {format_mesh(entry.quick_mesh)})" if entry.quick_mesh else ""
    return format_mesh(entry.mesh) + quick


def _values(params: Mapping[str, Any]) -> list[str]:
    """`name = value` for each; an axis has all of its values."""
    width = max(map(len, params), default=0)
    return [
        f"{name:<{width}} = {', '.join(map(str, value)) if isinstance(value, tuple) else repr(value)}"
        for name, value in params.items()
    ]


def _docstring(entry: Entry) -> str:
    tree = ast.parse(entry.file.read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry.name)
    return ast.get_docstring(function) or "(it has no docstring)"


def _last_time(entry: Entry, out: Path) -> str:
    # Reading run files takes longer to import than the table of scenarios takes.
    from distbench.records.results_folder import newest_finished

    run = newest_finished(out, entry.name)
    if run is None or not run.footer:
        return f"never run to its end on this machine (looked under {out})"
    day = datetime.datetime.fromtimestamp(run.about.started_at, datetime.UTC).strftime("%Y-%m-%d")
    budget = run.about.settings.get("budget_s")
    timed = f", at most {budget:g} s of it timed" if isinstance(budget, int | float) else ""
    mesh = format_mesh(run.about.mesh or {})
    label = f' "{run.about.label}"' if run.about.label else ""
    return f"{run.footer['wall_s']:.0f} s for {count_text(len(run.cases), 'case')} on {mesh}{timed} ({day}{label})"
