"""The command `distbench check`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    mesh_option,
    say_lines,
    scenario_names,
    width_option,
)
from distbench.processes import ask_child
from distbench.spec import format_mesh
from distbench.spec.mesh import mesh_size
from distbench.spec.printable_text import count_text

if TYPE_CHECKING:
    from distbench.spec import Job


CHECK_TIMEOUT_S = 600.0
MAX_PROBLEMS, MAX_TRIED, MAX_VARIANTS = 8, 3, 4


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
