"""`run --resume`: an interrupted run file to the job that goes on with it."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from distbench.launch.job_record import left_of
from distbench.runs.machine import host_facts
from distbench.runs.run_file import Run, read_run
from distbench.spec import Job, UserError
from distbench.spec.job import digest_of
from distbench.spec.versions import installed_torch
from distbench.spec.writing import write_whole

INTERRUPTED = "interrupted"


def job_left_of(file: Path) -> Job:
    """The job of an interrupted run without the cases that have a row, to be appended to the same file.

    The footer, and the row of the case that the interruption cut short, are taken out of the file, so that it stands as
    after a power cut.

    Raises:
        UserError: the run is complete, has no row yet, was made on several hosts or another machine, or of another
            commit, scenario file or torch.
    """
    run = read_run(file)
    record = run.header.get("job")
    facts = host_facts()
    try:
        job = Job.from_record({**record, "environment": facts}) if isinstance(record, dict) else None
    except (KeyError, TypeError):
        job = None
    if job is None:
        raise UserError(f"run file {file} does not say how it was made in words of this distbench; measure anew")
    about = run.header.get("environment")
    hosts = about.get("hosts") if isinstance(about, dict) else None
    if isinstance(hosts, list) and len({str(host) for host in hosts}) > 1:
        what = "it was measured on several hosts, and --resume starts ranks on this one alone"
        raise UserError(f"--resume {file}: {what}; what it has counts, measure the rest with --nodes and -k")
    for what, then, now in _differences(run, job, facts):
        was, now_is = ("not known" if fact is None else fact for fact in (then, now))
        raise UserError(f"--resume {file}: {what} was {was}, now it is {now_is}; go back to that, or measure anew")
    footer = run.footer or {}
    if footer.get("status") == "complete" and not footer.get("num_not_run"):
        which = "its one case" if len(run.cases) == 1 else f"each of its {len(run.cases)} cases"
        raise UserError(f"--resume {file}: nothing is left to run, {which} has a row")
    if not any(not _was_cut_short(case) for case in run.cases):
        raise UserError(f"--resume {file}: no case of it was finished; run it anew")
    _cut(file)
    log_dir = Path(job.log_dir)
    number = next(number for number in itertools.count(1) if not (log_dir / f"resume{number}").exists())
    job = replace(job, run_file=str(file.resolve()), log_dir=str(log_dir / f"resume{number}"), note="")
    return left_of(job)


def _differences(run: Run, job: Job, facts: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    """What must be as it was, and is not: its name, what it was and what it is."""
    then = run.about.environment
    pairs = (
        ("the machine", then.machine, facts["machine"]),
        ("the commit", then.git_commit, facts["git_commit"]),
        # The installed package may lack the suffix that names a build.
        ("torch", str(then.torch).partition("+")[0], installed_torch().partition("+")[0]),
        ("the scenario file", job.file_digest, digest_of(Path(job.file)) or f"gone ({job.file})"),
    )
    return (pair for pair in pairs if pair[1] and pair[1] != pair[2])


def _was_cut_short(record: dict[str, Any]) -> bool:
    """Whether this is the row of the case that ran when the user stopped the run: it says nothing of the case."""
    return record.get("status") == "aborted" and record.get("error") == INTERRUPTED


def _cut(file: Path) -> None:
    """Leave only the lines that go on counting."""
    lines = file.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _counts(line)]
    if len(kept) < len(lines):
        write_whole(file, "".join(f"{line}\n" for line in kept))


def _counts(line: str) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return not isinstance(record, dict) or not (record.get("type") == "footer" or _was_cut_short(record))
