"""A mixture of experts with all-to-alls of its own: each token goes to the rank of its expert and back. Once with
FSDP2 by distbench, which leaves the experts alone, once with FSDP2 of its own.
`distbench run docs/examples/own_experts.py`"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, `sent` to each, `received` from each; backward takes gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = (received, sent, group)
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.back), None, None, None


class Experts(nn.Module):
    """Rows, those of one expert after those of another, `counts` of each; with a group, a rank has some experts."""

    group = None

    def __init__(self, num_experts, dim):
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_experts, dim, 2 * dim))
        self.down = nn.Parameter(torch.empty(num_experts, 2 * dim, dim))

    def forward(self, rows, counts):
        if self.group is None:
            return self.computed(rows, counts, self.up, self.down)
        size = self.group.size()
        arriving = counts.clone()
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = (one.view(size, -1).sum(1).tolist() for one in (counts, arriving))
        rows = Exchange.apply(rows, sent, received, self.group)
        # Rank by rank, and expert by expert within; each expert wants its own in a row.
        own = len(counts) // size
        order = torch.arange(own, device=rows.device).repeat(size).repeat_interleave(arriving).argsort(stable=True)
        out = self.computed(rows[order], arriving.view(size, own).sum(0), self.up.to_local(), self.down.to_local())
        return Exchange.apply(torch.empty_like(out).index_copy(0, order, out), received, sent, self.group)

    def computed(self, rows, counts, up, down):
        parts = rows.split(counts.tolist())
        return torch.cat([F.gelu(part @ one) @ two for part, one, two in zip(parts, up, down, strict=True)])


class Mixture(nn.Module):
    def __init__(self, num_experts, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, num_experts)
        self.experts = Experts(num_experts, dim)

    def forward(self, x):
        gate, expert = self.router(self.norm(x)).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        out = self.experts(x[order], torch.bincount(expert, minlength=self.router.out_features))
        return x + gate[:, None] * torch.empty_like(out).index_copy(0, order, out)


class Stack(nn.Module):
    def __init__(self, num_experts=8, dim=64):
        super().__init__()
        self.layers = nn.ModuleList(Mixture(num_experts, dim) for _ in range(2))
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch():
    torch.manual_seed(0)
    return torch.randn(64, 64), torch.randint(8, (64,))


def spread_experts(model, mesh):
    """What a training script does: experts over the ranks of a mesh dim."""
    for layer in model.layers:
        layer.experts.group = mesh.get_group("ep")
        for name, weight in list(layer.experts.named_parameters()):
            setattr(layer.experts, name, nn.Parameter(distribute_tensor(weight, mesh["ep"], [Shard(0)])))


def average(model, mesh):
    """An expert's gradient has every rank's tokens already; each rank's loss is a mean over its own."""
    for layer in model.layers:
        for weight in layer.experts.parameters():
            weight.register_hook(lambda gradient: gradient / mesh.size())


def spread_and_shard(model, mesh):
    """The same, and FSDP2 of its own: experts over the ranks that have the same ones, all else over all ranks."""
    spread_experts(model, mesh)
    everyone = init_device_mesh(mesh.device_type, (mesh.size(),))
    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh["dp_shard"])
        layer.experts.set_gradient_divide_factor(mesh.size())
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)


@scenario(mesh={"ep": 4})
def experts_left_alone() -> Scenario:
    """FSDP2 by distbench round experts that a function of one's own has spread."""
    fsdp = FsdpPlan(wrap=("layers.*",), mesh_dims=("ep",), ignored=("layers.*.experts.*",))  # glue
    return Scenario(
        build_model=Stack,
        make_batch=batch,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW,
        parallelize=spread_experts,  # glue
        after_materialize=average,  # glue
        plan=ParallelPlan(fsdp=fsdp),  # glue
    )


@scenario(mesh={"dp_shard": 2, "ep": 2})
def own_experts() -> Scenario:
    """A parallelize function that does expert parallel and FSDP2 itself."""
    return Scenario(
        build_model=Stack,
        make_batch=batch,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW,
        parallelize=spread_and_shard,  # glue
    )
