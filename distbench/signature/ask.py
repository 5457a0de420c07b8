"""A job to its signature: one child process runs each case once with ranks that do not exist."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from distbench.signature.paths import Signature, counted
from distbench.spec import Job, UserError

TIMEOUT_S = 600.0


def signature_of(job: Job, timeout_s: float = TIMEOUT_S) -> Signature:
    """What the job's cases communicate.

    Args:
        job: one scenario's.
        timeout_s: seconds after which the process is given up.

    Raises:
        UserError: the scenario cannot work, or the process failed or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        job.save(file)
        command = [sys.executable, "-m", "distbench.worker.signature", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{job.scenario} did not end within {timeout_s:g} s; give smaller sizes with --quick or --set"
            ) from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(f"{job.scenario} failed where no rank is real: {last}; does distbench run it?") from error
    if "user_error" in answer:
        raise UserError(answer["user_error"])
    cases = {case: counted(rows) for case, rows in answer["cases"].items()}
    return Signature(job.scenario, job.mesh, answer["torch"], cases)
