"""Every fault of a plan is found at once and named, before anything is measured. One process, a fake group."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from distbench.plans.parallelize import parallelize
from distbench.plans.plan_check import grouped, problems, undivided
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.spec import (
    CompilePlan,
    CpPlan,
    DdpPlan,
    FsdpPlan,
    ParallelPlan,
    PipelinePlan,
    Scenario,
    ShardParam,
    UserError,
)
from distbench.spec.plan import matching
from distbench.spec.versions import release
from distbench.torch_private import Unsupported, divide_factors


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


def problem_texts(
    context: RankContext, plan: ParallelPlan, batch: tuple[int, ...] = (4, 8), **model: object
) -> list[str]:
    with torch.device("meta"):
        return problems(Model(**model), torch.empty(batch), plan, context)


GOOD = ParallelPlan(tp={"layers.*": ColwiseParallel(), "head": RowwiseParallel()}, fsdp=FsdpPlan(wrap=("layers.*",)))


def test_a_good_plan_has_no_problems(context: RankContext) -> None:
    assert problem_texts(context, GOOD) == []


def test_an_undividable_parameter_is_named_with_shape_mesh_dim_and_size(context: RankContext) -> None:
    plan = ParallelPlan(tp={"head": RowwiseParallel()}, fsdp=FsdpPlan())
    (text,) = problem_texts(context, plan, hidden=18)
    assert "parameter head.weight of shape [8, 18] cannot be sharded on tensor dim 1" in text
    assert "mesh dim 'tp' of size 4" in text and "sizes that work: 1, 2, 3, 6, 9, 18" in text


def test_parameters_that_fail_for_one_reason_are_one_problem_with_their_layers_counted(context: RankContext) -> None:
    (text,) = problem_texts(context, GOOD, hidden=18)
    assert text.startswith("mesh dim 'tp' of size 4 does not divide 18 (sizes that work: 1, 2, 3, 6, 9, 18)")
    # Two weights and two biases of layers.*, one weight of head.
    assert text.endswith(" by layers.*.weight: 2 layers; layers.*.bias: 2 layers; head.weight")


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (["layers.0.w1 is bad", "layers.1.w1 is bad", "no"], ["layers.*.w1 is bad: 2 layers", "no"]),
        (["layers.0.w1 is bad"], ["layers.0.w1 is bad"]),
        (["a share of 0.5 is bad", "a share of 0.6 is bad"], ["a share of 0.5 is bad", "a share of 0.6 is bad"]),
    ],
)
def test_sentences_that_differ_in_the_layer_alone_are_one(problems: list[str], message: list[str]) -> None:
    assert grouped(problems) == message


def test_modules_beside_each_other_are_named_together(context: RankContext) -> None:
    names = [f"layers.{layer}.attention.{name}.weight" for layer in range(8) for name in ("wq", "wk")]
    (text,) = grouped([undivided("", 9, ("tp",), context, name) for name in names])
    assert text.endswith(" by layers.*.attention.{wq,wk}.weight: 8 layers")


def test_everything_wrong_is_listed_at_once(context: RankContext) -> None:
    plan = ParallelPlan(tp={"layer.*": ColwiseParallel()}, fsdp=FsdpPlan(wrap=("blocks.*",)))
    texts = problem_texts(context, plan, batch=(3, 8))
    assert any("TP pattern 'layer.*' matches no module" in text and "layers" in text for text in texts)
    assert any("FSDP pattern 'blocks.*'" in text for text in texts)
    assert any("a batch of 3 cannot be split over mesh dim 'dp_shard' of size 2" in text for text in texts)


def test_a_mesh_dim_that_no_part_uses_is_named(context: RankContext) -> None:
    assert problem_texts(context, ParallelPlan(fsdp=FsdpPlan())) == [
        "the plan does not use mesh dim 'tp' (size 4), only dp_shard"
    ]


def test_a_mesh_dim_of_one_rank_needs_no_part_that_uses_it(context: RankContext) -> None:
    """One device, say, and no plan."""
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp_shard", "tp"))
    assert problem_texts(replace(context, mesh=mesh), ParallelPlan(fsdp=FsdpPlan()), batch=(8, 8)) == []


def test_context_parallel_without_its_mesh_dim_is_named(context: RankContext) -> None:
    plan = ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, cp=CpPlan(rotate="ring"))
    texts = problem_texts(context, plan)
    assert any("needs mesh dim 'cp'" in text for text in texts) and any("'ring' is unknown" in text for text in texts)


def fsdp_texts(context: RankContext, batch: tuple[int, ...] = (4, 8), tied: bool = False, **knobs: object) -> list[str]:
    plan = FsdpPlan(**{"wrap": ("layers.*",), "mesh_dims": ("dp_shard", "tp"), **knobs})  # type: ignore[arg-type]
    return problem_texts(context, ParallelPlan(fsdp=plan), batch, hidden=16, tied=tied)


def applied(context: RankContext, plan: ParallelPlan, model: nn.Module) -> None:
    assert problems(model, torch.empty(4, 8, device="meta"), plan, context) == []
    with torch.device("meta"):
        parallelize(model, plan, context)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"reshard_after_forward": 3}, "reshard_after_forward.* torch rejects 0, a Linear .*factor of 8"),
        ({"shard_placement": lambda parameter: Shard(1)}, r"shard_placement.* 0, a Linear .*\[12, 12\]"),
        (
            {"configure": {"set_all_reduce_hook": lambda tensor: None}},
            "'set_all_reduce_hook'. raises TypeError",
        ),
        (
            {"configure": {"set_reshard_after_forward": "yes"}},
            "configure.'set_reshard_after_forward'.: torch rejects the root, a Sequential .*should be a bool",
        ),
    ],
)
def test_what_torch_refuses_names_the_field_and_the_unit(
    context: RankContext, knobs: dict[str, object], words: str
) -> None:
    fsdp = FsdpPlan(**{"wrap": ("*",), "mesh_dims": ("dp_shard", "tp"), **knobs})  # type: ignore[arg-type]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 12))
    with pytest.raises(UserError, match=words):
        applied(context, ParallelPlan(fsdp=fsdp), model)


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(fsdp=FsdpPlan(("layers.*",), ("dp_shard", "tp"))),
        ParallelPlan(tp={"layers.0": ColwiseParallel(), "head": RowwiseParallel()}, fsdp=FsdpPlan()),
    ],
)
def test_a_shared_parameter_of_which_one_holder_is_laid_out_alone_is_refused(
    context: RankContext, plan: ParallelPlan
) -> None:
    scenario = Scenario(
        build_model=partial(Model, tied=True), make_batch=partial(torch.ones, 4, 8), inference=True, plan=plan
    )
    with pytest.raises(UserError, match=r"layers.0.weight is shared with layers.1.weight .* FSDP unit"):
        TrainingStep(scenario, context)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"replicate_dims": ("tp",)}, "shards and replicates over mesh dim 'tp'"),
        ({"configure": {"set_prefetch": 1}}, "has no option 'set_prefetch'; use "),
        (
            {"configure": {"set_gradient_divide_factor": {"by": 2}}},
            "configure['set_gradient_divide_factor']: missing a required argument: 'factor'",
        ),
        (
            {"whole": ("head.bias",), "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
            "mixed precision does not cast parameters in FSDP's whole",
        ),
    ],
)
def test_fsdp_fields_that_exclude_each_other_are_named(
    context: RankContext, knobs: dict[str, object], words: str
) -> None:
    (text,) = fsdp_texts(context, **knobs)
    assert words in text


def test_every_setter_of_torch_can_be_configured_by_one_value(context: RankContext) -> None:
    """Each public setter of FSDPModule takes one argument, or has defaults for the others."""
    setters = [name for name in vars(FSDPModule) if name.startswith("set_")]
    assert fsdp_texts(context, configure=dict.fromkeys(setters, 1)) == []


def test_configured_setters_are_called_on_each_unit(context: RankContext) -> None:
    requested: list[str] = []

    def factor(name: str, mesh: Any) -> float:
        requested.append(name)
        assert mesh is context.mesh
        return 2.0

    fsdp = FsdpPlan(("layers.*",), ("dp_shard", "tp"), configure={"set_gradient_divide_factor": factor})
    with torch.device("meta"):
        model, _ = parallelize(Model(), ParallelPlan(fsdp=fsdp), context)
    assert requested == ["layers.0", "layers.1", ""] and divide_factors(model) == {2.0}


def test_a_setter_that_recurses_is_called_once_or_a_unit_at_a_time(
    context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each unit would make a process group for its reductions, and the root would undo units' values."""
    calls: list[tuple[Any, bool]] = []
    monkeypatch.setattr(
        FSDPModule, "set_reshard_after_backward", lambda unit, value, *, recurse=True: calls.append((value, recurse))
    )
    for value in (False, lambda name, mesh: name):
        fsdp = FsdpPlan(("layers.*",), ("dp_shard", "tp"), configure={"set_reshard_after_backward": value})
        with torch.device("meta"):
            parallelize(Model(), ParallelPlan(fsdp=fsdp), context)
    assert calls == [(False, True), ("layers.0", False), ("layers.1", False), ("", False)]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ParallelPlan(ddp=DdpPlan(configure={"bucket_mb": 1})), "DdpPlan.configure: torch"),
        (
            ParallelPlan(ddp=DdpPlan(configure={"static_graph": True})),
            "use the field of the plan, DdpPlan.static_graph",
        ),
        (ParallelPlan(pipeline=PipelinePlan(configure={"depth": 1})), "PipelinePlan.configure: torch"),
        *(
            (ParallelPlan(ddp=DdpPlan(configure={"bucket_cap_mb_list": sizes})), f"bucket_cap_mb_list={sizes!r} is not")
            for sizes in ("abc", 4, ["a"], [0])
        ),
    ],
)
def test_options_that_torch_lacks_or_rejects_are_named_with_allowed_ones(
    context: RankContext, plan: ParallelPlan, words: str
) -> None:
    mesh_dim = "dp_replicate" if plan.ddp else "pp"
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=(mesh_dim,))
    texts = problem_texts(replace(context, mesh=mesh), replace(plan, microbatches=1), batch=(8, 8))
    assert any(words in text and ("; use " in text) for text in texts)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (ParallelPlan(fsdp=FsdpPlan(configure={"set_keep_unsharded_storage": True})), "set_keep_unsharded_storage"),
        (ParallelPlan(ddp=DdpPlan(configure={"lazy_bucket_allocation": True})), "lazy_bucket_allocation"),
    ],
)
@pytest.mark.skipif(release(torch.__version__) >= (2, 15), reason="torch 2.15 has these options")
def test_an_option_of_a_newer_torch_is_unsupported_in_one_sentence(
    context: RankContext, plan: ParallelPlan, name: str
) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_replicate" if plan.ddp else "dp_shard",))
    here = replace(context, mesh=mesh)
    assert problem_texts(here, plan, batch=(8, 8)) == []
    with torch.device("meta"), pytest.raises(Unsupported, match=rf"{name}: needs torch 2.15 or newer, but this is"):
        parallelize(Model(), plan, here)


