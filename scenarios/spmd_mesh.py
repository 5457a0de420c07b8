"""FSDP2 and tensor parallel on one mesh: parameters and activations are DTensors on the whole mesh, and fully_shard's
`dp_mesh_dims` (torch 2.13) lists the data parallel mesh dims."""

from functools import partial
from typing import Any

import torch
from models import Attention, Llama, next_token_loss, token_batch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, ShardParam, scenario

SHARDS = {
    "layers.*.attention.w[qkv].weight": ShardParam(0),
    "layers.*.attention.wo.weight": ShardParam(1),
    "layers.*.feed_forward.w[13].weight": ShardParam(0),
    "layers.*.feed_forward.w2.weight": ShardParam(1),
    "output.weight": ShardParam(0),
}


class OwnHeads(Attention):
    """Attention of a rank's heads on local tensors: DTensor has no sharding strategy for the CPU's attention kernel."""

    def attend(self, query: Any, key: Any, value: Any, table: Any = None) -> Any:
        if not isinstance(query, DTensor):
            return super().attend(query, key, value, table)
        local = super().attend(query.to_local(), key.to_local(), value.to_local())
        return DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)


def built(*sizes: int) -> Llama:
    """A llama-like stack whose attention works on each rank's own heads."""
    model = Llama(*sizes)
    for layer in model.layers:
        layer.attention.__class__ = OwnHeads
    return model


def summed_at_once(model: nn.Module, mesh: Any) -> None:
    """Reduce the outputs of a block's row-wise halves, as tensor parallel does. DTensor would keep the partial sums
    until an operator does not support them."""

    def whole(_: nn.Module, given: Any, output: DTensor) -> DTensor:
        placements = [Replicate() if placement == Partial() else placement for placement in output.placements]
        return output.redistribute(placements=placements)

    for name, module in model.named_modules():
        if name.endswith((".wo", ".w2")):
            module.register_forward_hook(whole)


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"dim": 64, "hidden": 128, "num_layers": 2, "sequence": 64},
    tags=("tp", "fsdp", "further"),
)
def spmd_mesh(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 4,
    sequence: int = 256,
) -> Scenario:
    """FSDP2 and TP on one SPMD mesh, by annotation. A llama-like stack as DTensors, tensor parallel by annotation,
    fully_shard by dp_mesh_dims.
    """
    vocab_size = 1000
    fsdp = FsdpPlan(wrap=("layers.*",), replicate_dims=("dp_replicate",), spmd_mesh=True)
    return Scenario(
        build_model=partial(built, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        parallelize=summed_at_once,
        plan=ParallelPlan(shard_params=SHARDS, fsdp=fsdp),
    )
