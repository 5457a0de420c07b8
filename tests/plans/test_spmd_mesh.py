"""A model as DTensors on the whole mesh, with FSDP2's `dp_mesh_dims`. One process, a fake group."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from distbench.plans.parallelize import annotate_parameters, onto_spmd_mesh, parallelize
from distbench.plans.plan_check import fsdp_problems
from distbench.ranks.context import RankContext
from distbench.spec import CpPlan, FsdpPlan, LargestDim, ParallelPlan, ShardParam, UserError
from distbench.torch_private import Unsupported, fake_ranks, is_strided_shard, needs_newer
from distbench.torch_private.probe import SPMD_MESH


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"dp_replicate": 2, "dp_shard": 2, "tp": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.second(self.first(x)) + self.table
        return {"out": out if mask is None else out * mask}


PLAN = ParallelPlan(shard_params={"first.weight": ShardParam(0)}, fsdp=FsdpPlan(spmd_mesh=True))


def test_parameters_and_buffers_are_replicated_over_what_they_do_not_lie_on(context: RankContext) -> None:
    model = Model()
    annotate_parameters(model, PLAN, context)
    onto_spmd_mesh(model, context)
    weight: Any = model.first.weight
    assert weight.placements == (Replicate(), Replicate(), Shard(0)) and weight.device_mesh is context.mesh
    assert weight.shape == (8, 8) and weight.to_local().shape == (4, 8)
    assert model.second.weight is weight and not model.state_dict().keys() & {"table"}
    table: Any = model.table
    assert table.placements == (Replicate(),) * 3 and torch.equal(table.to_local(), torch.arange(8.0))


@pytest.mark.long
def test_a_model_is_given_and_gives_this_ranks_part(context: RankContext) -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    onto_spmd_mesh(model, context)
    seen: list[Any] = []
    model.first.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    x, mask = torch.randn(3, 8), torch.rand(8)
    out = model(x, mask=mask)["out"]
    # Four data parallel ranks have three samples each.
    assert seen[0].shape == (12, 8) and seen[0].placements == (Shard(0), Shard(0), Replicate())
    assert type(out) is torch.Tensor and torch.equal(out, plain(x, mask)["out"])
    out.sum().backward()
    plain(x, mask)["out"].sum().backward()
    gradient: Any = model.first.weight.grad
    assert torch.allclose(gradient.to_local(), plain.first.weight.grad)
    assert [str(one) for one in gradient.placements] == ["P(sum)", "P(sum)", "R"]


@pytest.mark.skipif(needs_newer(SPMD_MESH) is not None, reason=str(needs_newer(SPMD_MESH)))
def test_fully_shard_is_given_the_whole_mesh(context: RankContext) -> None:
    with torch.device("meta"):
        model, _ = parallelize(
            Model(), replace(PLAN, fsdp=FsdpPlan((), ("dp_shard",), ("dp_replicate",), spmd_mesh=True)), context
        )
    weight: Any = model.first.weight
    assert weight.device_mesh is context.mesh and weight.to_local().shape == (2, 8)
    assert weight.placements[0] == Replicate() and is_strided_shard(weight.placements[1])


def test_a_parameter_on_another_mesh_is_named(context: RankContext) -> None:
    model = Model()
    other = context.mesh["dp_shard", "tp"]._flatten("others")
    model.first.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 8), other, [Shard(0)], run_check=False))
    with pytest.raises(UserError, match=r"dp_shardxtp or its mesh dims, but first.weight is on others"):
        onto_spmd_mesh(model, context)


def test_a_model_that_returns_a_number_is_refused(context: RankContext) -> None:
    class Summed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    model = Summed(8, 8)
    onto_spmd_mesh(model, context)
    with pytest.raises(UserError, match="the model returns a number; give loss"):
        model(torch.ones(2, 8))


def test_a_torch_without_it_says_so(context: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda module, mesh: module)
    message = "needs torch 2" if needs_newer(SPMD_MESH) else "torch .* fully_shard without its parameter dp_mesh_dims"
    with pytest.raises(Unsupported, match=f"one SPMD mesh: {message}"):
        parallelize(Model(), PLAN, context)


@pytest.mark.parametrize(
    ("plan", "fsdp", "words"),
    [
        ({}, {}, ""),
        ({"tp": lambda model, mesh: model}, {"reshard_after_forward": False}, ""),
        ({"cp": CpPlan()}, {}, "spmd_mesh cannot be combined with cp"),
        ({}, {"ignored": ("first.weight",)}, "spmd_mesh cannot be combined with FsdpPlan.ignored"),
        ({}, {"shard_placement": LargestDim(5)}, "spmd_mesh cannot be combined with LargestDim.min_numel"),
        ({}, {"mesh_dims": (), "replicate_dims": ("dp_shard",)}, "combined with FsdpPlan.replicate_dims alone"),
        ({}, {"configure": {"set_all_reduce_hook": print}}, "spmd_mesh cannot be combined with set_all_reduce_hook"),
    ],
)
def test_what_does_not_go_with_it_is_named(
    context: RankContext, plan: dict[str, Any], fsdp: dict[str, Any], words: str
) -> None:
    given = FsdpPlan(**{"mesh_dims": ("dp_replicate", "dp_shard"), "spmd_mesh": True, **fsdp})
    with torch.device("meta"):
        texts = [str(one) for one in fsdp_problems(Model(), replace(PLAN, fsdp=given, **plan), context)]
    assert len(texts) == bool(words) and words in "".join(texts)
