"""Plans that can be applied, and models that cannot run under them; one that can, but not without values."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from distbench.spec import ParallelPlan, Scenario, scenario

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios"))
from models import Attention, vector_batch

WHOLE = Replicate()


class Gate(nn.Module):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.linear = nn.Linear(12, 12)
        self.gate = Gate()
        # Six heads of two: two ranks can share them, four cannot.
        self.attention = Attention(12, 6, rotary=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.fault == "asks for a value" and float(y.sum()) == 0:
            return y
        gated = self.gate(x, y) if self.fault == "passed by position" else self.gate(x, gate=y)
        return self.attention(gated)


def prepared(inputs: int, keyword: str) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(WHOLE,) * inputs,
        desired_input_layouts=(WHOLE,) * inputs,
        input_kwarg_layouts={keyword: WHOLE},
        desired_input_kwarg_layouts={keyword: WHOLE},
        use_local_output=True,
    )


HEADS = {"attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel()}
PLANS: dict[str, dict[str, Any]] = {
    "heads": HEADS,
    "too many layouts": {"gate": prepared(2, "gate")},
    "no such input": {"gate": prepared(1, "gates")},
    "passed by position": {"gate": prepared(2, "gate")},
    "sharded output": {"attention.wo": ColwiseParallel(use_local_output=False)},
}


def loss(fault: str, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - (targets[:, :3] if fault == "loss" else targets)).square().mean()


@scenario(
    mesh={"tp": 4},
    axes={
        "fault": (
            "none",
            "heads",
            "too many layouts",
            "no such input",
            "passed by position",
            "sharded output",
            "loss",
            "asks for a value",
        )
    },
)
def bad_steps(*, fault: str = "none") -> Scenario:
    """One small model, and what may go wrong when it runs."""
    return Scenario(
        build_model=partial(Model, fault),
        make_batch=partial(vector_batch, 2, 16, 12),
        loss=partial(loss, fault),
        plan=ParallelPlan(tp=PLANS.get(fault, {"linear": ColwiseParallel(output_layouts=WHOLE)})),
    )
