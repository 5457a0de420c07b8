"""Plans that run and compute something else than one device: what a check of losses and gradients is for."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scenarios"))

from models import Llama, next_token_loss, token_batch

from distbench.spec import CpPlan, FsdpPlan, ParallelPlan, Scenario, scenario


@scenario(mesh={"cp": 2}, axes={"mistake": ("none", "positions", "not_averaged")})
def mistaken(*, mistake: str = "none") -> Scenario:
    """Context parallel right, with every rank's positions counted from 0, and with gradients of its own tokens only."""
    buffers = {} if mistake == "positions" else {"rotations": 0}
    return Scenario(
        build_model=partial(Llama, 100, 32, 1, 2, 64, 32),
        make_batch=partial(token_batch, 2, 32, 100),
        loss=next_token_loss,
        plan=ParallelPlan(
            cp=CpPlan(load_balance=False, buffers=buffers),
            fsdp=None if mistake == "not_averaged" else FsdpPlan(mesh_dims=("cp",)),
        ),
    )
