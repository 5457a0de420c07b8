"""The command `distbench check`."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    format_option,
    mesh_option,
    quick_option,
    refuse_with,
    refuse_without,
    say_lines,
    scenario_names,
    set_option,
    width_option,
)
from distbench.processes import ask_child
from distbench.spec import UserError, format_mesh
from distbench.spec.mesh import RANKS_PER_CPU, mesh_size
from distbench.spec.printable_text import count_text
from distbench.spec.recipes import INSTALLS

if TYPE_CHECKING:
    from distbench.spec import Job


CHECK_TIMEOUT_S = 600.0
MAX_PROBLEMS, MAX_TRIED, MAX_VARIANTS = 8, 3, 4


@click.command()
@click.argument("scenarios", nargs=-1, metavar="SCENARIO...", shell_complete=scenario_names)
@set_option
@mesh_option("At most 65536 ranks. Default: the scenario's mesh.")
@quick_option("")
@click.option("--all", "source", type=click.Choice([*INSTALLS]), help="Check all recipes against a memory size.")
@click.option(
    "--hardware", default="h100", show_default=True, metavar="NAME|FILE", help="Predict for this machine. Needs --all."
)
@click.option("--world", type=int, metavar="N", help="Number of devices (ranks). Needs --all. [devices of one node]")
@format_option("table", "json")
@width_option
def check(
    scenarios: tuple[str, ...],
    choices: tuple[str, ...],
    mesh: dict[str, int] | None,
    quick: bool,
    source: str | None,
    hardware: str,
    world: int | None,
    form: str,
) -> None:
    """Check whether plans can work on a mesh of any size, and list every problem. No ranks are started.

    The exit code is 2 if there are problems. With --all, the exit code is 1 if a recipe has no plan that fits.

    \b
    Examples:
      distbench check llama_2d --mesh dp_shard=512,tp=8 --set batch=512
      distbench check my_model.py --mesh tp=3
      distbench check --all hf --hardware h100 --world 8
    """
    if source is not None:
        from distbench.cli.check_all import check_all

        refuse_with("--all", "scenarios", "mesh", "quick")
        sys.exit(0 if check_all(source, choices, hardware, world, form) else 1)
    refuse_without("--all", "hardware", "world")
    if not scenarios:
        raise UserError("check needs a SCENARIO or --all SOURCE; `distbench list` shows scenarios")
    from distbench.launch import Request, jobs_of

    request = Request(scenarios, choices, mesh, "cpu", quick, started_at=STARTED_AT, shapes_only=True)
    jobs = jobs_of(request, None)
    answers = _answers(jobs)
    lines, num_problems = _lines_of(jobs, answers)
    if not num_problems:
        num_ranks = max(mesh_size(job.mesh) for job in jobs)
        command = "run" if num_ranks <= RANKS_PER_CPU * (os.cpu_count() or 1) else "simulate"
        options = [*(["--mesh", format_mesh(mesh)] if mesh else []), *(["--quick"] if quick else [])]
        options += [word for choice in choices for word in ("--set", choice)]
        lines.append(f"Next: {shlex.join(['distbench', command, scenarios[0], *options])}")
    if form == "json":
        described = zip(jobs, answers, strict=True)
        records = [{"scenario": job.scenario, "mesh": job.mesh, "variants": variants} for job, variants in described]
        click.echo(json.dumps(records, indent=1))
    else:
        say_lines(lines)
    sys.exit(2 if num_problems else 0)


def check_jobs(jobs: "Sequence[Job]") -> tuple[list[str], int]:
    """Check the plan of every variant without starting ranks.

    Returns:
        Lines for a terminal, with the answer last, and the number of different problems.

    Raises:
        UserError: the child process failed.
    """
    return _lines_of(jobs, _answers(jobs))


def _answers(jobs: "Sequence[Job]") -> Any:
    """A record per job and variant, with label, problems, and a mesh that works or the size."""
    return ask_child(
        "plan_problems",
        given=[replace(job, device="cpu").to_record() for job in jobs],
        timeout_s=CHECK_TIMEOUT_S,
        failure="the plans cannot be checked: {why}; try `distbench doctor`",
    )


def _lines_of(jobs: "Sequence[Job]", answers: Any) -> tuple[list[str], int]:
    all_lines, num_problems = [], 0
    every_variant = [variant for variants in answers for variant in variants]
    solution = _mesh_for_all(every_variant)
    for job, variants in zip(jobs, answers, strict=True):
        by_problem: dict[str, list[str]] = {}
        by_mesh: dict[str, list[str]] = {}
        lines = []
        for variant in variants:
            label = variant["label"]
            for problem in variant["problems"]:
                by_problem.setdefault(problem, []).append(label)
            if (other_mesh := variant.get("works")) and not solution:
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
        meshes = [f"  --mesh {mesh} works (checked){_whose(labels, len(variants))}" for mesh, labels in by_mesh.items()]
        all_lines += [head, *problems, *meshes[:MAX_TRIED], *lines]
        num_problems += len(by_problem)
    return [*all_lines, _answer(every_variant, num_problems, solution)], num_problems


def _mesh_for_all(variants: Sequence[Mapping[str, Any]]) -> str:
    """The one mesh that works for every variant with a problem; empty if no mesh does."""
    meshes = {format_mesh(variant.get("works") or {}) for variant in variants if variant["problems"]}
    return meshes.pop() if len(meshes) == 1 else ""


def _answer(variants: Sequence[Mapping[str, Any]], num_problems: int, mesh: str) -> str:
    """`OK: ...`, or `error: ...` with the mesh that works, if there is one."""
    if num_problems:
        bad = sum(bool(variant["problems"]) for variant in variants)
        found = f"error: {count_text(num_problems, 'problem')} in {bad} of {count_text(len(variants), 'variant')}"
        return f"{found}. {f'Use --mesh {mesh} (checked), or change' if mesh else 'Change'} the plan"
    skipped, untried = (sum(bool(variant.get(name)) for variant in variants) for name in ("skipped", "not_tried"))
    notes = [f"{skipped} skipped"] if skipped else []
    notes += [f"no step was run for {untried}"] if untried else []
    return "; ".join([f"OK: no problem in {count_text(len(variants), 'variant')}", *notes])


def _size(variant: Mapping[str, Any]) -> str:
    from distbench.show import units

    step = f"no step was run: {reason}" if (reason := variant["not_tried"]) else variant["step"]
    per_rank = units.size_text(variant["parameter_bytes"])
    return f"{units.count_text(variant['num_parameters'])} parameters, {per_rank} per rank; {step}"


def _whose(labels: list[str], num_variants: int) -> str:
    if num_variants == 1:
        return ""
    if len(labels) == num_variants:
        return " [every variant]"
    axes = [label.partition("/")[2] for label in labels]
    return f" [{'; '.join(axes[:MAX_VARIANTS])}{'; ...' if len(axes) > MAX_VARIANTS else ''}]"
