"""`python -m distbench.worker.check`: whether plans can work, asked of a fake process group in one process.

Reads jobs as a JSON list on stdin; its last line of output is a JSON list, one entry a variant, or
{"user_error": sentence}.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbench.spec import Job, Scenario, Settings, UserError
from distbench.spec.job import Variant
from distbench.worker.failure import one_line
from distbench.worker.materialise import blueprint
from distbench.worker.parallelize import parallelize
from distbench.worker.place import Place
from distbench.worker.plan_check import problems
from distbench.worker.session import load_scenario, variant_label
from distbench.worker.torch_internals import Skipped, fake_ranks
from distbench.worker.workloads.step import parameter_bytes


def answers(job: Job) -> Iterator[dict[str, Any]]:
    """For each variant: `label`, `problems`, and where there are none `parameter_bytes` of a rank or why it is skipped.

    Args:
        job: a job whose mesh may have any number of ranks; none of them is started.
    """
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        assert dist.group.WORLD is not None
        place = Place(0, torch.device(job.device), mesh, "gloo", dist.group.WORLD, job.settings.seed)
        for variant in job.variants:
            yield {"label": variant_label(job, variant), **_of_variant(function, variant, place)}


def _of_variant(function: Callable[..., Scenario], variant: Variant, place: Place) -> dict[str, Any]:
    """What raises in the scenario's own code is one more problem: it must not hide those of the others."""
    try:
        scenario = function(**variant)
        if not isinstance(scenario, Scenario):
            return {"problems": [f"it returns {type(scenario).__name__}, it must return a Scenario"]}
        return _answer(scenario, place)
    except UserError as error:
        return {"problems": [str(error)]}
    except (Exception, SystemExit) as error:
        return {"problems": [f"the scenario raises {one_line(error)}"]}


def _answer(scenario: Scenario, place: Place) -> dict[str, Any]:
    if scenario.build_model is None or scenario.make_batch is None:
        return {"problems": [], "skipped": "it declares no model, so there is no plan to check"}
    model = blueprint(scenario.build_model, place.seed).model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if found := problems(model, scenario.make_batch()[0], scenario.plan, place):
        return {"problems": found}
    try:
        model, _ = parallelize(model, scenario.plan, place)
    except Skipped as reason:
        return {"problems": [], "skipped": str(reason)}
    except Exception as error:
        # What plan_check does not know of, torch says when the plan is applied.
        return {"problems": [f"torch refuses the plan: {one_line(error)}"]}
    return {"problems": [], "num_parameters": num_parameters, "parameter_bytes": parameter_bytes(model)}


def main() -> None:
    """Answer for every job on stdin, or say why that cannot be."""
    records = json.load(sys.stdin)
    jobs = [Job(**{**record, "settings": Settings(**record["settings"])}) for record in records]
    found: Any
    # What a scenario prints is not the answer.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            found = [[*answers(job)] for job in jobs]
        except UserError as error:
            found = {"user_error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
