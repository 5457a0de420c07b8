"""The library of redistributions on real ranks: every value against shards cut by index, forward and backward.

`library_checks.py FILE BACKEND`: rank 0 writes to FILE how many redistributions were checked of each kind; BACKEND is
torch.compile's.
"""

import copy
import json
import random
import re
import sys
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks.random_states import random_state
from distbench import redistribute
from distbench.planning.cost_profile import Line, Profile
from distbench.planning.placement_states import State, parse_state
from distbench.redistribute.expected_shards import part_of, shard_in_order, tagged, torch_placement
from distbench.spec.errors import UserError

PAIRS, DTYPES = 120, (torch.float32, torch.float64, torch.bfloat16)


def shard(full: torch.Tensor, state: State, mesh: DeviceMesh) -> torch.Tensor:
    return shard_in_order(full, state.orders, mesh.shape, tuple(mesh.get_coordinate() or ())).contiguous()


def parts(full: torch.Tensor, state: State, mesh: DeviceMesh) -> torch.Tensor:
    placements = [torch_placement(placement) for placement in state.placements()]
    return shard(part_of(full, placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())), state, mesh)


def whole(local: torch.Tensor, state: State, mesh: DeviceMesh) -> torch.Tensor:
    """The sum over the mesh dims with a Partial."""
    local = local.clone()
    for mesh_dim, _ in state.partials:
        dist.all_reduce(local, group=mesh.get_group(mesh_dim))
    return local


def random_profile(mesh: DeviceMesh, rng: random.Random) -> Profile:
    """Prices over three orders of magnitude, so that all kinds of steps are the cheapest."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    ops = ("all_gather", "all_to_all_native", "all_to_all", "all_reduce", "reduce_scatter")
    lines = [Line(op, name, size, 10 ** rng.uniform(-6, -3), 1e-9) for name, size in sizes.items() for op in ops]
    return Profile("test", "gloo", torch.__version__, sizes, tuple(lines))


def check_values(mesh: DeviceMesh) -> Counter[str]:
    """Random pairs: nested, uneven and empty shards in any order, Partial on either side, and the gradient's way."""
    rng, checked = random.Random(f"library/{tuple(mesh.shape)}"), Counter[str]()
    for number in range(PAIRS):
        ndim, op = rng.randrange(1, 4), rng.choice(("sum", "sum", "max", "min"))
        shape = tuple(rng.choice((1, 2, 3, 5, 8, 12)) for _ in range(ndim))
        source, target = random_state(rng, mesh.ndim, ndim, [op]), random_state(rng, mesh.ndim, ndim, ["sum"])
        if op != "sum" and source.partials:
            target = State(mesh.ndim, target.orders)
        planner = rng.choice((None, "calibrated", "direct")) if not target.partials else "calibrated"
        plan = redistribute.plan(source, target, shape, mesh, random_profile(mesh, rng), planner=planner)
        dtype, what = rng.choice(DTYPES), f"{plan.path} by {plan.planner} of {shape} on {tuple(mesh.shape)}"
        full, given = tagged(shape, dtype), tagged(shape, dtype, 53, shift=5)
        local = parts(full, source, mesh).requires_grad_()
        moved = redistribute.execute(local, plan, async_op=number % 3 == 0)
        moved = moved.wait() if isinstance(moved, redistribute.Pending) else moved
        wanted = shard(full, target, mesh)
        assert moved.shape == wanted.shape and torch.equal(whole(moved.detach(), target, mesh), wanted), what
        checked.update(step.op for step in plan.steps)
        checked[f"{plan.planner}: forward"] += 1
        if {reduce_op for _, reduce_op in source.partials} <= {"sum"}:
            moved.backward(shard(given, target, mesh))
            assert torch.equal(local.grad, shard(given, source, mesh)), f"backward of {what}"
            checked["backward"] += 1
    return checked


def check_compiled(mesh: DeviceMesh, backend: str) -> int:
    """In one graph with what surrounds them, forward and backward. Some ranks have an empty shard of one column."""
    both = ("calibrated", "direct")
    pairs = [("S(0)S(0)", "S(1)R", (6, 5)), ("P(sum)S(1)", "S(0)S(1)", (6, 5)), ("S(0)R", "S(1)S(1)", (6, 1))]
    for (source, target, shape), planner in product(pairs, both):
        plan, full = redistribute.plan(source, target, shape, mesh, planner=planner), tagged(shape, torch.float32)
        step = torch.compile(partial(doubled, plan), backend=backend, fullgraph=True)
        local = parts(full, plan.source, mesh).requires_grad_()
        moved = step(local)
        assert torch.equal(moved, shard(full, plan.target, mesh) * 2 + 1), f"{plan.path} by {planner}"
        moved.backward(shard(full, plan.target, mesh))
        assert torch.equal(local.grad, shard(full, plan.source, mesh) * 2), f"backward of {plan.path}"
        with torch.no_grad():  # A graph without a backward has fewer uses of the result.
            assert torch.equal(step(local), shard(full, plan.target, mesh) * 2 + 1), f"{plan.path} by {planner}"
        torch._dynamo.reset()
    same = redistribute.plan("S(0)R", "RR", (6, 5), mesh), redistribute.plan("S(0)R", "RR", (6, 5), mesh)
    others = [redistribute.plan("S(0)R", "RR", (6, 6), mesh), redistribute.plan("S(1)R", "RR", (6, 5), mesh)]
    # A compiled graph on disk holds the key only.
    assert same[0].key == same[1].key and len({plan.key for plan in (*same, *others)}) == 3
    return len(pairs)


