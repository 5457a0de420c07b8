"""Two steps under FSDP2: one that can be traced, and one whose loss raises wherever it is traced."""

from functools import partial

import torch
from torch import nn

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


def loss(trouble: bool, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "BackendSelect")
    if trouble and has_kernel and not torch._C._len_torch_dispatch_stack():  # under a mode memory is predicted
        raise RuntimeError("this loss raises where collectives are timed")
    return nn.functional.mse_loss(output, target)


@scenario(mesh={"dp_shard": 2}, axes={"trouble": (True, False)}, tags=("test",))
def traced(*, trouble: bool = False) -> Scenario:
    """Two linear layers, a unit each."""
    return Scenario(
        build_model=Stack,
        make_batch=batch,
        loss=partial(loss, trouble),
        optimizer=partial(torch.optim.SGD, lr=1e-2),
        plan=ParallelPlan(fsdp=FsdpPlan(wrap=("layers.*",))),
    )
