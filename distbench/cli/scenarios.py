"""The commands on scenarios as they are declared: `list`, and `check`, whether their plans can work."""

import ast
import datetime
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    PATH,
    format_option,
    mesh_option,
    refuse_with,
    refuse_without,
    say,
    say_lines,
    scenario_names,
    width_option,
)
from distbench.processes import ask_child
from distbench.show.terminal import width_here
from distbench.spec import Entry, find, format_mesh, list_entries
from distbench.spec.mesh import mesh_size
from distbench.spec.printable_text import clean, count_text

if TYPE_CHECKING:
    from distbench.spec import Job

INDENT = "    "
LABEL_WIDTH = 12
CHECK_TIMEOUT_S = 600.0
MAX_PROBLEMS, MAX_TRIED, MAX_VARIANTS = 8, 3, 4


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
        say("\n\n".join("\n".join(_lines_of(entry, runs)) for entry in entries))
    else:
        say(_table(entries))


def _table(entries: Sequence[Entry]) -> str:
    """Name, mesh and tags in columns, and below them the summary; laid out here, since rich takes long to import."""
    rows = [tuple(map(clean, (entry.name, format_mesh(entry.mesh), ", ".join(entry.tags)))) for entry in entries]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    width, lines = width_here(), []
    for entry, row in zip(entries, rows, strict=True):
        cells = [cell.ljust(most) for cell, most in zip(row, widths, strict=True)]
        while len("  ".join(cells).rstrip()) > width and len(cells) > 1:
            cells.pop()
        lines.append("  ".join(cells).rstrip())
        lines += textwrap.wrap(
            clean(entry.summary), width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )
    return "\n".join(lines)


def _lines_of(entry: Entry, out: Path) -> Iterator[str]:
    """One scenario in full; `out` is the results folder."""
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
        "last time": [_last_time(entry, out)],
    }
    for label, texts in rows.items():
        for place, text in enumerate(texts):
            # Continued under the value.
            indent = " " * (LABEL_WIDTH + 4 + (text.find(" = ") + 3 if " = " in text else 0))
            yield from _wrapped(f"  {'' if place else label:<{LABEL_WIDTH}}  {text}", indent)


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, width_here(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _values(params: Mapping[str, Any]) -> list[str]:
    """`name = value` for each; an axis has all of its values."""
    width = max(map(len, params), default=0)
    return [
        f"{name:<{width}} = {', '.join(map(str, value)) if isinstance(value, tuple) else repr(value)}"
        for name, value in params.items()
    ]


def _last_time(entry: Entry, out: Path) -> str:
    # Reading run files takes longer to import than the table of scenarios takes.
    from distbench.records.results_folder import newest_finished

    run = newest_finished(out, entry.name)
    if run is None or not run.footer:
        return f"never run to its end on this machine (looked under {out})"
    day = datetime.datetime.fromtimestamp(run.about.started_at, datetime.UTC).strftime("%Y-%m-%d")
    budget = run.about.settings.get("budget_s")
    timed = f", at most {budget:g} s of it timed" if isinstance(budget, int | float) else ""
    label = f' "{run.about.label}"' if run.about.label else ""
    cases = f"{count_text(len(run.cases), 'case')} on {format_mesh(run.about.mesh or {})}"
    return f"{run.footer['wall_s']:.0f} s for {cases}{timed} ({day}{label})"


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...", shell_complete=scenario_names)
@click.option("--set", "choices", multiple=True, metavar="AXIS=VALUE", help="Pin an axis or parameter; A,B sweeps it.")
@mesh_option("Mesh, e.g. dp_shard=512,tp=8, up to 65536 ranks. Default: its own.")
@click.option("--quick", is_flag=True, help="Check the quick sizes.")
@width_option
def check(scenarios: tuple[str, ...], choices: tuple[str, ...], mesh: dict[str, int] | None, quick: bool) -> None:
    """Say whether plans can work on a mesh of any size, every problem at once; no ranks are started.

    Exits with 2 where there are problems.

    \b
    Examples:
      distbench check llama_2d --mesh dp_shard=512,tp=8 --set batch=512
      distbench check my_model.py --mesh tp=3
    """
    from distbench.launch import Request, jobs_of

    request = Request(scenarios, choices, mesh, "cpu", quick, started_at=STARTED_AT, shapes_only=True)
    lines, num_problems = check_jobs(jobs_of(request, None))
    say_lines(lines)
    sys.exit(2 if num_problems else 0)


def check_jobs(jobs: "Sequence[Job]") -> tuple[list[str], int]:
    """Check the plan of every variant; no rank is started.

    Returns:
        Lines for a terminal, and how many different problems the plans have.

    Raises:
        UserError: the child process has no answer.
    """
    answers = ask_child(
        "plan_problems",
        given=[replace(job, device="cpu").to_record() for job in jobs],
        timeout_s=CHECK_TIMEOUT_S,
        failure="the plans cannot be checked: {why}; try `distbench doctor`",
    )
    all_lines, num_problems = [], 0
    for job, variants in zip(jobs, answers, strict=True):
        by_problem: dict[str, list[str]] = {}
        by_mesh: dict[str, list[str]] = {}
        lines = []
        for variant in variants:
            label = variant["label"]
            for problem in variant["problems"]:
                by_problem.setdefault(problem, []).append(label)
            if other_mesh := variant.get("works"):
                by_mesh.setdefault(format_mesh(other_mesh), []).append(label)
            if "skipped" in variant:
                lines.append(f"  {label}: skipped: {variant['skipped']}")
            elif "parameter_bytes" in variant:
                lines.append(f"  {label}: {_size(variant)}")
                lines += [f"    note: {sentence}" for sentence in variant.get("advice", ())]
        head = f"{job.scenario} on {format_mesh(job.mesh)} ({count_text(mesh_size(job.mesh), 'rank')})"
        head += f": {count_text(len(by_problem), 'problem')}" if by_problem else ""
        problems = [f"  - {problem}{_whose(labels, len(variants))}" for problem, labels in by_problem.items()]
        if len(problems) > MAX_PROBLEMS:
            problems[MAX_PROBLEMS - 1 :] = [f"  ... {len(problems) - MAX_PROBLEMS + 1} more problems"]
        meshes = [f"  --mesh {mesh} works: tried{_whose(labels, len(variants))}" for mesh, labels in by_mesh.items()]
        all_lines += [head, *problems, *meshes[:MAX_TRIED], *lines]
        num_problems += len(by_problem)
    return all_lines, num_problems


def _size(variant: Mapping[str, Any]) -> str:
    from distbench.show.units import size_text

    step = f"no step was tried: {reason}" if (reason := variant["not_tried"]) else "a step runs"
    on_rank = size_text(variant["parameter_bytes"])
    return f"ok, {variant['num_parameters'] / 1e6:.3g} M parameters, {on_rank} of them on a rank; {step}"


def _whose(labels: list[str], num_variants: int) -> str:
    if num_variants == 1:
        return ""
    if len(labels) == num_variants:
        return " [every variant]"
    axes = [label.partition("/")[2] for label in labels]
    return f" [{'; '.join(axes[:MAX_VARIANTS])}{'; ...' if len(axes) > MAX_VARIANTS else ''}]"
