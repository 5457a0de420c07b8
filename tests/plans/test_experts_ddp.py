"""DDP's buckets, experts and FSDP's whole and ignored parameters: plain arithmetic, and one rank on a fake group."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distbench.observe import module_attribution
from distbench.observe.module_attribution import Communication, communications_of
from distbench.plans.batch import Batch
from distbench.plans.plan_check import problems
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, UserError
from distbench.spec.expert_loads import weights_of
from distbench.torch_private import fake_ranks
from distbench.worker.rank_session import load_scenario


@pytest.fixture(scope="module")
def mixture() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scenarios"))
    try:
        import mixture

        yield mixture
    finally:
        sys.path.remove(str(ROOT / "scenarios"))
        for name in ("mixture", "models"):
            sys.modules.pop(name, None)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(6))
        self.norm = nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 256), torch.ones(4, 256)


def rank_0(mesh: Any) -> RankContext:
    group = torch.distributed.group.WORLD
    assert group is not None
    return RankContext(0, torch.device("cpu"), mesh, "gloo", group, 1)


def rows_of(plan: ParallelPlan, mesh: dict[str, int]) -> list[Communication]:
    with fake_ranks(mesh) as ranks:
        context = rank_0(ranks)
        scenario = Scenario(build_model=Layers, make_batch=batch, loss=nn.functional.mse_loss, plan=plan)
        assert problems(Layers().to("meta"), Batch(batch()), plan, context) == []
        step = TrainingStep(scenario, context)
        for _ in range(step.num_setup_steps):
            step(no_stamp)
        return communications_of(step, step.phases, plan, context, step.model)


def test_each_of_ddps_buckets_is_a_path_and_all_gradients_are_in_one() -> None:
    rows = rows_of(ParallelPlan(ddp=DdpPlan(bucket_cap_mb=0.5)), {"dp_replicate": 2})
    assert [row.owner for row in rows] == ["DDP bucket 0", "DDP bucket 1", "DDP bucket 2"]
    assert {(row.source, row.kind, row.phase, row.mesh_dim) for row in rows} == {
        ("ddp", "all_reduce", "backward", "dp_replicate")
    }
    # 256 KiB a layer, and a norm's weight and bias; a bucket is closed when it has 512 KiB.
    assert sum(row.payload_bytes for row in rows) == 6 * 256 * 256 * 4 + 2 * 256 * 4
    assert max(row.payload_bytes for row in rows) <= 2 * 256 * 256 * 4 + 2 * 256 * 4


def test_buckets_are_counted_anew_in_each_micro_batch_unless_only_the_last_one_averages() -> None:
    each = ParallelPlan(ddp=DdpPlan(bucket_cap_mb=8), microbatches=2)
    last = ParallelPlan(ddp=DdpPlan(bucket_cap_mb=8, sync_each_microbatch=False), microbatches=2)
    assert [row.owner for row in rows_of(each, {"dp_replicate": 2})] == ["DDP bucket 0"] * 2
    assert [row.owner for row in rows_of(last, {"dp_replicate": 2})] == ["DDP bucket 0"]


def test_whole_parameters_are_averaged_one_by_one_and_ignored_ones_not_at_all() -> None:
    whole = rows_of(ParallelPlan(fsdp=FsdpPlan(whole=("norm.*",))), {"dp_shard": 2})
    assert [(row.owner, row.payload_bytes) for row in whole if row.kind == "all_reduce"] == [("norm", 1024)] * 2
    ignored = rows_of(ParallelPlan(fsdp=FsdpPlan(ignored=("norm.*",))), {"dp_shard": 2})
    assert {row.kind for row in ignored} == {"all_gather", "reduce_scatter"}
    assert {row.payload_bytes for row in ignored} == {6 * 256 * 256 * 4}


def test_replicas_alone_average_each_units_gradients_in_one_all_reduce_and_gather_nothing() -> None:
    plan = FsdpPlan(wrap=("layers.*",), mesh_dims=(), replicate_dims=("dp_replicate",), ignored=("layers.0.weight",))
    rows = rows_of(ParallelPlan(fsdp=plan), {"dp_replicate": 2})
    assert {(row.source, row.kind, row.phase, row.mesh_dim) for row in rows} == {
        ("fsdp", "all_reduce", "backward", "dp_replicate")
    }
    # Backward reaches the last layer first; the root has the norm's weight and bias; what is ignored is nobody's.
    moved = {row.owner: row.payload_bytes for row in rows}
    assert moved == {**{f"layers.{layer}": 256 * 256 * 4 for layer in range(1, 6)}, "": 2 * 256 * 4}
    assert len(rows) == len(moved)


REPLICAS = FsdpPlan(mesh_dims=(), replicate_dims=("dp_replicate",))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ParallelPlan(ddp=DdpPlan(), tp=lambda model, mesh: model), "use FsdpPlan(mesh_dims=(), replicate_dims=...)"),
        (
            ParallelPlan(fsdp=replace(REPLICAS, replicate_dims=("dp",))),
            "FSDP has no mesh_dims to shard over, but the mesh has only",
        ),
        (ParallelPlan(ddp=DdpPlan(), fsdp=FsdpPlan(mesh_dims=("dp_replicate",))), "use FsdpPlan(replicate_dims=...)"),
        (ParallelPlan(ddp=DdpPlan(mesh_dims=("dp_shard",))), "DDP replicates over dp_shard, but the mesh has only"),
        (ParallelPlan(ddp=DdpPlan(bucket_cap_mb=0)), "bucket_cap_mb=0 is not a valid bucket size"),
        (ParallelPlan(ddp=DdpPlan(ignored=("",))), "no parameter of the model that it does not ignore requires"),
        (
            ParallelPlan(ddp=DdpPlan(static_graph=True, sync_each_microbatch=False), microbatches=2),
            "static_graph needs the first backward, which sync_each_microbatch=False skips",
        ),
        (ParallelPlan(ddp=DdpPlan(ignored=("nrm",))), "DDP's ignored pattern 'nrm' matches no module (nearest: norm"),
        (ParallelPlan(ddp=DdpPlan(), ep={"norm": object()}), "expert parallel needs mesh dim 'ep', but the mesh has"),
        (ParallelPlan(fsdp=FsdpPlan(whole=("nrm.*",))), "FSDP's whole pattern 'nrm.*' matches no parameter"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(plan: ParallelPlan, message: str) -> None:
    with fake_ranks({"dp_replicate": 2}) as mesh:
        result = problems(Layers().to("meta"), Batch(batch()), plan, rank_0(mesh))
    assert any(message in sentence for sentence in result), result


def test_experts_must_not_be_sharded_twice_over_ep_nor_others_left_alone() -> None:
    experts = {"layers.0": object()}
    with fake_ranks({"dp_shard": 2, "ep": 2}) as mesh:
        context, model = rank_0(mesh), Layers().to("meta")
        twice = ParallelPlan(ep=experts, fsdp=FsdpPlan(mesh_dims=("dp_shard", "ep")))
        alone = ParallelPlan(ep=experts, fsdp=FsdpPlan(unit_mesh_dims={"layers.0": ("dp_shard",)}))
        assert (
            "FSDP shards layers.0 over 'ep' like expert parallel" in problems(model, Batch(batch()), twice, context)[0]
        )
        assert "do not sum gradients of other parameters" in problems(model, Batch(batch()), alone, context)[0]


def step_of_experts_over_tp() -> tuple[TrainingStep, list[Communication]]:
    make = load_scenario(ROOT / "scenarios" / "moe.py", "moe_tp")
    scenario = make(dim=32, hidden=64, num_layers=1, num_experts=4, batch=2, sequence=16, capacity=1.0)
    with fake_ranks({"dp_shard": 1, "ep": 2, "tp": 2}) as mesh:
        context = rank_0(mesh)
        step = TrainingStep(scenario, context)
        step(no_stamp)
        return step, communications_of(step, step.phases, step.plan, context, step.model)


@pytest.fixture(scope="module")
def experts_over_tp(mixture: Any) -> tuple[TrainingStep, list[Communication]]:
    """The shipped EP x TP step as rank 0 of four has it, and what it communicates."""
    return step_of_experts_over_tp()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.long
def test_an_expert_over_tp_is_sharded_by_expert_and_by_its_hidden_size(
    experts_over_tp: tuple[TrainingStep, list[Communication]],
) -> None:
    local = {name: list(parameter.to_local().shape) for name, parameter in experts_over_tp[0].model.named_parameters()}
    experts = "layers.0.feed_forward.experts"
    # Two of four experts, and 32 of 64 hidden.
    assert local[f"{experts}.w1"] == local[f"{experts}.w3"] == [2, 32, 32] and local[f"{experts}.w2"] == [2, 32, 32]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.long
def test_experts_over_tp_exchange_tokens_over_ep_alone_and_sum_what_comes_out_over_tp_once(
    experts_over_tp: tuple[TrainingStep, list[Communication]],
) -> None:
    rows = experts_over_tp[1]
    exchanged = [(row.phase, row.source, row.mesh_dim, row.owner) for row in rows if row.kind == "all_to_all"]
    owner = "layers.0.feed_forward"
    assert sorted(exchanged) == sorted(
        2 * [(phase, "ep", "ep", f"{owner}.experts") for phase in ("forward", "backward")]
    )
    over_tp = [(row.phase, row.kind) for row in rows if row.owner == owner and row.mesh_dim == "tp"]
    both = ("all_gather", "reduce_scatter")
    assert sorted(over_tp) == [(phase, kind) for phase in ("backward", "forward") for kind in both]
    # Each rank of tp knows a part of the router's gradient.
    (router,) = [row for row in rows if row.redistribution == "P(sum)->R" and "router" in row.owner]
    assert (router.phase, router.kind, router.mesh_dim, router.source) == ("backward", "all_reduce", "tp", "tp")


mesh_dims_by_ranks = module_attribution.mesh_dims_by_ranks


def with_swapped_mesh_dims(meshes: Sequence[DeviceMesh]) -> dict[tuple[int, ...], str]:
    swapped = {"ep": "tp", "tp": "ep"}
    return {ranks: swapped.get(name, name) for ranks, name in mesh_dims_by_ranks(meshes).items()}


def last_module(self: module_attribution.RunningModules, running: str | None, position: int | None) -> str | None:
    return running if running is not None or position is None else self._spans[-1][2]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("function", "mutant"),
    [("mesh_dims_by_ranks", with_swapped_mesh_dims), ("RunningModules.owner", last_module)],
    ids=["mesh dims swapped", "the last module owns"],
)
@pytest.mark.long
def test_a_collective_of_another_mesh_dim_or_owner_is_noticed(
    mixture: Any, function: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants of attribution: the check above must fail for them."""
    monkeypatch.setattr(f"distbench.observe.module_attribution.{function}", mutant)
    with pytest.raises(AssertionError):
        test_experts_over_tp_exchange_tokens_over_ep_alone_and_sum_what_comes_out_over_tp_once(
            step_of_experts_over_tp()
        )


