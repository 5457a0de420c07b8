"""Calibrated plans and the direct executor on real ranks: every value against shards cut without DTensor.

`planning_checks.py four_ranks|eight_ranks FILE`: rank 0 writes to FILE how many redistributions were checked.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as module

from benchmarks.random_states import random_state
from distbench.planning.cost_profile import Line, Profile
from distbench.planning.placement_states import State, parse_state
from distbench.planning.redistribution_request import zero_filled
from distbench.redistribute.direct import DirectRedistribution
from distbench.redistribute.expected_shards import (
    parse_placement,
    part_of,
    rounding_of,
    shard_in_order,
    shard_of,
    tagged,
    torch_placement,
)
from distbench.spec.errors import UserError
from distbench.torch_private import ZERO_FILLS, OrderedPlacements, OrderedTensor, lacks, planner
from distbench.torch_private.calibrated_planner import calibrated_planning
from distbench.torch_private.planners import layout_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def profile_of(mesh: DeviceMesh, all_to_all_s: float) -> Profile:
    """Gathers of a plausible cost, all-to-alls of a dictated one, so that two profiles take different paths."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    lines = []
    for name, size in sizes.items():
        lines.append(Line("all_to_all", name, size, all_to_all_s, 0.0))
        lines += [Line(op, name, size, 2e-6, 1e-9) for op in ("all_gather", "all_reduce", "reduce_scatter")]
    return Profile("test", "gloo", torch.__version__, sizes, tuple(lines))


def nested_shard(full: torch.Tensor, state: State, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's shard under any shard order."""
    return shard_in_order(full, state.orders, mesh.shape, tuple(mesh.get_coordinate() or ())).contiguous()


def check_direct(mesh: DeviceMesh, pairs: int) -> int:
    """Random pairs with shard orders, uneven and empty shards, against nested cuts and a counted lower bound."""
    rng = random.Random(f"direct/{tuple(mesh.shape)}")
    for _ in range(pairs):
        tensor_ndim = rng.randrange(1, 4)
        shape = tuple(rng.choice((1, 2, 3, 5, 8, 12)) for _ in range(tensor_ndim))
        source, target = (random_state(rng, mesh.ndim, tensor_ndim) for _ in range(2))
        offsets = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
        before, after = nested_shard(offsets, source, mesh), nested_shard(offsets, target, mesh)
        direct = DirectRedistribution(source, target, shape, mesh.mesh)
        lacking = set(after.flatten().tolist()) - set(before.flatten().tolist())
        assert direct.received_numel == len(lacking), f"{source} -> {target} of {shape}"
        dtype = rng.choice(DTYPES)
        full = tagged(shape, dtype)
        result = direct(nested_shard(full, source, mesh))
        wanted = nested_shard(full, target, mesh)
        assert result.shape == wanted.shape and torch.equal(result, wanted), f"{source} -> {target} of {shape}"
    return pairs


def check_direct_from_partial(mesh: DeviceMesh, pairs: int) -> int:
    """Random pairs from Partial, by one exchange and by two: values, and the gradient's way back."""
    rng = random.Random(f"partial/{tuple(mesh.shape)}")
    at, num_stages = (tuple(mesh.shape), tuple(mesh.get_coordinate() or ())), set()
    for _ in range(pairs):
        tensor_ndim, reduce_op = rng.randrange(1, 4), rng.choice(("sum", "avg", "min", "max"))
        shape = tuple(rng.choice((1, 3, 5, 8, 12)) for _ in range(tensor_ndim))
        source, target = (
            random_state(rng, mesh.ndim, tensor_ndim, [reduce_op]),
            random_state(rng, mesh.ndim, tensor_ndim),
        )
        dtype = rng.choice((torch.float32, torch.float64) if reduce_op == "avg" else DTYPES)
        full, waiting = tagged(shape, dtype), [torch_placement(placement) for placement in source.placements()]
        # Either way is right, whatever is predicted for it.
        prefer = rng.choice((lambda exchange: 1.0, lambda exchange: float(exchange.load()[0] ** 2)))
        direct = DirectRedistribution(source, target, shape, mesh.mesh, seconds_of=prefer)
        num_stages.add((bool(source.partials), len(direct.stages)))
        result, wanted = (
            direct(nested_shard(part_of(full, waiting, *at), source, mesh)),
            nested_shard(full, target, mesh),
        )
        missed = rounding_of(waiting, [], at[0], dtype) if dtype.is_floating_point else 0.0
        assert result.shape == wanted.shape
        torch.testing.assert_close(result, wanted, rtol=0, atol=missed, msg=f"{source} -> {target} of {shape} {dtype}")
        back = State(source.mesh_ndim, source.orders)
        gradient = DirectRedistribution(target, back, shape, mesh.mesh)(wanted)
        assert torch.equal(gradient, nested_shard(full, back, mesh)), f"back from {target} to {source}"
    assert num_stages == {(False, 1), (True, 1), (True, 2)}
    return 2 * pairs


def check_replicas_of_a_sum_hold_the_same_bits(mesh: DeviceMesh) -> None:
    """Sums of thirds depend on their order; ranks that hold replicas must not differ."""
    torch.manual_seed(dist.get_rank())
    source, target = parse_state("P(sum)" * mesh.ndim, 1), parse_state("R" * mesh.ndim, 1)
    for prefer in (lambda exchange: 1.0, None):
        result = DirectRedistribution(source, target, (1000,), mesh.mesh, seconds_of=prefer)(torch.rand(1000) / 3)
        everyone = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, result)
        assert all(torch.equal(one, result) for one in everyone)


