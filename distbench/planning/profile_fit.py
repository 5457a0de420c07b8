"""A cost profile fitted to a run of scenario `calibrate`."""

import math
import statistics
from dataclasses import dataclass, field

import msgspec

from distbench.planning.cost_profile import LOCAL_OPS, Profile, Sample, fit_line
from distbench.records.run_file import Run
from distbench.spec.errors import UserError
from distbench.spec.mesh import mesh_shapes


@dataclass
class MeasuredSteps:
    """The samples of one op over one mesh dim, from which a `Line` is fitted and validated."""

    op: str
    mesh_dim: str
    group_size: int
    fitted: list[Sample] = field(default_factory=list)
    held_out: list[Sample] = field(default_factory=list)


def measured_in(run: Run) -> list[MeasuredSteps]:
    """Return the samples of a run of scenario `calibrate`, each the median of a case, by mesh dims, then ops.

    Raises UserError if the run has no samples.
    """
    by_key: dict[tuple[str, str], MeasuredSteps] = {}
    for record in run.cases:
        if record["case"].get("kind") != "calibrate" or record["status"] != "ok":
            continue
        params = record["case"]["params"]
        op, mesh_dim = params["op"], params["mesh_dim"]
        measured = by_key.setdefault((op, mesh_dim), MeasuredSteps(op, mesh_dim, record["group_size"]))
        seconds = statistics.median(record["samples_s"])
        counters = record["counters"]
        sample = Sample(record["payload_bytes"], counters["num_copies"], seconds, counters.get("num_messages", 0))
        (measured.held_out if params["held_out"] else measured.fitted).append(sample)
    if not by_key:
        raise UserError(f"{run.path} has no calibration; measure with distbench calibrate")
    # Samples over the whole mesh, whose name is not the name of a mesh dim, come last.
    rank = {name: number for number, name in enumerate(run.header["job"]["mesh"])}

    def place(steps: MeasuredSteps) -> tuple[int, str, bool, str]:
        return rank.get(steps.mesh_dim, len(rank)), steps.mesh_dim, steps.op in LOCAL_OPS, steps.op

    return sorted(by_key.values(), key=place)


def profile_of(run: Run) -> Profile:
    """Fit a profile to a run of `calibrate`. UserError if the run has no calibration, or too few sizes."""
    try:
        lines = [
            fit_line(steps.op, steps.mesh_dim, steps.group_size, steps.fitted, steps.held_out)
            for steps in measured_in(run)
        ]
    except ValueError as error:
        raise UserError(f"{run.path} cannot be fitted ({error}); measure more sizes") from error
    machine, backend, torch = (str(run.header["environment"][name]) for name in ("machine", "backend", "torch"))
    source = f"measured by distbench calibrate, run {run.header['run_id']}"
    mesh, hosts = dict(run.header["job"]["mesh"]), hosts_of(run)
    # The name of a group that belongs to no mesh dim is its shape.
    shapes = mesh_shapes(mesh, hosts) if hosts else {}
    lines = [
        msgspec.structs.replace(line, hosts=shapes.get(line.mesh_dim, line.mesh_dim) if hosts else "") for line in lines
    ]
    return Profile(machine, backend, torch, mesh, tuple(lines), source, hosts)


def hosts_of(run: Run) -> tuple[str, ...]:
    """Return each rank's host, in rank order; () if the run's header has no hosts."""
    hosts = run.header["environment"].get("hosts") or ()
    return tuple(map(str, hosts)) if len(hosts) == math.prod(run.header["job"]["mesh"].values()) else ()
