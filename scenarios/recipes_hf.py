"""Models of transformers at their published sizes, from their configurations alone: no weights, no download."""

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, UserError, scenario
from distbench.spec.errors import nearest
from distbench.spec.recipes import FAMILIES, recipe_configs

CLASSES: dict[str, Any] = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "image": AutoModelForImageClassification,
}


def batch_of(task: str, batch: int, sequence: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Token ids and labels (batch, sequence), or images (batch, 3, side, side) and their classes."""
    torch.manual_seed(0)
    if task == "image":
        return {"pixel_values": torch.randn(batch, 3, sequence, sequence), "labels": torch.randint(2, (batch,))}
    tokens = torch.randint(vocab_size, (batch, sequence))
    return {"input_ids": tokens, "labels": tokens}


def model_of(task: str, config: Any, checkpoint: str) -> Any:
    """Return the model with random values, and transformers' own activation checkpointing of each block."""
    model = CLASSES[task].from_config(config, dtype=torch.float32)
    if checkpoint == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@scenario(mesh={"dp_shard": 8, "tp": 1}, tags=("fsdp", "recipe", "real-size"))
def hf(
    *,
    config: str = "llama@tiny",
    layers: int = 0,
    sequence: int = 0,
    batch: int = 8,
    dtype: str = "bf16",
    checkpoint: str = "none",
) -> Scenario:
    """hf:FAMILY@SIZE: transformers at published sizes.

    FSDP2 per block and the model's own tensor parallel plan. `layers` and `sequence` are the published ones by default;
    `batch` is the global one. dtype is bf16 (f32 parameters and reductions, bf16 compute) or f32; checkpoint: full or
    none. Dropout is off.
    """
    name, _, size = config.partition("@")
    if name not in FAMILIES or size not in FAMILIES[name].sizes:
        raise UserError(f"no recipe hf:{config} ({nearest(config, recipe_configs('hf'))})")
    if dtype not in ("bf16", "f32") or checkpoint not in ("none", "full"):
        raise UserError(
            f"dtype={dtype}, checkpoint={checkpoint} cannot be used; dtype is bf16 or f32, checkpoint none or full"
        )
    family = FAMILIES[name]
    length = sequence or (32 if size == "tiny" else family.sequence)
    fields = {**family.common, **family.sizes[size], "use_cache": False}
    if layers:
        fields |= {key: layers for key in ("num_hidden_layers", "num_layers", "num_decoder_layers") if key in fields}
    model_config = AutoConfig.for_model(name, **fields)
    if family.task == "image":
        model_config.image_size = length
    elif getattr(model_config, "max_position_embeddings", length) < length:
        model_config.max_position_embeddings = length
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dtype == "bf16" else None
    return Scenario(
        build_model=partial(model_of, family.task, model_config, checkpoint),
        make_batch=partial(batch_of, family.task, batch, length, getattr(model_config, "vocab_size", 0)),
        num_tokens=None if family.task == "image" else batch * length,
        optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
        plan=ParallelPlan(
            tp="auto" if getattr(model_config, "base_model_tp_plan", None) else None,
            fsdp=FsdpPlan(wrap="auto", mixed_precision=policy),
        ),
    )
