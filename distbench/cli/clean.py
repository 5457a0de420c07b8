"""The command `distbench clean`."""

import sys
import time
from pathlib import Path

import click

from distbench.cli.options import MAX_LAUNCHES, PATH, Duration, say, say_lines
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text

MOST_AGE_S = 99_999 * 7 * 86_400.0
MAX_LISTED = 15


@click.command()
@click.option(
    "--results", "runs", type=PATH, metavar="DIR", default=Path("results"), help="Results folder to clean. [results]"
)
@click.option("--keep", type=click.IntRange(0, MAX_LAUNCHES), metavar="N", help="Keep the newest N runs.")
@click.option(
    "--older-than",
    "older_s",
    type=Duration(0, MOST_AGE_S),
    metavar="TIME",
    help="Delete only older runs: 12h, 30d, 2w.",
)
@click.option("--dry-run", is_flag=True, help="Delete nothing: list what would be deleted.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def clean(runs: Path, keep: int | None, older_s: float | None, dry_run: bool, yes: bool) -> None:
    """Delete old runs with their ranks' logs: what would go is listed, then it asks.

    All that one command measured counts as one run, and goes together. With --keep and --older-than, what either keeps
    stays. Baselines, plots, files of other programs and runs that may still be going on are never touched.

    \b
    Examples:
      distbench clean --keep 20
      distbench clean --older-than 30d --yes
    """
    from distbench.records.results_folder import delete, runs_kept_and_deleted
    from distbench.show.units import disk_text

    if keep is None and older_s is None:
        raise UserError(
            "clean must be told what is old; give --keep N (the newest N stay) or --older-than 30d, or both"
        )
    latest = None if older_s is None else time.time() - older_s
    kept, old = runs_kept_and_deleted(runs, keep, latest)
    staying = f"{count_text(len(kept), 'run')} stay{'s' * (len(kept) == 1)}"
    if not old:
        say_lines([f"nothing to delete under {runs}: {staying}"])
        return
    for old_run in old[:MAX_LISTED]:
        say_lines([f"{old_run.started_text}  {disk_text(old_run.num_bytes):>8}  {old_run.text}"], " " * 4)
    if len(old) > MAX_LISTED:
        say(f"... {len(old) - MAX_LISTED} more")
    num_files, num_bytes = sum(len(old_run.files) for old_run in old), sum(old_run.num_bytes for old_run in old)
    summary = (
        f"{count_text(len(old), 'run')} ({count_text(num_files, 'file')}, {disk_text(num_bytes)}) "
        f"under {runs}; {staying}"
    )
    if dry_run:
        say_lines([f"would delete {summary}"])
        return
    try:
        is_agreed = yes or click.confirm(f"Delete {summary}?")
    except click.Abort:
        say("")  # the question has no end of its line
        raise UserError("nothing was deleted: nobody answered; add --yes to delete without being asked") from None
    if not is_agreed:
        say("nothing was deleted")
        return
    failed = delete(old, runs)
    for sentence in failed:
        say(f"distbench: {sentence}", err=True)
    say_lines([f"deleted {summary}"])
    sys.exit(2 if failed else 0)
