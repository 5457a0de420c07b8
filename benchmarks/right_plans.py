"""What bench_right_models checks: models under plans that fit them."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from benchmarks.right_models import Decoder, ImageClassifier, Sizes, image_batch, image_loss, text_batch, text_loss
from distbench.spec import CpPlan, FsdpPlan, ParallelPlan, Scenario

BF16 = torch.bfloat16
SIZES = Sizes()
GATHERED = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
GATHERED_WITH_TABLE = PrepareModuleInput(
    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
)
HEAD_NORM = SequenceParallel(sequence_dim=2, use_local_output=True)
TEXT_PLAN: dict[str, Any] = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.*_layernorm": SequenceParallel(),
    "layers.*.self_attn": GATHERED_WITH_TABLE,
    "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.mlp": GATHERED,
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
QK_PLAN = TEXT_PLAN | {"layers.*.self_attn.[qk]_norm": HEAD_NORM}
IMAGE_PLAN: dict[str, Any] = {
    "layers.*.query": ColwiseParallel(),
    "layers.*.key": ColwiseParallel(),
    "layers.*.value": ColwiseParallel(),
    "layers.*.dense": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}
# One DTensor cannot be sharded on either tensor dim: the shared matrix stays whole, and so is what goes in and out.
TIED_PLAN = {name: style for name, style in TEXT_PLAN.items() if name not in ("embed_tokens", "lm_head", "norm")} | {
    "layers.0": PrepareModuleInput(
        input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None), use_local_output=True
    ),
    "norm": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
}
POLICIES: dict[str, Any] = {
    "fp32": None,
    "bf16 policy": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16 model": None,
}
# One whose attention nearly picks single tokens: in f32 its gradients are off by 1e-5, in bf16 by as much as they are.
SHARP = replace(SIZES, sharpness=6.0)
DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"sizes": SIZES}, TEXT_PLAN),
    "qwen3": ({"sizes": SIZES, "normed": True}, QK_PLAN),
    "sharp qwen3": ({"sizes": SHARP, "normed": True}, QK_PLAN),
    "tied": ({"sizes": SIZES, "tied": True}, TIED_PLAN),
}
# Model, the mesh that its plan is for.
RIGHT = (
    ("llama", "tp"),
    ("llama", "cp"),
    ("qwen3", "tp"),
    ("sharp qwen3", "tp"),
    ("qwen3", "cp"),
    ("tied", "tp"),
    ("vit", "tp"),
)


def built(precision: str, make: Any, *arguments: Any, **options: Any) -> nn.Module:
    """A model, its parameters in bf16 where that is the precision; its buffers stay as they are."""
    model: nn.Module = make(*arguments, **options)
    if precision == "bf16 model":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(BF16)
    return model


def styles_of(model: str) -> dict[str, Any]:
    """The tensor parallel plan that fits a model."""
    return IMAGE_PLAN if model == "vit" else DECODERS[model][1]


def scenario_of(model: str, precision: str, seed: int, mesh: str = "tp") -> Scenario:
    """A right model under a plan that fits it: tensor or context parallel, and FSDP.

    Context parallel ranks hold the same parameters and see other tokens, so that FSDP shards over them as well.
    """
    fsdp = FsdpPlan(wrap=("layers.*",), mesh_dims=("dp_shard", "cp"), mixed_precision=POLICIES[precision])
    tp = styles_of(model) if mesh == "tp" else None
    cp = CpPlan(buffers={"angles": 0}, rotate="alltoall") if mesh == "cp" else None
    if model == "vit":
        dtype = BF16 if precision == "bf16 model" else torch.float32
        return Scenario(
            build_model=partial(built, precision, ImageClassifier),
            make_batch=partial(image_batch, dtype, seed),
            loss=image_loss,
            plan=ParallelPlan(tp=tp, fsdp=fsdp),
        )
    return Scenario(
        build_model=partial(built, precision, Decoder, **DECODERS[model][0]),
        make_batch=partial(text_batch, SIZES, seed),
        loss=text_loss,
        plan=ParallelPlan(tp=tp, cp=cp, fsdp=fsdp),
    )
