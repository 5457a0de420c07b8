"""Models, batches and parallelize functions of others that `check` and a step on real ranks must agree about."""

import collections
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel

from benchmarks.agree_parts import (
    FLAT,
    STYLES,
    TP,
    Bags,
    Item,
    Loose,
    Mesh,
    Net,
    Pair,
    Scalar,
    Slope,
    Tied,
    WithLoss,
    both,
    by_field,
    by_key,
    cast,
    compiled,
    frozen,
    half,
    head_alone,
    in_wrappers,
    on_meta,
    over_a_group,
    own_mesh,
    scattering,
    shard,
    with_buffer,
    without_values,
    xs,
    ys,
)
from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario

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
    "tensors of an object": (FLAT, {"make_batch": lambda: SimpleNamespace(x=xs(), y=ys()), "call": by_field}),
    "a deque": (FLAT, {"make_batch": lambda: deque([xs(), ys()]), "call": lambda m, b: F.cross_entropy(m(b[0]), b[1])}),
    "a batch that was computed": (FLAT, {"make_batch": lambda: {"x": xs().requires_grad_() * 2, "y": ys()}}),
    "a sparse batch": (FLAT, {"make_batch": lambda: {"x": xs().to_sparse(), "y": ys()}}),
    "a sparse matrix for every rank": (
        FLAT,
        {"make_batch": lambda: {**NAMED, "a": torch.eye(8).to_sparse()}, "batch_dims": {"x": 0, "y": 0}},
    ),
    "names with brackets": (
        FLAT,
        {
            "make_batch": lambda: {"x[0]": xs(), "y": ys()},
            "batch_dims": {"x[0]": 0, "y": 0},
            "call": lambda m, b: F.cross_entropy(m(b["x[0]"]), b["y"]),
        },
    ),
    "a list of samples": (FLAT, {"make_batch": lambda: [{"x": one, "y": ys(1)[0]} for one in xs()]}),
    "an output with its loss": (FLAT, {"build_model": WithLoss, "call": None}),
    "a detached loss": (FLAT, {"call": lambda m, b: by_key(m, b).detach()}),
    "nothing that learns": (FLAT, {"build_model": lambda: Net().requires_grad_(False)}),
    "slopes of units": (FLAT, {"build_model": Slope, "plan": ParallelPlan(fsdp=FsdpPlan(wrap=("blocks.*",)))}),
    "a tie that a style breaks": (
        TP,
        {"build_model": Tied, "parallelize": head_alone, "call": lambda m, b: F.cross_entropy(m(b["y"]), b["y"])},
    ),
    "a scatter": (FLAT, {"parallelize": scattering}),
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
