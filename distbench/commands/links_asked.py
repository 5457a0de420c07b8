"""`distbench run --fail-on-outlier` and `--against`: what is refused before measuring, and what is said after it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distbench.commands.say import say
from distbench.spec import Job, UserError
from distbench.spec.mesh import mesh_size
from distbench.spec.printable import count_text

TAG = "links"
SLOW, UNKNOWN = 1, 3
ONLY_LINKS = "--fail-on-outlier and --against are for links, and none {}; run scenario links"


def require_links(targets: Sequence[str], asked: Mapping[str, Any]) -> int | None:
    """Refuse, before anything is measured, what cannot be held against anything.

    Args:
        targets: the scenarios as they were given.
        asked: the command's parameters.

    Returns:
        How many ranks the earlier run had, None where none is given.

    Raises:
        UserError: none of the scenarios, all of which are shipped, is of links; or the earlier run cannot be read, or
            measured none.
    """
    earlier: Path | None = asked["against"]
    if not (earlier or asked["fail_on_outlier"]):
        return None
    from distbench.links import link_run_of
    from distbench.runs.run_file import read_run
    from distbench.spec import find
    from distbench.spec.discovery import scenario_folder

    entries = [entry for target in targets for entry in find(target)]
    # What a file of the user's own measures is known once it runs.
    if entries and not any(TAG in one.tags or one.file.parent != scenario_folder() for one in entries):
        raise UserError(ONLY_LINKS.format("would be measured"))
    if earlier is None:
        return None
    links = link_run_of(read_run(earlier))
    if links is None:
        raise UserError(f"--against {earlier}: it measured no links; give a run file of scenario links")
    return len(links.hosts)


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
        what = f"--against: the earlier run has {count_text(num_ranks, 'rank')}, this one {', '.join(map(str, sizes))}"
        raise UserError(f"{what}; give a run with the same ranks on each host, or another --mesh")


def links_code(jobs: Sequence[Job], earlier: Path | None, silent: bool) -> int:
    """Print what is slow among the links, also since an earlier run where one is given; return the exit code.

    The codes are those of `gate --strict`: an unknown outcome is not a success.

    Args:
        jobs: what was measured.
        earlier: a run file.
        silent: whether the summary was not shown: then only what is slow is said, and where nothing could be told.

    Returns:
        SLOW where anything is slow, UNKNOWN where a rank or link of half the speed could have gone unnoticed, else 0.

    Raises:
        UserError: no links were measured, or the earlier run's are others.
    """
    from distbench.links.link_text import judged, link_hosts_note, loss_lines
    from distbench.runs.run_file import read_run

    runs = [run for job in jobs if Path(job.run_file).exists() for run in [read_run(Path(job.run_file))]]
    found = [(run, verdict) for run in runs if (verdict := judged(run))]
    if not found:
        raise UserError(ONLY_LINKS.format("were measured"))
    judgements = []
    before = read_run(earlier) if earlier else None
    for run, verdict in found:
        since = judged(run, before) if before else None
        for line in loss_lines(run) if silent else ():
            say(f"distbench: {run.scenario}: {line}", err=True)
        if before and since and not silent:
            lines = [*link_hosts_note(run, before), *since.lines]
            say("\n".join(f"since {before.path.name}: {line}" for line in lines))
        for one, prefix in ((verdict, ""), (since, f"since {before.path.name}: " if before else "")):
            if one and silent and (one.is_slow or not one.is_told):
                say(f"distbench: {run.scenario}: {prefix}{one.lines[0]}", err=True)
            judgements += [one] if one else []
    if any(one.is_slow for one in judgements):
        return SLOW
    return 0 if all(one.is_told for one in judgements) else UNKNOWN
