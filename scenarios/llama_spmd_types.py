"""llama_2d's plan by DTensor's dispatch, and by collectives of spmd_types on local tensors."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from llama_2d import TP_PLAN
from models import Attention, FeedForward, Llama, next_token_loss, token_batch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

# Tensor dim by which tp shards the weight of a module; other parameters are replicated.
SHARDED = {"tok_embeddings": 0, "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


class Columns(nn.Linear):
    """Multiply by the rank's output features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to_local())


class Rows(nn.Linear):
    """Multiply by the rank's input features; the sum is sharded on the sequence."""

    mesh: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return summed(F.linear(x, self.weight.to_local()), self.mesh)


class OwnWords(nn.Embedding):
    """Look up the words of the rank's rows, and zeros for other words."""

    mesh: Any

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local()
        rows = tokens - self.mesh.get_local_rank("tp") * weight.shape[0]
        is_other = (rows < 0) | (rows >= weight.shape[0])
        found = F.embedding(rows.masked_fill(is_other, 0), weight)
        return summed(found.masked_fill(is_other[..., None], 0), self.mesh)


class OwnSequence(nn.RMSNorm):
    """Normalize the rank's part of the sequence; the gradients of the weight are summed over tp."""

    mesh: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import spmd_types as spmd

        weight = spmd.invariant_to_replicate(self.weight.to_local(), self.mesh.get_group("tp"))
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class AllWords(Columns):
    """Compute the logits of the rank's words, and gather the logits of all."""

    mesh: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import spmd_types as spmd

        own = super().forward(gathered(x, self.mesh))
        # dst=I: every rank computes the same loss, so the gradients of the logits are equal.
        return spmd.all_gather(own, self.mesh.get_group("tp"), src=spmd.S(2), dst=spmd.I)


def gathered(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Gather the sequence."""
    import spmd_types as spmd

    return spmd.all_gather(x, mesh.get_group("tp"), src=spmd.S(1), dst=spmd.R)


def summed(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Sum over tp, and shard on the sequence."""
    import spmd_types as spmd

    return spmd.reduce_scatter(x, mesh.get_group("tp"), src=spmd.P, dst=spmd.S(1))


KINDS = {"tok_embeddings": OwnWords, "output": AllWords, "wo": Rows, "w2": Rows}


def by_spmd_types(model: nn.Module, mesh: Any) -> None:
    """Shard the parameters over tp, and let the modules work on local tensors."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, (Attention, FeedForward)):
            module.register_forward_pre_hook(lambda _, given: (gathered(given[0], mesh), *given[1:]))
        if not hasattr(module, "weight"):
            continue
        placement = Shard(SHARDED[last]) if last in SHARDED else Replicate()
        weight = distribute_tensor(module.weight.detach(), mesh["tp"], [placement], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))
        module.__class__ = KINDS.get(last, Columns if last in SHARDED else OwnSequence)
        module.mesh = mesh


def by_dtensor(model: nn.Module, mesh: Any) -> None:
    """Apply llama_2d's styles."""
    parallelize_module(model, mesh["tp"], TP_PLAN)


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    axes={"activations": ("dtensor", "spmd_types")},
    quick={"dim": 128, "hidden": 512, "num_layers": 2, "sequence": 64},
    tags=("tp", "fsdp", "further", "optional"),
)
def llama_spmd_types(
    *,
    activations: str = "dtensor",
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 4,
    sequence: int = 256,
) -> Scenario:
    """TP by DTensor and by spmd_types. One llama-like stack under TP, SP and FSDP2, whose activations are DTensors or
    local tensors.

    activations: dtensor, or spmd_types (skipped without the package).
    """
    vocab_size = 1000
    return Scenario(
        build_model=partial(Llama, vocab_size, dim, num_layers, num_heads, hidden),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        parallelize=by_spmd_types if activations == "spmd_types" else by_dtensor,
        needs=("spmd_types",) if activations == "spmd_types" else (),
        plan=ParallelPlan(fsdp=FsdpPlan(wrap=("layers.*",))),
    )
