"""The command `distbench list`."""

import ast
import datetime
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from distbench.cli.options import (
    format_option,
    refuse_with,
    refuse_without,
    results_option,
    say,
    scenario_names,
    width_option,
)
from distbench.show.terminal import width_here
from distbench.spec import Entry, find, format_mesh, list_entries
from distbench.spec.printable_text import clean, count_text

INDENT = "    "
LABEL_WIDTH = 12
# Question to the tags of scenarios that answer the question. A scenario is listed under its first question.
QUESTIONS = {
    "How fast is this machine? (distbench calibrate)": {"calibrate"},
    "Which plan fits a large model? (distbench simulate, tune)": {"real-size"},
    "Which link is slow? (distbench preflight)": {"links"},
    "What does a collective cost?": {"collective"},
    "Which planner redistributes a tensor fastest?": {"redistribute"},
    "How long does a step take?": {"tp", "fsdp", "cp", "ep", "pp", "ddp"},
}
OWN = "Your scenarios"


@click.command("list")
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO...]", shell_complete=scenario_names)
@format_option("table", "json")
@results_option("The last run of a SCENARIO is read from this folder.")
@width_option
def list_command(scenarios: tuple[str, ...], form: str, out: Path) -> None:
    """List the shipped scenarios by the question that they answer, one line each.

    With a SCENARIO, show its description, mesh, tags, axes, parameters and last run. For a file of several scenarios,
    list the scenarios.

    \b
    Examples:
      distbench list
      distbench list cp_attention
      distbench list bench.py
    """
    if not scenarios:
        refuse_without("a SCENARIO", "out")
    if form == "json":
        refuse_with("--format json", "out")
    entries = [entry for target in scenarios for entry in find(target)] if scenarios else list_entries()
    if form == "json":
        fields = ("name", "mesh", "tags", "axes", "params", "summary")
        records = [{name: getattr(entry, name) for name in fields} | {"file": str(entry.file)} for entry in entries]
        click.echo(json.dumps(records, indent=1))
    elif scenarios and not (scenarios[0].endswith(".py") and len(scenarios) == 1 < len(entries)):
        say("\n\n".join("\n".join(_lines_of(entry, out)) for entry in entries))
    else:
        say(_table(entries))


def _question(entry: Entry) -> str:
    questions = (question for question, tags in QUESTIONS.items() if tags & set(entry.tags))
    return next(questions, OWN)


def _table(entries: Sequence[Entry]) -> str:
    """Names with their first sentence, by question. This does not use rich, whose import is slow."""
    by_question: dict[str, list[Entry]] = {}
    for entry in entries:
        by_question.setdefault(_question(entry), []).append(entry)
    indent = " " * (4 + max((len(entry.name) for entry in entries), default=0))
    lines = []
    for question in (*reversed(QUESTIONS), OWN):
        lines += ["", question] if question in by_question else []
        for entry in by_question.get(question, ()):
            sentence = re.split(r"(?<=\.) ", clean(entry.summary), maxsplit=1)[0]
            head = f"  {clean(entry.name)}".ljust(len(indent))
            lines += textwrap.wrap(head + sentence, width_here(), subsequent_indent=indent, break_on_hyphens=False) or [
                head
            ]
    return "\n".join([*lines[1:], "", "Next: distbench list SCENARIO   (details), distbench run SCENARIO --quick"])


def _lines_of(entry: Entry, out: Path) -> Iterator[str]:
    """The lines that describe one scenario; `out` is the results folder."""
    function = next(
        node
        for node in ast.parse(entry.file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == entry.name
    )
    yield entry.name
    for line in (ast.get_docstring(function) or "(it has no docstring)").splitlines():
        yield from _wrapped(f"  {line}" if line else "", INDENT) or [""]
    yield ""
    quick_mesh = f" (with --quick {format_mesh(entry.quick_mesh)})" if entry.quick_mesh else ""
    other_params = {name: value for name, value in entry.params.items() if name not in entry.axes}
    quick = ", ".join(f"{name}={value!r}" for name, value in entry.quick.items())
    rows = {
        "mesh": [format_mesh(entry.mesh) + quick_mesh],
        "tags": [", ".join(entry.tags) or "-"],
        "axes": _values(entry.axes),
        "parameters": _values(other_params),
        "with --quick": [quick] if quick else [],
        "file": [str(entry.file)],
        "last run": [_last_run(entry, out)],
    }
    for label, texts in rows.items():
        for place, text in enumerate(texts):
            # Continued under the value.
            indent = " " * (LABEL_WIDTH + 4 + (text.find(" = ") + 3 if " = " in text else 0))
            yield from _wrapped(f"  {'' if place else label:<{LABEL_WIDTH}}  {text}", indent)


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, width_here(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _values(params: Mapping[str, Any]) -> list[str]:
    """Lines such as `name = value`. An axis has all values."""
    width = max(map(len, params), default=0)
    return [
        f"{name:<{width}} = {', '.join(map(str, value)) if isinstance(value, tuple) else repr(value)}"
        for name, value in params.items()
    ]


def _last_run(entry: Entry, out: Path) -> str:
    # Imported here, because this import takes longer than the table of scenarios.
    from distbench.records.results_folder import newest_finished

    run = newest_finished(out, entry.name)
    if run is None or not run.footer:
        return f"no finished run of this machine in {out}"
    day = datetime.datetime.fromtimestamp(run.about.started_at, datetime.UTC).strftime("%Y-%m-%d")
    budget = run.about.settings.get("budget_s")
    timed = f", of which at most {budget:g} s timed" if isinstance(budget, int | float) else ""
    label = f' "{run.about.label}"' if run.about.label else ""
    cases = f"{count_text(len(run.cases), 'case')} on {format_mesh(run.about.mesh or {})}"
    return f"{run.footer['wall_s']:.0f} s for {cases}{timed} ({day}{label})"
