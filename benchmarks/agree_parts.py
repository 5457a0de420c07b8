"""What agree_models is made of: models, batches and parallelize functions of others, as they are."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Mesh = dict[str, int]
FLAT, TP = {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}
STYLES = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each sample."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Loose(Net):
    """A tensor that is no buffer, a buffer made of a parameter, one on its device, and rates that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, 16)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.register_buffer("mean", self.head.weight.detach().clone())
        self.register_buffer("mask", torch.ones(16, device=self.head.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        return super().forward(x * self.scale.to(x.device) * self.mask) + x @ self.mean.T


class Scalar(Net):
    """With a parameter of no tensor dim."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        return super().forward(x) * self.scale


class Bags(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(4, 16, sparse=True), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        return self.head(self.bag((x > 0).long()))


class Slope(Net):
    """Adds the gradient of its output by its input: weights of blocks are read again when FSDP2 has freed them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        x = x.detach().requires_grad_()
        output = super().forward(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output + slope[:, :8]


class Tied(nn.Module):
    """An embedding whose weight is the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Likewise, of classes."""
        return self.head(torch.tanh(self.embedding(x)))


class Output(NamedTuple):
    """Of a model that has its loss."""

    logits: torch.Tensor
    loss: torch.Tensor


class WithLoss(Net):
    """As models of transformers return it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:  # type: ignore[override]
        """Likewise."""
        logits = super().forward(x)
        return Output(logits, F.cross_entropy(logits, y))


class Pair(NamedTuple):
    """A batch."""

    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Item:
    """A batch."""

    x: torch.Tensor
    y: torch.Tensor
    note: str = "none"


def xs(rows: int = 8) -> torch.Tensor:
    """Inputs, the same on every rank."""
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))


def ys(rows: int = 8) -> torch.Tensor:
    """Classes, likewise."""
    return torch.randint(8, (rows,), generator=torch.Generator().manual_seed(4))


def by_key(model: Any, batch: Any) -> torch.Tensor:
    """Of a mapping."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def by_field(model: Any, batch: Any) -> torch.Tensor:
    """Of an object."""
    return F.cross_entropy(model(batch.x), batch.y)


def cast(model: Any, batch: Any) -> torch.Tensor:
    """Under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def shard(model: Any, mesh: Any, factor: float | None = None, **options: Any) -> None:
    """FSDP2 over blocks and root."""
    for one in (*model.blocks, model):
        fully_shard(one, mesh=mesh, **options)
        if factor is not None:
            one.set_gradient_divide_factor(factor)


def styled(model: Any, mesh: Any) -> None:
    """Tensor parallel blocks."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def both(model: Any, mesh: Any) -> None:
    """On the mesh that is given."""
    styled(model, mesh["tp"])
    shard(model, mesh["dp_shard"])


def own_mesh(model: Any, mesh: Any) -> None:
    """On a mesh of its own."""
    own = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("data", "model"))
    styled(model, own["model"])
    shard(model, own["data"])


def in_wrappers(model: Any, mesh: Any) -> None:
    """Checkpointed blocks, which names change by."""
    for at, block in enumerate(model.blocks):
        model.blocks[at] = checkpoint_wrapper(block)
    shard(model, mesh)


def compiled(model: Any, mesh: Any) -> Any:
    """Compiled as a whole."""
    shard(model, mesh)
    return torch.compile(model, backend="aot_eager")


def over_a_group(model: Any, mesh: Any) -> None:
    """A collective over a group of its own, in a hook."""
    from torch.distributed.nn.functional import all_reduce

    group, _ = dist.new_subgroups(group_size=2)
    model.head.register_forward_hook(lambda _, given, output: all_reduce(output, group=group) / 2)
    shard(model, mesh)


def frozen(model: Any, mesh: Any) -> None:
    """Freezes what was built to learn."""
    model.blocks[0].requires_grad_(False)
    shard(model, mesh)


def head_alone(model: Any, mesh: Any) -> None:
    """A style for one holder of a shared weight."""
    style = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"head": style})


def scattering(model: Any, mesh: Any) -> None:
    """A collective whose input is rank 0's alone, in a hook."""
    shard(model, mesh)

    def hook(*_: Any) -> None:
        parts = [torch.ones(4) for _ in range(4)] if dist.get_rank() == 0 else None
        dist.scatter(torch.ones(4), parts, src=0)

    model.head.register_forward_hook(hook)


def half(model: Any, mesh: Any) -> None:
    """Casts what was built in f32."""
    shard(model.to(torch.bfloat16), mesh)


def with_buffer(model: Any, mesh: Any) -> None:
    """Adds a buffer that has values."""
    shard(model, mesh)
    model.register_buffer("steps", torch.zeros(3))


def without_values(model: Any, mesh: Any) -> None:
    """Adds one that has none."""
    shard(model, mesh)
    model.register_buffer("steps", torch.zeros(3, device="meta"))


def on_meta(model: Any, mesh: Any) -> None:
    """Takes a parameter from FSDP2."""
    shard(model, mesh)
    model.head.bias = nn.Parameter(torch.empty(8, device="meta"))
