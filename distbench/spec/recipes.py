"""Recipes: model configurations by name. The scenario of a recipe's source builds the model without its weights.

`hf:FAMILY@SIZE` is a configuration of transformers, with its model type as FAMILY and a SIZE from FAMILIES.
`torchtitan:CONFIG` is a function in the config registries of an installed torchtitan, which are parsed but not
imported.
"""

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.spec.errors import UserError

# Source to the command that installs its package.
INSTALLS = {"hf": "pip install 'distbench[hf]'", "torchtitan": "pip install torchtitan==0.3.0"}
_PACKAGES = {"hf": "transformers", "torchtitan": "torchtitan"}


@dataclass(frozen=True)
class Family:
    """The models of one configuration class of transformers.

    Args:
        task: "causal", "masked", "seq2seq" or "image", which determines the head and the batch.
        sequence: default tokens per sample; for images, the side in pixels.
        common: fields of the configuration that all sizes share.
        sizes: size to the fields that differ.
    """

    task: str
    sequence: int
    common: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, Any]]


def _fields(
    layers: int, hidden: int, intermediate: int, heads: int, key_value_heads: int = 0, **others: Any
) -> dict[str, Any]:
    names = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    names |= {"intermediate_size": intermediate} if intermediate else {}
    return names | ({"num_key_value_heads": key_value_heads} if key_value_heads else {}) | others


def _t5(layers: int, hidden: int, feed_forward: int, heads: int, head_dim: int) -> dict[str, int]:
    names = {"num_layers": layers, "num_decoder_layers": layers, "d_model": hidden}
    return names | {"d_ff": feed_forward, "num_heads": heads, "d_kv": head_dim}


_TINY = _fields(2, 64, 128, 4, 2, head_dim=16, vocab_size=256)
_SMALL = _fields(4, 512, 1536, 8, 4, head_dim=64, vocab_size=8192)
_MANY_HEADS = ({**_TINY, "num_key_value_heads": 4}, {**_SMALL, "num_key_value_heads": 8})
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = ({"num_local_experts": 4}, {"num_local_experts": 8})
_QWEN_EXPERTS = (
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
)
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_DEEPSEEK_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_DEEPSEEK_SMALL = {**_LATENT, **_DEEPSEEK_EXPERTS, "first_k_dense_replace": 1, "head_dim": 16}  # of rotations

