"""Every fault of a plan is found at once and named, before anything is measured. One process, a fake group."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from distbench.plans.parallelize import parallelize
from distbench.plans.plan_check import fsdp_problems, grouped, local_shape, problems, tp_problems, undivided
from distbench.ranks.context import RankContext
from distbench.spec import CompilePlan, CpPlan, FsdpPlan, LargestDim, ParallelPlan, ShardParam, UserError
from distbench.spec.plan import matching


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
    assert dist.group.WORLD is not None
    yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, hidden: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, 8)
        self.register_buffer("table", torch.ones(3))
        if tied:
            self.layers[1].weight = self.layers[0].weight


def found(context: RankContext, plan: ParallelPlan, batch: tuple[int, ...] = (4, 8), **model: object) -> list[str]:
    with torch.device("meta"):
        return problems(Model(**model), torch.empty(batch), plan, context)


GOOD = ParallelPlan(tp={"layers.*": ColwiseParallel(), "head": RowwiseParallel()}, fsdp=FsdpPlan(wrap=("layers.*",)))


def test_a_good_plan_has_no_problems(context: RankContext) -> None:
    assert found(context, GOOD) == []


def test_an_undividable_parameter_is_named_with_shape_mesh_dim_and_size(context: RankContext) -> None:
    plan = ParallelPlan(tp={"head": RowwiseParallel()}, fsdp=FsdpPlan())
    (text,) = found(context, plan, hidden=18)
    assert "parameter head.weight of shape [8, 18] cannot be sharded on tensor dim 1" in text
    assert "mesh dim 'tp' of size 4" in text and "sizes that work: 1, 2, 3, 6, 9, 18" in text


def test_parameters_that_fail_for_one_reason_are_one_problem_with_their_layers_counted(context: RankContext) -> None:
    (text,) = found(context, GOOD, hidden=18)
    assert text.startswith("mesh dim 'tp' of size 4 does not divide 18 (sizes that work: 1, 2, 3, 6, 9, 18)")
    # Two weights and two biases of layers.*, one weight of head.
    assert text.endswith(": layers.*.weight: 2 layers; layers.*.bias: 2 layers; head.weight")


@pytest.mark.parametrize(
    ("problems", "told"),
    [
        (["layers.0.w1 is bad", "layers.1.w1 is bad", "no"], ["layers.*.w1 is bad: 2 layers", "no"]),
        (["layers.0.w1 is bad"], ["layers.0.w1 is bad"]),
        (["a share of 0.5 is bad", "a share of 0.6 is bad"], ["a share of 0.5 is bad", "a share of 0.6 is bad"]),
    ],
)
def test_sentences_that_differ_in_the_layer_alone_are_one(problems: list[str], told: list[str]) -> None:
    assert grouped(problems) == told


def test_modules_beside_each_other_are_named_together(context: RankContext) -> None:
    names = [f"layers.{layer}.attention.{name}.weight" for layer in range(8) for name in ("wq", "wk")]
    (text,) = grouped([undivided("", 9, ("tp",), context, name) for name in names])
    assert text.endswith(": layers.*.attention.{wq,wk}.weight: 8 layers")


def test_everything_wrong_is_listed_at_once(context: RankContext) -> None:
    plan = ParallelPlan(tp={"layer.*": ColwiseParallel()}, fsdp=FsdpPlan(wrap=("blocks.*",)))
    texts = found(context, plan, batch=(3, 8))
    assert any("TP pattern 'layer.*' matches no module" in text and "layers" in text for text in texts)
    assert any("FSDP pattern 'blocks.*'" in text for text in texts)
    assert any("a batch of 3 cannot be split over mesh dim 'dp_shard' of size 2" in text for text in texts)


def test_a_mesh_dim_that_no_part_uses_is_named(context: RankContext) -> None:
    assert found(context, ParallelPlan(fsdp=FsdpPlan())) == [
        "mesh dim 'tp' (size 4) is not used by the plan, which uses dp_shard"
    ]


def test_a_mesh_dim_of_one_rank_needs_no_part_that_uses_it(context: RankContext) -> None:
    """One device, say, and no plan."""
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp_shard", "tp"))
    assert found(replace(context, mesh=mesh), ParallelPlan(fsdp=FsdpPlan()), batch=(8, 8)) == []


def test_context_parallel_without_its_mesh_dim_is_named(context: RankContext) -> None:
    plan = ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, cp=CpPlan(rotate="ring"))
    texts = found(context, plan)
    assert any("needs mesh dim 'cp'" in text for text in texts) and any("'ring' is unknown" in text for text in texts)


def fsdp_texts(context: RankContext, batch: tuple[int, ...] = (4, 8), tied: bool = False, **knobs: object) -> list[str]:
    plan = FsdpPlan(**{"wrap": ("layers.*",), "mesh_dims": ("dp_shard", "tp"), **knobs})  # type: ignore[arg-type]
    return found(context, ParallelPlan(fsdp=plan), batch, hidden=16, tied=tied)


@pytest.mark.parametrize("size", [3, 8, 1])
def test_resharding_to_no_proper_divisor_names_those_that_are(context: RankContext, size: int) -> None:
    (text,) = fsdp_texts(context, reshard_after_forward=size)
    where = "mesh dim 'dp_shardxtp' of size 8"
    assert text == f"reshard_after_forward={size} is no proper divisor of {where}; use 2, 4, True or False"


def test_a_shard_placement_that_does_not_divide_names_the_parameter(context: RankContext) -> None:
    texts = fsdp_texts(context, shard_placement=lambda parameter: Shard(1) if parameter.ndim == 2 else None)
    assert texts == [], "8 and 16 columns over 8 ranks"
    with torch.device("meta"):
        (text,) = problems(
            nn.Sequential(nn.Linear(12, 16, bias=False)),
            torch.empty(4, 12),
            ParallelPlan(fsdp=FsdpPlan(mesh_dims=("dp_shard", "tp"), shard_placement=lambda parameter: Shard(1))),
            context,
        )
    assert "parameter 0.weight of shape [16, 12] cannot be sharded by FSDP on tensor dim 1" in text
    assert "'dp_shardxtp' of size 8: 12 is not a multiple of 8" in text


def test_what_tp_leaves_of_a_tensor_dim_must_divide_too(context: RankContext) -> None:
    columns = FsdpPlan(shard_placement=lambda parameter: Shard(1) if parameter.ndim == 2 else None)
    plan = ParallelPlan(tp={"head": RowwiseParallel()}, fsdp=columns)
    assert found(context, plan, hidden=16) == []
    (text,) = found(context, plan, hidden=12)
    assert "head.weight of shape [8, 12] cannot be sharded by FSDP on tensor dim 1 after TP over" in text
    assert "3 is not a multiple of 2" in text


def test_a_parameter_shared_by_two_units_is_refused(context: RankContext) -> None:
    (text,) = fsdp_texts(context, tied=True)
    assert "layers.0.weight is shared with layers.1.weight" in text and "(layers.0, layers.1)" in text
    assert fsdp_texts(context, tied=True, wrap=()) == []


def test_a_shared_parameter_under_tp_is_refused_unless_its_holders_lay_it_out_alike(context: RankContext) -> None:
    assert not any("TP would give each its own" in text for text in found(context, GOOD, tied=True))
    one = replace(GOOD, tp={"layers.0": ColwiseParallel(), "head": RowwiseParallel()})
    texts = found(context, one, tied=True)
    assert any("layers.0.weight is shared with layers.1.weight, and TP would give each its own" in one for one in texts)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"replicate_dims": ("tp",)}, "shards and replicates over mesh dim 'tp'"),
        ({"unshard_ahead": -1}, "unshard_ahead=-1 is no number of units"),
        ({"not_in_backward": ("tail",)}, "not_in_backward pattern 'tail' matches no FSDP unit"),
        ({"all_reduce_each_microbatch": False}, "has no all-reduce to leave out; name replicate_dims"),
        ({"all_reduce_hook": lambda mesh: None}, "has no replicas to reduce over; name replicate_dims"),
        ({"all_gather": dict}, "all_gather makes a dict"),
        ({"prefetch_forward": -1}, "prefetch_forward=-1 is no number of units"),
        ({"prefetch_backward": 1, "wrap": ()}, "has no units to gather ahead"),
        (
            {"shard_placement": LargestDim(99), "gradient_divide_factor": 1.0},
            "does not reach parameters that LargestDim",
        ),
        ({"gather_extension": lambda tensor: tensor}, "without fsdp_pre_all_gather and fsdp_post_all_gather"),
        ({"reshard_after_forward": 2, "shard_placement": LargestDim()}, "works with shards on tensor dim 0 only"),
    ],
)
def test_fsdp_knobs_that_exclude_each_other_are_named(
    context: RankContext, knobs: dict[str, object], words: str
) -> None:
    (text,) = fsdp_texts(context, **knobs)
    assert words in text


def test_microbatches_must_divide_a_ranks_batch(context: RankContext) -> None:
    plan = ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, microbatches=3)
    assert found(context, plan) == ["a batch of 2 a rank cannot be split into 3 micro-batches; use a divisor of 2"]


def test_async_tp_needs_tp_and_inductor(context: RankContext) -> None:
    for plan in (
        ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, compile=CompilePlan(("*",), backend="aot_eager", async_tp=True)),
        ParallelPlan(fsdp=FsdpPlan(mesh_dims=("dp_shard", "tp")), compile=CompilePlan(("*",), async_tp=True)),
    ):
        assert any("async_tp is inductor's overlap of what tp communicates" in text for text in found(context, plan))


def test_unmatched_checkpoint_and_compile_patterns_and_an_unknown_backend_are_named(context: RankContext) -> None:
    compiled = CompilePlan(("heads",), "inductr")
    texts = found(context, ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, checkpoint=("layer.*",), compile=compiled))
    assert len(texts) == 3 and "checkpoint pattern 'layer.*' matches no module" in texts[0]
    assert "compile pattern 'heads' matches no module (nearest: head)" in texts[1]
    assert "compile backend 'inductr' is unknown" in texts[2] and "inductor" in texts[2]


@pytest.mark.parametrize(
    ("shard_params", "words"),
    [
        ({"head.weight": ShardParam(2)}, "head.weight of shape [8, 16] has no tensor dim 2; use 0 to 1"),
        ({"heads": ShardParam(0)}, "shard_params pattern 'heads' matches no parameter (nearest: head.bias"),
        (
            {"head.weight": ShardParam(0, ("dp_shard",))},
            "cannot use mesh dim 'dp_shard', whose ranks have different data",
        ),
        ({"head.weight": ShardParam(0, ("cp",))}, "shards over mesh dim 'cp', tp_dim has only tp; add it there"),
        ({"head.*": ShardParam(0), "head.weight": ShardParam(1)}, "head.weight over mesh dim 'tp' twice"),
    ],
)
def test_annotations_that_cannot_hold_are_named(
    context: RankContext, shard_params: dict[str, ShardParam], words: str
) -> None:
    texts = found(context, ParallelPlan(shard_params=shard_params, fsdp=FsdpPlan()))
    assert any(words in text for text in texts), texts


def test_a_bad_annotation_does_not_keep_other_problems_from_being_listed(context: RankContext) -> None:
    columns = FsdpPlan(shard_placement=lambda parameter: Shard(1))
    texts = found(context, ParallelPlan(shard_params={"head.weight": ShardParam(2)}, fsdp=columns))
    assert any("head.weight of shape [8, 16] has no tensor dim 2" in text for text in texts)
    assert any("head.bias of shape [8] has no tensor dim 1 for FSDP" in text for text in texts)


def test_an_annotated_tensor_dim_must_be_a_multiple_of_the_product_of_its_mesh_dims(context: RankContext) -> None:
    both = replace(context, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("cp", "tp")))
    annotations = {"head.*": ShardParam(0, ("tp",)), "head.weight": ShardParam(0, ("cp",))}
    plan = ParallelPlan(shard_params=annotations, tp_dim=("cp", "tp"))
    with torch.device("meta"):
        assert problems(nn.ModuleDict({"head": nn.Linear(3, 8)}), torch.empty(4, 3), plan, both) == []
        (text,) = problems(nn.ModuleDict({"head": nn.Linear(3, 12)}), torch.empty(4, 3), plan, both)
    assert "head.weight of shape [12, 3] cannot be sharded on tensor dim 0 over mesh dim 'cpxtp' of size 8" in text
    assert "sizes that work: 1, 2, 3, 4, 6, 12" in text


def test_a_parameter_is_sharded_by_a_style_or_by_an_annotation_but_not_by_both(context: RankContext) -> None:
    plan = ParallelPlan(tp=GOOD.tp, shard_params={"head.weight": ShardParam(0)}, fsdp=FsdpPlan())
    assert found(context, plan) == [
        "parameter head.weight is sharded by a TP style and by shard_params; leave it to one of them"
    ]


def test_a_style_on_a_module_it_cannot_shard_is_named(context: RankContext) -> None:
    plan = ParallelPlan(tp={"layers": ColwiseParallel()}, fsdp=FsdpPlan())
    assert found(context, plan) == [
        "TP pattern 'layers': ColwiseParallel shards Linear and Embedding, but layers is a ModuleList"
    ]


class Refusing(ParallelStyle):
    """As transformers' styles are with a Conv1D: what it raises names no module."""

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        raise AttributeError("'Conv1D' object has no attribute 'out_features'")


