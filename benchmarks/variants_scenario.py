"""Eight variants of one step: all the same, or the last two slower by real work that changes no value; equal calls."""

from collections.abc import Callable

from distbench.spec import ParallelPlan, Scenario, scenario

NUM_COPIES = 8


@scenario(mesh={"tp": 4}, axes={"copy": (0, 1, 2, 3, 4, 5, 6, 7)})
def copies(*, copy: int = 0, less: int = 0, more: int = 0) -> Scenario:
    """Copies of a two-layer MLP; the last two multiply a matrix `less` and `more` times besides, each step."""
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    repeats = {NUM_COPIES - 2: less, NUM_COPIES - 1: more}.get(copy, 0)

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                matrix = torch.ones(96, 96)
                for _ in range(repeats):
                    torch.mm(matrix, matrix)
            return self.down(torch.relu(self.up(inputs)))

    def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(64, 256, generator=generator), torch.randn(64, 256, generator=generator)

    return Scenario(
        build_model=Mlp,
        make_batch=make_batch,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp={"up": ColwiseParallel(), "down": RowwiseParallel()}),
    )


@scenario(mesh={"tp": 2}, axes={"copy": (0, 1, 2, 3, 4, 5)})
def calls(*, copy: int = 0) -> Scenario:
    """Six copies of one all_reduce, as a user's own call."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    def make(mesh: DeviceMesh) -> Callable[[], None]:
        group, values = mesh.get_group("tp"), torch.zeros(65536)
        return lambda: dist.all_reduce(values, group=group)

    return Scenario(calls={"all_reduce": make})
