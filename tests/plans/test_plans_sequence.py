"""Context parallel round a step, in one process on a fake group: buffers come back, and what a whole output costs."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT

from distbench.cases.single_device_reference import Difference, Differences
from distbench.cases.step_correctness import Allowance
from distbench.observe.module_attribution import Communication, communications_of
from distbench.plans.plan_check import problems
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.spec import CpPlan, ParallelPlan, UserError
from distbench.torch_private import Skipped, Unsupported, context_parallel, fake_ranks, require_kernel
from distbench.torch_private.context_parallel import _of_four_dims
from distbench.torch_private.fake_tensors import _flash_attention


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"cp": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)


def step_of(context: RankContext, **plan: Any) -> TrainingStep:
    sys.path.insert(0, str(ROOT / "tests" / "data"))
    from wrong_plans import mistaken

    scenario = mistaken()
    assert scenario.plan.cp is not None
    return TrainingStep(replace(scenario, plan=replace(scenario.plan, cp=replace(scenario.plan.cp, **plan))), context)


@pytest.mark.parametrize(
    ("load_balance", "rows"),
    # Of 32 positions in four chunks, rank 0 of two has the head, and with load balance the tail instead of the second.
    [(False, [*range(16)]), (True, [*range(8), *range(24, 32)])],
)
@pytest.mark.parametrize("raises", [False, True])
def test_buffers_are_sharded_for_the_step_and_whole_again_after_it(
    context: RankContext, load_balance: bool, rows: list[int], raises: bool
) -> None:
    step = step_of(context, load_balance=load_balance)
    table = step.model.rotations
    before, seen, attention = table.clone(), [], F.scaled_dot_product_attention

    def look(*_: object) -> None:
        seen.append(table.clone())
        assert F.scaled_dot_product_attention is not attention
        if raises:
            raise KeyError("stop here")

    step.model.norm.register_forward_pre_hook(look)
    if raises:
        with pytest.raises(KeyError, match="stop here"):
            step.forward_backward()
    else:
        step.forward_backward()
    assert before.shape[0] == 32 and torch.equal(seen[0], before[rows])
    assert torch.equal(table, before) and F.scaled_dot_product_attention is attention


def gathers(context: RankContext, **plan: Any) -> list[Communication]:
    step = step_of(context, **plan)
    step(lambda: None)
    rows = communications_of(step, step.phases, step.plan, context, step.model)
    return [row for row in rows if row.kind == "all_gather" and row.source == "cp"]


def test_a_whole_output_costs_one_all_gather_of_the_logits_that_belongs_to_the_root(context: RankContext) -> None:
    (more,) = set(gathers(context, unshard_output=True)) - set(gathers(context))
    assert (more.phase, more.mesh_dim, more.owner, more.owner_known) == ("forward", "cp", "", True)
    assert more.payload_bytes == 4 * 2 * 32 * 100, "fp32 logits of (batch, sequence, vocabulary)"


def test_an_output_that_is_off_is_told() -> None:
    right, off = Difference(0.0, 2.0), Difference(2e-3, 2.0)
    allowance = Allowance(1e-5, 1e-5, "as for every f32 step")
    (_, finding) = allowance.judged(Differences(2.0, right, output=off))
    message = "the output differs from one device's by 1.00e-03 (relative); 1e-05 is allowed, as for every f32 step"
    assert finding.is_wrong and str(finding) == message
    assert not any(one.is_wrong for one in allowance.judged(Differences(2.0, right, output=Difference(1e-6, 2.0))))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ParallelPlan(cp=CpPlan(kernel="flush")), "attention kernel 'flush' is unknown; use flash, efficient, cudnn"),
        (ParallelPlan(cp=CpPlan(unshard_output=True, seq_dim=0)), "seq_dim=0 is not the sequence"),
        (ParallelPlan(cp=CpPlan(unshard_output=True), tp=lambda model, mesh: model, loss_parallel=True), "a DTensor"),
    ],
)
def test_what_context_parallel_cannot_do_is_one_sentence(
    context: RankContext, plan: ParallelPlan, message: str
) -> None:
    with torch.device("meta"):
        (text,) = problems(torch.nn.Linear(2, 2), torch.empty(4, 8, 2), plan, context)
    assert message in text


@pytest.mark.parametrize("used", ["sdpa", "eager"])
def test_attention_that_context_parallel_does_not_replace_is_a_problem(context: RankContext, used: str) -> None:
    """As of transformers' models with attention sinks, which have no other attention."""
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    model.config = cast(Any, SimpleNamespace(_attn_implementation=used))
    texts = problems(model, torch.empty(4, 8, 2), ParallelPlan(cp=CpPlan()), context)
    assert len(texts) == (used != "sdpa") and all("Linear has attn_implementation='eager'" in text for text in texts)


