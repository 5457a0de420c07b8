"""Families of transformers as their configs are by default, small: `use_cache`, dropout and attention as they come.

`distbench simulate benchmarks/hf_families.py::family --set family=llama --mesh dp_shard=8`
"""

from typing import Any

import torch
import transformers
from torch import nn

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

VOCABULARY, SEQUENCE, SIDE = 256, 32, 32
# Sizes, under each family's own names.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {**GROUPED, "head_dim": 16}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
STATES = {"mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}
BLOCKS = {"vocab_size": VOCABULARY, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
BLOCKS |= {"encoder_layers": 2, "encoder_attention_heads": 4, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128}
IMAGES = {**SIZES, "image_size": SIDE, "patch_size": 8}

TEXT, MASKED, PAIRS, SPEECH, PICTURES, BOTH = (
    "CausalLM",
    "MaskedLM",
    "Seq2SeqLM",
    "Speech",
    "ImageClassification",
    "CLIP",
)
# Family to the kind of its task, the prefix of its config's class, and its sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (TEXT, "Llama", GROUPED),
    "qwen2": (TEXT, "Qwen2", GROUPED),
    "qwen3": (TEXT, "Qwen3", HEADS),
    "qwen3_moe": (TEXT, "Qwen3Moe", {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mistral": (TEXT, "Mistral", GROUPED),
    "mixtral": (TEXT, "Mixtral", {**GROUPED, "num_local_experts": 4}),
    "gemma": (TEXT, "Gemma", HEADS),
    "gemma2": (TEXT, "Gemma2", HEADS),
    "gemma3": (TEXT, "Gemma3Text", HEADS),
    "phi": (TEXT, "Phi", GROUPED),
    "phi3": (TEXT, "Phi3", GROUPED),
    "gpt2": (TEXT, "GPT2", GPT),
    "gpt_neox": (TEXT, "GPTNeoX", SIZES),
    "gptj": (TEXT, "GPTJ", {**GPT, "rotary_dim": 8}),
    "opt": (TEXT, "OPT", {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": (TEXT, "Bloom", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": (TEXT, "Falcon", SIZES),
    "stablelm": (TEXT, "StableLm", GROUPED),
    "olmo": (TEXT, "Olmo", GROUPED),
    "olmo2": (TEXT, "Olmo2", GROUPED),
    "cohere": (TEXT, "Cohere", GROUPED),
    "granite": (TEXT, "Granite", GROUPED),
    "deepseek_v2": (TEXT, "DeepseekV2", {**GROUPED, **LATENT, **ROUTED, "num_key_value_heads": 4}),
    "deepseek_v3": (
        TEXT,
        "DeepseekV3",
        {**GROUPED, **LATENT, **ROUTED, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    ),
    "starcoder2": (TEXT, "Starcoder2", GROUPED),
    "mpt": (TEXT, "Mpt", {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "mamba": (TEXT, "Mamba", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}),
    "mamba2": (
        TEXT,
        "Mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "jamba": (TEXT, "Jamba", {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}),
    "bamba": (TEXT, "Bamba", {**GROUPED, **STATES, "attn_layer_indices": [1]}),
    "rwkv": (TEXT, "Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}),
    "bert": (MASKED, "Bert", SIZES),
    "roberta": (MASKED, "Roberta", SIZES),
    "distilbert": (
        MASKED,
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    ),
    "deberta": (MASKED, "Deberta", SIZES),
    "electra": (MASKED, "Electra", SIZES),
    "modernbert": (MASKED, "ModernBert", {**SIZES, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "t5": (
        PAIRS,
        "T5",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (PAIRS, "Bart", BLOCKS),
    "whisper": (
        SPEECH,
        "Whisper",
        {
            **BLOCKS,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "vit": (PICTURES, "ViT", IMAGES),
    "clip": (BOTH, "CLIP", {"text_config": SIZES, "vision_config": IMAGES, "projection_dim": 64}),
    "dinov2": (PICTURES, "Dinov2", IMAGES),
    "swin": (
        PICTURES,
        "Swin",
        {"image_size": SIDE, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
}
AUTO = {SPEECH: "AutoModelForSpeechSeq2Seq", BOTH: "CLIPModel"}
# Units of models without `_no_split_modules`.
WRAPPED = {
    "distilbert": ("distilbert.transformer.layer.*",),
    "deberta": ("deberta.encoder.layer.*",),
    "electra": ("electra.encoder.layer.*",),
}


def batch_of(kind: str) -> dict[str, Any]:
    """A global batch of 8 with labels, as this kind of model takes it."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (8, SEQUENCE))
    images = torch.randn(8, 3, SIDE, SIDE)
    return {
        SPEECH: {"input_features": torch.randn(8, 16, 2 * SEQUENCE), "labels": ids},
        PICTURES: {"pixel_values": images, "labels": torch.randint(2, (8,))},
        BOTH: {"input_ids": ids, "pixel_values": images},
    }.get(kind, {"input_ids": ids, "labels": ids})


def model_of(kind: str, prefix: str, sizes: dict[str, Any]) -> nn.Module:
    """A model of a family, from its config alone."""
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    if kind == BOTH:
        return transformers.CLIPModel(config)
    return getattr(transformers, AUTO.get(kind, f"AutoModelFor{kind}")).from_config(config)


def contrasted(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """CLIP's loss, which it computes on request."""
    loss: torch.Tensor = model(**batch, return_loss=True).loss
    return loss


def family_of(family: str) -> Scenario:
    """A family under FSDP2."""
    kind, prefix, sizes = FAMILIES[family]
    fsdp = FsdpPlan(wrap=WRAPPED.get(family, "auto"), whole=("logit_scale",) if kind == BOTH else ())
    return Scenario(
        build_model=lambda: model_of(kind, prefix, sizes),
        make_batch=lambda: batch_of(kind),
        call=contrasted if kind == BOTH else None,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(fsdp=fsdp),
    )


@scenario(
    mesh={"dp_shard": 4},
    axes={
        "family": (
            "llama",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "mistral",
            "mixtral",
            "gemma",
            "gemma2",
            "gemma3",
            "phi",
            "phi3",
            "gpt2",
            "gpt_neox",
            "gptj",
            "opt",
            "bloom",
            "falcon",
            "stablelm",
            "olmo",
            "olmo2",
            "cohere",
            "granite",
            "deepseek_v2",
            "deepseek_v3",
            "starcoder2",
            "mpt",
            "mamba",
            "mamba2",
            "jamba",
            "bamba",
            "rwkv",
            "bert",
            "roberta",
            "distilbert",
            "deberta",
            "electra",
            "modernbert",
            "t5",
            "bart",
            "whisper",
            "vit",
            "clip",
            "dinov2",
            "swin",
        )
    },
    tags=("tests",),
)
def family(*, family: str = "llama") -> Scenario:
    """One family under FSDP2."""
    return family_of(family)


@scenario(
    mesh={"dp_shard": 4},
    axes={"family": ("llama", "mixtral", "gemma2", "deepseek_v3", "mamba", "bert", "t5", "vit")},
    tags=("tests",),
)
def sample(*, family: str = "llama") -> Scenario:
    """Some of them, which also run."""
    return family_of(family)


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    axes={
        "family": (
            "llama",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "mistral",
            "mixtral",
            "gemma",
            "gemma2",
            "gemma3",
            "phi",
            "phi3",
            "gpt2",
            "gpt_neox",
            "gptj",
            "opt",
            "bloom",
            "falcon",
            "stablelm",
            "olmo",
            "olmo2",
            "cohere",
            "granite",
            "deepseek_v2",
            "deepseek_v3",
            "starcoder2",
            "mpt",
            "mamba",
            "mamba2",
            "jamba",
            "bamba",
            "rwkv",
        )
    },
    tags=("tests",),
)
def decoder(*, family: str = "llama") -> Scenario:
    """A decoder under the TP plan that it brings along, and FSDP2."""
    kind, prefix, sizes = FAMILIES[family]
    return Scenario(
        build_model=lambda: model_of(kind, prefix, sizes),
        make_batch=lambda: batch_of(kind),
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp="auto", fsdp=FsdpPlan(wrap="auto")),
    )
