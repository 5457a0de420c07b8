"""Five cases, the third (or any others) of which go wrong on rank 1 in a way of the test's choice."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Model(nn.Module):
    def __init__(self, misdeed: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.misdeed = misdeed
        self.pids: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = int(os.environ["RANK"])
        if self.misdeed == "raise_everywhere":
            raise ValueError("every rank refuses")
        if self.misdeed == "raise_apart":
            time.sleep(6.5 * rank)
            raise ValueError("every rank refuses in its own time")
        if rank == 1 and self.misdeed == "raise":
            raise ValueError("rank one refuses")
        if rank == 1 and self.misdeed == "hang":
            time.sleep(1000)
        if rank == 1 and self.misdeed == "leave":
            os._exit(0)
        if rank == 1 and self.misdeed == "interrupt":
            raise KeyboardInterrupt
        if self.misdeed == "print":
            os.write(1, b"x" * 1_000_000)
        if rank == 1 and self.misdeed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.misdeed == "fork" and not self.pids:
            self.pids.append(os.fork())
            if not self.pids[0]:
                os.setsid()
                Path(os.environ["LEFT"], f"{os.getpid()}").touch()
                time.sleep(1000)
        if self.misdeed == "slow":
            time.sleep(0.5)
        if self.misdeed == "nan":
            return self.linear(x) * float("nan")
        return self.linear(x) * (2 if rank == 1 and self.misdeed == "wrong" else 1)


@scenario(mesh={"dp_shard": 2}, axes={"case": (1, 2, 3, 4, 5)})
def misdeeds(*, case: int = 1, misdeed: str = "none", bad: str = "3") -> Scenario:
    """Five small steps; the bad ones misbehave."""
    return Scenario(
        build_model=lambda: Model(misdeed if str(case) in bad.split("+") else "none"),
        make_batch=lambda: (torch.ones(4, 8), torch.ones(4, 8)),
        loss=F.mse_loss,
        plan=ParallelPlan(fsdp=FsdpPlan()),
    )
