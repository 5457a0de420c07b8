"""`distbench run --fail-on-outlier` and `--against`: refused before measuring, or printed after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.cli.options import PATH, option
from distbench.cli.output import say
from distbench.spec import Job
from distbench.spec.errors import UserError
from distbench.spec.mesh import mesh_size
from distbench.spec.printable_text import count_text

TAG = "links"
SLOW, UNKNOWN = 1, 3
ONLY_LINKS = "--fail-on-outlier and --against are for links, and none {}; run scenario links"


@dataclass(frozen=True)
class LinkOptions:
    """What a run of links is compared with, and whether a slow link fails it."""

    fail_on_outlier: bool = option(
        "--fail-on-outlier",
        default=False,
        is_flag=True,
        help="End with 1 where a rank, host or link is slow, with 3 where that is unknown.",
    )
    against: Path | None = option(  # noqa: RUF009 - it makes a field
        "--against", type=PATH, metavar="RUN", help="Links: what is slower since that run."
    )


def require_links(targets: Sequence[str], links: LinkOptions) -> int | None:
    """Refuse, before anything is measured, a comparison of links that cannot be made.

    Args:
        targets: the scenarios as they were given.
        links: the options.

    Returns:
        How many ranks the run of --against had, None without that option.

    Raises:
        UserError: none of the scenarios, all of which are shipped, is of links; or the run of --against cannot be read,
            or measured none.
    """
    if not (links.against or links.fail_on_outlier):
        return None
    from distbench.judge.links import link_run_of
    from distbench.records.run_file import read_run
    from distbench.spec import find
    from distbench.spec.discovery import scenario_folder

    entries = [entry for target in targets for entry in find(target)]
    # What a file of the user's own measures is known once it runs.
    if entries and not any(TAG in entry.tags or entry.file.parent != scenario_folder() for entry in entries):
        raise UserError(ONLY_LINKS.format("would be measured"))
    if links.against is None:
        return None
    before = link_run_of(read_run(links.against))
    if before is None:
        raise UserError(f"--against {links.against}: it measured no links; give a run file of scenario links")
    return len(before.hosts)


def require_as_many(num_ranks: int | None, jobs: Sequence[Job]) -> None:
    """Refuse an earlier run of another number of ranks.

    Args:
        num_ranks: what `require_links` returned.
        jobs: what will be measured.

    Raises:
        UserError: no job has as many.
    """
    sizes = sorted({mesh_size(job.mesh) for job in jobs})
    if num_ranks is not None and num_ranks not in sizes:
        problem = (
            f"--against: the earlier run has {count_text(num_ranks, 'rank')}, this one {', '.join(map(str, sizes))}"
        )
        raise UserError(f"{problem}; give a run with the same ranks on each host, or another --mesh")


def links_code(jobs: Sequence[Job], earlier_file: Path | None, silent: bool) -> int:
    """Print which links are slow, also since an earlier run where one is given; return the exit code.

    The codes are those of `gate --strict`: an unknown outcome is not a success.

    Args:
        jobs: what was measured.
        earlier_file: a run file.
        silent: whether the summary was not shown: then only slow links and unknown outcomes are printed.

    Returns:
        SLOW where anything is slow, UNKNOWN where a rank or link of half the speed could have gone unnoticed, else 0.

    Raises:
        UserError: no links were measured, or the earlier run's are others.
    """
    from distbench.judge.links_text import judged, link_hosts_note, loss_lines
    from distbench.records.run_file import read_run

    runs = [read_run(Path(job.run_file)) for job in jobs if Path(job.run_file).exists()]
    of_links = [(run, verdict) for run in runs if (verdict := judged(run))]
    if not of_links:
        raise UserError(ONLY_LINKS.format("were measured"))
    verdicts = []
    before = read_run(earlier_file) if earlier_file else None
    since_words = f"since {before.path.name}: " if before else ""
    for run, verdict in of_links:
        since = judged(run, before) if before else None
        for line in loss_lines(run) if silent else ():
            say(f"distbench: {run.scenario}: {line}", err=True)
        if before and since and not silent:
            say("\n".join(f"{since_words}{line}" for line in [*link_hosts_note(run, before), *since.lines]))
        for judgement, words in ((verdict, ""), (since, since_words)):
            if judgement and silent and (judgement.is_slow or not judgement.is_conclusive):
                say(f"distbench: {run.scenario}: {words}{judgement.lines[0]}", err=True)
        verdicts += [verdict, *([since] if since else [])]
    if any(verdict.is_slow for verdict in verdicts):
        return SLOW
    return 0 if all(verdict.is_conclusive for verdict in verdicts) else UNKNOWN
