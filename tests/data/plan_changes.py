"""One llama-like plan, and twenty ways in which somebody may change what it communicates, most without meaning to."""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
)

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios"))
from llama_2d import TP_PLAN
from models import Llama, next_token_loss, token_batch

GATHERED = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
FROM_SHARDS = ColwiseParallel(input_layouts=Shard(1))
# What an FSDP plan gets instead of its defaults.
FSDP = {
    "reshard_after_forward False": {"reshard_after_forward": False},
    "parameters gathered in bf16": {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "gradients reduced in bf16": {"mixed_precision": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "no layer wrapped": {"wrap": ()},
    "the output wrapped too": {"wrap": ("layers.*", "output")},
    "halves of layers wrapped": {"wrap": ("layers.*.attention", "layers.*.feed_forward")},
}
# Module pattern to its style instead, None for none.
TP = {
    "SequenceParallel dropped before attention": {"layers.*.attention_norm": None},
    "SequenceParallel dropped before feed_forward": {"layers.*.ffn_norm": None},
    "SequenceParallel dropped at the end": {"norm": None},
    "the output replicated": {
        "output": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    },
    "the embedding sharded by column": {
        "tok_embeddings": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    },
    "three gathers before attention": {"layers.*.attention": None, "layers.*.attention.w[qkv]": FROM_SHARDS},
    "two gathers before feed_forward": {"layers.*.feed_forward": None, "layers.*.feed_forward.w[13]": FROM_SHARDS},
    "one layer's feed_forward gathers twice": {
        "layers.*.feed_forward": None,
        "layers.0.feed_forward.w[13]": FROM_SHARDS,
        "layers.1.feed_forward": GATHERED,
    },
    "the last norm redistributed": {
        "norm": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        )
    },
    "wo scatters by a replica": {
        "layers.*.attention": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        ),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Replicate()),
    },
}
SIZES = {
    "a wider model": {"dim": 256},
    "a wider hidden layer": {"hidden": 512},
    "another layer": {"num_layers": 3},
    "a longer sequence": {"sequence": 64},
}
CHANGES = (*FSDP, *TP, *SIZES)
# The module whose communication each change changes, layers folded.
NAMED = {
    "reshard_after_forward False": "layers.*",
    "parameters gathered in bf16": "layers.*",
    "gradients reduced in bf16": "layers.*",
    "no layer wrapped": "layers.*",
    "the output wrapped too": "output",
    "halves of layers wrapped": "layers.*.feed_forward",
    "SequenceParallel dropped before attention": "layers.*.attention_norm",
    "SequenceParallel dropped before feed_forward": "layers.*.ffn_norm",
    "SequenceParallel dropped at the end": "norm",
    "the output replicated": "output",
    "the embedding sharded by column": "tok_embeddings",
    "three gathers before attention": "layers.*.attention.wq",
    "two gathers before feed_forward": "layers.*.feed_forward.w1",
    "one layer's feed_forward gathers twice": "layers.*.feed_forward.w1",
    "the last norm redistributed": "norm",
    "wo scatters by a replica": "layers.*.attention.wo",
    "a wider model": "layers.*.attention",
    "a wider hidden layer": "layers.*",
    "another layer": "layers.*.attention",
    "a longer sequence": "layers.*.attention",
}


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    axes={
        "change": (
            "none",
            "reshard_after_forward False",
            "parameters gathered in bf16",
            "gradients reduced in bf16",
            "no layer wrapped",
            "the output wrapped too",
            "halves of layers wrapped",
            "SequenceParallel dropped before attention",
            "SequenceParallel dropped before feed_forward",
            "SequenceParallel dropped at the end",
            "the output replicated",
            "the embedding sharded by column",
            "three gathers before attention",
            "two gathers before feed_forward",
            "one layer's feed_forward gathers twice",
            "the last norm redistributed",
            "wo scatters by a replica",
            "a wider model",
            "a wider hidden layer",
            "another layer",
            "a longer sequence",
        )
    },
)
def plan_changes(*, change: str = "none") -> Scenario:
    """The plan of llama_2d on a small model, as it is and changed."""
    size = {"dim": 128, "hidden": 256, "num_layers": 2, "sequence": 32, **SIZES.get(change, {})}
    tp = {name: style for name, style in (TP_PLAN | TP.get(change, {})).items() if style is not None}
    return Scenario(
        build_model=partial(Llama, 64, size["dim"], size["num_layers"], 4, size["hidden"]),
        make_batch=partial(token_batch, 4, size["sequence"], 64),
        loss=next_token_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        plan=ParallelPlan(tp=tp, fsdp=FsdpPlan(**({"wrap": ("layers.*",)} | FSDP.get(change, {})))),
    )