@pytest.mark.parametrize("name", sorted(FsdpPlan.removed_fields))
def test_a_removed_field_names_what_to_write_now(name: str) -> None:
    with pytest.raises(TypeError, match=rf"FsdpPlan\.{name} was removed; (write configure=|call unshard)"):
        FsdpPlan(**{name: None})  # type: ignore[arg-type]


def test_microbatches_must_divide_a_ranks_batch(context: RankContext) -> None:
    plan = ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, microbatches=3)
    assert problem_texts(context, plan) == [
        "a batch of 2 per rank cannot be split into 3 micro-batches; use a divisor of 2"
    ]


def test_async_tp_needs_tp_and_inductor(context: RankContext) -> None:
    for plan in (
        ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, compile=CompilePlan(("*",), backend="aot_eager", async_tp=True)),
        ParallelPlan(fsdp=FsdpPlan(mesh_dims=("dp_shard", "tp")), compile=CompilePlan(("*",), async_tp=True)),
    ):
        assert any("async_tp is inductor's overlap of TP collectives" in text for text in problem_texts(context, plan))


def test_unmatched_checkpoint_and_compile_patterns_and_an_unknown_backend_are_named(context: RankContext) -> None:
    compiled = CompilePlan(("heads",), "inductr")
    texts = problem_texts(context, ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, checkpoint=("layer.*",), compile=compiled))
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
        ({"head.weight": ShardParam(0, ("cp",))}, "over mesh dim 'cp'; use mesh dims of tp_dim that the mesh has: tp"),
        ({"head.*": ShardParam(0), "head.weight": ShardParam(1)}, "head.weight over mesh dim 'tp' twice"),
    ],
)
def test_annotations_that_cannot_hold_are_named(
    context: RankContext, shard_params: dict[str, ShardParam], words: str
) -> None:
    texts = problem_texts(context, ParallelPlan(shard_params=shard_params, fsdp=FsdpPlan()))
    assert any(words in text for text in texts), texts


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
    assert problem_texts(context, plan) == [
        "parameter head.weight is sharded by a TP style and by shard_params; remove one of them"
    ]


def test_a_style_on_a_module_it_cannot_shard_is_named(context: RankContext) -> None:
    plan = ParallelPlan(tp={"layers": ColwiseParallel()}, fsdp=FsdpPlan())
    assert problem_texts(context, plan) == [
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


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [("layers.*", ["layers.0", "layers.1"]), ("*", ["layers", "head"]), ("layers.*.wq", []), ("l*.1", ["layers.1"])],
)
def test_a_star_never_crosses_a_dot(pattern: str, matched: list[str]) -> None:
    assert matching(pattern, ["layers", "layers.0", "layers.1", "layers.1.wq.x", "head"]) == matched
