"""A pipeline whose stages all take exactly as long: what a layer multiplies does not depend on what it is given."""

import torch
import torch.nn.functional as F
from torch import nn

from distbench.spec import ParallelPlan, PipelinePlan, Scenario, scenario

SIZE, KEPT = 64, 4  # tensors that a layer keeps of each micro-batch


class Layer(nn.Module):
    """Two parameters multiplied; backward multiplies twice, whether or not a gradient of the input is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(SIZE, SIZE)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tanh((self.left @ self.right).sum())
        for _ in range(KEPT):
            x = x * scale
        return x


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, 4096), torch.zeros(8, 4096)


@scenario(
    mesh={"pp": 4},
    axes={
        "schedule": (
            "gpipe",
            "1f1b",
            "interleaved_1f1b",
            "interleaved_1f1b_deferred",
            "interleaved_1f1b_deferred_edges",
        )
    },
    tags=("tests",),
)
def equal_stages(*, schedule: str = "1f1b") -> Scenario:
    """One schedule per variant, 4 micro-batches of 2 samples, no optimizer.

    Deferred receives need torch 2.13, communicators per edge torch 2.15.
    """
    options = {"defer_pp_recv": True} if "_deferred" in schedule else {}
    options |= {"pipeline_per_edge_p2p": True} if schedule.endswith("_edges") else {}
    return Scenario(
        build_model=Layers,
        make_batch=batch,
        loss=F.mse_loss,
        plan=ParallelPlan(pipeline=PipelinePlan(schedule.partition("_deferred")[0], configure=options), microbatches=4),
    )
