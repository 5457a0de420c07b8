"""Plans of two models over four ranks: each a scenario to record, and all of them calls of one launch to measure."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

SEED = 20260101
SCENARIOS = str(Path(__file__).parent.parent / "scenarios")
if SCENARIOS not in sys.path:
    sys.path.append(SCENARIOS)  # where their models are
BLOCKS = ("layers.*",)


class Plan(NamedTuple):
    """A model, its mesh, and how it is laid over it."""

    model: str
    mesh: dict[str, int]
    fsdp: FsdpPlan | None = None
    tp: bool = False
    more: tuple[tuple[str, Any], ...] = ()


FSDP, KEPT = FsdpPlan(wrap=BLOCKS), FsdpPlan(wrap=BLOCKS, reshard_after_forward=False)
HYBRID = FsdpPlan(wrap=BLOCKS, replicate_dims=("dp_replicate",))
FOUR, TWO_BY_TWO, ALL_TP = {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"tp": 4}
REPLICATED = {"dp_replicate": 2, "dp_shard": 2}
PLANS = {
    "llama_fsdp4": Plan("llama", FOUR, FSDP),
    "llama_fsdp4_kept": Plan("llama", FOUR, KEPT),
    "llama_2x2": Plan("llama", TWO_BY_TWO, FSDP, tp=True),
    "llama_2x2_kept": Plan("llama", TWO_BY_TWO, KEPT, tp=True),
    "llama_tp4": Plan("llama", ALL_TP, tp=True),
    "llama_hybrid": Plan("llama", REPLICATED, HYBRID),
    "llama_recompute": Plan("llama", FOUR, FSDP, more=(("checkpoint", BLOCKS),)),
    "llama_two_parts": Plan("llama", FOUR, FSDP, more=(("microbatches", 2),)),
    "llama_bf16": Plan("llama", FOUR, FSDP, more=(("bf16", True),)),
    "mlp_fsdp4": Plan("mlp", FOUR, FSDP),
    "mlp_fsdp4_kept": Plan("mlp", FOUR, KEPT),
    "mlp_2x2": Plan("mlp", TWO_BY_TWO, FSDP, tp=True),
    "mlp_tp4": Plan("mlp", ALL_TP, tp=True),
    "mlp_tp4_sequence": Plan("mlp", ALL_TP, tp=True, more=(("sequence", True),)),
    "mlp_hybrid": Plan("mlp", REPLICATED, HYBRID),
    "mlp_bf16": Plan("mlp", FOUR, FSDP, more=(("bf16", True),)),
}


@scenario(
    mesh={"dp_shard": 4},
    axes={"plan": ("llama_fsdp4",)},
)
def planned(*, plan: str = "llama_fsdp4") -> Scenario:
    """One of PLANS."""
    import torch

    chosen = PLANS[plan]
    more = dict(chosen.more)
    fsdp = chosen.fsdp
    if more.pop("bf16", False):
        from dataclasses import replace

        from torch.distributed.fsdp import MixedPrecisionPolicy

        assert fsdp is not None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp = replace(fsdp, mixed_precision=policy)
    parts = _llama() if chosen.model == "llama" else _mlp(more.pop("sequence", False))
    tp = parts.pop("tp") if chosen.tp else None
    parts.pop("tp", None)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return Scenario(**parts, optimizer=optimizer, plan=ParallelPlan(tp=tp, fsdp=fsdp, **more))


def _llama() -> dict[str, Any]:
    from llama_2d import TP_PLAN
    from models import Llama, next_token_loss, token_batch

    return {
        "build_model": partial(Llama, 1000, 512, 3, 8, 1408),
        "make_batch": partial(token_batch, 8, 64, 1000),
        "loss": next_token_loss,
        "num_tokens": 8 * 64,
        "tp": TP_PLAN,
    }


def _mlp(sequence: bool) -> dict[str, Any]:
    import torch
    from models import FeedForward, vector_batch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInputOutput, RowwiseParallel

    class Stack(torch.nn.Module):
        """Three feed-forwards with a residual each."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(FeedForward(640, 2560) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    wide: Any = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
    narrow: Any = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    tp = {"layers.*.w1": wide, "layers.*.w2": narrow, "layers.*.w3": wide}
    if sequence:
        tp["layers.*"] = PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        )
    return {
        "build_model": Stack,
        "make_batch": partial(vector_batch, 4, 64, 640),
        "loss": torch.nn.functional.mse_loss,
        "num_tokens": 4 * 64,
        "tp": tp,
    }


@scenario(mesh={"dp_shard": 4})
def measured() -> Scenario:
    """A step of each of PLANS, as a call of its own: they take turns in one launch, whatever their meshes."""
    return Scenario(calls={name: partial(step_of, name) for name in PLANS})


_MESHES: dict[tuple[tuple[str, int], ...], Any] = {}


def step_of(name: str, whole: Any) -> Callable[[], object]:
    """A step of the plan on a mesh of its own; made once a process and shape, by all ranks together."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from distbench.plans.training_step import TrainingStep
    from distbench.ranks.context import RankContext
    from distbench.ranks.measure import no_stamp

    key = tuple(PLANS[name].mesh.items())
    if key not in _MESHES:
        sizes, names = tuple(size for _, size in key), tuple(name for name, _ in key)
        _MESHES[key] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    assert dist.group.WORLD is not None
    device, world = torch.device("cpu"), dist.group.WORLD
    context = RankContext(whole.get_rank(), device, _MESHES[key], "gloo", world, SEED, check="none")
    step = TrainingStep(planned(plan=name), context)
    return lambda: step(no_stamp)
