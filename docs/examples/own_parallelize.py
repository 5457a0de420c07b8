"""Steps as people write them: a batch that is a dict or a tuple, a loss inside the model, a parallelize function that
makes its own mesh. `distbench run docs/examples/own_parallelize.py`"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, scenario


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Returns a dict with its loss where it is given labels."""

    def __init__(self, dim=64, num_classes=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x, keep, labels=None):
        for block in self.blocks:
            x = block(x) * keep
        logits = self.head(x)
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def examples():
    torch.manual_seed(0)
    return torch.randn(16, 64), torch.ones(16, 1), torch.randint(8, (16,))


def as_dict():
    return dict(zip(("x", "keep", "labels"), examples(), strict=True))


def parallelize(model, mesh):
    """What somebody's training script does: its own mesh, its own tensor parallelism, its own FSDP2."""
    own = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("data", "model"))
    for block in model.blocks:
        parallelize_module(block, own["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=own["data"])
    fully_shard(model, mesh=own["data"])


TP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@scenario(mesh={"dp_shard": 2, "tp": 2})
def dict_batch() -> Scenario:
    """A dict of tensors goes to the model by keyword, and the loss is in what it returns."""
    return Scenario(
        build_model=Classifier,
        make_batch=as_dict,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp=TP, fsdp=FsdpPlan(wrap=("blocks.*",))),  # glue
    )


@scenario(mesh={"dp_shard": 2, "tp": 2})
def tuple_batch() -> Scenario:
    """Three tensors and no target: `call` is forward and loss."""
    return Scenario(
        build_model=Classifier,
        make_batch=examples,
        call=lambda model, batch: F.cross_entropy(model(*batch[:2])["logits"], batch[2]),  # glue
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(tp=TP, fsdp=FsdpPlan(wrap=("blocks.*",))),  # glue
    )


@scenario(mesh={"dp_shard": 2, "tp": 2})
def own_parallelize() -> Scenario:
    """A parallelize function that makes its own mesh and does everything itself."""
    return Scenario(
        build_model=Classifier,
        make_batch=as_dict,
        optimizer=torch.optim.AdamW,
        parallelize=parallelize,  # glue
    )


@scenario(mesh={"dp_replicate": 4})
def averaged_in_buckets() -> Scenario:
    """DistributedDataParallel."""
    return Scenario(
        build_model=Classifier,
        make_batch=as_dict,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(ddp=DdpPlan()),  # glue
    )
