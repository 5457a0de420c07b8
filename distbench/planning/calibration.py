"""From a run of scenario `calibrate` to a cost profile."""

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
    """What was measured of one op over one mesh dim: samples to fit a `Line` to, and to judge it by."""

    op: str
    mesh_dim: str
    group_size: int
    fitted: list[Sample] = field(default_factory=list)
    held_out: list[Sample] = field(default_factory=list)


def measured_in(run: Run) -> list[MeasuredSteps]:
    """What a run of scenario `calibrate` measured, a sample the median of a case; in order of mesh dims, then ops.

    Raises:
        UserError: the run holds no calibration.
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
        raise UserError(f"{run.path} holds no calibration; write one with distbench calibrate")
    # Last what was measured over the whole mesh, whose name is no mesh dim's.
    rank = {name: number for number, name in enumerate(run.header["job"]["mesh"])}

    def place(steps: MeasuredSteps) -> tuple[int, str, bool, str]:
        return rank.get(steps.mesh_dim, len(rank)), steps.mesh_dim, steps.op in LOCAL_OPS, steps.op

    return sorted(by_key.values(), key=place)


def profile_of(run: Run) -> Profile:
    """The profile of such a run; UserError where it holds no calibration, or too few sizes of an op for a line."""
    try:
        lines = [
            fit_line(steps.op, steps.mesh_dim, steps.group_size, steps.fitted, steps.held_out)
            for steps in measured_in(run)
        ]
    except ValueError as error:
        raise UserError(f"{run.path} cannot be fitted: {error}; measure more sizes") from error
    machine, backend, torch = (str(run.header["environment"][name]) for name in ("machine", "backend", "torch"))
    source = f"measured by distbench calibrate, run {run.header['run_id']}"
    mesh, hosts = dict(run.header["job"]["mesh"]), hosts_of(run)
    # What no mesh dim has is called by its shape.
    shapes = mesh_shapes(mesh, hosts) if hosts else {}
    lines = [
        msgspec.structs.replace(line, hosts=shapes.get(line.mesh_dim, line.mesh_dim) if hosts else "") for line in lines
    ]
    return Profile(machine, backend, torch, mesh, tuple(lines), source, hosts)


def hosts_of(run: Run) -> tuple[str, ...]:
    """Each rank's host, in rank order; empty where the run's header does not say."""
    hosts = run.header["environment"].get("hosts") or ()
    return tuple(map(str, hosts)) if len(hosts) == math.prod(run.header["job"]["mesh"].values()) else ()
