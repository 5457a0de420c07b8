"""Operators of DTensors under calibrated_planning, on fake ranks: what plans them, at which price, how often."""

from collections.abc import Callable, Iterator
from itertools import permutations, product
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

from distbench.planning.cost_profile import COLLECTIVES, Line, Profile
from distbench.spec.errors import UserError
from distbench.torch_private import calibrated_planner
from distbench.torch_private.calibrated_planner import calibrated_planning, forget_plans

PLANNER = module.DTensorRedistributePlanner
NEXT_STATES = PLANNER.get_next_state
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
    monkeypatch.setattr(calibrated_planner, "_plan_one_pair", lambda planner_class: None)


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
@pytest.mark.long
def test_torch_never_searches_for_an_operator(mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
    with calibrated_planning(profile(sizes)) as counts:
        for forward in forwards(mesh).values():
            forward().sum().backward()
    assert (counts.ours > 0) == (sizes == SIZES)
    assert set(counts.left_to_torch) <= {"a mesh that the profile does not cover", "_MaskPartial"}


def test_a_context_entered_again_plans_nothing_twice(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    call, planned = forwards(mesh)["mm"], []
    with calibrated_planning(profile()):
        pass  # probes torch, which must not see the counter below
    generate = PLANNER.generate_graph_based_transform_infos

    def counted(self: Any, *arguments: Any) -> Any:
        planned.append(arguments)
        return generate(self, *arguments)

    monkeypatch.setattr(PLANNER, "generate_graph_based_transform_infos", counted)
    counts = []
    for _ in range(3):
        with calibrated_planning(profile()) as result:
            call()
        counts.append(result.ours)
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


def local_bytes(placements: tuple[Placement, ...]) -> int:
    """Of 2048 bytes that every mesh dim of two ranks cuts evenly."""
    return 2048 >> sum(placement.is_shard() for placement in placements)


def torchs_steps(planner: Any, first: Any) -> dict[Any, list[Any]]:
    """Every state of torch's own graph with the states next to it."""
    result: dict[Any, list[Any]] = {}
    waiting = [first]
    while waiting:
        state = waiting.pop()
        if state not in result:
            result[state] = list(NEXT_STATES(planner, state.placements, state.tensor_dim_to_mesh_dim))
            waiting += result[state]
    return result


def reachable(steps: dict[Any, list[Any]], source: Any, limit: int) -> set[Any]:
    """The states that steps holding at most this much lead to."""
    result, waiting = {source}, [source]
    while waiting:
        state = waiting.pop()
        for following in steps[state]:
            held = local_bytes(state.placements) + local_bytes(following.placements)
            if held <= limit and following not in result:
                result.add(following)
                waiting.append(following)
    return result


@pytest.mark.filterwarnings("ignore:a redistribution of")
@pytest.mark.parametrize("limit", [640, 768, 1024, 1536])
@pytest.mark.long
def test_a_limit_of_memory_is_kept_wherever_torchs_graph_has_a_path_that_keeps_it(mesh: DeviceMesh, limit: int) -> None:
    meta = TensorMeta(torch.Size((32, 16)), (16, 1), torch.float32)
    choices: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))
    specs = [DTensorSpec(mesh, placements, meta) for placements in product(choices, repeat=3)]
    states = [PLANNER.DistState(spec.placements, spec.shard_order) for spec in specs]
    steps = torchs_steps(PLANNER(mesh, meta), states[0])
    possible = {state: reachable(steps, state, limit) for state in states}
    num_kept = num_above = 0
    with calibrated_planning(profile(), max_bytes=limit) as counts:
        for (source, before), (target, after) in permutations(zip(specs, states, strict=True), 2):
            placements, most = list(source.placements), 0
            for info in module._gen_transform_infos(source, target):
                held = local_bytes(tuple(placements))
                placements[info.mesh_dim] = info.src_dst_placements[1]
                most = max(most, held + local_bytes(tuple(placements)))
            assert tuple(placements) == target.placements
            assert (most <= limit) == (after in possible[before]), f"{source} -> {target}"
            num_kept, num_above = num_kept + (most <= limit), num_above + (most > limit)
    assert num_kept and num_above and counts.above_max_bytes == num_above


def test_a_limit_changes_plans_and_prices(mesh: DeviceMesh) -> None:
    # To gather all and to cut it again is cheapest here, and holds everything.
    cheap_gathers = [
        Line(op, name, 2, 1e-6 if op == "all_gather" else 1e-3, 0.0) for name in NAMES for op in COLLECTIVES
    ]
    known = Profile("test", "gloo", torch.__version__, dict(zip(NAMES, SIZES, strict=True)), tuple(cheap_gathers))
    meta = TensorMeta(torch.Size((32, 16)), (16, 1), torch.float32)
    specs = [
        DTensorSpec(mesh, placements, meta)
        for placements in ((Shard(0), *[Replicate()] * 2), (Shard(1), *[Replicate()] * 2))
    ]
    with calibrated_planning(known):
        assert [info._comm_type_key() for info in module._gen_transform_infos(*specs)] == ["all_gather", None]
        assert operators.redistribute_cost(*specs) == pytest.approx(1.0)
    with calibrated_planning(known, max_bytes=2048):
        assert [info._comm_type_key() for info in module._gen_transform_infos(*specs)] != ["all_gather", None]
        assert operators.redistribute_cost(*specs) > 1.5


def test_a_limit_that_no_path_keeps_is_a_sentence_and_the_least_is_taken(mesh: DeviceMesh) -> None:
    meta = TensorMeta(torch.Size((32, 16)), (16, 1), torch.float32)
    specs = [DTensorSpec(mesh, (placement, *[Replicate()] * 2), meta) for placement in (Shard(0), Replicate())]
    message = r"of \(32, 16\) from .* holds 3072 bytes per rank on any path, but max_bytes is 1; allow more"
    with calibrated_planning(profile(), max_bytes=1) as counts:
        with pytest.warns(UserWarning, match=message):
            assert [info._comm_type_key() for info in module._gen_transform_infos(*specs)] == ["all_gather"]
        module._gen_transform_infos(*reversed(specs))
    assert counts.above_max_bytes == 2


@pytest.mark.parametrize("given", [0, -1, 2.5, True, "1MiB"])
def test_a_limit_that_is_no_number_of_bytes_is_a_sentence(mesh: DeviceMesh, given: Any) -> None:
    with (
        pytest.raises(UserError, match="give a positive whole number of bytes"),
        calibrated_planning(profile(), max_bytes=given),
    ):
        pass
