"""A job to its signature: one child process runs each case once with ranks that do not exist."""

import tempfile
from pathlib import Path

from distbench.ask_child import ask_child
from distbench.signature.paths import Signature, counted
from distbench.spec import Job

TIMEOUT_S = 600.0


def signature_of(job: Job, timeout_s: float = TIMEOUT_S) -> tuple[Signature, dict[str, str]]:
    """What the job's cases communicate, and those that cannot run: case id to what it raises.

    Args:
        job: one scenario's.
        timeout_s: seconds after which the process is given up.

    Raises:
        UserError: the scenario cannot work, no case runs, or the process failed or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        job.save(file)
        answer = ask_child(
            "distbench.worker.signature",
            [str(file)],
            timeout_s=timeout_s,
            failure=f"{job.scenario} has no signature: {{why}}; see whether distbench run runs it, or give --quick",
        )
    cases = {case: counted(found["paths"]) for case, found in answer["cases"].items()}
    peaks = {case: found["peak_bytes"] for case, found in answer["cases"].items() if found["peak_bytes"] is not None}
    return Signature(job.scenario, job.mesh, answer["torch"], cases, peaks), answer["left_out"]
