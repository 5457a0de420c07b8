"""The command `distbench ab`."""

import secrets
import shlex
from pathlib import Path

import click

from distbench.cli.gate import VerdictOptions
from distbench.cli.options import (
    MAX_LAUNCHES,
    PATH,
    Duration,
    OutputOptions,
    dry_run_option,
    new_folder,
    options_of,
    progress_lines,
    quiet_option,
    say,
    verbose_option,
    width_option,
)
from distbench.spec.printable_text import count_text


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("ref_a")
@click.argument("ref_b")
@click.argument("run_arguments", nargs=-1, required=True, metavar="-- SCENARIO... [RUN OPTIONS]")
@click.option(
    "--pairs",
    type=click.IntRange(2, MAX_LAUNCHES),
    default=20,
    show_default=True,
    help="Maximum number of pairs of launches.",
)
@click.option(
    "--max-time",
    "max_time_s",
    type=Duration(),
    default=1800.0,
    metavar="TIME",
    help="Time limit, such as 30s or 5m. A pair that would probably exceed the limit is not started. [30m]",
)
@click.option(
    "--seed", type=click.IntRange(0, 1 << 32), help="Seed of the random order within each pair. [random, printed]"
)
@click.option("--env-a", multiple=True, metavar="NAME=VALUE", help="Environment variable of side a.")
@click.option("--env-b", multiple=True, metavar="NAME=VALUE", help="Environment variable of side b.")
@click.option("--python-a", metavar="PATH", help="Python executable of side a, with the torch of side a.")
@click.option("--python-b", metavar="PATH", help="Python executable of side b.")
@options_of(VerdictOptions, "verdict", "tolerance", "min_launches", "allow_different", "strict")
@options_of(OutputOptions, "output")
@click.option("--results", "out", type=PATH, metavar="DIR", help="Results folder. [results/ab/<time>]")
@dry_run_option("List both sides and the limits.")
@quiet_option
@width_option
@verbose_option
@click.pass_context
def ab(
    ctx: click.Context,
    ref_a: str,
    ref_b: str,
    run_arguments: tuple[str, ...],
    pairs: int,
    max_time_s: float,
    seed: int | None,
    env_a: tuple[str, ...],
    env_b: tuple[str, ...],
    python_a: str | None,
    python_b: str | None,
    verdict: VerdictOptions,
    output: OutputOptions,
    out: Path | None,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Launch two git revisions in turn until the verdict on REF_B against REF_A is decided.

    Each revision is checked out into a separate worktree. The revision . is the working tree with uncommitted changes.
    The two launches of a pair run in random order, so that the machine's drift affects both sides equally. Use this
    command on a shared machine. The words after -- are the arguments of distbench run. To compare two torch
    installations or two settings, give . . and --python-b or --env-b.

    The exit codes are listed by distbench gate --help.

    \b
    Examples:
      distbench ab main . -- llama_2d --quick
      distbench ab v1.2 HEAD --max-time 600 -- bench/steps.py::train --mesh tp=8
      distbench ab main . --github --write junit=ab.xml -- bench.py --quick --passes 24
      distbench ab . . --env-b NCCL_ALGO=Tree -- collectives
    """
    from distbench.judge import ab as turns
    from distbench.judge import gate_text

    turns.check_run_arguments(run_arguments)
    output.files()  # rejected before anything is launched
    options = verdict.terms()
    sides = [
        turns.Side(
            name,
            ref,
            Path.cwd(),
            turns.python_at(python, f"--python-{name}"),
            turns.parse_variables(env, f"--env-{name}"),
        )
        for name, ref, python, env in (("a", ref_a, python_a, env_a), ("b", ref_b, python_b, env_b))
    ]
    folder = new_folder("ab", out)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    terms = turns.Terms(pairs, max_time_s, turns.looks_of(pairs, options), seed)
    with turns.checked_out(sides) as trees:
        for side in trees:
            if dry_run or not quiet:
                say(side.text(), err=not dry_run)
        if dry_run:
            command = shlex.join(["distbench", "run", *run_arguments])
            say(f"each launch: {command}\nlimits: {count_text(pairs, 'pair')} of launches, {max_time_s / 60:.0f} min")
            return
        progress = progress_lines(quiet)
        progress(f"random order within each pair: --seed {seed}")
        outcome = turns.run_pairs(trees, run_arguments, folder, options, terms, progress)
    progress(f"stopped after {count_text(outcome.num_pairs, 'pair')}: {outcome.reason}. Runs: {folder}")
    output.show(lambda form: gate_text.FORMS[form](outcome.gated, verdict.strict), quiet)
    ctx.exit(outcome.gated.exit_code(verdict.strict))