@pytest.mark.parametrize("over", ["ep", "dp_shard"])
def test_experts_must_not_be_sharded_over_ranks_with_other_tokens(over: str) -> None:
    plan = ParallelPlan(ep={"layers.0": object()}, ep_tp_dim=over, fsdp=FsdpPlan(mesh_dims=("dp_shard", "ep")))
    with fake_ranks({"dp_shard": 2, "ep": 2}) as mesh:
        (result,) = problems(Layers().to("meta"), Batch(batch()), plan, rank_0(mesh))
    assert f"ep_tp_dim={over!r} shards each expert over a mesh dim whose ranks have different tokens" in result


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.long
def test_whole_experts_on_ranks_of_tp_exchange_tokens_over_all_of_them(mixture: Any) -> None:
    make = load_scenario(ROOT / "scenarios" / "moe.py", "moe_tp")
    sizes = {"dim": 32, "hidden": 64, "num_layers": 1, "num_experts": 4, "batch": 2, "sequence": 16}
    with fake_ranks({"dp_shard": 1, "ep": 2, "tp": 2}) as mesh:
        context = rank_0(mesh)
        step = TrainingStep(make(**sizes, capacity=1.0, expert_tp=False), context)
        step(no_stamp)
        rows = communications_of(step, step.phases, step.plan, context, step.model)
    local = {name: list(parameter.to_local().shape) for name, parameter in step.model.named_parameters()}
    experts = "layers.0.feed_forward.experts"
    # One of four experts, with all of its hidden size.
    assert local[f"{experts}.w1"] == [1, 64, 32] and local[f"{experts}.w2"] == [1, 32, 64]
    exchanged = [row for row in rows if row.kind == "all_to_all"]
    assert len(exchanged) == 4 and {(row.source, row.mesh_dim, row.owner) for row in exchanged} == {
        ("ep", "epxtp", experts)
    }
    # A sample of 16 tokens with 2 choices each is on both ranks of tp: each sends half, 16 rows of 32 numbers.
    assert {row.payload_bytes for row in exchanged} == {16 * 32 * 4}


