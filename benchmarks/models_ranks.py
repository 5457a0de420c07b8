"""The ranks of bench_models: each step of some scenario files, checked, and looked at by both methods."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.dispatch_mode import differences, rows_by_both
from distbench.cases.step_correctness import StepCheck
from distbench.observe.trace import StepTrace
from distbench.plans.training_step import step_of
from distbench.ranks.context import RankContext
from distbench.ranks.device import calm_scheduler
from distbench.spec import Entry, find
from distbench.worker.rank_session import declared, load_scenario


def rows_of(entry: Entry) -> Iterator[dict[str, Any]]:
    """One row a variant of a scenario."""
    function = load_scenario(entry.file, entry.name)
    mesh = init_device_mesh("cpu", tuple(entry.mesh.values()), mesh_dim_names=tuple(entry.mesh))
    assert dist.group.WORLD is not None
    context = RankContext(dist.get_rank(), torch.device("cpu"), mesh, "gloo", dist.group.WORLD, seed=1)
    for values in itertools.product(*entry.axes.values()):
        variant = dict(zip(entry.axes, values, strict=True))
        scenario = declared(function, {**entry.params, **variant})
        step = step_of(scenario, context)
        check = StepCheck(step, scenario, context)
        wrong = check()
        rows, dispatched = rows_by_both(StepTrace(step, context))
        yield {
            "file": str(entry.file),
            "name": "/".join([entry.name, *(f"{name}={value}" for name, value in variant.items())]),
            "wrong": wrong,
            "num_traced": len(rows),
            "num_owned": sum(row.owner_known for row in rows),
            "differences": differences(rows, dispatched),
            **check.counters,
        }


def main(out: Path, *files: str) -> None:
    """Look at them all; rank 0 writes what was found."""
    calm_scheduler("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for file in files for entry in find(file) for row in rows_of(entry)]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