def check_transforms(mesh: DeviceMesh) -> int:
    """torch.func's gradients, and shapes on tensors without values."""
    pairs = [
        ("S(0)S(0)", "S(1)R"),
        ("P(sum)S(1)", "S(0)S(1)"),
        ("S(0)R", "RS(1)"),
        ("P(sum)R", "RR"),
        ("RR", "P(sum)R"),
    ]
    for (source, target), planner in product(pairs, ("calibrated", "direct")):
        if "P" in target and planner == "direct":
            continue
        plan, full = redistribute.plan(source, target, (6, 5), mesh, planner=planner), tagged((6, 5), torch.float32)
        local, given = parts(full, plan.source, mesh), shard(full, State(2, plan.target.orders), mesh)
        moved, gradients = torch.func.vjp(partial(doubled, plan), local)
        leaf = local.clone().requires_grad_()
        wanted = doubled(plan, leaf)
        wanted.backward(given)
        assert torch.equal(moved, wanted) and torch.equal(gradients(given)[0], leaf.grad), f"{plan.path} by {planner}"
        with FakeTensorMode() as fake:
            assert redistribute.execute(fake.from_tensor(local), plan).shape == moved.shape, f"{plan.path} by {planner}"
    return len(pairs)


def check_gradients_in_graphs(mesh: DeviceMesh) -> int:
    """Two plans with the same layouts, whose gradients have others: a replica of DTensor and R of spmd_types."""
    try:
        import spmd_types as spmd
    except ImportError:
        return 0
    full, names = tagged((6, 5), torch.float32), mesh.mesh_dim_names or ()
    given = shard(full, parse_state("S(0)R", 2), mesh)
    sources = "RR", spmd.SpmdType(dict.fromkeys(names, spmd.R))
    plans = [redistribute.plan(source, "S(0)R", (6, 5), mesh, planner="calibrated") for source in sources]
    assert plans[0].path == plans[1].path and plans[0].key != plans[1].key
    for plan in plans:  # the older one first
        gradients = []
        for call in (redistribute.execute, torch.compile(redistribute.execute, backend="aot_eager", fullgraph=True)):
            local = full.clone().requires_grad_()
            call(local, plan).backward(given)
            gradients.append(local.grad)
        assert torch.equal(*gradients), plan.source
        torch._dynamo.reset()
    return len(plans)


def check_dtypes(mesh: DeviceMesh) -> int:
    """Whatever torch can hold: lazy conjugates, averages of complex numbers, dtypes that collectives reject."""
    full, shape = tagged((8, 12), torch.float32), (8, 12)
    for planner, dtype in product(
        ("calibrated", "direct"), (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.bool)
    ):
        plan = copy.deepcopy(redistribute.plan("S(0)R", "S(1)R", shape, mesh, planner=planner))
        given = (full % 8).to(dtype)
        moved = redistribute.execute(shard(given, plan.source, mesh), plan)
        assert moved.dtype == dtype and torch.equal(moved.float(), shard(given, plan.target, mesh).float()), dtype
    for planner in ("calibrated", "direct"):
        plan, given = redistribute.plan("S(0)R", "S(1)R", shape, mesh, planner=planner), torch.complex(full, full)
        moved = redistribute.execute(shard(given, plan.source, mesh).conj(), plan)
        assert torch.equal(moved, shard(given.conj(), plan.target, mesh)), planner
        average = redistribute.plan("P(avg)R", "RR", shape, mesh, planner=planner)
        assert torch.equal(redistribute.execute(given, average), given)
    return 12


def doubled(plan: redistribute.Plan, local: torch.Tensor) -> Any:
    return redistribute.execute(local * 2, plan) + 1


def check_front_ends(mesh: DeviceMesh) -> int:
    """Placements, a DTensor with its own, and strided shards are the layouts that their text is."""
    full, names = tagged((8, 12), torch.float32), mesh.mesh_dim_names
    dtensor = DTensor.from_local(shard(full, parse_state("S(0)R", 2), mesh), mesh, [Shard(0), Replicate()])
    strided = [_StridedShard(0, split_factor=2), Shard(-2)]
    bf16 = redistribute.plan(dtensor.bfloat16(), "RS(1)", full.shape, mesh)
    assert 2 * bf16.sent_bytes == redistribute.plan("S(0)R", "RS(1)", full.shape, mesh).sent_bytes
    layouts = [(dtensor, "S(0)R"), ([Shard(0), Replicate()], "S(0)R"), (strided, "S(0)[1]S(0)[0]")]
    for source, text in (*layouts, (["S(0)", "R"], "S(0)R"), ("S(-2) R", "S(0)R")):
        plan = redistribute.plan(source, "RS(1)", full.shape, mesh)
        moved = redistribute.execute(shard(full, parse_state(text, 2), mesh), plan)
        assert torch.equal(moved, shard(full, parse_state("RS(1)", 2), mesh)), (text, names)
    slice_of_mesh = mesh["m1"]
    plan = redistribute.plan("S(0)", "S(1)", (8, 12), slice_of_mesh)
    assert torch.equal(
        redistribute.execute(shard(full, parse_state("S(0)", 2), slice_of_mesh), plan),
        shard(full, parse_state("S(1)", 2), slice_of_mesh),
    )
    return 4


