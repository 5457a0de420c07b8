"""What a plan does to a model before it has ranks: buffers, shared parameters, recomputing, all-gather extensions."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from distbench.plans.fsdp import shard_placement_of
from distbench.plans.model import blueprint, materialise
from distbench.plans.parallelize import (
    compile_modules,
    fused_modules,
    parallelize,
    planned_loss,
    recompute_modules,
    why_not,
)
from distbench.ranks.context import RankContext
from distbench.spec import CompilePlan, LargestDim, ParallelPlan, Scenario, UserError
from distbench.torch_private import Skipped, async_tp_options, each_operator, is_pending


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    assert dist.group.WORLD is not None
    yield RankContext(1, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)
    dist.destroy_process_group()


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.second = nn.Linear(4, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("noise", torch.rand(2))


def test_a_blueprint_has_no_memory_but_knows_its_buffers() -> None:
    built, again = blueprint(WithBuffers, 7), blueprint(WithBuffers, 7)
    assert all(tensor.is_meta for tensor in (*built.model.parameters(), *built.model.buffers()))
    assert built.buffers["table"].tolist() == [0, 1, 2]
    assert torch.equal(built.buffers["noise"], again.buffers["noise"])
    assert not torch.equal(built.buffers["noise"], blueprint(WithBuffers, 8).buffers["noise"])
    assert not nn.Linear(2, 2).weight.is_meta, "parameters are ordinary again afterwards"


def test_a_blueprint_without_values_is_built_once() -> None:
    # Where only shapes are wanted, the real size of a mixture of experts took two minutes to draw.
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(WithBuffers())
        return built[-1]

    plain = blueprint(build, 7, with_values=False)
    assert len(built) == 1 and not plain.buffers and all(buffer.is_meta for buffer in plain.model.buffers())


def test_materialised_buffers_have_their_values_and_shared_parameters_stay_shared(context: RankContext) -> None:
    built = blueprint(WithBuffers, 7)
    materialise(built.model, context, built)
    model = built.model
    assert model.table.tolist() == [0, 1, 2] and torch.equal(model.noise, built.buffers["noise"])
    assert model.first.weight is model.second.weight and model.first.weight.abs().sum() > 0


def test_frozen_parameters_stay_frozen_under_sequence_parallel(context: RankContext) -> None:
    from torch.distributed.tensor.parallel import SequenceParallel

    model = blueprint(lambda: nn.ModuleDict({"norm": nn.LayerNorm(4), "other": nn.LayerNorm(4)}), 7).model
    model["norm"].requires_grad_(False)
    styled = SequenceParallel()
    parallelize(model, ParallelPlan(tp={"norm": styled, "other": styled}), context)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


def test_tensor_parallel_over_one_rank_is_none(context: RankContext) -> None:
    """Else a mesh with tp=1 takes another step than one without tp: DTensor's dispatch, and its own loss."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel

    for shape, is_split in (((2, 1), False), ((1, 2), True)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
        model, _ = parallelize(
            blueprint(lambda: nn.Sequential(nn.Linear(4, 4)), 7).model,
            ParallelPlan(tp={"0": ColwiseParallel()}),
            replace(context, mesh=mesh),
        )
        assert all(isinstance(parameter, DTensor) is is_split for parameter in model.parameters())


@pytest.mark.parametrize(
    ("shape", "chosen"), [((8, 4), 0), ((4, 8), 1), ((6, 4), 1), ((8, 8), 0), ((3, 5), None), ((7,), None)]
)
def test_the_largest_tensor_dim_that_divides_is_sharded(shape: tuple[int, ...], chosen: int | None) -> None:
    from distbench.spec import FsdpPlan

    choose = shard_placement_of(FsdpPlan(shard_placement=LargestDim()), 4)
    assert choose is not None
    placement = choose(nn.Parameter(torch.empty(shape)))
    assert (None if placement is None else placement.dim) == chosen


def test_a_tensor_dim_that_tp_shards_is_not_sharded_again(context: RankContext) -> None:
    from torch.distributed.tensor import DTensor, Shard

    from distbench.spec import FsdpPlan

    choose = shard_placement_of(FsdpPlan(shard_placement=LargestDim()), 4)
    assert choose is not None
    local = torch.empty(8, 4)
    assert choose(nn.Parameter(DTensor.from_local(local, context.mesh, [Shard(0)], run_check=False))).dim == 1


@pytest.mark.parametrize(("form", "bound"), [("bf16", 2**-8), ("int8", 0.5 / 127)])
def test_what_an_extension_gathers_comes_back_within_its_rounding(form: str, bound: float) -> None:
    sys.path.insert(0, str(ROOT / "scenarios"))
    from gather_extension import gathered_as

    full = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    halves = [gathered_as(form)(half) for half in full.chunk(2)]
    given = [half.fsdp_pre_all_gather(None)[0] for half in halves]
    gathered = tuple(torch.cat(parts) for parts in zip(*given, strict=True))
    value, freed = halves[0].fsdp_post_all_gather(gathered, None, torch.float32)
    error = (value - full).abs() / full.abs().amax(dim=1, keepdim=True)
    assert freed == (value,) and 0 < float(error.max()) <= bound * 1.0001
    assert sum(part.numel() * part.element_size() for part in gathered) < full.numel() * 4 * 0.6


class Counted(nn.Module):
    """Counts its forwards, and tells one that is being compiled by its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x).exp() * (2 if torch.compiler.is_compiling() else 1)


def test_a_checkpointed_module_is_run_again_in_backward_and_others_are_not() -> None:
    model = nn.Sequential(Counted(), Counted())
    names = [name for name, _ in model.named_parameters()]
    recompute_modules(model, ("0",))
    model(torch.ones(2, 3)).sum().backward()
    assert (model[0].calls, model[1].calls) == (2, 1)
    assert [name for name, _ in model.named_parameters()] == names


def test_what_a_selective_checkpoint_keeps_is_not_computed_again() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    result = []
    for context_fn in (None, lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])):
        torch.manual_seed(0)
        model = nn.Sequential(Counted())
        recompute_modules(model, ("0",), context_fn)
        run: list[str] = []

        def count(func: Any, args: Any, kwargs: Any, run: list[str] = run) -> Any:
            run.append(func.overloadpacket.__name__)
            return func(*args, **kwargs)

        with each_operator(count):
            model(torch.ones(2, 3)).sum().backward()
        result.append((model[0].inner.weight.grad, run.count("addmm"), run.count("exp")))
    assert torch.equal(result[0][0], result[1][0])
    assert [(linear, exponential) for _, linear, exponential in result] == [(2, 2), (1, 2)]


def test_only_the_modules_that_match_are_compiled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counted(), Counted())
    given = torch.ones(2, 3)
    plain = model[0](given)
    compile_modules(model, CompilePlan(("0",), "eager"), torch.device("cpu"))
    assert torch.allclose(model[0](given), 2 * plain)
    assert torch.allclose(model[1](given), model[1].inner(given).exp())
    torch.compiler.reset()
    # Ranks share that cache, and its keys do not tell their groups apart.
    assert not importlib.import_module("torch._functorch.config").enable_autograd_cache


@pytest.mark.long
def test_a_row_wise_embedding_compiles_whatever_an_earlier_compilation_left_of_its_mask(context: RankContext) -> None:
    with FakeTensorMode():  # as a compiler computes shapes
        weight = DTensor.from_local(torch.ones(4, 8), context.mesh, [Shard(0)])
        torch.nn.functional.embedding(DTensor.from_local(torch.ones(2, 4).long(), context.mesh, [Replicate()]), weight)
    model = nn.Sequential(nn.Embedding(8, 8))
    parallelize_module(model, context.mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    compile_modules(model, CompilePlan(("",), "aot_eager"), context.device)
    assert model(torch.zeros(2, 4).long()).shape == (2, 4, 8)
    torch.compiler.reset()


def test_only_what_inductor_compiles_is_simulated_as_fused() -> None:
    model = nn.Sequential(nn.Sequential(Counted(), Counted()), Counted())
    assert fused_modules(model, None) == fused_modules(model, CompilePlan(("0.*",), "aot_eager")) == ()
    assert fused_modules(model, CompilePlan(("0.*",))) == ("0.0", "0.1")
    assert fused_modules(model, CompilePlan(("",))) == ("0", "1")


class Tripled(nn.Module):
    """Three times what it is given, or what an uncompiled function makes of it first."""

    def __init__(self, first: Any = None) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Any) -> torch.Tensor:
        x = x if self.first is None else self.first(x)
        return 3.0 * (x.to_local() if hasattr(x, "to_local") else x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("what", ["a tensor", "a DTensor", "after a graph break"])
def test_what_a_collective_still_fills_is_waited_for_and_keeps_its_gradient(context: RankContext, what: str) -> None:
    """torch 2.12 to 2.15 drop the gradient of such an input of compiled code; 2.11 to 2.13 do not wait in a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def gathered(own: torch.Tensor) -> Any:
        split = DTensor.from_local(own, context.mesh, [Shard(0)])
        whole = split.redistribute(placements=[Replicate()], async_op=True)
        return whole if what == "a DTensor" else whole.to_local()

    own = torch.ones(2, 3, requires_grad=True)
    is_inside = what == "after a graph break"
    model = nn.Sequential(Tripled(torch.compiler.disable(gathered) if is_inside else None))
    compile_modules(model, CompilePlan(("0",), "aot_eager"), context.device)
    given = own if is_inside else gathered(own)
    assert is_pending(given) != is_inside
    model(given).sum().backward()
    torch.compiler.reset()
    assert torch.equal(own.grad, torch.full((2, 3), 3.0))  # type: ignore[arg-type]
    assert not (what == "a DTensor" and is_pending(given))


def test_async_tp_is_skipped_where_there_is_no_symmetric_memory(context: RankContext) -> None:
    plan = CompilePlan(("0",), async_tp=True)
    with pytest.raises(Skipped, match="async TP needs symmetric memory, which cpu does not have"):
        compile_modules(nn.Sequential(Counted()), plan, context.device, context.mesh["tp"])


def test_async_tp_is_an_option_of_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be given; torch.compile refuses an option that inductor does not know."""
    requested: list[str] = []
    name = "torch.distributed._symmetric_memory.enable_symm_mem_for_group"
    monkeypatch.setattr(name, lambda group_name: requested.append(group_name))
    group = SimpleNamespace(group_name="group of tp")
    mesh: Any = SimpleNamespace(device_type="cuda", get_group=lambda: group)
    options = async_tp_options(mesh)
    known = importlib.import_module("torch._inductor.config").get_config_copy()
    assert requested == ["group of tp"] and set(options) <= set(known)


def test_a_compile_backend_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Skipped, match="no C\\+\\+ compiler"):
        compile_modules(nn.Sequential(Counted()), CompilePlan(("0",)), torch.device("cpu"))
    assert why_not("aot_eager", torch.device("cpu")) is None


@pytest.mark.parametrize("kind", ["chunked", "compiled"])
def test_planned_loss_equals_the_plain_loss(kind: Literal["chunked", "compiled"]) -> None:
    """10 positions do not divide into 8 parts; the mean over parts and its gradient remain the whole ones."""

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))

    plan = ParallelPlan(loss=kind, compile=CompilePlan(("*",), backend="aot_eager"))
    scenario = Scenario(build_model=lambda: nn.Linear(2, 2), make_batch=lambda: None, loss=loss, plan=plan)
    planned = planned_loss(scenario, torch.device("cpu"))
    assert planned is not None and planned.__name__ == "loss"
    logits, targets = torch.randn(2, 10, 7, dtype=torch.float64), torch.randint(7, (2, 10))
    values, gradients = [], []
    for function in (loss, planned):
        own = logits.clone().requires_grad_()
        value = function(own, targets)
        value.backward()
        values.append(value)
        gradients.append(own.grad)
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    if kind == "chunked":
        with pytest.raises(UserError, match="needs an output"):
            planned(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match=r"needs Scenario\.loss"):
        replace(scenario, loss=None)
