"""Plans of four models over four ranks: each a scenario to record, and all of them calls of one launch to measure."""

import sys
from collections.abc import Callable
from dataclasses import replace
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
    """A mesh, and how a model is laid over it."""

    mesh: dict[str, int]
    fsdp: FsdpPlan | None = None
    tp: bool = False
    more: tuple[tuple[str, Any], ...] = ()


FSDP, KEPT = FsdpPlan(wrap=BLOCKS), FsdpPlan(wrap=BLOCKS, reshard_after_forward=False)
HYBRID, HYBRID_KEPT = (replace(plan, replicate_dims=("dp_replicate",)) for plan in (FSDP, KEPT))
FOUR, TWO_BY_TWO, REPLICATED = {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}
KINDS = {
    "fsdp4": Plan(FOUR, FSDP),
    "fsdp4_kept": Plan(FOUR, KEPT),
    "2x2": Plan(TWO_BY_TWO, FSDP, tp=True),
    "2x2_kept": Plan(TWO_BY_TWO, KEPT, tp=True),
    "tp4": Plan({"tp": 4}, tp=True),
    "hybrid": Plan(REPLICATED, HYBRID),
    "hybrid_kept": Plan(REPLICATED, HYBRID_KEPT),
    "recompute": Plan(FOUR, FSDP, more=(("checkpoint", BLOCKS),)),
    "two_parts": Plan(FOUR, FSDP, more=(("microbatches", 2),)),
    "bf16": Plan(FOUR, FSDP, more=(("bf16", True),)),
}
MODELS = "llama", "mlp", "gpt", "wide"
PLANS = {f"{model}_{kind}": plan for model in MODELS for kind, plan in KINDS.items()}


def model_of(name: str) -> str:
    """The model of one of PLANS."""
    return name.partition("_")[0]


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
        from torch.distributed.fsdp import MixedPrecisionPolicy

        assert fsdp is not None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp = replace(fsdp, mixed_precision=policy)
    of_models = {
        "llama": partial(_llama, 512, 3, 1408),
        "mlp": _mlp,
        "gpt": _gpt,
        "wide": partial(_llama, 1024, 1, 2048),
    }
    parts = of_models[model_of(plan)]()
    tp = parts.pop("tp") if chosen.tp else None
    parts.pop("tp", None)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return Scenario(**parts, optimizer=optimizer, plan=ParallelPlan(tp=tp, fsdp=fsdp, **more))


def _llama(dim: int, num_layers: int, hidden: int) -> dict[str, Any]:
    from llama_2d import TP_PLAN
    from models import Llama, next_token_loss, token_batch

    return {
        "build_model": partial(Llama, 1000, dim, num_layers, 8, hidden),
        "make_batch": partial(token_batch, 8, 64, 1000),
        "loss": next_token_loss,
        "num_tokens": 8 * 64,
        "tp": TP_PLAN,
    }


def _gpt() -> dict[str, Any]:
    from decoder import GPT_TP_PLAN, LEFT_OUT_OF_GPT, Decoder
    from models import next_token_loss, token_batch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    tp = {name: style for name, style in GPT_TP_PLAN.items() if name not in LEFT_OUT_OF_GPT}
    return {
        "build_model": partial(Decoder, True, 4000, 384, 4, 8, 8, 1536, 128, "fused", False),
        "make_batch": partial(token_batch, 8, 128, 4000),
        "loss": next_token_loss,
        "num_tokens": 8 * 128,
        "tp": {**tp, "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
    }


def _mlp() -> dict[str, Any]:
    import torch
    from models import FeedForward, vector_batch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    class Stack(torch.nn.Module):
        """Three feed-forwards with a residual each."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(FeedForward(640, 2560) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    wide: Any = ColwiseParallel()
    return {
        "build_model": Stack,
        "make_batch": partial(vector_batch, 8, 32, 640),
        "loss": torch.nn.functional.mse_loss,
        "num_tokens": 8 * 32,
        "tp": {"layers.*.w1": wide, "layers.*.w2": RowwiseParallel(), "layers.*.w3": wide},
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
