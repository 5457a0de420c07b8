"""The command `distbench clean`."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from distbench.cli.options import (
    MAX_LAUNCHES,
    Duration,
    dry_run_option,
    format_option,
    quiet_option,
    results_option,
    say,
    say_lines,
)
from distbench.spec.errors import USER_ERROR, UserError
from distbench.spec.printable_text import count_text

MOST_AGE_S = 99_999 * 7 * 86_400.0
MAX_LISTED = 15


@click.command()
@results_option("")
@click.option("--keep", type=click.IntRange(0, MAX_LAUNCHES), metavar="N", help="Keep the newest N runs.")
@click.option(
    "--older-than",
    "older_s",
    type=Duration(0, MOST_AGE_S),
    metavar="TIME",
    help="Delete only runs older than 12h, 30d or 2w.",
)
@dry_run_option("List the runs.")
@click.option("--yes", is_flag=True, help="Continue without confirmation.")
@quiet_option
@format_option("table", "json")
def clean(out: Path, keep: int | None, older_s: float | None, dry_run: bool, yes: bool, quiet: bool, form: str) -> None:
    """List old runs, and delete the runs with their ranks' logs after a confirmation.

    All scenarios of one command are one run and are deleted together. With both --keep and --older-than, a run is
    deleted only if both options select it. Baselines, plots, files of other programs and runs that may still be
    measuring are never deleted.

    \b
    Examples:
      distbench clean --keep 20
      distbench clean --older-than 30d --yes
    """
    from distbench.records.results_folder import delete, runs_kept_and_deleted
    from distbench.show.units import disk_text

    if keep is None and older_s is None:
        raise UserError("clean needs a limit; give --keep N (the newest N remain), --older-than 30d, or both")
    latest = None if older_s is None else time.time() - older_s
    kept, old = runs_kept_and_deleted(out, keep, latest)
    if form == "json":
        if not dry_run and not yes:
            raise UserError("--json has no confirmation; add --dry-run to list the runs, or --yes to delete them")
        names = [[str(file) for file in old_run.run_files] for old_run in old]
        records = [
            {"started": old_run.started_text, "bytes": old_run.num_bytes, "text": old_run.text, "run_files": files}
            for old_run, files in zip(old, names, strict=True)
        ]
        failed = [] if dry_run else delete(old, out)
        click.echo(json.dumps({"num_kept": len(kept), "failed": failed, "runs": records}, indent=1))
        sys.exit(USER_ERROR if failed else 0)
    show: Callable[..., None] = (lambda *_: None) if quiet else say_lines
    staying = f"{count_text(len(kept), 'run')} remain{'s' * (len(kept) == 1)}"
    if not old:
        show([f"nothing to delete under {out}: {staying}"])
        return
    for old_run in old[:MAX_LISTED]:
        show([f"{old_run.started_text}  {disk_text(old_run.num_bytes):>8}  {old_run.text}"], " " * 4)
    if len(old) > MAX_LISTED:
        show([f"... {len(old) - MAX_LISTED} more"])
    num_files, num_bytes = sum(len(old_run.files) for old_run in old), sum(old_run.num_bytes for old_run in old)
    summary = (
        f"{count_text(len(old), 'run')} ({count_text(num_files, 'file')}, {disk_text(num_bytes)}) "
        f"under {out}; {staying}"
    )
    if dry_run:
        show([f"would delete {summary}"])
        return
    try:
        is_agreed = yes or click.confirm(f"Delete {summary}?")
    except click.Abort:
        say("")  # ends the line of the question
        raise UserError(
            "nothing was deleted, because no answer was given; add --yes to delete without confirmation"
        ) from None
    if not is_agreed:
        show(["nothing was deleted"])
        return
    failed = delete(old, out)
    for sentence in failed:
        say(f"distbench: {sentence}", err=True)
    show([f"deleted {summary}"])
    sys.exit(USER_ERROR if failed else 0)
