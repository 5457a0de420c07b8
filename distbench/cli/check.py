"""The command `distbench check`."""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    format_option,
    mesh_option,
    quick_option,
    refuse_with,
    refuse_without,
    say,
    say_lines,
    scenario_names,
    set_option,
    width_option,
)
from distbench.processes import ask_child
from distbench.spec.errors import UserError
from distbench.spec.mesh import RANKS_PER_CPU, format_mesh, mesh_size
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
            problems[MAX_PROBLEMS - 1 :] = [f"  ... {len(problems) - MAX_PROBLEMS + 1} more"]
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
        summary = f"error: {count_text(num_problems, 'problem')} in {bad} of {count_text(len(variants), 'variant')}"
        return f"{summary}. {f'Use --mesh {mesh} (checked), or change' if mesh else 'Change'} the plan"
    skipped, untried = (sum(bool(variant.get(name)) for variant in variants) for name in ("skipped", "not_tried"))
    notes = [f"{skipped} skipped"] if skipped else []
    notes += [f"no step was run for {untried}"] if untried else []
    return "; ".join([f"OK: no problem in {count_text(len(variants), 'variant')}", *notes])


def _size(variant: Mapping[str, Any]) -> str:
    from distbench.show import units

    step = f"no step was run: {reason}" if (reason := variant["not_tried"]) else variant["step"]
    per_rank = units.size_text(variant["parameter_bytes"])
    return f"{units.short_count_text(variant['num_parameters'])} parameters, {per_rank} per rank; {step}"


def _whose(labels: list[str], num_variants: int) -> str:
    if num_variants == 1:
        return ""
    if len(labels) == num_variants:
        return " [every variant]"
    axes = [label.partition("/")[2] for label in labels]
    return f" [{'; '.join(axes[:MAX_VARIANTS])}{'; ...' if len(axes) > MAX_VARIANTS else ''}]"


SEARCH_S = 30.0  # CPU time of a row, after which no further plan is tried for it
ROW_TIMEOUT_S = 600.0  # on a busy machine a row may take ten times its CPU time
MAX_REASON = 200  # characters
MADE_UP = ("@tiny", "@small")
FITS, TOO_LARGE, INVALID, REJECTED = "fits", "does not fit", "plan invalid", "rejected"


def check_all(source: str, choices: tuple[str, ...], hardware_name: str, world: int | None, form: str) -> bool:
    """Print one row per recipe, and return whether every recipe has a plan that fits.

    Raises:
        UserError: the source's package is not installed, or the hardware file or a choice is not valid.
    """
    from distbench.launch import Request, jobs_of
    from distbench.search.sweep_child import Question, SweepChild
    from distbench.simulate.hardware_file import load_hardware
    from distbench.spec.recipes import recipe_configs

    hardware = load_hardware(hardware_name)
    configs = [config for config in recipe_configs(source) if not config.endswith(MADE_UP)]
    world = hardware.devices_per_node if world is None else world
    if world < 1:
        raise UserError(f"--world {world} is not a number of ranks; use 1 or more")
    targets = tuple(f"{source}:{config}" for config in configs)
    request = Request(targets, choices, None, "cpu", started_at=STARTED_AT, shapes_only=True)
    jobs = jobs_of(request, None)
    if form == "table":
        usable_gib = hardware.usable_bytes / 2**30
        say_lines(
            [f"{len(configs)} recipes of {source} on {world} x {hardware.name}, {usable_gib:.1f} GiB usable each"]
        )
        widths = _widths(configs)
        say(_columns(("recipe", "parameters", "mesh", "GiB per rank", "verdict"), widths))
    about = {"world": world, "hardware": hardware_name, "search_s": SEARCH_S, "limit_s": ROW_TIMEOUT_S}
    questions = [Question("fit", job.variants, job.mesh, about) for job in jobs]
    answers: dict[int, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    with SweepChild(Path(jobs[0].file), jobs[0].scenario) as child:
        for place, answer in child.ask(questions):
            answers[place] = answer
            while len(rows) in answers:
                row = _row(configs[len(rows)], answers[len(rows)])
                rows.append(row)
                if form == "json":
                    click.echo(json.dumps(row))
                else:
                    say_lines(_recipe_lines(row, widths))
    has_plan = [row["verdict"] == FITS or bool(row.get("nearest")) for row in rows]
    if form == "table":
        say_lines([_recipes_answer(rows, all(has_plan))])
    return all(has_plan)


def _row(config: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the child's answer with `recipe`, `verdict`, `reason` and `seconds`. A failure is also a row."""
    about = {"recipe": config, "verdict": REJECTED, "reason": answer.get("left_out"), "seconds": answer["seconds"]}
    if "left_out" in answer:
        return about
    (row,) = answer["answers"]
    verdict = FITS if row["fits"] else INVALID if row["problems"] else REJECTED if row["why_not"] else TOO_LARGE
    if verdict == REJECTED and row["peak_bytes"] > row["usable_bytes"]:
        verdict = TOO_LARGE
    reason = "; ".join(row.pop("problems")) or row.pop("why_not")
    return about | {"verdict": verdict, "reason": reason} | row


def _recipe_lines(row: Mapping[str, Any], widths: Sequence[int]) -> Iterator[str]:
    from distbench.show.units import short_count_text

    cells = [row["recipe"], "-", "-", "-", row["verdict"]]
    if "mesh" in row:
        cells[1:4] = [short_count_text(row["num_parameters"]), format_mesh(row["mesh"]), _gib(row)]
    yield _columns(cells, widths)
    if row["reason"]:
        yield f"    {_cut(row['reason'])}"
    if own := row.get("own_plan"):
        yield f"    checked with FSDP2 per block, because the recipe's plan fails: {_cut(own)}"
    if omitted := row.get("omits"):
        yield f"    without {', '.join(omitted)}"
    if near := row.get("nearest"):
        options = [
            f"--mesh {format_mesh(near['mesh'])}",
            *(f"--set {name}={near['set'][name]}" for name in near["set"]),
        ]
        yield f"    nearest plan that fits: {' '.join(options)} ({_gib(near)} GiB)"
    elif row["verdict"] == TOO_LARGE:
        limit = f" in {SEARCH_S:g} s of CPU time" if row["process_s"] >= SEARCH_S else ""
        yield f"    no fitting plan was found{limit}"


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."


def _gib(row: Mapping[str, Any]) -> str:
    """The memory: exact, a lower bound, or extrapolated from few layers."""
    return {"": ">= ", "all": ""}.get(row["depth"], "~") + f"{row['peak_bytes'] / 2**30:.1f}"


def _widths(configs: Sequence[str]) -> list[int]:
    return [max(map(len, configs)), 10, len("dp_shard=1024,tp=1"), 12, 0]


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    is_right = (False, True, False, True, False)
    padded = zip(cells, widths, is_right, strict=True)
    return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in padded).rstrip()


def _recipes_answer(rows: Sequence[Mapping[str, Any]], is_pass: bool) -> str:
    """`PASS: ...` or `FAIL: ...` with the count of each verdict."""
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (FITS, TOO_LARGE, INVALID, REJECTED)
    }
    near = sum(bool(row.get("nearest")) for row in rows)
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    plans = f" ({near} with a plan that fits)" if near else ""
    text = f"{', '.join(parts)}{plans}, of {len(rows)} recipes"
    return f"PASS: {text}" if is_pass else f"FAIL: {text}. Change or remove the recipes by the reasons above"
