"""Plans of others, right and wrong, that `check` and a step on real ranks must agree about."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.right_plans import RIGHT, scenario_of
from distbench.spec import CpPlan, DdpPlan, FsdpPlan, LargestDim, ParallelPlan, PipelinePlan, Scenario, ShardParam

Mesh = dict[str, int]
DDP = {"dp_replicate": 4}
TP, FSDP = {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}
PP, PP_TP = {"dp_shard": 2, "pp": 2}, {"pp": 2, "tp": 2}
WRAP = ("blocks.*",)
PAIR: dict[str, Any] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
HYBRID = FsdpPlan(wrap=WRAP, mesh_dims=("dp_shard",), replicate_dims=("dp_replicate",))
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BOTH = ("dp_replicate", "dp_shard")


class Block(nn.Module):
    """A norm and two linears."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With the input added."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three blocks and a head."""

    def __init__(self, dim: int = 16, hidden: int = 32, unused: bool = False) -> None:
        super().__init__()
        if unused:
            self.unused = Block(dim, hidden)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(3))
        self.head = nn.Linear(dim, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each token."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 8, 16, generator=generator), torch.randint(10, (rows, 8), generator=generator)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def by_function(model: nn.Module, mesh: Any) -> nn.Module:
    """A tensor parallel plan as a function."""
    return parallelize_module(model, mesh, PAIR)


def wrong_function(model: nn.Module, mesh: Any) -> int:
    """Returns no model."""
    return 1


# Name to mesh, and what the plan is made of; `hidden` and `rows` are the model's and the batch's.
PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "pair": (TP, {"tp": PAIR}),
    "pair and FSDP": (TP, {"tp": PAIR, "fsdp": FsdpPlan(wrap=WRAP)}),
    "function": (TP, {"tp": by_function, "fsdp": FsdpPlan()}),
    "function that returns a number": (TP, {"tp": wrong_function, "fsdp": FsdpPlan()}),
    "colwise alone": (TP, {"tp": {"blocks.*.up": ColwiseParallel()}, "fsdp": FsdpPlan()}),
    "rowwise alone": (TP, {"tp": {"blocks.*.down": RowwiseParallel()}, "fsdp": FsdpPlan()}),
    "colwise, output gathered": (
        TP,
        {"tp": {"blocks.*.up": ColwiseParallel(output_layouts=Replicate())}, "fsdp": FsdpPlan()},
    ),
    "hidden of 33": (TP, {"tp": PAIR, "fsdp": FsdpPlan(), "hidden": 33}),
    "a pattern of nothing": (TP, {"tp": {"layers.*.up": ColwiseParallel()}, "fsdp": FsdpPlan()}),
    "colwise on a norm": (TP, {"tp": {"blocks.*.norm": ColwiseParallel()}, "fsdp": FsdpPlan()}),
    "norm by sequence": (
        TP,
        {"tp": {**PAIR, "blocks.*.norm": SequenceParallel(use_local_output=True)}, "fsdp": FsdpPlan()},
    ),
    "inputs of two": (
        TP,
        {
            "tp": {
                "blocks.*.up": PrepareModuleInput(
                    input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
                )
            },
            "fsdp": FsdpPlan(),
        },
    ),
    "an output prepared": (
        TP,
        {
            "tp": {"blocks.*": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())},
            "fsdp": FsdpPlan(),
        },
    ),
    "loss parallel": (
        TP,
        {
            "tp": {**PAIR, "head": ColwiseParallel(use_local_output=False)},
            "fsdp": FsdpPlan(),
            "loss_parallel": True,
        },
    ),
    "annotated rows": (TP, {"shard_params": {"blocks.*.up.weight": ShardParam(0)}, "fsdp": FsdpPlan()}),
    "annotated, no such dim": (TP, {"shard_params": {"blocks.*.up.weight": ShardParam(2)}, "fsdp": FsdpPlan()}),
    "annotated, no such parameter": (TP, {"shard_params": {"up.weight": ShardParam(0)}, "fsdp": FsdpPlan()}),
    "context parallel without attention": (
        {"dp_shard": 2, "cp": 2},
        {"cp": CpPlan(), "fsdp": FsdpPlan(mesh_dims=("dp_shard", "cp"))},
    ),
    "context parallel, unknown rotation": ({"cp": 4}, {"cp": CpPlan(rotate="sideways")}),
    "context parallel, sequence of 8 in 8 chunks": ({"cp": 4}, {"cp": CpPlan(), "fsdp": FsdpPlan(mesh_dims=("cp",))}),
    "a mesh dim of nobody": (TP, {"fsdp": FsdpPlan()}),
    "FSDP over both": (FSDP, {"fsdp": FsdpPlan(wrap=WRAP, mesh_dims=BOTH)}),
    "FSDP over no such dim": (FSDP, {"fsdp": FsdpPlan(mesh_dims=("dp",))}),
    "hybrid": (FSDP, {"fsdp": HYBRID}),
    "hybrid, divided by 3": (FSDP, {"fsdp": replace(HYBRID, configure={"set_gradient_divide_factor": 3.0})}),
    "divided by 3": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH, configure={"set_gradient_divide_factor": 3.0})}),
    "shards and replicas over one dim": (FSDP, {"fsdp": replace(HYBRID, mesh_dims=BOTH)}),
    "reshard to 2": (FSDP, {"fsdp": FsdpPlan(wrap=WRAP, mesh_dims=BOTH, reshard_after_forward=2)}),
    "reshard to 3": (FSDP, {"fsdp": FsdpPlan(wrap=WRAP, mesh_dims=BOTH, reshard_after_forward=3)}),
    "reshard to 2 with TP": (TP, {"tp": PAIR, "fsdp": FsdpPlan(wrap=WRAP, reshard_after_forward=2)}),
    "columns": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH, shard_placement=lambda p: Shard(1) if p.ndim == 2 else None)}),
    "columns of 30": (
        FSDP,
        {"fsdp": FsdpPlan(mesh_dims=BOTH, shard_placement=lambda p: Shard(1) if p.ndim == 2 else None), "hidden": 30},
    ),
    "a tensor dim that biases lack": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH, shard_placement=lambda p: Shard(1))}),
    "largest dims": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH, shard_placement=LargestDim(100))}),
    "largest dims in bf16": (
        FSDP,
        {
            "fsdp": FsdpPlan(
                mesh_dims=BOTH,
                shard_placement=LargestDim(100),
                mixed_precision=BF16,
            )
        },
    ),
    "bf16": (
        FSDP,
        {"fsdp": FsdpPlan(mesh_dims=BOTH, mixed_precision=BF16)},
    ),
    "bf16 outputs": (
        FSDP,
        {"fsdp": FsdpPlan(mesh_dims=BOTH, mixed_precision=MixedPrecisionPolicy(output_dtype=torch.bfloat16))},
    ),
    "checkpointed within units": (FSDP, {"fsdp": FsdpPlan(wrap=WRAP, mesh_dims=BOTH), "checkpoint": ("blocks.*.up",)}),
    "names of styles": (
        TP,
        {"tp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_rep"}, "fsdp": FsdpPlan()},
    ),
    "a name of no style": (TP, {"tp": {"blocks.*.up": "columns"}, "fsdp": FsdpPlan()}),
    "a model's own plan that there is none of": (TP, {"tp": "auto", "fsdp": FsdpPlan()}),
    "f16 reductions": (
        FSDP,
        {"fsdp": FsdpPlan(mesh_dims=BOTH, mixed_precision=MixedPrecisionPolicy(reduce_dtype=torch.float16))},
    ),
    "prefetch of -1": (FSDP, {"fsdp": FsdpPlan(wrap=WRAP, mesh_dims=BOTH, prefetch_forward=-1)}),
    "wrapped nothing": (FSDP, {"fsdp": FsdpPlan(wrap=("layers.*",), mesh_dims=BOTH)}),
    "a batch of 6": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH), "rows": 6}),
    "three micro-batches of 2": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH), "microbatches": 3}),
    "two micro-batches": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH, sync_each_microbatch=False), "microbatches": 2}),
    "checkpointed": (FSDP, {"fsdp": FsdpPlan(wrap=WRAP, mesh_dims=BOTH), "checkpoint": WRAP}),
    "checkpointed nothing": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH), "checkpoint": ("layers.*",)}),
    "DDP": (DDP, {"ddp": DdpPlan()}),
    "DDP, small buckets": (DDP, {"ddp": DdpPlan(bucket_cap_mb=0.001)}),
    "DDP, an unused block": (DDP, {"ddp": DdpPlan(), "unused": True}),
    "DDP, an unused block looked for": (DDP, {"ddp": DdpPlan(find_unused_parameters=True), "unused": True}),
    "DDP, an unused block left out": (DDP, {"ddp": DdpPlan(ignored=("unused",)), "unused": True}),
    "DDP, a static graph and an unused block": (DDP, {"ddp": DdpPlan(static_graph=True), "unused": True}),
    "DDP that ignores all": (DDP, {"ddp": DdpPlan(ignored=("",))}),
    "DDP, a static graph whose first backward is left out": (
        DDP,
        {"ddp": DdpPlan(static_graph=True, sync_each_microbatch=False), "microbatches": 2},
    ),
    "DDP over no such dim": (FSDP, {"ddp": DdpPlan(mesh_dims=("dp",))}),
    "DDP with TP": ({"dp_replicate": 2, "tp": 2}, {"ddp": DdpPlan(), "tp": PAIR}),
    "stages with FSDP": (PP, {"pipeline": PipelinePlan("gpipe"), "microbatches": 2, "fsdp": FsdpPlan(wrap=WRAP)}),
    "stages with TP": (PP_TP, {"pipeline": PipelinePlan(), "microbatches": 2, "tp": PAIR}),
    "stages of one and two layers": (
        PP_TP,
        {"pipeline": PipelinePlan(first_layers=(1,)), "microbatches": 4, "tp": PAIR},
    ),
    "a stage without a layer": (PP_TP, {"pipeline": PipelinePlan(first_layers=(3,)), "microbatches": 2, "tp": PAIR}),
    "more stages than layers": ({"pp": 4}, {"pipeline": PipelinePlan(), "microbatches": 4}),
    "fewer micro-batches than stages": (PP_TP, {"pipeline": PipelinePlan(), "microbatches": 1, "tp": PAIR}),
    "a schedule that is unknown": (PP_TP, {"pipeline": PipelinePlan("2f2b"), "microbatches": 2, "tp": PAIR}),
    "stages over no such dim": (TP, {"pipeline": PipelinePlan(), "microbatches": 2, "tp": PAIR}),
    "zero bubbles with FSDP": (PP, {"pipeline": PipelinePlan("zbv"), "microbatches": 4, "fsdp": FsdpPlan(wrap=WRAP)}),
    "zero bubbles with FSDP that keeps parameters": (
        PP,
        {
            "pipeline": PipelinePlan("zbv"),
            "microbatches": 4,
            "fsdp": FsdpPlan(wrap=WRAP, reshard_after_forward=False),
        },
    ),
    "stages with DDP": (
        {"dp_replicate": 2, "pp": 2},
        {"pipeline": PipelinePlan(), "microbatches": 2, "ddp": DdpPlan()},
    ),
    "state saved without an optimizer": (FSDP, {"fsdp": FsdpPlan(mesh_dims=BOTH), "state_dict": True}),
}


# Refused because a part of them would do nothing (a stage without a layer, too): without the refusal, a step runs as if
# it were not there.
WITHOUT_EFFECT = (
    *("a pattern of nothing", "annotated, no such parameter", "a mesh dim of nobody"),
    *("wrapped nothing", "checkpointed nothing"),
    *("a stage without a layer", "more stages than layers", "zero bubbles with FSDP that keeps parameters"),
)


def plans() -> Iterator[tuple[str, Mesh, Scenario]]:
    """(name, mesh, scenario) of each."""
    for name, (mesh, given) in PLANS.items():
        parts = dict(given)
        hidden, rows = parts.pop("hidden", 32), parts.pop("rows", 8)
        unused = parts.pop("unused", False)
        yield (
            name,
            mesh,
            Scenario(
                build_model=lambda hidden=hidden, unused=unused: Stack(hidden=hidden, unused=unused),
                make_batch=lambda rows=rows: batch(rows),
                loss=loss,
                plan=ParallelPlan(**parts),
            ),
        )
    for model, mesh_dim in RIGHT:
        yield f"{model} over {mesh_dim}", {"dp_shard": 2, mesh_dim: 2}, scenario_of(model, "fp32", 1, mesh_dim)
