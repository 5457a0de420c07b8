"""Checkpoints of a step's state: saves by torch.distributed.checkpoint, and loads on the same and on another mesh."""

from dataclasses import replace

from llama_2d import llama_2d

from distbench.spec import Checkpoints, Scenario, scenario


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"dim": 128, "hidden": 512, "num_layers": 2, "sequence": 64},
    tags=("tp", "fsdp", "further"),
)
def state_checkpoint(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 4,
    sequence: int = 256,
    load_mesh: str = "dp_shard4",
    folder: str = "",
) -> Scenario:
    """Saves and loads of model and AdamW by DCP. The plan is that of llama_2d; saves are synchronous, in a thread or in
    a process.

    load_mesh: a second mesh on which the files are loaded. folder: a folder that all hosts share.
    """
    step = llama_2d(dim=dim, hidden=hidden, num_layers=num_layers, num_heads=num_heads, batch=batch, sequence=sequence)
    return replace(step, checkpoints=(Checkpoints(load_meshes=(load_mesh,), folder=folder),))
