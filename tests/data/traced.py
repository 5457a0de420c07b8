"""Two steps under FSDP2: one that can be traced, and one whose model raises wherever it is traced."""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Stack(nn.Module):
    def __init__(self, trouble: bool) -> None:
        super().__init__()
        self.trouble = trouble
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # On one device such kernels refuse collectives; under a mode memory is predicted.
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "BackendSelect")
        is_step = isinstance(self.layers[0], FSDPModule) and not torch._C._len_torch_dispatch_stack()
        if self.trouble and has_kernel and is_step:
            raise RuntimeError("this model raises where collectives are timed")
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


@scenario(mesh={"dp_shard": 2}, axes={"trouble": (True, False)}, tags=("test",))
def traced(*, trouble: bool = False) -> Scenario:
    """Two linear layers, a unit each."""
    return Scenario(
        build_model=partial(Stack, trouble),
        make_batch=batch,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-2),
        plan=ParallelPlan(fsdp=FsdpPlan(wrap=("layers.*",))),
    )
