"""The worker, where a job of llama_3d stands for plans on meshes of their own: one launch for all combinations."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from distbench.cases import step
from distbench.ranks.case_protocol import CaseSpec
from distbench.ranks.context import RankContext
from distbench.spec import Job, format_mesh, list_entries, parse_mesh
from distbench.worker import rank_session
from distbench.worker.__main__ import main

LLAMA = {"dim": 64, "hidden": 256, "num_layers": 2, "sequence": 64}
ATTENTION = {"dim": 64, "sequence": 128, "load_balance": False, "causal": False}
SPMD = {"dim": 64, "hidden": 256, "num_layers": 2, "sequence": 64}
# By number of ranks: scenario, mesh, parameters. A mesh dim of size 1 leaves its part out; FSDP always shards over cp
# too. On eight ranks only what has three mesh dims, and of DTensors on all three a small model: DTensor tries each way
# to shard each of its operators over all of them.
COMBINATIONS: dict[int, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    4: (
        ("llama_3d", "dp_replicate=1,dp_shard=2,cp=2,tp=1", LLAMA),
        ("llama_3d", "dp_replicate=1,dp_shard=1,cp=2,tp=2", {**LLAMA, "rotate": "alltoall", "load_balance": False}),
        ("llama_3d", "dp_replicate=1,dp_shard=1,cp=2,tp=2", {**LLAMA, "rotate": "ulysses", "checkpoint": True}),
        ("cp_attention", "cp=4", ATTENTION),
        ("cp_attention", "cp=4", {**ATTENTION, "rotate": "alltoall", "unshard_output": True}),
        ("spmd_mesh", "dp_shard=2,tp=2", SPMD),
    ),
    8: (
        ("llama_3d", "dp_replicate=1,dp_shard=2,cp=2,tp=2", {**LLAMA, "rotate": "alltoall", "checkpoint": True}),
        ("llama_3d", "dp_replicate=2,dp_shard=2,cp=1,tp=2", LLAMA),
        ("llama_3d", "dp_replicate=2,dp_shard=1,cp=2,tp=2", {**LLAMA, "unshard_output": True}),
        ("hybrid_spmd", "dp_replicate=2,dp_shard=2,tp=2", {}),
    ),
}
OWN = {"hybrid_spmd": Path(__file__).parents[1] / "data" / "hybrid_spmd.py"}


def combinations(job: Job, function: object, context: RankContext) -> list[CaseSpec]:
    if job.scenario != "llama_3d":
        return alone(job, function, context)
    files = {entry.name: entry.file for entry in list_entries()} | OWN
    result = []
    for number, (name, mesh_text, params) in enumerate(COMBINATIONS[context.mesh.size()]):
        mesh = parse_mesh(mesh_text)
        devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        load = partial(rank_session.load_scenario, files[name], name)
        one = replace(job, scenario=f"{number} {name} {format_mesh(mesh)}", variants=[params], axes=[])
        result += alone(one, load(), replace(context, mesh=devices))
    return result


alone = rank_session.all_cases
rank_session.all_cases = combinations
# What a step needs of memory is held elsewhere, and takes as long as its check.
step.memory_counters = lambda *_: {}

if __name__ == "__main__":
    main(sys.argv[1])
