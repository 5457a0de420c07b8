"""The ranks of bench_right_optimizers: the check of right and of mistaken optimizers, under five plans."""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.optimizer_mistakes import MISTAKEN_STEPS, MISTAKES, OF_COPIES
from benchmarks.right_models import Decoder, Sizes, text_batch, text_loss
from benchmarks.right_optimizers import RIGHT, RIGHT_STEPS
from benchmarks.right_plans import TEXT_PLAN
from distbench.cases.step_correctness import StepCheck
from distbench.plans.training_step import step_of
from distbench.ranks.context import RankContext
from distbench.ranks.device import calm_scheduler
from distbench.ranks.failure import one_line
from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, find
from distbench.worker.rank_session import declared, load_scenario

SIZES = Sizes(dim=32, hidden=48, layers=2, sequence=16, vocabulary=64)
SHARDED = FsdpPlan(wrap=("layers.*",))
PLANS: dict[str, tuple[dict[str, int], ParallelPlan]] = {
    "TP and FSDP": ({"dp_shard": 2, "tp": 2}, ParallelPlan(tp=TEXT_PLAN, fsdp=SHARDED)),
    "FSDP": ({"dp_shard": 4}, ParallelPlan(fsdp=SHARDED)),
    "HSDP": (
        {"dp_replicate": 2, "dp_shard": 2},
        ParallelPlan(fsdp=replace(SHARDED, replicate_dims=("dp_replicate",))),
    ),
    "TP": ({"tp": 4}, ParallelPlan(tp=TEXT_PLAN)),
    "DDP": ({"dp_replicate": 4}, ParallelPlan(ddp=DdpPlan())),
}
# One seed for each plan; mistakes are of shards.
# Scenarios on which the cost of the check is measured, and how often.
COSTS, NUM_TIMED = ("llama_2d", "fsdp_stack"), 7
MISTAKEN_PLANS = ("TP and FSDP", "FSDP", "HSDP")


def subjects(*patterns: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """What is checked: (facts, fields of the scenario, plan); with patterns those names alone, under the first plan."""
    right = {name: ({"optimizer": make, "loss": text_loss}, "") for name, make in RIGHT.items()}
    right |= {name: (fields, "") for name, fields in RIGHT_STEPS.items()}
    mistaken = {name: ({"optimizer": make, "loss": text_loss}, cause) for name, (make, cause) in MISTAKES.items()}
    mistaken |= MISTAKEN_STEPS
    for is_right, group, plans in ((True, right, tuple(PLANS)), (False, mistaken, MISTAKEN_PLANS)):
        for seed, plan in enumerate(plans[:1] if patterns else plans, start=1):
            for name, (fields, cause) in group.items():
                is_none = plan == "FSDP" and name in OF_COPIES
                if not is_none and any(fnmatch(name, pattern) for pattern in patterns or "*"):
                    facts = {"what": name, "plan": plan, "seed": seed, "is_right": is_right, "cause": cause}
                    yield facts, fields, plan


def costs(rank: int) -> dict[str, float]:
    """Scenario to the time of the check with its optimizer over that without, less one; the quickest of some."""
    shares = {}
    for name in COSTS:
        [entry] = [entry for entry in find(f"scenarios/{name}.py") if entry.name == name]
        values = {axis: choices[0] for axis, choices in entry.axes.items()}
        whole = declared(load_scenario(entry.file, name), {**entry.params, **entry.quick, **values})
        mesh = init_device_mesh("cpu", tuple(entry.mesh.values()), mesh_dim_names=tuple(entry.mesh))
        assert dist.group.WORLD is not None
        context = RankContext(rank, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, seed=1)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * NUM_TIMED):
            scenario = replace(whole, optimizer=None) if turn % 2 else whole
            step = step_of(scenario, context)
            step(lambda: None)
            dist.barrier()
            begun = time.perf_counter()
            assert StepCheck(step, scenario, context)() is None
            seconds[turn % 2 == 0].append(time.perf_counter() - begun)
        shares[name] = statistics.median(seconds[True]) / statistics.median(seconds[False]) - 1
    return shares


def main(out: Path, *patterns: str) -> None:
    """Check them all; rank 0 writes what was found."""
    calm_scheduler("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    meshes = {
        plan: init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        for plan, (mesh, _) in PLANS.items()
    }
    rows = []
    for facts, fields, plan in subjects(*patterns):
        scenario = Scenario(
            build_model=partial(Decoder, SIZES),
            make_batch=partial(text_batch, SIZES, facts["seed"]),
            **fields,
            plan=PLANS[plan][1],
        )
        where = dist.get_rank(), torch.device("cpu"), meshes[plan], "gloo", dist.group.WORLD
        context = RankContext(*where, seed=facts["seed"])
        check = StepCheck(step_of(scenario, context), scenario, context)
        try:
            wrong, is_refused = check(), False
        except (RuntimeError, NotImplementedError) as error:  # torch's own Adafactor takes no sharded DTensors
            wrong, is_refused = one_line(error), True
        rows.append(facts | {"wrong": wrong, "is_refused": is_refused} | check.counters)
        if dist.get_rank() == 0:
            row = rows[-1]
            ratio = row.get("param_rel_error", -1) / (row.get("param_tolerance") or 1)
            print(row["what"], "|", plan, "|", f"{ratio:.2g}", row.get("optimizer_check", ""), "|", wrong, flush=True)
    shares = {} if patterns else costs(dist.get_rank())
    if dist.get_rank() == 0:
        out.write_text(json.dumps((rows, shares)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
