"""A plan as Python to paste: it makes the same plan again, for all that ships; what has no text is not written."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from distbench.plans.plan_changes import changed_plan, without_idle_tp
from distbench.plans.plan_code import change_code, plan_code
from distbench.spec import CpPlan, Entry, FsdpPlan, ParallelPlan, list_entries
from distbench.spec.job import variants_of
from distbench.worker.rank_session import declared, load_scenario

PLAN = ParallelPlan(
    tp={
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(sequence_dim=2),
        "block": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    },
    cp=CpPlan(buffers={"rotations": 0}),
    checkpoint=("layers.*",),
    fsdp=FsdpPlan(wrap=("layers.*",), mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float16)),
)


def pasted(lines: list[str], **names: Any) -> Any:
    """The plan that code makes, with nothing else known than what it imports and a scenario's own file has."""
    space = dict(names)
    exec("\n".join(lines), space)
    return space["plan"]


def own_names(function: Any) -> dict[str, Any]:
    """What a scenario's file declares or has from the files beside it."""
    outside = ("torch", "distbench.", "functools", "typing")
    return {
        name: value
        for name, value in vars(sys.modules[function.__module__]).items()
        if callable(value) and not str(getattr(value, "__module__", "")).startswith(outside)
    }


def code_of(plan: ParallelPlan) -> list[str]:
    code = plan_code(plan)
    assert code is not None
    return code


@pytest.mark.parametrize(
    "entry", [entry for entry in list_entries() if "recipe" not in entry.tags], ids=lambda entry: entry.name
)
def test_every_shipped_plan_is_made_again_by_its_code(entry: Entry) -> None:
    function = load_scenario(entry.file, entry.name)
    for variant in variants_of(entry, {}, quick=True)[:6]:
        plan = declared(function, variant).plan
        code = code_of(plan)
        again = pasted(code, **own_names(function))
        assert repr(again) == repr(plan) or code_of(again) == code


def test_code_imports_all_that_it_takes() -> None:
    assert repr(pasted(code_of(PLAN))) == repr(PLAN)
    # torch's own text of a style would be ColwiseParallel(input_layouts=(Shard(dim=1),), ...), which is another style.
    assert "ColwiseParallel(input_layouts=Shard(1), use_local_output=False)" in code_of(PLAN)[-1]


def test_what_stands_in_the_scenarios_own_files_is_named() -> None:
    """Else a plan that is pasted elsewhere says no more than that a name is not defined."""
    code = code_of(ParallelPlan(checkpoint=("layers.*",), checkpoint_context=own_names))
    assert code[-2] == "# from the scenario's own files: own_names"
    assert not any(line.startswith("#") for line in code_of(PLAN))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


STYLES = {
    "rowwise linear": (RowwiseParallel(output_layouts=Shard(1)), torch.nn.Linear(4, 4)),
    "rowwise embedding": (RowwiseParallel(input_layouts=Replicate()), torch.nn.Embedding(4, 4)),
    "colwise": (ColwiseParallel(), torch.nn.Linear(4, 4)),
    "sequence": (SequenceParallel(), torch.nn.LayerNorm(4)),
}


@pytest.mark.parametrize(("style", "module"), STYLES.values(), ids=list(STYLES))
def test_a_style_that_was_applied_has_the_same_code(
    style: ParallelStyle, module: torch.nn.Module, mesh: DeviceMesh
) -> None:
    plan = ParallelPlan(tp={"one": style})
    before, kept = code_of(plan), dict(vars(style))
    parallelize_module(module, mesh, style)
    assert vars(style) != kept, "torch no longer writes into a style that it applies"
    assert code_of(plan) == before


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(fsdp=FsdpPlan(gather_extension=lambda tensor: tensor)),
        ParallelPlan(tp={"up": partial(ColwiseParallel, print)}, checkpoint_context=partial(max, key=lambda one: one)),
        ParallelPlan(ep={"experts": object()}, fsdp=FsdpPlan(configure={"set_gradient_divide_factor": math.inf})),
    ],
)
def test_what_has_no_text_is_not_written(plan: ParallelPlan) -> None:
    assert plan_code(plan) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plan.checkpoint", "none"),
        ("plan.checkpoint", "full"),
        ("plan.microbatches", 4),
        ("plan.rotate", "alltoall"),
        ("plan.rotate", "ulysses"),
        ("plan.load_balance", False),
        ("plan.mixed_precision", "bf16"),
        ("plan.mixed_precision", "none"),
        ("plan.prefetch", 2),
        ("plan.reshard_after_forward", False),
        ("plan.compile", "aot_eager"),
        ("plan.compile", "none"),
    ],
)
def test_each_change_as_code_is_the_change(name: str, value: Any) -> None:
    changed = changed_plan(PLAN, {name: value})
    lines = change_code(PLAN, changed)
    assert lines is not None
    assert repr(pasted(lines, plan=PLAN) if lines else PLAN) == repr(changed)


def test_a_change_names_what_differs_alone() -> None:
    selective = replace(PLAN, checkpoint_context=own_names)
    assert change_code(selective, changed_plan(selective, {"plan.checkpoint": "full"})) == [
        "from dataclasses import replace",
        "plan = replace(plan, checkpoint_context=None)",
    ]
    assert change_code(PLAN, changed_plan(PLAN, {"plan.prefetch": 2})) == [
        "from dataclasses import replace",
        "plan = replace(plan, fsdp=replace(plan.fsdp, prefetch_forward=2, prefetch_backward=2))",
    ]
    assert change_code(PLAN, replace(PLAN, fsdp=FsdpPlan(gather_extension=lambda tensor: tensor))) is None


def test_a_mesh_without_tensor_parallel_gets_a_plan_without_its_styles() -> None:
    plan = ParallelPlan(tp={"a": ColwiseParallel()}, loss_parallel=True, fsdp=FsdpPlan())
    assert without_idle_tp(plan, {"dp_shard": 2, "tp": 2}) == plan
    for mesh in ({"dp_shard": 4}, {"dp_shard": 4, "tp": 1}):
        assert without_idle_tp(plan, mesh) == ParallelPlan(fsdp=FsdpPlan())