def check_local_targets_stay_silent(mesh: DeviceMesh) -> None:
    """No collective is entered where every rank already holds its target."""

    def forbidden(*arguments: object) -> None:
        raise AssertionError("a collective ran")

    group: Any = dist.ProcessGroup
    replaced, full = (vars(group)["send"], vars(group)["recv"]), tagged((5, 6), torch.float32)
    group.send = group.recv = forbidden
    try:
        for before, after in (("RR", "S(0)S(1)"), ("S(1)R", "S(1)S(1)"), ("S(0)S(1)", "S(0)S(1)")):
            source, target = parse_state(before, 2), parse_state(after, 2)
            result = DirectRedistribution(source, target, full.shape, mesh.mesh)(nested_shard(full, source, mesh))
            assert torch.equal(result, nested_shard(full, target, mesh))
    finally:
        group.send, group.recv = replaced


def check_calibrated(mesh: DeviceMesh, shapes: tuple[tuple[int, ...], ...], stride: int) -> int:
    """Pairs over S(0), S(1), R and Partial sources, under two profiles that take different paths."""
    coordinate = tuple(mesh.get_coordinate() or ())
    sources = list(product(("R", "S(0)", "S(1)", "P(sum)"), repeat=mesh.ndim))
    targets = list(product(("R", "S(0)", "S(1)"), repeat=mesh.ndim))
    pairs = list(product(sources, targets, shapes))[::stride]
    paths: list[list[int]] = []
    for all_to_all_s in (1e-9, 1.0):
        paths.append([])
        with calibrated_planning(profile_of(mesh, all_to_all_s)) as counts:
            for before, after, shape in pairs:
                source, target = ([parse_placement(text) for text in texts] for texts in (before, after))
                full = tagged(shape, torch.float32)
                at = mesh.shape, coordinate
                local = shard_of(part_of(full, source, *at), source, *at).contiguous()
                dtensor: Any = DTensor.from_local(
                    local, mesh, source, run_check=False, shape=full.shape, stride=full.stride()
                )
                moved = dtensor.redistribute(mesh, target)
                wanted = shard_of(full, target, mesh.shape, coordinate)
                assert torch.equal(moved.to_local(), wanted), f"{before} -> {after} of {shape}"
                paths[-1].append(len(module._gen_transform_infos(dtensor._spec, moved._spec)))
        assert counts.ours > len(pairs) / 2 and not counts.left_to_torch
    assert paths[0] != paths[1]
    return 2 * len(pairs)


