"""torchtitan's registered configurations, each laid out by its own parallelize function: no weights, no data set."""

import copy
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchtitan.tools import utils

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, UserError, scenario
from distbench.spec.errors import nearest
from distbench.spec.recipes import INSTALLS, recipe_configs, registries

utils.device_type = "cpu"  # Without an accelerator torchtitan uses the device type CUDA.
# Mesh dim of distbench to the field of torchtitan's ParallelismConfig.
DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
SDPA = "ScaledDotProductAttention"
PLAIN: set[str] = set()  # configurations without their converters, which need a GPU
# With expert parallelism its dispatcher reads a mesh that is not made on a fake process group.
LEFT_OUT = {"spmd_backend": "partial_dtensor", "expert_parallel_degree": 1}


def registered(name: str) -> Any:
    """Return a configuration of torchtitan, as its `--config` finds it."""
    models = registries()
    if name not in models:
        raise UserError(f"no recipe torchtitan:{name} ({nearest(name, recipe_configs('torchtitan'))})")
    try:
        registry = import_module(f"torchtitan.models.{models[name]}.config_registry")
        try:
            return getattr(registry, name)()
        except (ImportError, RuntimeError, ValueError, AssertionError):  # converters that need a GPU
            plain = registry.model_registry
            registry.model_registry = lambda flavor, **_: plain(flavor)
            PLAIN.add(name)
            return getattr(registry, name)()
    except ImportError as error:
        problem = f"torchtitan's registry of {models[name]} cannot be imported ({error})"
        advice = f"install that module ({INSTALLS['torchtitan']} installs what torchtitan itself requires)"
        raise UserError(f"{problem}; {advice}") from error


def omits(name: str, config: Any) -> tuple[str, ...]:
    """Return the parts of a configuration's own step that `torchtitan` replaces or leaves out."""
    parts = ["its converters, which need a GPU"] if name in PLAIN else []
    attentions = [layer.attention for layer in config.model_spec.model.layers if hasattr(layer, "attention")]
    kinds = {type(each.inner_attention).__qualname__.partition(".")[0] for each in attentions}
    parts += [f"{kind} (causal scaled_dot_product_attention instead)" for kind in sorted(kinds - {SDPA})]
    if any("sinks" in (getattr(each, "param_init", None) or {}) for each in attentions):
        parts.append("attention sinks")
    if (degree := config.parallelism.expert_parallel_degree) > 1:
        parts.append(f"expert parallelism of degree {degree}")
    optimizers = {group.optimizer_name for group in config.optimizer.param_groups}
    return (*parts, *(f"{optimizer} (AdamW instead)" for optimizer in sorted(optimizers - {"AdamW"})))


def own_tensor_parallel(name: str) -> int:
    """Return the degree that a configuration sets."""
    return registered(name).parallelism.tensor_parallel_degree


def model_of(config: Any, layers: int, degrees: dict[str, int]) -> Any:
    """Return the model for these degrees of parallelism, with causal scaled_dot_product_attention.

    torchtitan's own attention is flex attention over masks of packed documents, which is compiled for GPUs. Kernels
    that send tokens to experts need expert parallelism.
    """
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    own = copy.deepcopy(config)
    fields = {field: degrees.get(mesh_dim, 1) for mesh_dim, field in DEGREES.items()}
    own.parallelism = replace(own.parallelism, **fields, **LEFT_OUT)
    model = own.model_spec.model
    if layers:
        model.layers = model.layers[:layers]
    for layer in [*model.layers, *getattr(model, "mtp_layers", ())]:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if (mixture := getattr(layer, "moe", None)) is not None:
            routed = mixture.routed_experts
            num_experts, top_k = routed.token_dispatcher.num_experts, routed.token_dispatcher.top_k
            routed.token_dispatcher = AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=top_k)
    model.update_from_config(config=own)
    return model.build()


def parallelize(model: nn.Module, mesh: Any, config: Any, checkpointing: Any) -> nn.Module:
    """Return the model under torchtitan's own parallelize function, on meshes of its own."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import parallel_dims

    # torchtitan makes a mesh of all ranks on the device type that it detected at import.
    parallel_dims.init_device_mesh = lambda *_, **names: mesh._flatten(*names["mesh_dim_names"])
    degrees = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    with torch.device("meta"):
        model_of(config, 1, degrees)  # This raises an error if the ranks do not divide the heads.
    fields = {DEGREES[mesh_dim]: size for mesh_dim, size in degrees.items()}
    parallelism = replace(config.parallelism, **fields, **LEFT_OUT)
    return config.model_spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims.ParallelDims.from_config(parallelism, mesh.size()),
        training=config.training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=checkpointing,
        dump_folder="",
    )


def batch_of(batch: int, sequence: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, each (batch, sequence)."""
    torch.manual_seed(0)
    tokens = torch.randint(vocab_size, (2, batch, sequence))
    return tokens[0], tokens[1]


def loss_of(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of (batch, sequence, vocabulary), over all logits at once; their sum for a list of logits."""
    each = logits if isinstance(logits, list) else [logits]
    return sum(F.cross_entropy(one.flatten(0, 1).float(), targets.flatten()) for one in each)


@scenario(mesh={"dp_shard": 8, "tp": 1}, tags=("fsdp", "tp", "recipe", "real-size"))
def torchtitan(
    *,
    config: str = "llama3_debugmodel",
    layers: int = 0,
    sequence: int = 0,
    batch: int = 0,
    checkpoint: str = "own",
    plan: str = "own",
) -> Scenario:
    """torchtitan:CONFIG, under torchtitan's own plan.

    `layers` and `sequence` are the configuration's by default; `batch` is the global one, by default 8 times the
    configuration's local one. checkpoint is own, none or full; plan is own, or fsdp for FSDP2 of each block alone.
    Attention is causal scaled_dot_product_attention, the loss is of all logits at once, the optimizer is AdamW.
    """
    from torchtitan.distributed.activation_checkpoint import FullAC

    found = registered(config)
    ways = {"own": found.activation_checkpoint, "none": None, "full": FullAC.Config()}
    if checkpoint not in ways or plan not in ("own", "fsdp"):
        raise UserError(f"checkpoint={checkpoint}, plan={plan} cannot be used; give own, none or full, and own or fsdp")
    if not hasattr(found.model_spec.model, "vocab_size"):
        raise UserError(f"torchtitan:{config} is not a language model, and no batch is known for it; use another one")
    length, batch = sequence or found.training.seq_len, batch or 8 * found.training.local_batch_size
    own_function = partial(parallelize, config=found, checkpointing=ways[checkpoint])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = FsdpPlan(wrap=("layers.*",), mixed_precision=policy)
    return Scenario(
        build_model=partial(model_of, found, layers, {}),
        make_batch=partial(batch_of, batch, length, found.model_spec.model.vocab_size),
        num_tokens=batch * length,
        loss=loss_of,
        optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
        parallelize=own_function if plan == "own" else None,
        plan=ParallelPlan(loss_parallel=True)
        if plan == "own"
        else ParallelPlan(fsdp=blocks, checkpoint=() if checkpoint == "none" else ("layers.*",)),
        gradient_divide_factor=1 if plan == "own" else None,
        omits=omits(config, found),
    )