def test_ulysses_exchanges_heads_for_the_sequence_before_attention_and_back_after_it(context: RankContext) -> None:
    """Q, K, V and the output once in each direction, in forward and in backward: no ring, and attention owns them."""
    step = step_of(context, rotate="ulysses")
    step(lambda: None)
    rows = communications_of(step, step.phases, step.plan, context, step.model)
    moved = [row for row in rows if row.source == "cp"]
    message = Counter((row.phase, row.kind, row.redistribution) for row in moved)
    layers = len(step.model.layers)
    there, back = "S(2)->S(1)", "S(1)->S(2)"
    assert message == {
        ("forward", "all_to_all", there): 3 * layers,
        ("forward", "all_to_all", back): layers,
        ("backward", "all_to_all", there): layers,
        ("backward", "all_to_all", back): 3 * layers,
    }
    assert {row.owner for row in moved} == {f"layers.{layer}.attention" for layer in range(layers)}


@pytest.mark.parametrize(
    ("heads", "options", "error", "message"),
    [
        ((3, 3, 3), {}, UserError, "the heads of attention, 3 per rank, over 2 ranks of context parallel"),
        ((4, 1, 1), {"enable_gqa": True}, UserError, "the KV heads of attention, 1 per rank, over 2 ranks"),
        ((4, 4, 4), {"attn_mask": torch.ones(8, 8)}, Unsupported, "attn_mask of a rank's part of the sequence"),
    ],
)
def test_what_ulysses_cannot_split_is_one_sentence(
    context: RankContext, heads: tuple[int, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    tensors = [torch.zeros(1, count, 4, 8) for count in heads]
    with (
        context_parallel(context.mesh["cp"], [torch.zeros(1, 8)], [1], "ulysses", False, []),
        pytest.raises(error, match=message),
    ):
        F.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("shape", [(8, 4), (3, 8, 4), (2, 3, 8, 4), (2, 2, 3, 8, 4)])
def test_attention_takes_as_many_tensor_dims_as_torch_does(shape: tuple[int, ...]) -> None:
    """Ours that replaces torch's in context parallel, and on a simulated device."""
    tensors = [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    plain = F.scaled_dot_product_attention

    def of_four(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        assert query.ndim == 4
        return plain(query, *others, **options)

    expected = plain(*tensors, is_causal=True)
    for ours in (_of_four_dims(of_four), _flash_attention) if len(shape) != 4 else (_of_four_dims(of_four),):
        torch.testing.assert_close(ours(*tensors, is_causal=True), expected)


@pytest.mark.parametrize("rotate", ["ulysses", "allgather"])
def test_context_parallel_takes_attention_of_three_dims(context: RankContext, rotate: str) -> None:
    tensors = [torch.zeros(4, 4, 8, requires_grad=True) for _ in range(3)]
    batch = [torch.zeros(1, 8)]
    with context_parallel(context.mesh["cp"], batch, [1], rotate, False, batch):
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        assert out.shape == tensors[0].shape
        out.sum().backward()


def test_ulysses_takes_fewer_kv_heads_and_says_that_it_has_nothing_to_balance(context: RankContext) -> None:
    tensors = [torch.zeros(1, count, 4, 8) for count in (4, 2, 2)]
    batch = [torch.zeros(1, 8)]
    with context_parallel(context.mesh["cp"], batch, [1], "ulysses", False, []):
        assert F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).shape == tensors[0].shape
    with (
        pytest.raises(Skipped, match="ulysses has no load balance"),
        context_parallel(context.mesh["cp"], batch, [1], "ulysses", True, batch),
    ):
        pass
    assert not CpPlan(rotate="ulysses").balances and CpPlan().balances and CpPlan(load_balance=False).balances is False


def test_a_kernel_that_a_cpu_lacks_is_skipped_with_its_reason() -> None:
    require_kernel("flash", "cpu")
    with pytest.raises(Skipped, match="only the flash kernel"):
        require_kernel("cudnn", "cpu")
