"""Operators on DTensors: the placements of each result, and the implicit redistributions of each operator."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, ones

from distbench.spec import DTensorOperator, Scenario, UserError, scenario

Inputs = tuple[torch.Tensor, ...]


def matrices(rows: int, width: int) -> Inputs:
    """Activations and a weight."""
    return torch.randn(rows, width), torch.randn(width, width)


def normed(rows: int, width: int) -> Inputs:
    """Activations, and a norm's weight and bias."""
    return torch.randn(rows, width), torch.randn(width), torch.randn(width)


def looked_up(rows: int, width: int) -> Inputs:
    """Token ids and a square embedding table."""
    return torch.randint(width, (rows,)), torch.randn(width, width)


def classified(rows: int, width: int) -> Inputs:
    """Logits and target classes."""
    return torch.randn(rows, width), torch.randint(width, (rows,))


def activations(count: int, rows: int, width: int) -> Inputs:
    """The given number of tensors of one shape."""
    return tuple(torch.randn(rows, width) for _ in range(count))


def picked(rows: int, width: int) -> Inputs:
    """Activations, and the indexes of half of their rows."""
    return torch.randn(rows, width), torch.randperm(rows)[: rows // 2]


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """Apply an operator over the last tensor dim."""
    return F.layer_norm(x, weight.shape, weight, bias)


def plus_ones(x: Any) -> Any:
    """A factory's tensor, replicated on every rank by default."""
    return x + ones(x.shape, device_mesh=x.device_mesh)


def through_local(x: Any) -> Any:
    """Convert to a local tensor and back, without a check and so without communication."""
    return DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements)


def through_local_checked(x: Any) -> Any:
    """Convert to a local tensor and back, with a broadcast of the first rank's replica."""
    return DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements, run_check=True)


# Name, call, its inputs (of rows x width), their placements on dp_shard and tp, and the call on one device.
OPERATORS: tuple[tuple[str, Callable[..., Any], Any, tuple[tuple[str, ...], ...], Callable[..., Any] | None], ...] = (
    (
        "matmul",
        torch.matmul,
        matrices,
        (("S(0)R", "RS(1)"), ("S(0)S(1)", "RS(0)"), ("S(0)S(1)", "RS(1)")),
        None,
    ),
    (
        "add",
        torch.add,
        partial(activations, 2),
        (("S(0)S(1)", "S(1)S(0)"), ("S(0)S(0)", "S(1)P(sum)"), ("RP(sum)", "RR")),
        None,
    ),
    ("layer_norm", layer_norm, normed, (("S(0)S(1)", "RR", "RR"), ("RP(sum)", "RR", "RR")), None),
    ("embedding", F.embedding, looked_up, (("S(0)R", "RS(0)"), ("S(0)R", "RS(1)")), None),
    ("softmax", partial(torch.softmax, dim=-1), partial(activations, 1), (("S(0)R",), ("S(0)S(1)",)), None),
    ("cross_entropy", F.cross_entropy, classified, (("S(0)R", "S(0)R"), ("S(0)S(1)", "S(0)R")), None),
    ("slice", lambda x: x[: x.shape[0] // 2], partial(activations, 1), (("S(0)R",),), None),
    ("index", lambda x, places: x[places], picked, (("S(0)R", "RR"), ("RS(1)", "S(0)R")), None),
    ("factory", plus_ones, partial(activations, 1), (("RP(sum)",),), lambda x: x + 1),
    ("to_local, from_local", through_local, partial(activations, 1), (("S(0)S(1)",),), lambda x: x * 2),
    ("from_local, checked", through_local_checked, partial(activations, 1), (("S(0)R",),), lambda x: x * 2),
    ("full_tensor", lambda x: x.full_tensor(), partial(activations, 1), (("S(0)S(0)",), ("S(0)P(sum)",)), lambda x: x),
)


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"rows": 64, "width": 64, "ops": "matmul+add+embedding+softmax+cross_entropy+index"},
    tags=("redistribute", "further"),
)
def dtensor_ops(*, rows: int = 2048, width: int = 1024, planners: str = "", ops: str = "") -> Scenario:
    """Implicit redistributions of operators on DTensors. Operators run over placements of their inputs, with each
    planner.

    planners: names joined by "+"; by default greedy and min_cost, and with --profile also calibrated.
    ops: names joined by "+"; by default all.
    """
    names = [name for name, *_ in OPERATORS]
    wanted = [name for name in ops.split("+") if name] or names
    if unknown := [name for name in wanted if name not in names]:
        raise UserError(f"--set ops={unknown[0]} is unknown; use {', '.join(names)}, joined by +")
    return Scenario(
        operators=tuple(
            DTensorOperator(
                name,
                call,
                partial(make, rows, width),
                placements,
                one_device,
                tuple(name for name in planners.split("+") if name),
            )
            for name, call, make, placements, one_device in OPERATORS
            if name in wanted
        )
    )
