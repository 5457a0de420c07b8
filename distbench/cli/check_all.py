"""`distbench check --all SOURCE`: check every recipe of a source against a machine's memory, and print each row at
once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import say, say_lines
from distbench.spec.errors import UserError
from distbench.spec.mesh import format_mesh

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
                    say_lines(_lines_of(row, widths))
    has_plan = [row["verdict"] == FITS or bool(row.get("nearest")) for row in rows]
    if form == "table":
        say_lines([_answer(rows, all(has_plan))])
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


def _lines_of(row: Mapping[str, Any], widths: Sequence[int]) -> Iterator[str]:
    from distbench.show.units import count_text

    cells = [row["recipe"], "-", "-", "-", row["verdict"]]
    if "mesh" in row:
        bound = "" if row["depth"] else ">= "
        cells[1:4] = [count_text(row["num_parameters"]), format_mesh(row["mesh"]), bound + _gib(row)]
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
    return f"{row['peak_bytes'] / 2**30:.1f}"


def _widths(configs: Sequence[str]) -> list[int]:
    return [max(map(len, configs)), 10, len("dp_shard=1024,tp=1"), 12, 0]


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    is_right = (False, True, False, True, False)
    padded = zip(cells, widths, is_right, strict=True)
    return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in padded).rstrip()


def _answer(rows: Sequence[Mapping[str, Any]], is_pass: bool) -> str:
    """`PASS: ...` or `FAIL: ...` with the count of each verdict."""
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (FITS, TOO_LARGE, INVALID, REJECTED)
    }
    near = sum(bool(row.get("nearest")) for row in rows)
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    plans = f" ({near} with a plan that fits)" if near else ""
    text = f"{', '.join(parts)}{plans}, of {len(rows)} recipes"
    return f"PASS: {text}" if is_pass else f"FAIL: {text}. Change or remove the recipes by the reasons above"
