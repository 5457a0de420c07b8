"""`python -m distbench.worker.children.recordings FOLDER [RANKS]`: steps on a device that is not here, recorded.

RANKS are as JSON, null for rank 0 and those that differ from it; [0] by default. For each job it answers one entry a
variant: {"label": its name, "file": the recordings in FOLDER}, or {"label", "left_out": why there is none}.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distbench.simulate.recording_file import save_recordings
from distbench.spec import Job, UserError
from distbench.spec.plan_knobs import mesh_of
from distbench.worker.children.answer import answer_jobs
from distbench.worker.session import declared, load_scenario, variant_label
from distbench.worker.simulated.recorded_step import recorded_ranks
from distbench.worker.torch_internals import Unsupported


def recordings(job: Job, prefix: Path, ranks: Sequence[int] | None = (0,)) -> Iterator[dict[str, str]]:
    """Record a step of each variant, as some ranks run it, into a file, whose name begins with the prefix."""
    function = load_scenario(Path(job.file), job.scenario)
    for number, variant in enumerate(job.variants):
        label = variant_label(job, variant)
        try:
            scenario = declared(function, variant)
            mesh = mesh_of(variant, job.mesh)
            found = recorded_ranks(scenario, job.scenario, label.partition("/")[2], mesh, ranks)
        except (UserError, Unsupported) as error:
            yield {"label": label, "left_out": str(error)}
            continue
        file = prefix.with_name(f"{prefix.name}-{number}.jsonl")
        save_recordings(found, file)
        yield {"label": label, "file": str(file)}


def _of_jobs(jobs: Sequence[Job]) -> list[list[dict[str, str]]]:
    folder, ranks = Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else [0]
    return [[*recordings(job, folder / str(number), ranks)] for number, job in enumerate(jobs)]


if __name__ == "__main__":
    answer_jobs(_of_jobs)
