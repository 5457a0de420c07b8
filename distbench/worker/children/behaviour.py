"""`python -m distbench.worker.children.behaviour`: what works with this torch, tried on fake process groups.

It answers one row per feature: {"feature": its name, "failed": why it does not work, or null}.
"""

import contextlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distbench.costmodel.lines import COLLECTIVES, Line
from distbench.costmodel.profile import Profile
from distbench.spec import FsdpPlan, ParallelPlan, PipelinePlan, Redistributions, Scenario
from distbench.spec.planner_names import PLANNERS
from distbench.worker.cases.redistribution import redistribution_cases
from distbench.worker.cases.step import step_cases
from distbench.worker.children.cross_check import differences_of_step
from distbench.worker.rank.failure import one_line
from distbench.worker.rank.measure import no_stamp
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.simulated.recorded_step import recorded
from distbench.worker.torch_internals import Forwarding, fake_ranks

MESH = {"dp_shard": 2, "tp": 2}
SIZE = 8
# Calibrated planning and the direct exchange plan by a profile; which figures it has does not matter here.
PROFILE = Profile(
    *("made up", "gloo", torch.__version__, MESH),
    tuple(Line(op, name, size, 1e-3, 1e-9) for op in COLLECTIVES for name, size in MESH.items()),
)


class TwoLayers(nn.Module):
    """Two linear layers, which are FSDP units or stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _step(plan: ParallelPlan) -> Scenario:
    return Scenario(
        build_model=TwoLayers,
        make_batch=lambda: (torch.zeros(4, SIZE), torch.zeros(4, SIZE)),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        plan=plan,
    )


FSDP = _step(ParallelPlan(fsdp=FsdpPlan(wrap=("layers.*",))))
PIPELINE = _step(ParallelPlan(pipeline=PipelinePlan("1f1b"), microbatches=2))


@contextlib.contextmanager
def _fake_rank(mesh: dict[str, int]) -> Iterator[tuple[DeviceMesh, RankContext]]:
    with fake_ranks(mesh) as devices:
        assert dist.group.WORLD is not None
        yield devices, RankContext(0, torch.device("cpu"), devices, "gloo", dist.group.WORLD, seed=0)


def trace_a_step() -> None:
    """Two methods see the same collectives in a step under FSDP2."""
    with _fake_rank({"dp_shard": 2}) as (mesh, context):
        (case_spec,) = step_cases(FSDP, "doctor", context)
        compared = differences_of_step(case_spec, Forwarding(mesh))
    if compared["differences"] or not compared["num_rows"]:
        raise RuntimeError("; ".join(compared["differences"]) or "no collective was seen")


def simulate(scenario: Scenario, mesh: dict[str, int]) -> None:
    """A step is recorded on the simulated device, with collectives or messages."""
    if not recorded(scenario, "doctor", "", mesh).recording.collectives:
        raise RuntimeError("no collective was recorded")


def redistribute(planner: str) -> None:
    """A planner moves rows of a tensor to columns."""
    pair = (("R", "S(0)"), ("R", "S(1)"))
    scenario = Scenario(redistributions=(Redistributions((SIZE, SIZE), (pair,), planners=(planner,)),))
    with _fake_rank(MESH) as (_, context):
        (case_spec,) = redistribution_cases(scenario, replace(context, profile=PROFILE))
        with case_spec.open() as opened_case:
            moved: Any = opened_case.call(no_stamp)
    shape = tuple((moved.to_local() if hasattr(moved, "to_local") else moved).shape)
    if shape != (SIZE, SIZE // MESH["tp"]):
        raise RuntimeError(f"the result's local shape is {shape}")


FEATURES: dict[str, Callable[[], None]] = {
    # Simulations come first: autograd must not have run backward before it gets to know the simulated device.
    "simulated FSDP2 steps (simulate, sweep --hardware)": partial(simulate, FSDP, {"dp_shard": 2}),
    "simulated pipelines": partial(simulate, PIPELINE, {"pp": 2}),
    "tracing (run --trace-paths)": trace_a_step,
    **{f"redistribution by {name}": partial(redistribute, name) for name in PLANNERS},
}


def behaviour() -> list[dict[str, str | None]]:
    """Try every feature."""
    rows: list[dict[str, str | None]] = []
    for feature, attempt in FEATURES.items():
        failed = None
        try:
            attempt()
        except Exception as error:
            traceback.print_exc()
            failed = one_line(error)
        rows.append({"feature": feature, "failed": failed})
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = behaviour()
    print(json.dumps(answer))
