"""Simulated collectives against signatures, of every variant of the shipped scenarios."""

import sys
from pathlib import Path
from typing import Any

from distbench.launch import Request, jobs_of
from distbench.signature import counted, load
from distbench.simulate.record_steps import record_steps
from distbench.spec import Job

ROOT = Path(__file__).parent.parent
# Those without a model have no step.
WITHOUT_STEPS = {"collectives", "dtensor_ops", "redistribute"}
# Its operators choose their shardings themselves, others for RMSNorm's own kernel, which a CPU has not.
CPU_ONLY_PATHS = {"spmd_mesh"}
# A CPU's own signature has an all-gather for DTensor's all-to-all.
EXCHANGED = {"shard_params"}


def _exchanged(job: Job) -> dict[str, Any]:
    """The paths of each case of a job whose DTensors exchange as accelerators' do."""
    from distbench.worker.children.signatures import signature
    from distbench.worker.torch_internals import native_all_to_all

    with native_all_to_all():
        return {case: counted(one["paths"]) for case, one in signature(job)["cases"].items()}


def collectives_that_differ() -> int:
    """Over every variant of every shipped scenario that has a signature of steps."""
    names = sorted(path.stem for path in (ROOT / "signatures").glob("*.signature"))
    names = [name for name in names if name not in WITHOUT_STEPS | CPU_ONLY_PATHS]
    jobs = jobs_of(Request(tuple(names), device="cpu", quick=True, full_mesh=True), None)
    differing = compared = 0
    for job, (found, left_out) in zip(jobs, record_steps(jobs), strict=True):
        name = job.scenario
        cases = _exchanged(job) if name in EXCHANGED else load(ROOT / "signatures" / f"{name}.signature").cases
        theirs = {case.rpartition(name)[2].removeprefix("/"): paths for case, paths in cases.items()}
        for recording in (one for one in found if one.head.rank == 0):
            ours = counted([one._asdict() for one in recording.collectives])
            other = theirs[recording.head.variant]
            differing += sum(ours.get(path, 0) != other.get(path, 0) for path in {*ours, *other})
            compared += len(other)
        for label, reason in left_out.items():
            print(f"  left out: {label}: {reason}", file=sys.stderr)
    print(f"  {compared} paths of {len(names)} scenarios compared", file=sys.stderr)
    return differing if compared else 1
