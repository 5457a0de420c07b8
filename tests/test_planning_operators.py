"""Operators of DTensors under calibrated_planning, on fake ranks: what plans them, at which price, how often."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _redistribute as module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import utils as operators
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from distbench.costmodel.lines import COLLECTIVES, Line
from distbench.costmodel.profile import Profile
from distbench.worker.torch_internals import calibrated
from distbench.worker.torch_internals.calibrated import calibrated_planning, forget_plans

PLANNER = module.DTensorRedistributePlanner
NAMES, SIZES = ("a", "b", "c"), (2, 2, 2)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES)
    _clear_sharding_prop_cache()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_known(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator's sharding and no plan is kept from another test, and torch's search of its graph fails the test."""
    _clear_sharding_prop_cache()
    forget_plans()
    monkeypatch.setattr(PLANNER, "get_next_state", forbidden)
    monkeypatch.setattr(calibrated, "_plan_one_pair", lambda planner_class: None)


def forbidden(self: Any, placements: Any, shard_order: Any) -> Any:
    raise AssertionError("torch searched its graph")


def profile(sizes: tuple[int, ...] = SIZES) -> Profile:
    lines = [Line(op, name, size, 1e-5, 1e-9) for name, size in zip(NAMES, sizes, strict=True) for op in COLLECTIVES]
    return Profile("test", "gloo", torch.__version__, dict(zip(NAMES, sizes, strict=True)), tuple(lines))


def tensor(mesh: DeviceMesh, shape: tuple[int, ...], *placements: Placement) -> Any:
    cut = list(shape)
    for placement in placements:
        if isinstance(placement, Shard):
            cut[placement.dim] //= 2
    return DTensor.from_local(torch.ones(cut), mesh, placements, run_check=False).requires_grad_()


def forwards(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    left, right = (
        tensor(mesh, (16, 16), Shard(0), Shard(1), Shard(1)),
        tensor(mesh, (16, 16), Partial(), Shard(0), Shard(1)),
    )
    hidden, weight = tensor(mesh, (4, 8, 16), Shard(0), Shard(2), Shard(1)), tensor(mesh, (16,), *[Replicate()] * 3)
    ids = DTensor.from_local(torch.ones(4, 8, dtype=torch.long), mesh, [Shard(0), *[Replicate()] * 2], run_check=False)
    table, logits = (
        tensor(mesh, (32, 16), *[Replicate()] * 2, Shard(1)),
        tensor(mesh, (16, 32), Shard(0), Shard(1), Shard(1)),
    )
    labels = DTensor.from_local(torch.ones(8, dtype=torch.long), mesh, [Shard(0), *[Replicate()] * 2], run_check=False)
    return {
        "add": lambda: left + right,
        "mul": lambda: left * right,
        "mm": lambda: left @ right,
        "layer norm": lambda: F.layer_norm(hidden, (16,), weight, weight),
        "embedding": lambda: F.embedding(ids, table),
        "cross entropy": lambda: F.cross_entropy(logits, labels),
    }


@pytest.mark.parametrize("sizes", [SIZES, (2, 2, 4)], ids=["covered", "not covered"])
def test_torch_never_searches_for_an_operator(mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
    with calibrated_planning(profile(sizes)) as counts:
        for forward in forwards(mesh).values():
            forward().sum().backward()
    assert (counts.ours > 0) == (sizes == SIZES)
    assert set(counts.left_to_torch) <= {"a mesh that the profile does not cover", "_MaskPartial"}


def test_a_context_entered_again_plans_nothing_twice(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    call, planned = forwards(mesh)["mm"], []
    generate = PLANNER.generate_graph_based_transform_infos

    def counted(self: Any, *arguments: Any) -> Any:
        planned.append(arguments)
        return generate(self, *arguments)

    monkeypatch.setattr(PLANNER, "generate_graph_based_transform_infos", counted)
    counts = []
    for _ in range(3):
        with calibrated_planning(profile()) as found:
            call()
        counts.append(found.ours)
    assert len(set(counts)) == 1 and counts[0] == len(planned) > 0


def test_torchs_own_plans_are_still_known_after_leaving(mesh: DeviceMesh) -> None:
    call = forwards(mesh)["mm"]
    call()
    before = module._gen_transform_infos.cache_info()
    with calibrated_planning(profile()):
        call()
    after = module._gen_transform_infos.cache_info()
    assert (before.misses, before.currsize) == (after.misses, after.currsize)


@pytest.mark.parametrize(
    ("source", "target", "microseconds"),
    [
        # 1024 bytes gathered over two ranks, then 2048: 10 us and a nanosecond a byte each.
        ((Shard(0), Shard(0), Replicate()), (Replicate(),) * 3, 10 + 1.024 + 10 + 2.048),
        ((Partial(), Replicate(), Replicate()), (Shard(1), Replicate(), Replicate()), 10 + 2.048),
        ((Shard(0), Replicate(), Replicate()), (Shard(0), Shard(1), Partial()), 0.0),
        ((Replicate(),) * 3, (Partial(), Shard(0), Replicate()), 0.0),
        ((Shard(0), Shard(1), Replicate()), (Partial(), Shard(1), Replicate()), float("inf")),
        ((Partial("max"), Shard(1), Replicate()), (Partial("sum"), Shard(1), Replicate()), float("inf")),
    ],
)
def test_operators_are_told_the_profiles_prices(
    mesh: DeviceMesh, source: tuple[Placement, ...], target: tuple[Placement, ...], microseconds: float
) -> None:
    meta = TensorMeta(torch.Size((32, 16)), (16, 1), torch.float32)
    specs = [DTensorSpec(mesh, placements, meta) for placements in (source, target)]
    with calibrated_planning(profile()):
        assert operators.redistribute_cost(*specs) == pytest.approx(microseconds)