def check_spmd_types(mesh: DeviceMesh) -> int:
    """Forward and backward, against spmd_types' own collective over one axis."""
    try:
        import spmd_types as spmd
    except ImportError:
        return 0
    kinds = {"S(0)": spmd.S(0), "S(1)": spmd.S(1), "R": spmd.R, "I": spmd.I, "P": spmd.P}
    group, rank, num_checked = mesh.get_group(0), dist.get_rank(), 0
    for source, target in product(kinds, repeat=2):
        if source == target:
            continue
        types = [spmd.SpmdType({"m0": kinds[side]}) for side in (source, target)]
        plan = redistribute.plan(*types, (8, 12), mesh)
        full = tagged((8, 12), torch.float64)
        # Replicas are equal, shards and parts differ.
        own = full if source in "RI" else full + rank
        local = own.chunk(4, dim=int(source[2]))[rank] if source.startswith("S") else own
        sides = [local.clone().requires_grad_() for _ in range(2)]
        theirs = spmd.redistribute(sides[0], group, src=kinds[source], dst=kinds[target])
        moved = redistribute.execute(sides[1], plan)
        # The gradient of R is a part, and of P and I a replica.
        given = tagged(tuple(theirs.shape), torch.float64, 53, shift=0 if target in "IP" else 3 * rank)
        theirs.backward(given)
        moved.backward(given)
        same = [(theirs.detach(), moved.detach(), target == "P"), (sides[0].grad, sides[1].grad, source == "R")]
        for wanted, got, is_part in same:
            # Which rank holds how much of a sum is not defined.
            both = [whole(one, parse_state("P(sum)", 2), mesh) if is_part else one for one in (wanted, got)]
            assert torch.equal(*both), f"{source} -> {target}"
        num_checked += 1
    return num_checked


def check_refusals(mesh: DeviceMesh) -> int:
    """One sentence each."""
    plan, shape = redistribute.plan, (8, 12)
    backwards = DeviceMesh("cpu", torch.arange(4).flip(0).reshape(2, 2), mesh_dim_names=("a", "b"))
    cases: list[tuple[Any, str]] = [
        (lambda: plan("S(0)R", "RX", shape, mesh), "unknown"),
        (lambda: plan("S(0)R", "S(2)R", shape, mesh), "2-D tensor lacks"),
        (lambda: plan("S(0)", "RR", shape, mesh), "1 placements, but the mesh has 2"),
        (lambda: plan("S(0)R", [Shard(0), object()], shape, mesh), "is unknown; use R"),
        (lambda: plan([_StridedShard(0, split_factor=3), Shard(0)], "RR", shape, mesh), "factors 3, 1 are in no shard"),
        (
            lambda: redistribute.execute(torch.zeros(8, 12).to(torch.complex64), plan("P(max)R", "RR", shape, mesh)),
            "no max",
        ),
        (lambda: plan("S(0)R", "RR", shape, backwards), "do not ascend along mesh dim 0"),
        (lambda: plan("P(max)P(sum)", "RR", shape, mesh), "mixes the reduce ops"),
        (lambda: plan("S(0)R", "RR", shape, mesh, planner="greedy"), "calibrated or direct"),
        (lambda: plan("S(0)R", "RR", shape, mesh, max_bytes=8), "allow more"),
        (lambda: redistribute.execute(torch.zeros(3, 3), plan("S(0)R", "RR", shape, mesh)), r"has \(4, 12\) on this"),
        (lambda: redistribute.execute(torch.zeros(4, 12), plan("S(0)R", "RR", shape, (2, 2))), "give .* a DeviceMesh"),
    ]
    for call, words in cases:
        try:
            call()
        except UserError as error:
            assert re.search(words, str(error)), str(error)
            assert "\n" not in str(error)
        else:
            raise AssertionError(f"not refused: {words}")
    return len(cases)


def main(out: Path, backend: str) -> None:
    dist.init_process_group("gloo")
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("m0",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("m0", "m1"))
    checked: Counter[str] = check_values(flat) + check_values(square)
    checked["front ends"], checked["refused"] = check_front_ends(square), check_refusals(square)
    checked["spmd_types"] = check_spmd_types(flat)
    checked["dtypes"] = check_dtypes(square)
    check_gradients_in_graphs(square)
    checked["transforms"] = check_transforms(square)
    checked["compiled"] = check_compiled(square, backend)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(checked))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
