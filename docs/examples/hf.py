"""Models of transformers as they are, from their configs alone (random weights, nothing is downloaded), under the plans
that they bring along. `pip install distbench[hf]`; distbench run docs/examples/hf.py"""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GemmaConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    ViTConfig,
)

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "gemma": GemmaConfig(**SMALL, head_dim=16, tie_word_embeddings=True),
}
VIT = ViTConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
)
# A ViT brings no plan along.
VIT_PLAN = {
    "vit.layers.*.attention.[qkv]_proj": "colwise",
    "vit.layers.*.attention.o_proj": "rowwise",
    "vit.layers.*.mlp.fc1": "colwise",
    "vit.layers.*.mlp.fc2": "rowwise",
}


def text():
    torch.manual_seed(0)
    ids = torch.randint(256, (4, 32))
    return {"input_ids": ids, "labels": ids}


def images():
    torch.manual_seed(0)
    return {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(2, (8,))}


@scenario(mesh={"dp_shard": 2, "tp": 2}, axes={"model": ("llama", "qwen3", "mixtral", "gemma")})
def hf_causal_lm(*, model: str = "llama") -> Scenario:
    """Causal language models of transformers, each under its own TP plan and FSDP2 over its own blocks."""
    return Scenario(
        build_model=lambda: AutoModelForCausalLM.from_config(CONFIGS[model]),
        make_batch=text,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp="auto", fsdp=FsdpPlan(wrap="auto")),  # glue
        num_tokens=lambda batch: batch["input_ids"].numel(),
    )


@scenario(mesh={"dp_shard": 2, "tp": 2})
def hf_vit() -> Scenario:
    """A vision transformer of transformers under tensor parallel styles by name and FSDP2 over its own blocks."""
    return Scenario(
        build_model=lambda: AutoModelForImageClassification.from_config(VIT),
        make_batch=images,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp=VIT_PLAN, fsdp=FsdpPlan(wrap="auto")),  # glue
    )
