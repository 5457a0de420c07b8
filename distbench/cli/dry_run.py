"""What `distbench run` would measure and for how long, without ranks: one child process asks torch for the cases."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.processes.child import ask_child
from distbench.records.results_folder import newest_finished
from distbench.records.run_file import Header
from distbench.spec import Job, UserError, format_mesh
from distbench.spec.mesh import mesh_size
from distbench.spec.safe_text import count_text

TIMEOUT_S = 600.0
# What must be equal for an earlier run to say how long this one takes.
SAME = ("budget_s", "max_case_s", "max_samples", "iterations_per_sample", "check")


@dataclass(frozen=True)
class Estimate:
    """How long a job takes.

    Args:
        seconds: of wall time as a run before took, or None where there was none like it.
        because: in words.
    """

    seconds: float | None
    because: str


def lines_of(jobs: Sequence[Job], out: Path) -> list[str]:
    """For a terminal: each scenario with its time and its cases, then the sum.

    Raises:
        UserError: a scenario is declared wrongly, or the user's choice leaves no case of any.
    """
    answers = ask_child(
        "case_ids",
        given=[job.to_record() for job in jobs],
        timeout_s=TIMEOUT_S,
        failure="the cases cannot be listed: {why}; try `distbench doctor`",
    )
    errors = [answer["user_error"] for answer in answers if "user_error" in answer]
    if errors and (len(errors) == len(jobs) or not jobs[0].chosen):
        raise UserError(errors[0])
    pairs = [(job, answer["ids"]) for job, answer in zip(jobs, answers, strict=True) if "ids" in answer]
    estimates = [estimate(job, len(ids), out) for job, ids in pairs]
    lines = []
    for (job, ids), one in zip(pairs, estimates, strict=True):
        lines.append(f"{_head(job)}: {count_text(len(ids), 'case')}, {one.because}")
        lines += [f"  {case_id}" for case_id in ids]
    return [*lines, *(_sum([len(ids) for _, ids in pairs], estimates) if len(pairs) > 1 else [])]


def _sum(counts: Sequence[int], estimates: Sequence[Estimate]) -> list[str]:
    known = [one.seconds for one in estimates if one.seconds is not None]
    num_others = len(estimates) - len(known)
    others = f", and {count_text(num_others, 'scenario')} that never ran like this here" if num_others else ""
    total = f"about {sum(known):.0f} s{others}" if known else "none of them ever ran like this here"
    return [f"{count_text(sum(counts), 'case')} of {count_text(len(counts), 'scenario')}: {total}"]


def estimate(job: Job, num_cases: int, out: Path) -> Estimate:
    """From the newest run of the same scenario, mesh, device and settings on this machine, or the budget."""

    def fits(about: Header) -> bool:
        asked = job.settings.__dict__
        return (about.mesh, about.device) == (job.mesh, job.device) and all(
            about.settings.get(name, asked[name]) == asked[name] for name in SAME
        )

    run = newest_finished(out, job.scenario, fits)
    if run is None or not run.footer:
        timed_s = min(job.settings.budget_s, num_cases * job.settings.max_case_s)
        return Estimate(None, f"never run like this here: {timed_s:.0f} s timed, and what opening cases takes")
    seconds = run.footer["wall_s"] * num_cases / len(run.cases)
    day = datetime.datetime.fromtimestamp(run.about.started_at, datetime.UTC).strftime("%Y-%m-%d")
    rate = "" if num_cases == len(run.cases) else f", {count_text(len(run.cases), 'case')} then"
    return Estimate(seconds, f"about {seconds:.0f} s (as on {day}{rate})")


def _head(job: Job) -> str:
    return f"{job.scenario} on {format_mesh(job.mesh)} ({count_text(mesh_size(job.mesh), 'rank')}, {job.device})"
