"""The ranks of bench_values: generated pairs, moved by our planners and executor, compared on every rank."""

import contextlib
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.bench_values import ANY_ORDER, TORCHS
from benchmarks.random_states import random_state
from distbench import redistribute
from distbench.planning.cost_profile import Line, Profile
from distbench.planning.placement_states import State, parse_state
from distbench.ranks.device import calm_scheduler
from distbench.redistribute.direct import DirectRedistribution
from distbench.redistribute.expected_shards import (
    parse_placement,
    part_of,
    shard_in_order,
    shard_of,
    tagged,
    torch_placement,
)
from distbench.spec import UserError
from distbench.torch_private import (
    ZERO_FILLS,
    OrderedPlacements,
    OrderedTensor,
    calibrated_planning,
    lacks,
    native_all_to_all,
    planner,
)

SEED = 20261121
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SIDES = (1, 2, 3, 5, 7, 8, 12, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
REDUCE_OPS = ("sum", "avg", "max", "min")
SUM = "P(sum)"
# So many pairs in a row under one profile and one way to run all-to-alls, since entering either clears torch's caches.
BATCH = 50
REFUSED = "refused"
ANY_ORDER_BATCHES, TORCHS_BATCHES = 41, 42


def meshes() -> list[DeviceMesh]:
    """Each shape twice: the second time with all its mesh dims flattened into one, which torch's own paths use."""
    result = []
    for shape in MESHES:
        for flattened in (False, True)[: len(shape)]:
            names = tuple(f"{'f' if flattened else 'm'}{len(result)}_{number}" for number in range(len(shape)))
            result.append(init_device_mesh("cpu", shape, mesh_dim_names=names))
            if flattened:
                result[-1][names]._flatten(f"flat{len(result)}")
    return result


def random_profile(mesh: DeviceMesh, rng: random.Random) -> Profile:
    """Prices over three orders of magnitude, so that all kinds of paths are the cheapest."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    ops = ("all_gather", "all_to_all", "all_to_all_native", "all_reduce", "reduce_scatter")
    lines = [Line(op, name, size, 10 ** rng.uniform(-6, -3), 1e-9) for name, size in sizes.items() for op in ops]
    return Profile("bench", "gloo", torch.__version__, sizes, tuple(lines))


def parts_of(full: torch.Tensor, op: str, num_parts: int, part: int) -> torch.Tensor:
    """Part `part` of a Partial whose reduction over `num_parts` is exactly `full`, a tensor of small integers."""
    if op == "max":
        return full - part
    if op == "min":
        return full + part
    if op == "avg":
        return full + (2 * part - (num_parts - 1))
    return torch.full_like(full, part) if part else full - num_parts * (num_parts - 1) // 2


def dtensor_case(mesh: DeviceMesh, rng: random.Random) -> tuple[str, Any]:
    """(what, call): a random pair, also from Partial, moved by DTensor's planner that is in force, and back.

    A target keeps a P(sum) of the source, or has one in place of a shard where this torch fills zeros in.
    """
    shape, op = tuple(rng.choice(SIDES) for _ in range(rng.randint(1, 3))), rng.choice(REDUCE_OPS)
    plain = ["R", *(f"S({dim})" for dim in range(len(shape)))]
    texts = [[rng.choice(plain if side else [*plain, f"P({op})"]) for _ in mesh.shape] for side in range(2)]
    kept = (SUM, *(plain[1:] if lacks(ZERO_FILLS) is None and op == "sum" else ()))
    for mesh_dim, before in enumerate(texts[0]):
        if before in kept and rng.random() < 0.25:
            texts[1][mesh_dim] = SUM
    dtype = rng.choice(DTYPES)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        source, target = ([parse_placement(text) for text in side] for side in texts)
        coordinate, full = tuple(mesh.get_coordinate() or ()), tagged(shape, dtype)
        num_parts, part = 1, 0
        for size, index, placement in zip(mesh.shape, coordinate, source, strict=True):
            if placement.is_partial():
                num_parts, part = num_parts * size, part * size + index
        local = shard_of(parts_of(full, op, num_parts, part), source, mesh.shape, coordinate).contiguous()
        if SUM in texts[1]:
            states = [parse_state("".join(side), len(shape)) for side in texts]
            moved: Any = OrderedTensor(local, mesh, states[0], full).redistribute(mesh, OrderedPlacements.of(states[1]))
            return summed(moved, states[1], mesh), nested_shard(full, states[1], mesh)
        local.requires_grad_()
        dtensor: Any = DTensor.from_local(local, mesh, source, run_check=False, shape=full.shape, stride=full.stride())
        moved = dtensor.redistribute(mesh, target).to_local()
        wanted = shard_of(full, target, mesh.shape, coordinate)
        moved.backward(wanted.contiguous())
        replicas = [Replicate() if placement.is_partial() else placement for placement in source]
        returned = shard_of(full, replicas, mesh.shape, coordinate)
        return both(moved.detach(), local.grad), both(wanted, returned)

    return f"{''.join(texts[0])} -> {''.join(texts[1])} of {shape} {dtype} on {where(mesh)}", call


def where(mesh: DeviceMesh) -> str:
    """The mesh of a case."""
    is_flattened = (mesh.mesh_dim_names or "")[0].startswith("f")
    return f"{tuple(mesh.shape)}{', flattened too' if is_flattened else ''}"


def both(forward: torch.Tensor, backward: torch.Tensor | None) -> torch.Tensor:
    """The values of both directions, and the shape of the first."""
    assert backward is not None
    sizes = torch.tensor([*forward.shape, *backward.shape], dtype=forward.dtype)
    return torch.cat((sizes, forward.flatten(), backward.flatten()))


def summed(local: torch.Tensor, state: State, mesh: DeviceMesh) -> torch.Tensor:
    """The shard after the sums that a layout leaves to do."""
    whole = local.detach().clone(memory_format=torch.contiguous_format)
    for mesh_dim, _ in state.partials:
        dist.all_reduce(whole, group=mesh.get_group(mesh_dim))
    return whole


def direct_case(mesh: DeviceMesh, rng: random.Random) -> tuple[str, Any]:
    """(what, call): a random pair of layouts in any shard order, moved by one exchange of exactly what is lacking."""
    shape, dtype = tuple(rng.choice(SIDES) for _ in range(rng.randint(1, 3))), rng.choice(DTYPES)
    source, target = (random_state(rng, mesh.ndim, len(shape)) for _ in range(2))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        full, offsets = tagged(shape, dtype), torch.arange(tagged(shape, dtype).numel()).reshape(shape)
        direct = DirectRedistribution(source, target, shape, mesh.mesh)
        held, wanted = (set(nested_shard(offsets, state, mesh).flatten().tolist()) for state in (source, target))
        if direct.received_numel != len(wanted - held):
            raise AssertionError(f"{direct.received_numel} elements received, {len(wanted - held)} are lacking")
        return direct(nested_shard(full, source, mesh)), nested_shard(full, target, mesh)

    return f"{source} -> {target} of {shape} {dtype} on {where(mesh)}", call


def library_case(mesh: DeviceMesh, rng: random.Random) -> tuple[str, Any]:
    """(what, call): a random pair in any shard order, also to and from a sum, moved forward and backward by a plan."""
    shape, dtype = tuple(rng.choice(SIDES) for _ in range(rng.randint(1, 3))), rng.choice(DTYPES)
    source, target = (random_state(rng, mesh.ndim, len(shape), ["sum"]) for _ in range(2))
    profile, planner = random_profile(mesh, rng), rng.choice((None, "calibrated"))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        full, coordinate = tagged(shape, dtype), tuple(mesh.get_coordinate() or ())
        plan = redistribute.plan(source, target, shape, mesh, profile, dtype=dtype, planner=planner)
        placements = [torch_placement(placement) for placement in source.placements()]
        part = part_of(full, placements, tuple(mesh.shape), coordinate)
        local = nested_shard(part, source, mesh).requires_grad_()
        moved: Any = redistribute.execute(local, plan)
        wanted = nested_shard(full, target, mesh)
        moved.backward(wanted)
        return both(summed(moved, target, mesh), local.grad), both(wanted, nested_shard(full, source, mesh))

    return f"{source} -> {target} of {shape} {dtype} on {where(mesh)}", call


def nested_shard(full: torch.Tensor, state: State, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's shard, tensor dim by tensor dim, one mesh dim's chunk of another's."""
    return shard_in_order(full, state.orders, mesh.shape, tuple(mesh.get_coordinate() or ())).contiguous()


def mesh_in_any_order(number: int, rng: random.Random) -> DeviceMesh:
    """A mesh of a shape of MESHES whose ranks are shuffled, the same on all ranks."""
    shape, size = MESHES[number % len(MESHES)], dist.get_world_size()
    names = tuple(f"any{number}_{mesh_dim}" for mesh_dim in range(len(shape)))
    return DeviceMesh("cpu", torch.tensor(rng.sample(range(size), size)).reshape(shape), mesh_dim_names=names)


def differs(call: Any) -> str | None:
    """What is wrong with a case on this rank; None when it is right, REFUSED where its group's ranks do not ascend."""
    try:
        got, wanted = call()
    except UserError as error:
        return REFUSED if "do not ascend" in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if got.shape == wanted.shape and torch.equal(got, wanted) else "other values"


def main(num_cases: int, out: Path) -> None:
    """Check the cases; rank 0 writes how many there were of each way and which were wrong on any rank."""
    calm_scheduler("cpu")
    dist.init_process_group("gloo")
    result = meshes()
    checked: Counter[str] = Counter()
    num_left = 0
    mine: list[tuple[str, str]] = []
    refused: list[str] = []
    num_ours = num_cases // BATCH
    for number in range(num_ours + ANY_ORDER_BATCHES + TORCHS_BATCHES):
        rng, mesh = random.Random(f"{SEED}/{number}"), result[number % len(result)]
        way = ("calibrated", "calibrated+native", "direct", "library")[number % 4]
        if number >= num_ours + ANY_ORDER_BATCHES:
            # Each mesh by each of torch's planners.
            way = TORCHS[number // len(result) % len(TORCHS)]
        elif number >= num_ours:
            way, mesh = ANY_ORDER, mesh_in_any_order(number, rng)
        with contextlib.ExitStack() as stack:
            plans = None
            if way in TORCHS:
                stack.enter_context(planner(way))
            elif way not in ("direct", "library"):
                plans = stack.enter_context(calibrated_planning(random_profile(mesh, rng), check_ranks=False))
                stack.enter_context(native_all_to_all(way.endswith("native")))
            for _ in range(BATCH):
                what, call = {"direct": direct_case, "library": library_case}.get(way, dtensor_case)(mesh, rng)
                reason = differs(call)
                checked[way] += 1
                if way == ANY_ORDER and reason == REFUSED:
                    refused.append(what)
                elif reason:
                    mine.append((way, f"{way}: {what}: {reason}"))
            num_left += sum(plans.left_to_torch.values()) if plans else 0
    everyone: list[Any] = [None] * dist.get_world_size()
    # A case that only some ranks refuse is wrong: the others would wait for them.
    dist.all_gather_object(everyone, refused)
    if any(others != refused for others in everyone):
        mine.append((ANY_ORDER, "the ranks do not refuse the same cases"))
    dist.all_gather_object(everyone, mine)
    wrong = sorted({entry for one in everyone for entry in one})
    if dist.get_rank() == 0:
        num_wrong = Counter(way for way, _ in wrong)
        out.write_text(
            json.dumps(
                {
                    "num_checked": checked,
                    "num_wrong": num_wrong,
                    "num_left_to_torch": num_left,
                    "num_refused": len(refused),
                    "wrong": [text for _, text in wrong],
                }
            )
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
