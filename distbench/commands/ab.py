"""The command `ab`: arguments to calls, results to text and an exit code."""

import time
from pathlib import Path

import click

from distbench.commands.finite import FiniteRange
from distbench.spec.errors import UserError


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("ref_a")
@click.argument("ref_b")
@click.argument("run_arguments", nargs=-1, required=True, metavar="-- SCENARIO... [RUN OPTIONS]")
@click.option("--pairs", type=click.IntRange(2), default=20, show_default=True, help="Pairs of launches at most.")
@click.option("--budget", type=FiniteRange(1), default=1800.0, show_default=True, metavar="S", help="Seconds.")
@click.option("--env-a", multiple=True, metavar="NAME=VALUE", help="Environment variable of side a.")
@click.option("--env-b", multiple=True, metavar="NAME=VALUE", help="Environment variable of side b.")
@click.option("--python-a", metavar="PATH", help="Python of side a, with the torch that side a shall use.")
@click.option("--python-b", metavar="PATH", help="Python of side b.")
@click.option("--tolerance", multiple=True, metavar="[METRIC=]X", help="Slowdown still fine: 5%, 0.05, p10=3%. [5%]")
@click.option("--min-launches", type=click.IntRange(2), default=5, show_default=True, help="No verdict below so many.")
@click.option("--allow-different", multiple=True, metavar="FIELD", help="Compare although this field differs.")
@click.option("--strict", is_flag=True, help="Exit with 3 when a case is inconclusive.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for both sides' runs. [results/ab/<time>]")
@click.pass_context
def ab(
    ctx: click.Context,
    ref_a: str,
    ref_b: str,
    run_arguments: tuple[str, ...],
    pairs: int,
    budget: float,
    env_a: tuple[str, ...],
    env_b: tuple[str, ...],
    python_a: str | None,
    python_b: str | None,
    tolerance: tuple[str, ...],
    min_launches: int,
    allow_different: tuple[str, ...],
    strict: bool,
    out: Path | None,
) -> None:
    """Launch two git revisions in turn until it is settled whether REF_B is slower than REF_A.

    Each revision is checked out into a worktree of its own; . is the working tree as it is. Launches take turns
    (A B B A ...), so the machine's drift falls on both alike: this is how to compare on a shared machine. After --
    stands what distbench run is given. Two torch installations or two settings are compared with . . and --python-b
    or --env-b.

    Exit code: as distbench gate.

    \b
    Examples:
      distbench ab main . -- llama_2d --quick
      distbench ab v1.2 HEAD --budget 600 -- bench/steps.py::train --mesh tp=8
      distbench ab . . --env-b NCCL_ALGO=Tree -- collectives
    """
    from distbench.ab.side import Side, checked_out, parse_variables, python_at
    from distbench.ab.turns import Terms, check_run_arguments, looks_of, take_turns
    from distbench.compare.options import Options, tolerances_of
    from distbench.gate.comparable import check_allowed
    from distbench.gate.comparison_text import text

    check_run_arguments(run_arguments)
    options = Options(
        tolerances=tolerances_of(tolerance), min_launches=min_launches, allowed=check_allowed(allow_different)
    )
    given = [
        Side(name, ref, Path.cwd(), python_at(python, f"--python-{name}"), parse_variables(env, f"--env-{name}"))
        for name, ref, python, env in (("a", ref_a, python_a, env_a), ("b", ref_b, python_b, env_b))
    ]
    folder = _new_folder(out)
    terms = Terms(pairs, budget, looks_of(pairs, min_launches, options.alpha))
    with checked_out(given) as sides:
        for side in sides:
            click.echo(side.text(), err=True)
        settled = take_turns(sides, run_arguments, folder, options, terms, lambda line: click.echo(line, err=True))
    click.echo(text(settled.gated, strict))
    click.echo(f"{settled.num_pairs} pairs; no more because {settled.reason}. Runs: {folder}", err=True)
    ctx.exit(settled.gated.exit_code(strict))


def _new_folder(out: Path | None) -> Path:
    folder = out or Path("results") / "ab" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is no folder; give another, or one that is not there yet")
    # Empty folders are what a launch that could not work leaves behind.
    if any(path.is_file() for path in folder.rglob("*")):
        raise UserError(f"--out {folder} is not empty; give a new folder, so that only these launches are compared")
    return folder
