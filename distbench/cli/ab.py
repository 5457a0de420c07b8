"""The command `distbench ab`."""

import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distbench.cli.options import (
    MAX_LAUNCHES,
    PATH,
    Duration,
    OutputOptions,
    VerdictOptions,
    dry_run_option,
    new_folder,
    options_of,
    progress_lines,
    quiet_option,
    refuse_with,
    say,
    verbose_option,
    width_option,
)
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text

if TYPE_CHECKING:
    from distbench.judge.ab import Terms


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
@click.option("--bisect", is_flag=True, help="Find the first slower commit: REF_A is the good, REF_B the bad commit.")
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
    bisect: bool,
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
    """Alternate launches of two git revisions until the verdict on REF_B is decided.

    Each revision is checked out into a separate worktree. The revision . is the working tree with uncommitted changes.
    The two launches of a pair run in random order, so that the machine's drift affects both sides equally. Therefore
    this command also works on a shared machine. The words after -- are the arguments of distbench run. To compare two
    torch installations or two settings, give . . and --python-b or --env-b.

    With --bisect, REF_A is a good commit, and REF_B is a later, slower commit. If REF_B is slower, the commits in
    between are measured until the first slower commit is certain to 95 %. Commits that cannot be launched are skipped.

    The exit codes are listed by distbench gate --help. With --bisect, exit code 1 means that a slower commit was found.

    \b
    Examples:
      distbench ab --bisect v1.2 main --max-time 2h -- bench.py --quick
      distbench ab main . -- llama_2d --quick
      distbench ab v1.2 HEAD --max-time 600 -- bench/steps.py::train --mesh tp=8
      distbench ab main . --github --write junit=ab.xml -- bench.py --passes 24
      distbench ab . . --env-b NCCL_ALGO=Tree -- collectives
    """
    from distbench.judge import ab as turns
    from distbench.judge import bisect as bisection
    from distbench.judge import gate_text
    from distbench.judge.bisect import CommitLauncher, commits_between, search

    turns.check_run_arguments(run_arguments)
    output.files()  # rejected before anything is launched
    options = verdict.terms()
    if bisect:
        refuse_with("--bisect", "env_a", "env_b", "python_a", "python_b")
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
    show = say if dry_run else progress_lines(quiet)
    if bisect:
        with turns.worktrees() as trees:
            commits = commits_between(trees, ref_a, ref_b)
            terms = replace(terms, num_commits=len(commits) - 1)
            show(f"{count_text(terms.num_commits, 'commit')} after {commits[0].text}, up to {commits[-1].text}")
            _show_plan(terms, run_arguments, dry_run, show)
            if dry_run:
                return
            launcher = CommitLauncher(trees, commits, (ref_a, ref_b), run_arguments, folder, seed)
            result = search(commits, launcher.launch, options, terms, show)
        show(f"runs: {folder}")
        output.show(lambda form: bisection.render(form, result, verdict.strict), quiet)
        ctx.exit(bisection.exit_code(result, verdict.strict))
    with turns.checked_out(sides) as ready_sides:
        for side in ready_sides:
            show(side.text())
        _show_plan(terms, run_arguments, dry_run, show)
        if dry_run:
            return
        launch = partial(turns.launch_pair, sides=ready_sides, run_arguments=run_arguments, out=folder, seed=seed)
        outcome = turns.run_pairs(launch, options, terms, show)
    show(f"stopped after {count_text(outcome.num_pairs, 'pair')}: {outcome.reason}. Runs: {folder}")
    output.show(lambda form: gate_text.FORMS[form](outcome.gated, verdict.strict), quiet)
    ctx.exit(outcome.gated.exit_code(verdict.strict))


def _show_plan(terms: "Terms", run_arguments: Sequence[str], dry_run: bool, show: Callable[[str], None]) -> None:
    """Show the command of a launch, the expected cost, and the seed."""
    if dry_run:
        show(f"each launch: {shlex.join(['distbench', 'run', *run_arguments])}")
    show(terms.cost_text(_earlier_launch_s(run_arguments)))
    if not dry_run:
        show(f"random order within each pair: --seed {terms.seed}")


def _earlier_launch_s(run_arguments: Sequence[str]) -> float | None:
    """Return the seconds that the newest run with these scenarios and settings took, in results/ or results/ab/; None
    without such a run."""
    from distbench.cli.run import earlier_run, run
    from distbench.launch import Request, jobs_of

    folders = [Path("results"), *sorted(Path("results/ab").glob("*/*"), reverse=True)]
    try:
        given = run.make_context("run", [*run_arguments]).params
        chosen = {field.name: given[field.name] for field in fields(Request) if field.name in given}
        jobs = jobs_of(Request(given["scenarios"], **chosen), None)
        runs = [next(filter(None, (earlier_run(job, folder) for folder in folders)), None) for job in jobs]
    except (UserError, click.ClickException):  # each launch reports its own errors
        return None
    times_s = [each.footer["wall_s"] for each in runs if each and each.footer]
    return sum(times_s) if len(times_s) == len(jobs) else None
