"""The ranks of bench_right_models: the check that follows every timed step, on right plans and on mistaken ones."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.plan_mistakes import BELOW_BF16, MISTAKES, mistaken
from benchmarks.right_plans import POLICIES, RIGHT, scenario_of
from distbench.cases.step_correctness import StepCheck
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.device import calm_scheduler
from distbench.spec import Scenario

RIGHT_SEEDS = range(1, 6)
MISTAKEN_SEEDS = {"fp32": range(1, 3), "bf16 policy": range(1, 2)}


def subjects() -> Iterator[tuple[dict[str, Any], Scenario, str]]:
    """What is checked: (facts, scenario, mesh)."""
    for model, mesh in RIGHT:
        for precision in POLICIES:
            for seed in () if model == "sharp qwen3" and precision != "fp32" else RIGHT_SEEDS:
                facts = {"what": f"{model}, {mesh} and FSDP", "precision": precision, "seed": seed, "is_right": True}
                yield facts, scenario_of(model, precision, seed, mesh), mesh
    for mistake in MISTAKES:
        for precision, seeds in MISTAKEN_SEEDS.items():
            for seed in () if precision != "fp32" and mistake in BELOW_BF16 else seeds:
                scenario, mesh = mistaken(mistake, precision, seed)
                yield {"what": mistake, "precision": precision, "seed": seed, "is_right": False}, scenario, mesh


def main(out: Path) -> None:
    """Check them all; rank 0 writes what was found."""
    calm_scheduler("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    meshes = {name: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", name)) for name in ("tp", "cp")}
    rows = []
    for facts, scenario, mesh in subjects():
        where = dist.get_rank(), torch.device("cpu"), meshes[mesh], "gloo", dist.group.WORLD
        context = RankContext(*where, seed=facts["seed"])
        check = StepCheck(TrainingStep(scenario, context), scenario, context)
        rows.append(facts | {"wrong": check()} | check.counters)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
