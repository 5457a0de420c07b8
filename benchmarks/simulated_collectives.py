"""Simulated collectives against signatures, of every variant of the shipped scenarios."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distbench.judge.communication_signature import OF_TORCH, SUFFIX, counted, load, stored_for
from distbench.launch import Request, jobs_of
from distbench.simulate.recording import RecordedSteps, load_recordings, record_steps
from distbench.spec import Job
from distbench.spec.versions import installed_torch

ROOT = Path(__file__).parent.parent
# Its operators choose their shardings themselves, others for an accelerator's own kernel of RMSNorm than for the parts
# that a CPU has it in: recorded in parts as well.
IN_PARTS = {"spmd_mesh"}
# A CPU's own signature has an all-gather for DTensor's all-to-all.
EXCHANGED = {"shard_params"}
# Its exchanges have sizes that depend on values: a signature assumes rank 0's token counts for all ranks, and a
# simulation knows each rank's.
DROPLESS = "load=zipf,capacity=0.0"


def _exchanged(job: Job) -> dict[str, Any]:
    """The paths of each case of a job whose DTensors exchange as accelerators' do."""
    from distbench.torch_private import native_all_to_all
    from distbench.worker.child_verbs import signature

    with native_all_to_all():
        return {case: counted(one["paths"]) for case, one in signature(job)["cases"].items()}


def _recorded(jobs: list[Job]) -> Iterator[tuple[Job, RecordedSteps]]:
    whole = [job for job in jobs if job.scenario not in IN_PARTS]
    yield from zip(whole, record_steps(whole), strict=True)
    yield from ((job, _in_parts(job)) for job in jobs if job.scenario in IN_PARTS)


def _in_parts(job: Job) -> RecordedSteps:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.recordings_in_parts", folder]
        question = json.dumps([job.to_record()])
        done = subprocess.run(command, input=question, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        (answers,) = json.loads(done.stdout)
        result = [one for answer in answers if "file" in answer for one in load_recordings(Path(answer["file"]))]
    return RecordedSteps(result, {one["label"]: one["left_out"] for one in answers if "left_out" in one})


def collectives_that_differ() -> int:
    """Over every variant of every shipped scenario that has a signature of steps."""
    bases = [path for path in sorted((ROOT / "signatures").glob(f"*{SUFFIX}")) if not OF_TORCH.fullmatch(path.name)]
    cases_of = {path.stem: load(stored_for(path, installed_torch())).cases for path in bases}
    names = [name for name, cases in cases_of.items() if any(case.startswith("step/") for case in cases)]
    jobs = jobs_of(Request(tuple(names), device="cpu", quick=True, full_mesh=True), None)
    differing = compared = 0
    for job, (result, left_out) in _recorded(jobs):
        name = job.scenario
        cases = _exchanged(job) if name in EXCHANGED else cases_of[name]
        theirs = {case.rpartition(name)[2].removeprefix("/"): paths for case, paths in cases.items()}
        for recording in (one for one in result if one.head.rank == 0 and DROPLESS not in one.head.variant):
            ours = counted([one._asdict() for one in recording.collectives])
            # A CPU skips offload, which communicates as the plain plan does.
            other = theirs[recording.head.variant.replace("cpu_offload", "plain")]
            differs = [path for path in {*ours, *other} if ours.get(path, 0) != other.get(path, 0)]
            for path in differs:
                counts = f"{ours.get(path, 0)} simulated, {other.get(path, 0)} in the signature"
                print(f"  {name} {recording.head.variant}: {path}: {counts}", file=sys.stderr)
            differing += len(differs)
            compared += len(other)
        for label, reason in left_out.items():
            print(f"  left out: {label}: {reason}", file=sys.stderr)
    print(f"  {compared} paths of {len(names)} scenarios compared", file=sys.stderr)
    return differing if compared else 1
