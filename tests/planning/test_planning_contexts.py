"""Entering and leaving calibrated_planning in every way that user code does: often, across threads, out of order."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _redistribute as module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import utils as operators
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from distbench.planning.cost_profile import COLLECTIVES, Line, Profile
from distbench.torch_private.calibrated_planner import calibrated_planning

REPLACED = (
    (module, "_gen_transform_infos"),
    (module, "_gen_transform_infos_non_cached"),
    (module, "_optimize_transform_infos"),
    (operators, "redistribute_cost"),
)
BEFORE = tuple(getattr(owner, name) for owner, name in REPLACED)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    _clear_sharding_prop_cache()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def torch_is_as_before_afterwards() -> Iterator[None]:
    yield
    assert tuple(getattr(owner, name) for owner, name in REPLACED) == BEFORE


def profile(gather_s: float = 1e-6) -> Profile:
    """Whether S(0) -> S(1) is gathered and cut, or exchanged, is dictated by what a gather costs."""
    sizes = {"dp": 2, "tp": 4}
    lines = [
        Line(op, name, size, gather_s if op == "all_gather" else 1e-4, 1e-12)
        for name, size in sizes.items()
        for op in COLLECTIVES
    ]
    return Profile("test", "gloo", torch.__version__, sizes, tuple(lines))


GATHERS, EXCHANGES = profile(1e-6), profile(1.0)


def planned(mesh: DeviceMesh) -> list[str | None]:
    """The steps that DTensor plans now, through its cache."""
    meta = TensorMeta(torch.Size((64, 64)), (64, 1), torch.float32)
    source, target = ((placement, Replicate()) for placement in (Shard(0), Shard(1)))
    return [
        info._comm_type_key()
        for info in module._gen_transform_infos(*(DTensorSpec(mesh, one, meta) for one in (source, target)))
    ]


@pytest.mark.long
def test_a_thousand_times_without_growing(mesh: DeviceMesh) -> None:
    def enter(times: int) -> None:
        for _ in range(times):
            with calibrated_planning(GATHERS), calibrated_planning(EXCHANGES, max_bytes=2**40):
                planned(mesh)

    enter(20)
    gc.collect()
    before = len(gc.get_objects())
    enter(1000)
    gc.collect()
    # A closure that stayed for each time would be thousands.
    assert len(gc.get_objects()) - before < 200


def test_left_in_the_order_of_entering(mesh: DeviceMesh) -> None:
    def inside(given: Profile) -> Iterator[None]:
        with calibrated_planning(given):
            yield

    default = planned(mesh)
    first, second = inside(GATHERS), inside(EXCHANGES)
    next(first), next(second)
    assert planned(mesh) == ["all_to_all"]
    first.close()  # type: ignore[attr-defined]
    assert planned(mesh) == ["all_to_all"]
    second.close()  # type: ignore[attr-defined]
    assert planned(mesh) == default


def test_what_was_left_first_no_longer_plans(mesh: DeviceMesh) -> None:
    first, second = calibrated_planning(GATHERS), calibrated_planning(EXCHANGES)
    counts, _ = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    third = calibrated_planning(GATHERS)
    third.__enter__()
    assert planned(mesh) == ["all_gather", None]
    second.__exit__(None, None, None)
    assert planned(mesh) == ["all_gather", None]
    third.__exit__(None, None, None)
    assert counts.ours == 0


def test_a_thread_inside_and_one_that_enters_nothing(mesh: DeviceMesh) -> None:
    entered, done = threading.Event(), threading.Event()
    outside: list[Any] = [planned(mesh)]

    def work() -> None:
        entered.wait(30)
        outside.append(planned(mesh))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with calibrated_planning(EXCHANGES):
        entered.set()
        assert done.wait(30)
    thread.join()
    # Backward may run on threads of its own, so others are planned for as well while the context is open.
    assert outside[1] == ["all_to_all"]
    assert planned(mesh) == outside[0]


def test_two_threads_enter_and_leave_at_any_time(mesh: DeviceMesh) -> None:
    failed: list[BaseException] = []

    def work(given: Profile) -> None:
        try:
            for _ in range(100):
                with calibrated_planning(given):
                    assert planned(mesh) in (["all_to_all"], ["all_gather", None])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(given,)) for given in (GATHERS, EXCHANGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mesh: DeviceMesh, mode: Any) -> None:
    with mode(), calibrated_planning(EXCHANGES) as counts:
        given = DTensor.from_local(torch.ones(8, 16), mesh, (Shard(0), Replicate()), run_check=False)
        moved = given.redistribute(mesh, (Shard(1), Replicate()))
    assert (counts.ours, moved.to_local().shape) == (1, (16, 8))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_activation_checkpointing(mesh: DeviceMesh, use_reentrant: bool) -> None:
    """What is recomputed in backward is planned as in forward, also where backward comes after the context."""
    given: Any = DTensor.from_local(torch.ones(8, 16), mesh, (Shard(0), Replicate()), run_check=False).requires_grad_()

    def block(x: Any) -> Any:
        return (x.redistribute(mesh, (Shard(1), Replicate())) * 2).redistribute(mesh, (Shard(0), Replicate()))

    with calibrated_planning(EXCHANGES) as counts:
        output: Any = checkpoint(block, given, use_reentrant=use_reentrant)
        output.to_local().sum().backward()
        planned_once = counts.ours
        assert planned_once > 0 and given.grad.to_local().shape == (8, 16)
        output = checkpoint(block, given, use_reentrant=use_reentrant)
    output.to_local().sum().backward()
    assert counts.ours == planned_once and not counts.left_to_torch


@pytest.mark.long
def test_compiled(mesh: DeviceMesh) -> None:
    """Compiled inside, a redistribution is planned by the profile, with its backward."""

    def block(local: torch.Tensor) -> torch.Tensor:
        given = DTensor.from_local(local, mesh, (Shard(0), Replicate()), run_check=False)
        return (given.redistribute(mesh, (Shard(1), Replicate())) * 2).to_local()

    local = torch.ones(8, 16, requires_grad=True)
    try:
        with calibrated_planning(EXCHANGES) as counts:
            result = torch.compile(block, backend="aot_eager")(local)
            result.sum().backward()
    finally:
        torch.compiler.reset()
    assert counts.ours > 0 and not counts.left_to_torch
    assert local.grad is not None and (result.shape, local.grad.shape) == ((16, 8), (8, 16))