# Sizes are from config.json of the named Hugging Face Hub repositories, except for the invented `tiny` and `small`.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        *("causal", 4096, {"vocab_size": 128_256}),
        {
            "tiny": _TINY,
            "small": _SMALL,
            "1B": _fields(16, 2048, 8192, 32, 8, tie_word_embeddings=True),  # meta-llama/Llama-3.2-1B
            "3B": _fields(28, 3072, 8192, 24, 8, tie_word_embeddings=True),  # meta-llama/Llama-3.2-3B
            "8B": _fields(32, 4096, 14336, 32, 8),  # meta-llama/Llama-3.1-8B
            "70B": _fields(80, 8192, 28672, 64, 8),  # meta-llama/Llama-3.1-70B
            "405B": _fields(126, 16384, 53248, 128, 8),  # meta-llama/Llama-3.1-405B
        },
    ),
    "qwen3": Family(
        *("causal", 4096, {"vocab_size": 151_936, "head_dim": 128}),
        {
            "tiny": _TINY,
            "small": _SMALL,
            "0.6B": _fields(28, 1024, 3072, 16, 8, tie_word_embeddings=True),  # Qwen/Qwen3-0.6B
            "1.7B": _fields(28, 2048, 6144, 16, 8, tie_word_embeddings=True),  # Qwen/Qwen3-1.7B
            "4B": _fields(36, 2560, 9728, 32, 8, tie_word_embeddings=True),  # Qwen/Qwen3-4B
            "8B": _fields(36, 4096, 12288, 32, 8),  # Qwen/Qwen3-8B
            "14B": _fields(40, 5120, 17408, 40, 8),  # Qwen/Qwen3-14B
            "32B": _fields(64, 5120, 25600, 64, 8),  # Qwen/Qwen3-32B
        },
    ),
    "qwen3_moe": Family(
        *("causal", 4096, {"vocab_size": 151_936, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}),
        {
            "tiny": {**_TINY, **_QWEN_EXPERTS[0]},
            "small": {**_SMALL, **_QWEN_EXPERTS[1]},
            "30B": _fields(48, 2048, 6144, 32, 4, moe_intermediate_size=768),  # Qwen/Qwen3-30B-A3B
            "235B": _fields(94, 4096, 12288, 64, 4, moe_intermediate_size=1536),  # Qwen/Qwen3-235B-A22B
        },
    ),
    "mixtral": Family(
        *("causal", 4096, {"vocab_size": 32_000, "num_local_experts": 8}),
        {
            "tiny": {**_TINY, **_EXPERTS[0]},
            "small": {**_SMALL, **_EXPERTS[1]},
            "8x7B": _fields(32, 4096, 14336, 32, 8),  # mistralai/Mixtral-8x7B-v0.1
            "8x22B": _fields(56, 6144, 16384, 48, 8),  # mistralai/Mixtral-8x22B-v0.1
        },
    ),
    "deepseek_v3": Family(
        *("causal", 4096, {}),
        {
            "tiny": {**_MANY_HEADS[0], **_DEEPSEEK_SMALL, "moe_intermediate_size": 64},
            "small": {**_MANY_HEADS[1], **_DEEPSEEK_SMALL, "moe_intermediate_size": 256},
            # moonshotai/Moonlight-16B-A3B (DeepSeek's class)
            "16B": _fields(27, 2048, 11264, 16, 16, vocab_size=163_840, moe_intermediate_size=1408, q_lora_rank=None)
            | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
            | {"first_k_dense_replace": 1},
            # deepseek-ai/DeepSeek-V3; other fields are the class's defaults
            "671B": _fields(61, 7168, 18432, 128, 128, vocab_size=129_280, moe_intermediate_size=2048),
        },
    ),
    "gemma": Family(
        *("causal", 4096, {"vocab_size": 256_000, "head_dim": 256}),
        {
            "tiny": _TINY,
            "small": _SMALL,
            "2B": _fields(18, 2048, 16384, 8, 1),  # google/gemma-2b
            "7B": _fields(28, 3072, 24576, 16, 16),  # google/gemma-7b
        },
    ),
    "gemma2": Family(
        *("causal", 4096, {"vocab_size": 256_000, "head_dim": 256}),
        {
            "tiny": _TINY,
            "small": _SMALL,
            "2B": _fields(26, 2304, 9216, 8, 4),  # google/gemma-2-2b
            "9B": _fields(42, 3584, 14336, 16, 8),  # google/gemma-2-9b
            "27B": _fields(46, 4608, 36864, 32, 16, head_dim=128),  # google/gemma-2-27b
        },
    ),
    "mistral": Family(
        *("causal", 4096, {"head_dim": 128, "sliding_window": None}),
        {
            "tiny": _TINY,
            "small": _SMALL,
            "7B": _fields(32, 4096, 14336, 32, 8, vocab_size=32_768),  # mistralai/Mistral-7B-v0.3
            "12B": _fields(40, 5120, 14336, 32, 8, vocab_size=131_072),  # mistralai/Mistral-Nemo-Base-2407
            "24B": _fields(40, 5120, 32768, 32, 8, vocab_size=131_072),  # mistralai/Mistral-Small-24B-Base-2501
            "123B": _fields(88, 12288, 28672, 96, 8, vocab_size=32_768),  # mistralai/Mistral-Large-Instruct-2407
        },
    ),
    "phi": Family(
        *("causal", 2048, {"vocab_size": 51_200, "resid_pdrop": 0.0}),
        {
            "tiny": _TINY,
            "small": _SMALL,
            "1.3B": _fields(24, 2048, 8192, 32),  # microsoft/phi-1_5
            "2.7B": _fields(32, 2560, 10240, 32),  # microsoft/phi-2
        },
    ),
    "phi3": Family(
        *("causal", 4096, {"pad_token_id": None}),
        {
            "tiny": _TINY,
            "small": _SMALL,
            "3.8B": _fields(32, 3072, 8192, 32, 32, vocab_size=32_064),  # microsoft/Phi-3-mini-4k-instruct
            "14B": _fields(40, 5120, 17920, 40, 10, vocab_size=100_352),  # microsoft/phi-4
        },
    ),
    "gpt2": Family(
        *("causal", 1024, {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
        {
            "tiny": _fields(2, 64, 0, 4, vocab_size=256),
            "small": _fields(4, 512, 0, 8, vocab_size=8192),
            "124M": _fields(12, 768, 0, 12),  # openai-community/gpt2
            "355M": _fields(24, 1024, 0, 16),  # openai-community/gpt2-medium
            "774M": _fields(36, 1280, 0, 20),  # openai-community/gpt2-large
            "1.5B": _fields(48, 1600, 0, 25),  # openai-community/gpt2-xl
        },
    ),
    "bert": Family(
        *("masked", 512, _NO_DROPOUT),
        {
            "tiny": _fields(2, 64, 128, 4, vocab_size=256),
            "small": _fields(4, 512, 1536, 8, vocab_size=8192),
            "110M": _fields(12, 768, 3072, 12),  # google-bert/bert-base-uncased
            "335M": _fields(24, 1024, 4096, 16),  # google-bert/bert-large-uncased
        },
    ),
    "t5": Family(
        *("seq2seq", 512, {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
        {
            "tiny": {**_t5(2, 64, 128, 4, 16), "vocab_size": 256},
            "small": {**_t5(4, 512, 1536, 8, 64), "vocab_size": 8192},
            "60M": _t5(6, 512, 2048, 8, 64),  # google-t5/t5-small
            "220M": _t5(12, 768, 3072, 12, 64),  # google-t5/t5-base
            "770M": _t5(24, 1024, 4096, 16, 64),  # google-t5/t5-large
            "3B": _t5(24, 1024, 16384, 32, 128),  # google-t5/t5-3b
            "11B": _t5(24, 1024, 65536, 128, 128),  # google-t5/t5-11b
        },
    ),
    "vit": Family(
        *("image", 224, _NO_DROPOUT),
        {
            "tiny": _fields(2, 64, 128, 4, image_size=32, patch_size=8),
            "small": _fields(4, 512, 1536, 8),
            "86M": _fields(12, 768, 3072, 12),  # google/vit-base-patch16-224
            "304M": _fields(24, 1024, 4096, 16),  # google/vit-large-patch16-224
            "632M": _fields(32, 1280, 5120, 16, patch_size=14),  # google/vit-huge-patch14-224-in21k
        },
    ),
    # Without Mamba's kernels the scan is a loop over tokens, so recordings of longer sequences take minutes.
    "mamba": Family(
        *("causal", 32, {"vocab_size": 50_280}),
        {
            "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256},
            "small": {"num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 8192},
            "130M": {"num_hidden_layers": 24, "hidden_size": 768},  # state-spaces/mamba-130m-hf
            "370M": {"num_hidden_layers": 48, "hidden_size": 1024},  # state-spaces/mamba-370m-hf
            "790M": {"num_hidden_layers": 48, "hidden_size": 1536},  # state-spaces/mamba-790m-hf
            "1.4B": {"num_hidden_layers": 48, "hidden_size": 2048},  # state-spaces/mamba-1.4b-hf
            "2.8B": {"num_hidden_layers": 64, "hidden_size": 2560},  # state-spaces/mamba-2.8b-hf
        },
    ),
}


def recipe_configs(source: str) -> list[str]:
    """Return the names of a source's configurations. Raise UserError if the source's package is not installed."""
    if source == "torchtitan":
        return [*registries()]
    _folder(source)
    return [f"{name}@{size}" for name, family in FAMILIES.items() for size in family.sizes]


def registries() -> dict[str, str]:
    """Return a mapping from the installed torchtitan's configurations to the names of their models.

    Raises:
        UserError: torchtitan is not installed.
    """
    return {
        node.name: file.parent.name
        for file in sorted(_folder("torchtitan").glob("models/*/config_registry.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.args.args and node.returns is not None
        if ast.unparse(node.returns).endswith(".Config")
    }


def _folder(source: str) -> Path:
    """Return the folder of a source's package, without importing the package."""
    package = _PACKAGES[source]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        problem = f"recipes of {source} need {package}, which is not installed"
        raise UserError(f"{problem}; install it with {INSTALLS[source]}")
    return Path(next(iter(spec.submodule_search_locations)))


def is_small(config: str) -> bool:
    """Return whether the configuration is small enough for a step on a CPU."""
    return config.endswith(("@tiny", "@small")) or "debug" in config
