"""The worker, measuring plans on meshes of its own beside the job's: one launch of eight ranks for all combinations."""

import sys
from dataclasses import replace
from functools import partial

from torch.distributed.device_mesh import init_device_mesh

from distbench.spec import Job, format_mesh, list_entries, parse_mesh
from distbench.worker import session
from distbench.worker.__main__ import main
from distbench.worker.cases import step
from distbench.worker.rank.opened_case import CaseSpec
from distbench.worker.rank.rank_context import RankContext

LLAMA = {"dim": 64, "hidden": 256, "num_layers": 2, "sequence": 64}
ATTENTION = {"dim": 64, "sequence": 128, "load_balance": False, "causal": False}
# Scenario, mesh, parameters. A mesh dim of size 1 leaves its part out; FSDP always shards over cp too.
COMBINATIONS = (
    ("llama_3d", "dp_replicate=1,dp_shard=2,cp=2,tp=2", {**LLAMA, "rotate": "alltoall", "checkpoint": True}),
    ("llama_3d", "dp_replicate=2,dp_shard=2,cp=1,tp=2", LLAMA),
    ("llama_3d", "dp_replicate=1,dp_shard=2,cp=4,tp=1", LLAMA),
    ("llama_3d", "dp_replicate=1,dp_shard=1,cp=4,tp=2", {**LLAMA, "rotate": "alltoall", "load_balance": False}),
    ("llama_3d", "dp_replicate=2,dp_shard=1,cp=2,tp=2", {**LLAMA, "unshard_output": True}),
    ("cp_attention", "cp=8", ATTENTION),
    ("cp_attention", "cp=8", {**ATTENTION, "rotate": "alltoall", "unshard_output": True}),
    ("llama_3d", "dp_replicate=1,dp_shard=2,cp=2,tp=2", {**LLAMA, "rotate": "ulysses", "checkpoint": True}),
    ("spmd_mesh", "dp_replicate=2,dp_shard=2,tp=2", {"dim": 64, "hidden": 256, "num_layers": 2, "sequence": 64}),
)


def combinations(job: Job, function: object, context: RankContext) -> list[CaseSpec]:
    entries = {entry.name: entry for entry in list_entries()}
    found = []
    for number, (name, mesh_text, params) in enumerate(COMBINATIONS):
        mesh = parse_mesh(mesh_text)
        devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        load = partial(session.load_scenario, entries[name].file, name)
        one = replace(job, scenario=f"{number} {name} {format_mesh(mesh)}", variants=[params], axes=[])
        found += alone(one, load(), replace(context, mesh=devices))
    return found


alone = session.all_cases
session.all_cases = combinations
# What a step needs of memory is held elsewhere, and takes as long as its check.
step.memory_counters = lambda *_: {}

if __name__ == "__main__":
    main(sys.argv[1])
