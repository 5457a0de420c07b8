"""Models, batches and parallelize functions of others, as they are, that `check` and a step on real ranks must agree
about."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario

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


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
F16_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.float16)
ONE_SHARD = {"dp_replicate": 4, "dp_shard": 1}
NAMED: dict[str, Any] = {"x": xs(), "y": ys()}
# Name to mesh, and what differs from a model under FSDP2 with a batch of two named tensors.
MODELS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "tensors that are no parameters": (FLAT, {"build_model": Loose}),
    "the same under DDP": ({"dp_replicate": 4}, {"build_model": Loose, "plan": ParallelPlan(ddp=DdpPlan())}),
    "a scalar parameter": (FLAT, {"build_model": Scalar}),
    "a scalar parameter kept whole": (
        FLAT,
        {"build_model": Scalar, "plan": ParallelPlan(fsdp=FsdpPlan(whole=("scale",)))},
    ),
    "sparse gradients": (FLAT, {"build_model": Bags, "plan": ParallelPlan(fsdp=FsdpPlan())}),
    "a norm in bf16": (FLAT, {"build_model": lambda: nn.Sequential(nn.LayerNorm(16).bfloat16(), nn.Linear(16, 8))}),
    "autocast": (TP, {"call": cast, "plan": ParallelPlan(tp=STYLES, fsdp=FsdpPlan())}),
    "a class for a style": (TP, {"plan": ParallelPlan(tp={"blocks.*.0": ColwiseParallel}, fsdp=FsdpPlan())}),
    "a named tuple": (FLAT, {"make_batch": lambda: Pair(xs(), ys()), "call": by_field}),
    "a frozen dataclass": (FLAT, {"make_batch": lambda: Item(xs(), ys()), "call": by_field}),
    "a UserDict": (FLAT, {"make_batch": lambda: collections.UserDict(NAMED)}),
    "texts and numbers beside": (FLAT, {"make_batch": lambda: {**NAMED, "n": 3, "t": "a", "none": None}}),
    "lists of lists": (
        FLAT,
        {
            "make_batch": lambda: {"of": [[xs()], {"y": (ys(),)}]},
            "call": lambda m, b: F.cross_entropy(m(b["of"][0][0]), b["of"][1]["y"][0]),
        },
    ),
    "an uneven batch": (FLAT, {"make_batch": lambda: {"x": xs(6), "y": ys(6)}}),
    "a batch of nothing": (FLAT, {"make_batch": lambda: {"x": 3}}),
    "a tuple for a loss": (FLAT, {"call": lambda m, b: (by_key(m, b), 3)}),
    "its own function": (TP, {"parallelize": both}),
    "a mesh of its own": (TP, {"parallelize": own_mesh}),
    "wrapped in checkpoints": (FLAT, {"parallelize": in_wrappers}),
    "compiled whole": (FLAT, {"parallelize": compiled}),
    "a group of its own": (FLAT, {"parallelize": over_a_group}),
    "bf16 of its own": (FLAT, {"parallelize": lambda m, mesh: shard(m, mesh, mp_policy=BF16)}),
    "f16 sums of its own": (FLAT, {"parallelize": lambda m, mesh: shard(m, mesh, mp_policy=F16_SUMS)}),
    "divided by 3 by a function": (
        FLAT,
        {"parallelize": lambda m, mesh: shard(m, mesh, 3.0), "gradient_divide_factor": 3.0},
    ),
    "divided by 3 by a function, unsaid": (FLAT, {"parallelize": lambda m, mesh: shard(m, mesh, 3.0)}),
    "divided by 3 by a function, one shard": (
        ONE_SHARD,
        {"parallelize": lambda m, mesh: shard(m, mesh, 3.0), "gradient_divide_factor": 3.0},
    ),
    "frozen by the function": (FLAT, {"parallelize": frozen}),
    "cast by the function": (FLAT, {"parallelize": half}),
    "a buffer with values": (FLAT, {"parallelize": with_buffer}),
    "a buffer without": (FLAT, {"parallelize": without_values}),
    "a parameter on meta": (FLAT, {"parallelize": on_meta}),
    "a text for a model": (FLAT, {"parallelize": lambda m, mesh: "model"}),
    "DistributedDataParallel": (FLAT, {"parallelize": lambda m, mesh: nn.parallel.DistributedDataParallel(m)}),
}


def models() -> Iterator[tuple[str, Mesh, Scenario]]:
    """(name, mesh, scenario) of each."""
    for name, (mesh, given) in MODELS.items():
        plan = {} if "parallelize" in given else {"plan": ParallelPlan(fsdp=FsdpPlan())}
        base: dict[str, Any] = {"build_model": Net, "make_batch": lambda: dict(NAMED), "call": by_key, **plan}
        yield name, mesh, Scenario(**{**base, **given})