def check_zero_fill(mesh: DeviceMesh, pairs: int) -> int:
    """Shards that become parts of a sum, uneven and empty ones too: put together they are the tensor, whoever planned.

    In any shard order and next to any Partial as torch's operators may ask for it; and through `DTensor.redistribute`
    where that takes the pair.
    """
    if lacks(ZERO_FILLS):
        return 0
    rng = random.Random(f"filled/{tuple(mesh.shape)}")
    at = mesh.shape, tuple(mesh.get_coordinate() or ())
    cases: list[tuple[State, State, torch.Tensor, Any, Any]] = []
    for number in range(pairs):
        source, target = filled_pair(rng, mesh.ndim, is_pure=number < pairs / 4)
        before = layout_of(source)[0]
        full = tagged(rng.choice(((8, 8), (5, 3), (1, 9), (2, 7))), torch.float32)
        local = shard_in_order(part_of(full, before, *at), source.orders, *at).contiguous()
        cases.append((source, target, full, OrderedTensor(local, mesh, source, full), OrderedPlacements.of(target)))
        kept = dict(set(target.partials) & set(source.partials)).keys()
        if kept | zero_filled(source, target) == dict(target.partials).keys() and "[" not in f"{source}{target}":
            whole: Any = {"run_check": False, "shape": full.shape, "stride": full.stride()}
            dtensor = DTensor.from_local(local, mesh, before, **whole)
            cases.append((source, target, full, dtensor, layout_of(target)[0]))
    assert any(isinstance(tensor, DTensor) for *_, tensor, _ in cases)
    for planning in (planner("greedy"), planner("min_cost"), calibrated_planning(profile_of(mesh, 1e-9))):
        with planning:
            for source, target, full, tensor, placements in cases:
                moved = tensor.redistribute(mesh, placements)
                got = (moved.to_local() if isinstance(moved, DTensor) else moved).clone()
                if len(target.partials) == sum(map(len, source.orders)) == mesh.ndim:
                    offsets = torch.arange(full.numel()).reshape(full.shape)
                    own = torch.isin(offsets, nested_shard(offsets, source, mesh))
                    assert torch.equal(got, torch.where(own, full, 0)), f"{source}, {full.shape}"
                for mesh_dim, _ in target.partials:
                    dist.all_reduce(got, group=mesh.get_group(mesh_dim))
                wanted = nested_shard(full, target, mesh)
                assert got.shape == wanted.shape and torch.equal(got, wanted), f"{source} -> {target}, {full.shape}"
    return 3 * len(cases)


def filled_pair(rng: random.Random, mesh_ndim: int, is_pure: bool) -> tuple[State, State]:
    """Random layouts of which a shard becomes P(sum), and no Partial another one, which no version of torch does.

    `is_pure`: of shards alone, all of which become P(sum), so that each rank has zeros besides what it held.
    """
    while True:
        source = random_state(rng, mesh_ndim, 2, (rng.choice(("sum", "max")),))
        target = random_state(rng, mesh_ndim, 2, ("sum",))
        if is_pure:
            target = parse_state("P(sum)" * mesh_ndim, 2)
            if sum(map(len, source.orders)) < mesh_ndim:
                continue
        both = dict(source.partials).keys() & dict(target.partials).keys()
        if zero_filled(source, target) and all(dict(source.partials)[mesh_dim] == "sum" for mesh_dim in both):
            return source, target


