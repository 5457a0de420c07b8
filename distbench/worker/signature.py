"""`python -m distbench.worker.signature JOB.json`: what each case of a job communicates, with no other ranks there.

Prints one JSON object as the last line: {"torch": version, "cases": {case id: {"paths": [communication, ...],
"peak_bytes": predicted, or null}}, "left_out": {case id: what it raises}}, or {"user_error": sentence}.
"""

import contextlib
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbench.spec import Job, ParallelPlan, UserError
from distbench.worker.attribution import communications_of
from distbench.worker.bench import Prepared
from distbench.worker.failure import one_line
from distbench.worker.place import Place
from distbench.worker.session import all_benches, load_scenario
from distbench.worker.torch_internals import Skipped, Unsupported, fake_ranks, tracked_peak_bytes
from distbench.worker.workloads.step import Step


def signature(job: Job) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Case id to what rank 0 communicates and holds in one call of it, and to what it raises where it cannot run.

    The call before has set things up.

    Raises:
        UserError: the scenario or its plan is declared wrongly, or every case raises.
    """
    function = load_scenario(Path(job.file), job.scenario)
    with fake_ranks(job.mesh) as mesh:
        assert dist.group.WORLD is not None
        place = Place(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, job.settings.seed)
        found: dict[str, dict[str, Any]] = {}
        left_out: dict[str, str] = {}
        for bench in all_benches(job, function, place):
            try:
                # A case with nothing to measure here communicates nothing either.
                with contextlib.suppress(Skipped), bench.open() as prepared:
                    found[bench.case.id] = _of_case(prepared, place)
            except UserError:
                raise
            except Exception as error:
                left_out[bench.case.id] = one_line(error)
    if left_out and not found:
        first, reason = next(iter(left_out.items()))
        raise UserError(
            f"no case runs on ranks that do not exist: {first} raises {reason}; see if distbench run runs it"
        )
    return found, left_out


def _of_case(prepared: Prepared, place: Place) -> dict[str, Any]:
    call = prepared.call
    call(_nothing)
    if not isinstance(call, Step):
        rows = communications_of(call, prepared.phases, ParallelPlan(), place)
        return {"paths": [asdict(row) for row in rows], "peak_bytes": None}
    rows = communications_of(call, prepared.phases, call.plan, place, call.model)
    others = [call.optimizer] if call.optimizer is not None else []
    peak = tracked_peak_bytes(lambda: call(_nothing), call.model, *others)
    return {"paths": [asdict(row) for row in rows], "peak_bytes": peak}


def _nothing() -> None:
    """No phase is timed here."""


def main(job_path: str) -> None:
    """Print the signature, or why there is none."""
    torch.set_num_threads(1)
    job = Job.load(Path(job_path))
    answer: dict[str, Any]
    # What a scenario prints or torch warns of is not the answer.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cases, left_out = signature(job)
            answer = {"torch": torch.__version__, "cases": cases, "left_out": left_out}
        except (UserError, Unsupported) as error:
            answer = {"user_error": str(error)}
        except (Exception, SystemExit) as error:
            told = f"it raises {one_line(error)}, on ranks that do not exist; see whether distbench run runs it"
            answer = {"user_error": f"no signature of {job.scenario}: {told}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