def test_what_ranks_of_tp_share_is_every_choice_once(mixture: Any) -> None:
    counts = torch.tensor([3, 0, 4])
    rows = torch.arange(7.0)[:, None]
    shared = []
    for rank in range(2):
        mesh = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: 2)
        module = SimpleNamespace(sharers=mesh)
        own, of_experts = mixture.ExpertParallel()._own_share(module, rows, counts)
        shared.append((own.flatten().tolist(), of_experts.tolist()))
    assert shared == [([0, 2, 4, 6], [2, 0, 2]), ([1, 3, 5], [1, 0, 2])]
    uneven = SimpleNamespace(sharers=mesh, w1=torch.ones(3, 1, 1))
    with pytest.raises(UserError, match="2 token slots per expert cannot be split over 2 ranks"):
        mixture.ExpertParallel()._own_share(uneven, rows, None)


def by_hand(layer: Any, x: torch.Tensor, take: Any) -> torch.Tensor:
    """A mixture of experts token by token; `take(sequence, expert)` says whether an expert takes one more."""
    experts, out = layer.experts, torch.zeros_like(x)
    scores = layer.router(x).softmax(-1)
    for row, position in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        # Of 12 choices, experts with weights 3, 1, 1, 1 get 6, 2, 2, 2: first expert 0 for all 6 rows, then the others.
        chosen = (0, 1 + position // 2)
        total = sum(scores[row, position, one] for one in chosen)
        for one in chosen:
            if take(row, one):
                token = x[row, position]
                hidden = nn.functional.silu(experts.w1[one] @ token) * (experts.w3[one] @ token)
                out[row, position] += scores[row, position, one] / total * (experts.w2[one] @ hidden)
    return out


@pytest.mark.parametrize("capacity", [0.0, 0.5, 8.0])
def test_a_mixture_of_experts_is_what_its_tokens_say_one_by_one(mixture: Any, capacity: float) -> None:
    torch.manual_seed(0)
    layer = mixture.MixtureOfExperts(4, 2, 8, 16, (3, 1, 1, 1), capacity)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    # Of 6 x 2 choices a sequence, 3 are an expert's even share.
    slots = round(capacity * 3) if capacity else 6 * 2
    taken: dict[tuple[int, int], int] = {}

    def take(row: int, expert: int) -> bool:
        taken[row, expert] = taken.get((row, expert), 0) + 1
        return taken[row, expert] <= slots

    x = torch.randn(3, 6, 8)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), by_hand(layer, x, take), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("load", "shares"), [("uniform", [4] * 4), ("zipf", [8, 4, 2, 2]), ("W5", [0, 0, 8, 8])])
def test_experts_are_chosen_by_the_load_and_never_twice_by_a_token(mixture: Any, load: str, shares: list[int]) -> None:
    """Of 16 choices, Zipf of 4 experts ends at 7.68, 11.52, 14.08 and 16."""
    layer = mixture.MixtureOfExperts(4, 2, 8, 16, weights_of(load, 4, 2))
    chosen = layer._chosen(torch.rand(2, 8, 4))
    assert [torch.bincount(row.flatten(), minlength=4).tolist() for row in chosen] == [shares, shares]
    assert all(len(set(token)) == 2 for token in chosen.flatten(0, 1).tolist())
