"""`python -m distbench.worker.children.recordings FOLDER`: the steps of jobs on a device that is not here, recorded.

For each job it answers one entry a variant: {"label": its name, "file": the recording in FOLDER}, or {"label",
"left_out": why there is none}.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distbench.simulate.recording_file import save_recording
from distbench.spec import Job, Scenario, UserError
from distbench.spec.plan_knobs import mesh_of
from distbench.worker.children.answer import answer_jobs
from distbench.worker.plans.changed_plan import scenario_of
from distbench.worker.session import load_scenario, variant_label
from distbench.worker.simulated.recorded_step import recorded
from distbench.worker.torch_internals import Unsupported


def recordings(job: Job, prefix: Path) -> Iterator[dict[str, str]]:
    """Record a step of each variant into a file, whose name begins with the prefix."""
    function = load_scenario(Path(job.file), job.scenario)
    for number, variant in enumerate(job.variants):
        scenario = scenario_of(function, variant)
        if not isinstance(scenario, Scenario):
            raise UserError(f"scenario {job.scenario!r} returned {type(scenario).__name__}, it must return a Scenario")
        label = variant_label(job, variant)
        try:
            found = recorded(scenario, job.scenario, label.partition("/")[2], mesh_of(variant, job.mesh))
        except (UserError, Unsupported) as error:
            yield {"label": label, "left_out": str(error)}
            continue
        file = prefix.with_name(f"{prefix.name}-{number}.jsonl")
        save_recording(found, file)
        yield {"label": label, "file": str(file)}


def _of_jobs(jobs: Sequence[Job]) -> list[list[dict[str, str]]]:
    return [[*recordings(job, Path(sys.argv[1]) / str(number))] for number, job in enumerate(jobs)]


if __name__ == "__main__":
    answer_jobs(_of_jobs)
