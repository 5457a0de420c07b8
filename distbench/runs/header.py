"""The header of a run file: what was run, where, and which of it must agree before two launches are compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distbench.runs.run_file import Run

# A number measured under another value of one of these is another number.
MUST_AGREE = (
    "machine",
    "cpu_model",
    "num_cpus",
    "device",
    "device_name",
    "backend",
    "mesh",
    "world_size",
    "num_hosts",
    "num_threads",
    "scheduler",
    "pipelined",
    "passes",
)


# These may be the very thing that is compared.
SHOWN = ("torch", "nccl", "cuda", "python", "platform", "git_commit", "git_dirty", "variables", "settings", "profile")


def facts_of(job: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of MUST_AGREE and SHOWN, None where the file does not say."""
    facts = {name: environment.get(name) for name in (*MUST_AGREE, *SHOWN)}
    given, mesh = job.get("settings"), job.get("mesh")
    settings = dict(given) if isinstance(given, dict) else {}
    mesh = mesh if isinstance(mesh, dict) else {}
    facts["mesh"] = ",".join(f"{name}={size}" for name, size in mesh.items()) or None
    facts["device"] = environment.get("device") or job.get("device")
    facts["pipelined"] = settings.pop("iterations_per_sample", None)
    facts["passes"] = settings.pop("passes", 1)
    # Older files, which do not say, are of runs that checked everything.
    if settings.get("check") == "full":
        del settings["check"]
    facts["settings"] = settings or None
    facts["profile"] = job.get("profile")
    return facts


def scenario_name(run: Run) -> str:
    """The run's scenario; its file's name where the header does not say."""
    job = run.header.get("job")
    return str((job.get("scenario") if isinstance(job, dict) else None) or Path(run.path).stem)
