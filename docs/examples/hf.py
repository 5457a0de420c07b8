"""Models of transformers as they are, from their configs alone (random weights, nothing is downloaded), under the plans
that they bring along. `pip install distbench[hf]`; distbench run docs/examples/hf.py"""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GemmaConfig,
    GPT2Config,
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
VISION = {**SMALL, "image_size": 32, "patch_size": 8}
MODELS = {
    "llama": (AutoModelForCausalLM, LlamaConfig(**SMALL)),
    "qwen3": (AutoModelForCausalLM, Qwen3Config(**SMALL, head_dim=16)),
    "mixtral": (AutoModelForCausalLM, MixtralConfig(**SMALL, num_local_experts=4)),
    "gemma": (AutoModelForCausalLM, GemmaConfig(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "vit": (AutoModelForImageClassification, ViTConfig(**VISION)),
}
GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256)
# A ViT brings no plan along.
PLANS = {
    "vit": {
        "vit.layers.*.attention.[qkv]_proj": "colwise",
        "vit.layers.*.attention.o_proj": "rowwise",
        "vit.layers.*.mlp.fc1": "colwise",
        "vit.layers.*.mlp.fc2": "rowwise",
    }
}


def text():
    torch.manual_seed(0)
    ids = torch.randint(256, (4, 32))
    return {"input_ids": ids, "labels": ids}


def images():
    torch.manual_seed(0)
    return {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(2, (8,))}


@scenario(mesh={"dp_shard": 2, "tp": 2}, axes={"model": ("llama", "qwen3", "mixtral", "gemma", "vit")})
def hf(*, model: str = "llama") -> Scenario:
    """Models of transformers under the TP plan that each brings along, and FSDP2 over its own blocks."""
    kind, config = MODELS[model]
    return Scenario(
        build_model=lambda: kind.from_config(config),
        make_batch=images if model == "vit" else text,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp=PLANS.get(model, "auto"), fsdp=FsdpPlan(wrap="auto")),  # glue
    )


@scenario(mesh={"dp_shard": 4})
def gpt2() -> Scenario:
    """GPT-2 as it is trained, with dropout of 0.1: it comes out `wrong`, and the sentence names dropout."""
    return Scenario(
        build_model=lambda: AutoModelForCausalLM.from_config(
            GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256)
        ),
        make_batch=text,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(fsdp=FsdpPlan(wrap="auto")),  # glue
    )
