"""Communication signatures: what a scenario communicates, written in seconds with no rank started, and compared."""

from collections.abc import Mapping, Sequence
from typing import Any

from distbench.ask_child import ask_child
from distbench.signature.difference import differences, incomparable
from distbench.signature.signature_file import Path, Signature, counted, load, parse
from distbench.spec import Job, UserError

__all__ = ["Path", "Signature", "counted", "differences", "incomparable", "load", "parse", "signatures_of"]
TIMEOUT_S = 600.0


def signatures_of(jobs: Sequence[Job], timeout_s: float = TIMEOUT_S) -> list[tuple[Signature, dict[str, str]]]:
    """What the cases of each job communicate, and those that cannot run: case id to what it raises; in the jobs' order.

    One child process runs each case once on a fake process group.

    Raises:
        UserError: a scenario cannot work, none of its cases runs, or the process failed or did not end.
    """
    answers = ask_child(
        "distbench.worker.children.signatures",
        given=[job.to_record() for job in jobs],
        timeout_s=timeout_s,
        failure=f"{_none_of(*jobs)}: {{why}}; see whether distbench run runs it, or give --quick",
    )
    answered = list(zip(jobs, answers, strict=True))
    if errors := [f"{_none_of(job)}: {answer['user_error']}" for job, answer in answered if "user_error" in answer]:
        raise UserError("; ".join(errors))
    return [(_signature(job, answer), answer["left_out"]) for job, answer in answered]


def _signature(job: Job, answer: Mapping[str, Any]) -> Signature:
    cases = {case: counted(found["paths"]) for case, found in answer["cases"].items()}
    peaks = {case: found["peak_bytes"] for case, found in answer["cases"].items() if found["peak_bytes"] is not None}
    return Signature(job.scenario, job.mesh, answer["torch"], cases, peaks)


def _none_of(*jobs: Job) -> str:
    return f"no signature of {', '.join(job.scenario for job in jobs)}"
