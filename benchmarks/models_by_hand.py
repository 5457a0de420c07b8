"""Models under plans that their authors would write by hand, for bench_models."""

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

CONFIG = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
TP = {
    **dict.fromkeys(("model.layers.*.self_attn.[qkv]_proj", "model.layers.*.mlp.gate_proj"), "colwise"),
    "model.layers.*.mlp.up_proj": "colwise",
    **dict.fromkeys(("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"), "rowwise"),
}


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the next ones, each (4, 32)."""
    torch.manual_seed(0)
    ids = torch.randint(256, (4, 32))
    return ids, ids.roll(-1, 1)


@scenario(mesh={"dp_shard": 2, "tp": 2}, tags=("tests",))
def by_hand() -> Scenario:
    """A Llama of transformers, a plan of names, and a loss of its logits."""
    return Scenario(
        build_model=lambda: AutoModelForCausalLM.from_config(CONFIG),
        make_batch=tokens,
        loss=lambda output, targets: F.cross_entropy(output.logits.flatten(0, 1), targets.flatten()),  # glue
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp=TP, fsdp=FsdpPlan(wrap="auto")),  # glue
    )


@scenario(mesh={"dp_replicate": 2}, tags=("tests",))
def ddp_itself() -> Scenario:
    """torch's DistributedDataParallel around the model, which `check` rejects."""
    return Scenario(
        build_model=lambda: torch.nn.Linear(8, 8),
        make_batch=lambda: (torch.ones(4, 8), torch.ones(4, 8)),
        loss=F.mse_loss,
        optimizer=torch.optim.AdamW,
        parallelize=lambda model, _: DistributedDataParallel(model),  # glue
    )
