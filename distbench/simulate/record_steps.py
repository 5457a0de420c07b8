"""Steps recorded in a child process, which runs torch; everything else about a simulation needs none."""

import tempfile
from pathlib import Path

from distbench.ask_child import ask_child
from distbench.simulate.recording import Recording, load_recording
from distbench.spec import Job

TIMEOUT_S = 1800.0


def record_steps(job: Job, timeout_s: float = TIMEOUT_S) -> list[Recording]:
    """A step of every variant of a job, as rank 0 runs it.

    Raises:
        UserError: the scenario has no step, its plan cannot work, its model asks for values, or the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = ask_child(
            "distbench.worker.children.recordings",
            (folder,),
            given=[job.to_record()],
            timeout_s=timeout_s,
            failure=f"no step of {job.scenario} was recorded: {{why}}; see whether distbench check passes it",
        )
        return [load_recording(Path(found["file"])) for found in answer[0]]
