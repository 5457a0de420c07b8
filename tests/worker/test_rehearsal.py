"""A step is tried before any rank starts: what fails is told with its module, and nothing that works is refused."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import DATA, ROOT

from distbench.ranks.context import RankContext
from distbench.spec import DdpPlan, ParallelPlan
from distbench.spec.versions import release
from distbench.torch_private import fake_ranks
from distbench.worker import plan_rehearsal
from distbench.worker.plan_rehearsal import Rehearsal, rehearse

sys.path[:0] = [str(DATA), str(ROOT / "scenarios")]


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"tp": 4}) as mesh:
        assert dist.group.WORLD is not None
        yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)


def tried(fault: str, context: RankContext) -> Rehearsal:
    from bad_steps import bad_steps

    return rehearse(bad_steps(fault=fault), context)


GIVEN = "given f32[2,16,12] and gate=f32[2,16,12]"


@pytest.mark.parametrize(
    ("fault", "where", "what"),
    [
        ("heads", "attention, given f32[2,16,12], cannot run", "sizes [-1, 2] don't multiply up to the size of dim 2"),
        ("too many layouts", f"gate under PrepareModuleInput, {GIVEN}, cannot run", "should have same length"),
        ("no such input", "gate under PrepareModuleInput has a layout for input 'gates'", GIVEN.removeprefix("given ")),
        (
            "passed by position",
            "has a layout for input 'gate', but got",
            "f32[2,16,12] and f32",
        ),
        ("sharded output", "the loss, given f32[2,16,12] as S(2), cannot run", "mixed torch.Tensor"),
        ("loss", "the loss, given f32[2,16,12], cannot run", "3"),
    ],
)
# Above the limit nothing is run again with values, as with models that are too large for it.
@pytest.mark.parametrize("limit", [0, 20_000_000])
@pytest.mark.long
def test_what_cannot_run_is_one_sentence_with_the_module_and_what_it_got(
    context: RankContext, monkeypatch: pytest.MonkeyPatch, fault: str, where: str, what: str, limit: int
) -> None:
    monkeypatch.setattr(plan_rehearsal, "MAX_REPEATED", limit)
    (text,) = tried(fault, context).problems
    assert where in text and what in text and "\n" not in text
    assert text.endswith("(tried with shapes only)") == (limit == 0)


@pytest.mark.skipif(release(torch.__version__) >= (2, 15), reason="torch 2.15 has this option")
def test_an_option_of_ddp_that_torch_lacks_is_a_problem(context: RankContext) -> None:
    from bad_steps import bad_steps

    plan = ParallelPlan(ddp=DdpPlan(("tp",), configure={"lazy_bucket_allocation": True}))
    (text,) = rehearse(replace(bad_steps(fault="none"), plan=plan), context).problems
    assert text == f"lazy_bucket_allocation: needs torch 2.15 or newer, but this is {torch.__version__}"


@pytest.mark.parametrize("limit", [0, 20_000_000])
def test_what_runs_is_left_in_peace(context: RankContext, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(plan_rehearsal, "MAX_REPEATED", limit)
    # All parameters but the first layer's 12 x 12 weight and bias, of which a quarter is on a rank.
    phases = ("forward", "backward")
    assert tried("none", context) == Rehearsal(parameter_bytes=4 * (4 * 12 * 12 + 13 * 12 // 4), phases=phases)


def test_a_model_that_asks_for_a_value_is_tried_with_values_unless_it_is_too_large(
    context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried("asks for a value", context).why_not is None
    monkeypatch.setattr(plan_rehearsal, "MAX_REPEATED", 0)
    refused = tried("asks for a value", context)
    assert refused.problems == () and refused.why_not is not None
    assert refused.why_not.startswith("the root, given f32[2,16,12], needs values (aten._local_scalar_dense")


def test_a_torch_without_such_tensors_still_has_the_plan_applied(
    context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses import fake_tensor

    tried("heads", context)  # what torch itself imports of that module, it imports when a plan is first applied
    monkeypatch.delattr(fake_tensor, "FakeTensorMode")
    result = tried("heads", context)
    assert result.problems == () and result.parameter_bytes > 0
    assert result.why_not is not None and "has no torch._subclasses.fake_tensor.FakeTensorMode" in result.why_not


@pytest.mark.parametrize("style", ["vocabulary", "loss_parallel", "prepare_both"])
@pytest.mark.long
def test_masked_embeddings_and_dtensors_need_no_values(
    context: RankContext, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    from tp_styles import tp_styles

    monkeypatch.setattr(plan_rehearsal, "MAX_REPEATED", 0)
    result = rehearse(tp_styles(dim=64, hidden=128, sequence=32, style=style), context)
    assert result.problems == () and result.why_not is None


def test_a_step_of_a_size_that_no_machine_holds_is_tried(context: RankContext) -> None:
    from tp_attention import tp_attention

    # 4 x 65536 x 65536 parameters: 69 GB in fp32, a quarter of them on a rank.
    result = rehearse(tp_attention(dim=65536, num_heads=512, batch=1, sequence=8), context)
    assert result == Rehearsal(parameter_bytes=4 * 65536 * 65536, phases=("forward", "backward", "optimizer"))
