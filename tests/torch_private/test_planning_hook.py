"""The hook in DTensor on a fake process group: what it replaces, when it steps aside, and that it leaves no trace."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _redistribute as module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import utils as operators
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import distbench
from distbench.planning.cost_profile import Line, Profile
from distbench.spec.errors import UserError
from distbench.spec.versions import release
from distbench.torch_private import OwnPlans, plan_path
from distbench.torch_private import mesh as mesh_facts
from distbench.torch_private.calibrated_planner import calibrated_planning, require_known_planner
from distbench.torch_private.probe import ZERO_FILLS, Unsupported, lacks

PLANNER = module.DTensorRedistributePlanner
MASKED: Any = _MaskPartial(offset_shape=torch.Size((8, 1)), offset_dim=0)  # type: ignore[no-untyped-call]
REPLACED = (
    (module, "_gen_transform_infos"),
    (module, "_gen_transform_infos_non_cached"),
    (module, "_optimize_transform_infos"),
    (operators, "redistribute_cost"),
    (PLANNER, "find_min_cost_path"),
)
BEFORE = tuple(getattr(owner, name) for owner, name in REPLACED)


@pytest.fixture(scope="module", autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def profile_of(all_to_all_s: float, gather_per_byte_s: float = 1e-9) -> Profile:
    """Gathers cost per byte, all-to-alls a fixed time: which of the two is taken can be dictated."""
    lines = []
    per_byte = ("all_gather", "all_reduce", "reduce_scatter")
    for name, size in (("dp", 2), ("tp", 4)):
        lines.append(Line("all_to_all", name, size, all_to_all_s, 0.0))
        lines += [Line(op, name, size, 1e-6, gather_per_byte_s) for op in per_byte]
    return Profile("test", "gloo", torch.__version__, {"dp": 2, "tp": 4}, tuple(lines))


def assert_torch_is_as_before() -> None:
    assert tuple(getattr(owner, name) for owner, name in REPLACED) == BEFORE


def ops_of(mesh: DeviceMesh, source: tuple[Placement, ...], target: tuple[Placement, ...]) -> list[str | None]:
    """The steps that DTensor plans now, through its cache."""
    meta = TensorMeta(torch.Size((64, 64)), (64, 1), torch.float32)
    infos = module._gen_transform_infos(DTensorSpec(mesh, source, meta), DTensorSpec(mesh, target, meta))
    return [info._comm_type_key() for info in infos]


def test_the_profile_decides_the_path(mesh: DeviceMesh) -> None:
    pair = ((Shard(0), Replicate()), (Shard(1), Replicate()))
    with calibrated_planning(profile_of(all_to_all_s=1e-9)) as counts:
        assert ops_of(mesh, *pair) == ["all_to_all"]
    assert (counts.ours, counts.left_to_torch) == (1, {})
    with calibrated_planning(profile_of(all_to_all_s=1.0)):
        assert ops_of(mesh, *pair) == ["all_gather", None]


def test_nesting_restores_the_outer_profile_and_leaving_restores_torch(mesh: DeviceMesh) -> None:
    pair = ((Shard(0), Replicate()), (Shard(1), Replicate()))
    with calibrated_planning(profile_of(1e-9)):
        with calibrated_planning(profile_of(1.0)):
            assert ops_of(mesh, *pair)[0] == "all_gather"
        assert ops_of(mesh, *pair) == ["all_to_all"]
    assert module._FORCE_MIN_COST_REDISTRIBUTION_PLAN is None
    assert_torch_is_as_before()


def test_an_exception_restores_torch_too(mesh: DeviceMesh) -> None:
    with pytest.raises(ZeroDivisionError), calibrated_planning(profile_of(1.0)):
        ops_of(mesh, (Shard(0), Shard(1)), (Shard(1), Shard(0)))
        raise ZeroDivisionError
    assert_torch_is_as_before()


def test_a_plan_cached_before_is_not_served_inside(mesh: DeviceMesh) -> None:
    pair = ((Shard(0), Replicate()), (Shard(1), Replicate()))
    ops_of(mesh, *pair)
    with calibrated_planning(profile_of(1.0)):
        assert ops_of(mesh, *pair)[0] == "all_gather"


def test_what_we_do_not_handle_is_torchs_default_plan(mesh: DeviceMesh) -> None:
    pair: Any = ((MASKED, Replicate()), (Replicate(), Shard(0)))
    module._gen_transform_infos.cache_clear()
    expected = ops_of(mesh, *pair)
    with calibrated_planning(profile_of(1.0)) as counts:
        assert ops_of(mesh, *pair) == expected
    assert (counts.ours, counts.left_to_torch) == (0, {"_MaskPartial": 1})


def test_a_target_with_partial_is_planned_by_us(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANNER, "find_min_cost_path", forbidden)
    with calibrated_planning(profile_of(1.0)) as counts:
        assert ops_of(mesh, (Replicate(), Shard(0)), (Partial(), Shard(0))) == [None]
        gathers = ops_of(mesh, (Shard(0), Shard(1)), (Partial(), Replicate())).count("all_gather")
        assert gathers == (1 if lacks(ZERO_FILLS) is None else 2)
    assert (counts.ours, counts.left_to_torch) == (2, {})


def forbidden(self: Any, src_state: Any, dst_state: Any) -> Any:
    raise AssertionError("torch searched")


@pytest.mark.skipif(release(torch.__version__) < (2, 12), reason="torch 2.11 plans no undecodable strided shard")
def test_strided_shards_are_torchs_plan(mesh: DeviceMesh) -> None:
    # A split factor that is no product of mesh sizes cannot be decoded into a shard order.
    pair = ((_StridedShard(0, split_factor=3), Replicate()), (Replicate(), Replicate()))
    with calibrated_planning(profile_of(1.0)) as counts:
        ops_of(mesh, *pair)
    assert counts.left_to_torch == {"_StridedShard": 1}


def test_a_mesh_the_profile_does_not_cover_is_torchs_plan() -> None:
    other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with calibrated_planning(profile_of(1.0)) as counts:
        ops_of(other, (Shard(0), Replicate()), (Shard(1), Replicate()))
    assert counts.left_to_torch == {"a mesh that the profile does not cover": 1}


def test_ranks_out_of_order_are_refused_where_it_matters() -> None:
    # Over the first mesh dim each group ascends, (0, 2) and (1, 3) and so on; over the second one two do not.
    mixed = DeviceMesh("cpu", torch.tensor([[0, 1, 2, 3], [4, 5, 7, 6]]), mesh_dim_names=("dp", "tp"))
    with calibrated_planning(profile_of(1.0)):
        assert ops_of(mixed, (Shard(0), Replicate()), (Replicate(), Replicate())) == ["all_gather"]
        assert ops_of(mixed, (Replicate(), Partial()), (Replicate(), Replicate())) == ["all_reduce"]
        assert ops_of(mixed, (Replicate(), Replicate()), (Replicate(), Shard(1))) == [None]
        for source, target in ((Shard(0), Replicate()), (Shard(0), Shard(1)), (MASKED, Shard(0))):
            with pytest.raises(
                UserError, match=r"ranks, but \[4, 5, 7, 6\] do not ascend; make a mesh with ascending ranks"
            ):
                ops_of(mixed, (Replicate(), source), (Replicate(), target))


def test_ranks_are_looked_at_while_torch_traces(mesh: DeviceMesh) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mesh_facts.unordered_groups.cache_clear()
    with FakeTensorMode(), calibrated_planning(profile_of(1.0)):
        assert ops_of(mesh, (Shard(0), Replicate()), (Replicate(), Replicate())) == ["all_gather"]


def test_symbolic_shapes_are_torchs_plan(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    symbol: Any = env.create_unspecified_symint_and_symbol(64, source=_source(), dynamic_dim=_dynamic())
    shape: Any = (symbol, 64)
    meta = TensorMeta(shape, (64, 1), torch.float32)
    pair = [DTensorSpec(mesh, placements, meta) for placements in ((Shard(1), Replicate()), (Replicate(), Replicate()))]
    # torch has such shapes only while it traces, when it keeps no planner.
    monkeypatch.setattr(module, "_are_we_tracing", lambda: True)
    with calibrated_planning(profile_of(1.0)) as counts:
        infos = module._gen_transform_infos_non_cached(*pair)
    assert [info._comm_type_key() for info in infos] == ["all_gather"]
    assert list(counts.left_to_torch) == [f"size {symbol} is not a plain number"]


def _source() -> Any:
    from torch._dynamo.source import ConstantSource

    return ConstantSource("rows")


def _dynamic() -> Any:
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    return DimDynamic.DYNAMIC


def test_a_changed_signature_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANNER, "find_min_cost_path", lambda self, src_state, dst_state, budget: [])
    with pytest.raises(Unsupported, match="has parameters self, src_state, dst_state, budget"):
        require_known_planner()


def test_other_steps_than_ours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANNER, "get_next_state", lambda self, placements, order: {})
    with pytest.raises(Unsupported, match="other steps"), calibrated_planning(profile_of(1.0)):
        pass
    assert_torch_is_as_before()


def test_redistributions_inside_ops_and_backward_are_ours(mesh: DeviceMesh) -> None:
    left: Any = DTensor.from_local(torch.ones(8, 16), mesh, (Shard(0), Shard(0)), run_check=False).requires_grad_()
    right: Any = DTensor.from_local(torch.ones(16, 4), mesh, (Replicate(), Shard(1)), run_check=False)
    with calibrated_planning(profile_of(1e-6)) as counts:
        (left @ right).sum().backward()
        forward = counts.ours
        left.detach().redistribute(mesh, (Replicate(), Replicate()))
    assert forward > 0
    assert counts.ours == forward + 1
    assert not counts.left_to_torch


def test_random_pairs_translate_to_torch_and_back(mesh: DeviceMesh) -> None:
    rng = random.Random(0)
    choices: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial("sum")]
    with calibrated_planning(profile_of(3e-6)) as counts:
        for _ in range(100):
            source = tuple(rng.choice(choices) for _ in range(2))
            target = tuple(rng.choice(choices[:3]) for _ in range(2))
            if source == target:
                continue
            meta = TensorMeta(torch.Size((10, 7)), (7, 1), torch.float32)
            infos = module._gen_transform_infos_non_cached(
                DTensorSpec(mesh, source, meta), DTensorSpec(mesh, target, meta)
            )
            placements = list(source)
            for info in infos:
                assert placements[info.mesh_dim] == info.src_dst_placements[0]
                placements[info.mesh_dim] = info.src_dst_placements[1]
            assert tuple(placements) == target
    assert counts.ours > 80


def test_users_training_code_gives_a_path_or_a_profile(mesh: DeviceMesh, tmp_path: Path) -> None:
    pair = ((Shard(0), Replicate()), (Shard(1), Replicate()))
    cheap, file = profile_of(all_to_all_s=1e-9), tmp_path / "profile.json"
    cheap.save(file)
    for given in (cheap, file, str(file)):
        with distbench.calibrated_planning(given) as counts:
            assert ops_of(mesh, *pair) == ["all_to_all"]
        assert counts.ours == 1
    assert_torch_is_as_before()


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    missing = distbench.calibrated_planning(tmp_path / "missing.json")
    with pytest.raises(UserError, match="write a profile with distbench calibrate"), missing:
        pass
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        distbench.nonsense  # noqa: B018


def test_a_case_that_keeps_its_own_plans_keeps_those_of_its_profile(mesh: DeviceMesh) -> None:
    source = DTensor.from_local(torch.zeros(64, 16), mesh, [Replicate(), Shard(1)], run_check=False)
    result = []
    for all_to_all_s in (1e-9, 1.0):
        own = OwnPlans()
        for _ in range(2):
            with calibrated_planning(profile_of(all_to_all_s), check_ranks=False), own.used():
                result.append(plan_path(source, [Replicate(), Shard(0)])[1][0].op)
    assert result == ["all_to_all", "all_to_all", "all_gather", "all_gather"]