def check_a_flattened_mesh() -> int:
    """torch merges gathers over mesh dims that were flattened into one, wrongly where shards are uneven; we do not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("flat_a", "flat_b"))
    mesh["flat_a", "flat_b"]._flatten("flat_ab")
    return check_calibrated(mesh, ((5, 3),), stride=1)


def check_any_order(shape: tuple[int, ...], num_meshes: int, num_pairs: int) -> int:
    """Meshes with their ranks in any order: every value right, or the redistribution refused, on all ranks alike."""
    rng, size, num_refused = random.Random(str(shape)), dist.get_world_size(), 0
    names = tuple("xyz"[: len(shape)])
    for _ in range(num_meshes):
        mesh = DeviceMesh("cpu", torch.tensor(rng.sample(range(size), size)).reshape(shape), mesh_dim_names=names)
        at = mesh.shape, tuple(mesh.get_coordinate() or ())
        with calibrated_planning(profile_of(mesh, rng.choice((1e-9, 1.0))), check_ranks=False):
            for _ in range(num_pairs):
                source = [parse_placement(rng.choice(("R", "S(0)", "S(1)", "P(sum)"))) for _ in shape]
                target = [parse_placement(rng.choice(("R", "S(0)", "S(1)"))) for _ in shape]
                full = tagged(rng.choice(((8, 8), (5, 7))), torch.float32)
                local = shard_of(part_of(full, source, *at), source, *at).contiguous()
                whole = {"shape": full.shape, "stride": full.stride()}
                dtensor: Any = DTensor.from_local(local, mesh, source, run_check=False, **whole)
                try:
                    got = dtensor.redistribute(mesh, target).to_local()
                    assert torch.equal(got, shard_of(full, target, *at)), (
                        f"{source} -> {target} on {mesh.mesh.tolist()}"
                    )
                except UserError as error:
                    assert "do not ascend" in str(error), error
                    num_refused += 1
    refusals: list[Any] = [None] * size
    dist.all_gather_object(refusals, num_refused)
    assert len(set(refusals)) == 1 and 0 < num_refused < num_meshes * num_pairs, refusals
    return num_meshes * num_pairs


def check_gradients(mesh: DeviceMesh) -> int:
    """A matrix product whose operands must move: its gradients, planned by us, against one device."""
    torch.manual_seed(0)
    left: Any = torch.randn(8, 12, requires_grad=True)
    right: Any = torch.randn(12, 6, requires_grad=True)
    (left @ right).pow(2).sum().backward()
    shards = [parse_placement(text) for text in ("S(0)", "S(1)")]
    with calibrated_planning(profile_of(mesh, 1e-6)) as counts:
        moving: list[Any] = []
        for full in (left, right):
            part = shard_of(full.detach(), shards, mesh.shape, tuple(mesh.get_coordinate() or ()))
            whole = {"shape": full.shape, "stride": full.stride()}
            moving.append(DTensor.from_local(part, mesh, shards, run_check=False, **whole).requires_grad_())
        (moving[0] @ moving[1]).redistribute(mesh, [parse_placement("R")] * 2).pow(2).sum().backward()
        for full, part in zip((left, right), moving, strict=True):
            torch.testing.assert_close(part.grad.full_tensor(), full.grad)
    assert counts.ours
    return 2


@contextmanager
def refused(*sentences: str) -> Iterator[None]:
    """Fails unless a UserError says one of these."""
    try:
        yield
    except UserError as error:
        assert any(sentence in str(error) for sentence in sentences), error
    else:
        raise AssertionError(f"nothing was refused with {sentences}")


def check_disagreement_is_refused(mesh: DeviceMesh) -> None:
    mine = profile_of(mesh, float(dist.get_rank()))
    with refused("different profiles"), calibrated_planning(mine):
        pass
    # A file that one rank lacks must not leave the others waiting.
    given = mine if dist.get_rank() else "/nowhere/profile.json"
    with refused("different profiles", "cannot be read"), calibrated_planning(given):
        pass


def four_ranks() -> int:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    turned = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("x", "y"))
    check_disagreement_is_refused(square)
    check_local_targets_stay_silent(square)
    checked = check_calibrated(square, ((8, 8), (5, 3)), stride=2) + check_gradients(square)
    checked += check_a_flattened_mesh() + check_any_order((2, 2), num_meshes=3, num_pairs=40)
    for mesh in (square, line, turned):
        checked += check_direct(mesh, 60) + check_direct_from_partial(mesh, 60)
        checked += check_zero_fill(mesh, 15) if mesh is not turned else 0
        check_replicas_of_a_sum_hold_the_same_bits(mesh)
    return checked


def eight_ranks() -> int:
    wide = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    checked = check_calibrated(wide, ((9, 6),), stride=5) + check_calibrated(cube, ((6, 7),), stride=47)
    for mesh in (wide, cube):
        checked += check_direct(mesh, 45) + check_direct_from_partial(mesh, 30) + check_zero_fill(mesh, 12)
    return checked


def main(checks: str, file: str) -> None:
    dist.init_process_group("gloo")
    checked = {"four_ranks": four_ranks, "eight_ranks": eight_ranks}[checks]()
    dist.barrier()
    if dist.get_rank() == 0:
        Path(file).write_text(str(checked))


if __name__ == "__main__":
    main(*sys.argv[1:])