def test_a_module_that_a_style_refuses_when_it_is_applied_is_named(context: RankContext) -> None:
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=r"TP pattern 'layers\.\*': .* layers\.0, a Linear .*'out_features'"),
    ):
        parallelize(Model(), ParallelPlan(tp={"layers.*": Refusing()}), context)


def test_a_layout_for_an_input_that_a_module_does_not_take_is_named(context: RankContext) -> None:
    def opened_case(key: str) -> ParallelPlan:
        layouts = {key: Replicate()}
        style = PrepareModuleInput(input_kwarg_layouts=layouts, desired_input_kwarg_layouts=layouts)
        return ParallelPlan(tp={"head": style}, fsdp=FsdpPlan())

    assert found(context, opened_case("input")) == []
    assert found(context, opened_case("inputs")) == ["TP pattern 'head': head takes no input 'inputs' (nearest: input)"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [("layers.*", ["layers.0", "layers.1"]), ("*", ["layers", "head"]), ("layers.*.wq", []), ("l*.1", ["layers.1"])],
)
def test_a_star_never_crosses_a_dot(pattern: str, matched: list[str]) -> None:
    assert matching(pattern, ["layers", "layers.0", "layers.1", "layers.1.wq.x", "head"]) == matched


def test_a_shape_after_tp_is_that_of_every_style_and_annotation(context: RankContext) -> None:
    plan = replace(GOOD, shard_params={"layers.1.bias": ShardParam(0, ("tp",))}, tp={"layers.0": ColwiseParallel()})
    shapes = {name: local_shape(name, Model(), plan, context) for name in ("layers.0.weight", "layers.1.bias")}
    assert shapes == {"layers.0.weight": [4, 8], "layers.1.bias": [4]}
    assert local_shape("head.weight", Model(), plan, context) == [8, 16]
    assert local_shape("head.weight", Model(), GOOD, context) == [8, 4]


def test_tp_and_fsdp_are_checked_each_by_itself(context: RankContext) -> None:
    assert list(tp_problems(Model(), GOOD, context)) == list(fsdp_problems(Model(), GOOD, context)) == []
    bad = replace(GOOD, tp={"head": ColwiseParallel(), "": RowwiseParallel()}, fsdp=FsdpPlan(prefetch_forward=-1))
    assert list(tp_problems(Model(), bad, context)) == [
        "TP pattern '': RowwiseParallel shards Linear and Embedding, but the root is a Model"
    ]
    assert list(fsdp_problems(Model(), bad, context)) == [
        "prefetch_forward=-1 is no number of units; use 0 or more",
        "prefetch_forward=-1 has no units to gather ahead; name modules in wrap",
    ]
