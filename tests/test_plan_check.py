"""Every fault of a plan is found at once and named, before anything is measured. One process, a fake group."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.spec import CpPlan, FsdpPlan, ParallelPlan
from distbench.worker.parallelize import matching
from distbench.worker.place import Place
from distbench.worker.plan_check import problems


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
    assert dist.group.WORLD is not None
    yield Place(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, hidden: int = 16, buffer: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, 8)
        if buffer:
            self.register_buffer("table", torch.ones(3))


def found(place: Place, plan: ParallelPlan, batch: tuple[int, ...] = (4, 8), **model: object) -> list[str]:
    with torch.device("meta"):
        return problems(Model(**model), torch.empty(batch), plan, place)


GOOD = ParallelPlan(tp={"layers.*": ColwiseParallel(), "head": RowwiseParallel()}, fsdp=FsdpPlan(wrap=("layers.*",)))


def test_a_good_plan_has_no_problems(place: Place) -> None:
    assert found(place, GOOD) == []


def test_an_undividable_parameter_is_named_with_shape_mesh_dim_and_size(place: Place) -> None:
    texts = found(place, GOOD, hidden=18)
    assert len(texts) == 5, "two weights and two biases of layers.*, one weight of head"
    assert "layers.0.weight of shape [18, 8]" in texts[0]
    assert "mesh dim 'tp' of size 4" in texts[0] and "sizes that work: 1, 2, 3, 6, 9, 18" in texts[0]
    assert any("head.weight of shape [8, 18] cannot be sharded on tensor dim 1" in text for text in texts)


def test_everything_wrong_is_listed_at_once(place: Place) -> None:
    plan = ParallelPlan(tp={"layer.*": ColwiseParallel()}, fsdp=FsdpPlan(wrap=("blocks.*",)))
    texts = found(place, plan, batch=(3, 8), buffer=True)
    assert any("TP pattern 'layer.*' matches no module" in text and "layers" in text for text in texts)
    assert any("FSDP pattern 'blocks.*'" in text for text in texts)
    assert any("a batch of 3 cannot be split over mesh dim 'dp_shard' of size 2" in text for text in texts)
    assert any("buffer table" in text for text in texts)


def test_a_mesh_dim_that_no_part_uses_is_named(place: Place) -> None:
    assert found(place, ParallelPlan(fsdp=FsdpPlan())) == [
        "mesh dim 'tp' (size 4) is not used by the plan, which uses dp_shard"
    ]


def test_context_parallel_without_its_mesh_dim_is_named(place: Place) -> None:
    plan = ParallelPlan(tp=GOOD.tp, fsdp=GOOD.fsdp, cp=CpPlan(rotate="ring"))
    texts = found(place, plan)
    assert any("needs mesh dim 'cp'" in text for text in texts) and any("'ring' is unknown" in text for text in texts)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [("layers.*", ["layers.0", "layers.1"]), ("*", ["layers", "head"]), ("layers.*.wq", []), ("l*.1", ["layers.1"])],
)
def test_a_star_never_crosses_a_dot(pattern: str, matched: list[str]) -> None:
    assert matching(pattern, ["layers", "layers.0", "layers.1", "layers.1.wq.x", "head"]) == matched
