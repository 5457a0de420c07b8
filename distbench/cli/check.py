"""`distbench check`: whether plans can work on a mesh of any size, in seconds and without ranks."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import mesh_option, scenario_names, width_option
from distbench.cli.output import say_lines
from distbench.launch import Request, jobs_of
from distbench.processes.ask_child import ask_child
from distbench.show.units import size_text
from distbench.spec import Job, format_mesh
from distbench.spec.mesh import mesh_size
from distbench.spec.printable_text import count_text

TIMEOUT_S = 600.0
MAX_PROBLEMS = 8
MAX_TRIED = 3


@dataclass(frozen=True)
class Checked:
    """What `distbench check` found: lines for a terminal, and how many different problems the plans have."""

    lines: tuple[str, ...]
    num_problems: int


def check_jobs(jobs: Sequence[Job]) -> Checked:
    """Check the plan of every variant; no rank is started. Raises UserError where the child process has no answer."""
    answers = ask_child(
        "plan_problems",
        given=[replace(job, device="cpu").to_record() for job in jobs],
        timeout_s=TIMEOUT_S,
        failure="the plans cannot be checked: {why}; try `distbench doctor`",
    )
    checked = [_lines_of(job, answer) for job, answer in zip(jobs, answers, strict=True)]
    return Checked(tuple(line for lines, _ in checked for line in lines), sum(count for _, count in checked))


def _lines_of(job: Job, answers: Sequence[dict[str, object]]) -> tuple[list[str], int]:
    head = f"{job.scenario} on {format_mesh(job.mesh)} ({count_text(mesh_size(job.mesh), 'rank')})"
    by_problem: dict[str, list[str]] = {}
    works: dict[str, list[str]] = {}
    lines = []
    for answer in answers:
        label = str(answer["label"])
        for problem in answer["problems"]:  # type: ignore[attr-defined]
            by_problem.setdefault(problem, []).append(label)
        if other_mesh := answer.get("works"):
            works.setdefault(format_mesh(other_mesh), []).append(label)  # type: ignore[arg-type]
        if "skipped" in answer:
            lines.append(f"  {label}: skipped: {answer['skipped']}")
        elif "parameter_bytes" in answer:
            lines.append(f"  {label}: {_size(answer)}")
            lines += [f"    note: {sentence}" for sentence in answer.get("advice", ())]  # type: ignore[attr-defined]
    if by_problem:
        head += f": {count_text(len(by_problem), 'problem')}"
    problems = [f"  - {problem}{_whose(labels, len(answers))}" for problem, labels in by_problem.items()]
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS - 1 :] = [f"  ... {len(problems) - MAX_PROBLEMS + 1} more problems"]
    mesh_lines = [f"  --mesh {mesh} works: tried{_whose(labels, len(answers))}" for mesh, labels in works.items()]
    return [head, *problems, *mesh_lines[:MAX_TRIED], *lines], len(by_problem)


def _size(answer: dict[str, object]) -> str:
    parameters, rank_bytes = answer["num_parameters"], answer["parameter_bytes"]
    assert isinstance(parameters, int) and isinstance(rank_bytes, int)
    step = f"no step was tried: {reason}" if (reason := answer["not_tried"]) else "a step runs"
    return f"ok, {parameters / 1e6:.3g} M parameters, {size_text(rank_bytes)} of them on a rank; {step}"


def _whose(labels: list[str], num_variants: int) -> str:
    if num_variants == 1:
        return ""
    if len(labels) == num_variants:
        return " [every variant]"
    axes = [label.partition("/")[2] for label in labels]
    return f" [{'; '.join(axes[:4])}{'; ...' if len(axes) > 4 else ''}]"


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
    request = Request(scenarios, choices, mesh, "cpu", quick, started_at=STARTED_AT, shapes_only=True)
    checked = check_jobs(jobs_of(request, None))
    say_lines(checked.lines)
    sys.exit(2 if checked.num_problems else 0)
