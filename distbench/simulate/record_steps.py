"""Steps recorded in a child process, which runs torch; everything else about a simulation needs none."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distbench.ask_child import ask_child
from distbench.simulate.recording import Recording
from distbench.simulate.recording_file import load_recordings
from distbench.spec import Job, UserError

TIMEOUT_S = 1800.0


class Recorded(NamedTuple):
    """What came of recording a job's variants.

    Args:
        recordings: of each variant those of its ranks, one after another.
        left_out: a variant's label to why it cannot be simulated.
    """

    recordings: list[Recording]
    left_out: dict[str, str]


def record_steps(
    jobs: Sequence[Job], timeout_s: float = TIMEOUT_S, ranks: Sequence[int] | None = (0,)
) -> list[Recorded]:
    """A step of every variant of each job, as some ranks run it; jobs follow one another in one process.

    Args:
        ranks: None for rank 0 and those whose step may differ from its: with other shards, say.

    Raises:
        UserError: none of a job's variants can be simulated (it has no step, its plan cannot work, its model asks for
            values), or the process failed.
    """
    names = ", ".join(job.scenario for job in jobs)
    with tempfile.TemporaryDirectory() as folder:
        answer = ask_child(
            "distbench.worker.children.recordings",
            (folder, json.dumps(ranks)),
            given=[job.to_record() for job in jobs],
            timeout_s=timeout_s,
            failure=f"no step of {names} was recorded: {{why}}; see whether distbench check passes it",
        )
        found = []
        for of_job in answer:
            left_out = {one["label"]: one["left_out"] for one in of_job if "left_out" in one}
            files = [Path(one["file"]) for one in of_job if "file" in one]
            if not files:
                raise UserError("; ".join(_reasons(left_out)))
            found.append(Recorded([one for file in files for one in load_recordings(file)], left_out))
        return found


def _reasons(left_out: Mapping[str, str]) -> Iterator[str]:
    """Each reason once, with the first variant that it is of and how many more."""
    of_reason: dict[str, list[str]] = {}
    for label, reason in left_out.items():
        of_reason.setdefault(reason, []).append(label)
    for reason, (first, *others) in of_reason.items():
        yield f"{first}{f' (and {len(others)} more variants)' if others else ''}: {reason}"
