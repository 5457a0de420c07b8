"""Pipelines on real ranks: loss and gradients of each schedule against one device, plain, with FSDP2 or TP inside.

`pipeline_checks.py FILE`, 4 ranks: rank 0 writes what each step differs by, one line each.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.cases.single_device_reference import compare, reference_of
from distbench.observe.trace import traced
from distbench.plans.pipeline import idle_counters
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.spec import FsdpPlan, ParallelPlan, PipelinePlan, Scenario
from distbench.spec.plan import SCHEDULES
from distbench.torch_private import V_SCHEDULES, needs_newer

TP = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
STEPS: tuple[tuple[dict[str, int], str, dict[str, Any]], ...] = (
    ({"pp": 4}, "gpipe", {}),
    ({"pp": 4}, "interleaved_zero_bubble", {}),
    ({"pp": 2, "dp_shard": 2}, "zbv", {"fsdp": FsdpPlan(wrap=("layers.*",), reshard_after_forward=False)}),
    ({"pp": 4}, "dualpipev", {}),
    ({"pp": 2, "dp_shard": 2}, "1f1b", {"fsdp": FsdpPlan(wrap=("layers.*",))}),
    ({"pp": 2, "tp": 2}, "interleaved_1f1b", {"tp": TP, "checkpoint": ("layers.*",)}),
)


class Block(nn.Sequential):
    """What it is given, and more."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Layers(nn.Module):
    """Something before its layers, and something after them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(8))
        self.after = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 16, generator=generator)


def differences(context: RankContext, scenario: Scenario) -> str:
    step = TrainingStep(scenario, context)
    step(no_stamp)
    step.restart()
    loss = step.forward_backward()
    result = compare(
        step.model, None if loss is None else float(loss), reference_of(scenario, context), context, gradient_scale=1.0
    )
    worst = max(one.apart / one.size for one in result.gradients.values())
    assert step.pipeline is not None
    idle = idle_counters(step.pipeline, step.forward_backward, context)["idle_share"]
    return f"{result.loss.apart / result.loss.size} {worst} {len(result.gradients)} {idle}"


def messages(context: RankContext, scenario: Scenario) -> str:
    """Of a traced step: how many messages end before who received them went on, of how many."""
    step = TrainingStep(scenario, context)
    step(no_stamp)
    step.forward_backward()
    row = traced(step, context)
    known = sum(one.completed_s is not None and one.what.owner_known for one in row.rows)
    return f"{sum(context.gather(known))} {sum(context.gather(len(row.rows)))} {len(row.working)}"


def main(file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, control = dist.get_rank(), dist.new_group(backend="gloo")
    lines = []
    for mesh, schedule, parts in STEPS:
        if SCHEDULES[schedule].is_v and needs_newer(V_SCHEDULES):
            continue  # torch 2.11
        devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        context = RankContext(rank, torch.device("cpu"), devices, "gloo", control, seed=3)
        plan = ParallelPlan(pipeline=PipelinePlan(schedule), microbatches=8, **parts)
        scenario = Scenario(build_model=Layers, make_batch=batch, loss=nn.functional.mse_loss, plan=plan)
        lines.append(f"{schedule}/{'+'.join(parts)} {differences(context, scenario)}")
    context = RankContext(
        rank, torch.device("cpu"), init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)), "gloo", control, seed=3
    )
    plan = ParallelPlan(pipeline=PipelinePlan("gpipe"), microbatches=8)
    lines.append(
        messages(context, Scenario(build_model=Layers, make_batch=batch, loss=nn.functional.mse_loss, plan=plan))
    )
    if rank == 0:
        file.write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
