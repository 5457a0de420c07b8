"""Each FSDP2 knob's collectives, counted in one process on a fake group: that a knob really does what its name says."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.torch_private import fake_ranks


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, adds up the bytes that all-gathers put out, and notes what came before any matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.num = {"gather": 0, "scatter": 0, "reduce": 0}
        self.gathered_bytes = 0
        self.num_before_compute: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d._allgather_base_"):
            self.num["gather"] += 1
            self.gathered_bytes += args[0].numel() * args[0].element_size()
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.num["scatter"] += 1
        elif name.startswith("c10d.allreduce_"):
            self.num["reduce"] += 1
        elif name.startswith("aten.mm") and self.num_before_compute is None:
            self.num_before_compute = self.num["gather"]
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"dp_replicate": 2, "dp_shard": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)


def collectives_of(knob: str, context: RankContext) -> Collectives:
    sys.path.insert(0, str(ROOT / "scenarios"))
    from fsdp_knobs import fsdp_knobs

    step = TrainingStep(fsdp_knobs(dim=64, hidden=128, num_layers=3, sequence=32, knob=knob), context)
    step.forward_backward()  # FSDP2 learns the order of its units
    step.restart()
    with Collectives() as counted:
        step.forward_backward()
    return counted


# Four units: three blocks and the root, which FSDP2 keeps gathered unless it is told otherwise.
@pytest.mark.parametrize(
    ("knob", "gather", "scatter", "reduce"),
    [
        ("plain", 4 + 3, 4, 0),
        ("keep", 4, 4, 0),
        ("reshard_to_2", 4 + 4, 4, 0),
        ("hybrid", 4 + 3, 4, 4),
        ("accumulate", 2 * (4 + 3), 4, 0),
        ("accumulate_synced", 2 * (4 + 3), 2 * 4, 0),
        # Seven norms of 64 elements are left whole, and reduced by themselves.
        ("largest_dim", 4 + 3, 4, 7),
        # Every unit still has parameters that learn.
        ("frozen", 4 + 3, 4, 0),
    ],
)
@pytest.mark.long
def test_a_knob_changes_the_collectives_that_it_should(
    context: RankContext, knob: str, gather: int, scatter: int, reduce: int
) -> None:
    assert collectives_of(knob, context).num == {"gather": gather, "scatter": scatter, "reduce": reduce}


@pytest.mark.parametrize(("knob", "units"), [("plain", 2), ("prefetch_2", 4)])
def test_explicit_prefetch_gathers_units_before_the_first_matmul(context: RankContext, knob: str, units: int) -> None:
    # The root and the first block are needed by then anyway.
    assert collectives_of(knob, context).num_before_compute == units


@pytest.mark.parametrize(
    ("knob", "share"), [("bf16_params", 0.5), ("bf16_reduce", 1.0), ("gather_bf16", 0.5), ("gather_int8", 0.25)]
)
@pytest.mark.long
def test_parameters_travel_in_the_form_that_the_knob_names(context: RankContext, knob: str, share: float) -> None:
    plain = collectives_of("plain", context).gathered_bytes
    # The scales of int8, and the norms that extensions leave alone, are a few percent.
    assert collectives_of(knob, context).gathered_bytes / plain == pytest.approx(share, abs=0.03)
