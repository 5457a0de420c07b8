"""Cases of `calibrate`: single steps of redistributions for a cost profile, and operators and collectives for a
hardware file. Operators run on every rank at once, collectives in groups of every size.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from distbench.cases.collective import IN_PLACE, OPERATIONS, sizes_of
from distbench.cases.redistribution import Experiment, FieldsOf, open_pair, opened
from distbench.planning.cost_profile import DIRECT, NATIVE_ALL_TO_ALL, PARTITION, ZERO_FILL
from distbench.planning.direct_exchange import Exchange, plan_exchange
from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.dtypes import TORCH_DTYPES
from distbench.records.run_file import DTYPE_BYTES, Case
from distbench.redistribute.expected_shards import Pair
from distbench.redistribute.planners import PlannedRedistribution, check_planners, executed_as
from distbench.spec import Calibration, Scenario, UserError
from distbench.spec.devices import is_accelerator
from distbench.spec.mesh import dim_shape, flattened, groups_of
from distbench.torch_private import ZERO_FILLS, lacks, partition

# Op to the placements of its mesh dim before and after: tensor dim 0 is contiguous, tensor dim 1 needs copies.
STEPS = {
    "all_gather": (("S(0)", "R"), ("S(1)", "R")),
    "reduce_scatter": (("P(sum)", "S(0)"), ("P(sum)", "S(1)")),
    "all_reduce": (("P(sum)", "R"),),
    "all_to_all": (("S(0)", "S(1)"), ("S(1)", "S(0)")),
    NATIVE_ALL_TO_ALL: (("S(0)", "S(1)"), ("S(1)", "S(0)")),
    "cut": (("R", "S(0)"), ("R", "S(1)")),
    PARTITION: (("R", "P(sum)"),),
    ZERO_FILL: (("S(0)", "P(sum)"), ("S(1)", "P(sum)")),
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
CALL_PAYLOAD_BYTES, MOST_REPEATS = 1 << 21, 8
NEW_BLOCK_BYTES = 1 << 26  # above glibc's largest threshold, so each block is mapped again
HOST_LAYERS = 16  # of a chain of operators that are shorter than the host's work for them
COMPUTE, COMMUNICATION = "compute", "communication"
OVERLAP = (COMPUTE, COMMUNICATION, "both")  # parts of a measured overlap
OVERLAP_SIDE, OVERLAP_MATMULS, OVERLAP_BYTES, OVERLAP_MESSAGES = 4096, 64, 1 << 26, 8


class Sizes(NamedTuple):
    """Sizes of a type of device, each from the smallest.

    Args:
        matmul_sides: dtype to sides.
        attention_shapes: batch, heads, sequence, head dim.
        memory_bytes: that one elementwise operator reads and writes.
        call_flops, call_bytes: of one call of a case.
    """

    matmul_sides: Mapping[str, Sequence[int]]
    memory_bytes: Sequence[int]
    attention_shapes: Sequence[tuple[int, ...]]
    attention_dtype: str
    payload_bytes: Sequence[int]
    call_flops: float
    call_bytes: float


# From less than a core's cache to much more, and calls of some tens of milliseconds on a current core. Payloads have
# less than 32 MiB: glibc allocates larger buffers outside of its heap and maps each buffer again page by page.
OF_CPU = Sizes(
    matmul_sides={"f32": (64, 192, 512, 1024), "bf16": (64, 192, 512, 1024)},
    memory_bytes=(49152, 393216, 3145728, 25165824, 50331648),
    attention_shapes=((4, 4, 64, 64), (1, 8, 512, 64)),
    attention_dtype="f32",
    payload_bytes=(4096, 131072, 2097152, 8388608, 25165824),
    call_flops=1e9,
    call_bytes=2.5e8,
)
# Operators that fill an accelerator, buffers beyond its caches, and calls of some milliseconds.
OF_ACCELERATOR = Sizes(
    matmul_sides={"f32": (2048, 4096), "bf16": (2048, 4096, 8192)},
    memory_bytes=(402653184, 805306368),
    attention_shapes=((8, 16, 1024, 128), (2, 16, 4096, 128), (1, 16, 8192, 128)),
    attention_dtype="bf16",
    payload_bytes=(65536, 1 << 20, 1 << 24, 1 << 27, 1 << 28),
    call_flops=2e12,
    call_bytes=4e9,
)


def calibration_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield a case per redistribution step, mesh dim of two or more ranks and size, and per direct exchange and size.

    On several hosts, steps also run over groups with other placements on hosts than the mesh dims' groups. All groups
    of a mesh dim run at once. The order is random, so that drift of the machine over minutes does not favour an op or a
    size. Raises UserError for an unknown dtype, or a mesh of one rank.
    """
    for sweep in scenario.calibrations:
        check_planners((), sweep.dtype, context.profile)
        if context.mesh.size() == 1:
            raise UserError(
                "one rank has no peer to communicate with; use a mesh of two or more ranks, such as --mesh tp=2"
            )
        case_specs = list(_cases(sweep, context))
        random.Random(context.seed).shuffle(case_specs)
        yield from case_specs


def _cases(sweep: Calibration, context: RankContext) -> Iterator[CaseSpec]:
    other_meshes = _on_other_meshes(context)
    for size_bytes in (*sweep.sizes_bytes, *sweep.held_out_bytes):
        shape = square_of(size_bytes, DTYPE_BYTES[sweep.dtype], context.mesh.size())
        held_out = size_bytes in sweep.held_out_bytes
        for op, mesh_dim, pair in _pairs(shape, context):
            yield _case_spec(sweep.dtype, op, mesh_dim, pair, held_out, context)
        for mesh_dim, other_context in other_meshes:
            for op, _, pair in _steps(mesh_dim, shape, other_context):
                yield _case_spec(sweep.dtype, op, mesh_dim, pair, held_out, other_context)


def _on_other_meshes(context: RankContext) -> list[tuple[str, RankContext]]:
    """On several hosts, return meshes for groups that this mesh lacks, each with a mesh dim named by its shape."""
    if len(set(context.hosts)) < 2:
        return []
    contexts = []
    mesh = dict(zip(context.mesh_dims, context.mesh_shape, strict=True))
    for name, size, stride in flattened(mesh, context.hosts):
        all_sizes = {"outer": len(context.hosts) // size // stride, name: size, "inner": stride}
        sizes = {mesh_dim: count for mesh_dim, count in all_sizes.items() if count > 1}
        other_mesh = init_device_mesh(context.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        contexts.append((name, replace(context, mesh=other_mesh)))
    return contexts


def _pairs(shape: tuple[int, int], context: RankContext) -> Iterator[tuple[str, str, Pair]]:
    """Yield (op, mesh dim, pair) of every step over each mesh dim of two or more ranks, and of the exchanges."""
    for mesh_dim in context.mesh_dims:
        yield from _steps(mesh_dim, shape, context)
    for source, target in _exchange_sides(len(context.mesh_dims)):
        pair = Pair.of(source, target, shape)
        if _exchange(pair, context).transfers:
            yield DIRECT, "x".join(context.mesh_dims), pair


def _steps(mesh_dim: str, shape: tuple[int, int], context: RankContext) -> Iterator[tuple[str, str, Pair]]:
    """Yield (op, mesh dim, pair) of every step over a mesh dim of two or more ranks."""
    number = context.mesh_dims.index(mesh_dim)
    before, after = "R" * number, "R" * (len(context.mesh_dims) - number - 1)
    # DTensor replaces native collectives only on CPU.
    left_out = {NATIVE_ALL_TO_ALL} if is_accelerator(context.device.type) else set()
    left_out |= {ZERO_FILL} if lacks(ZERO_FILLS) is not None else set()
    for op, sides in STEPS.items():
        for source, target in sides if context.size(mesh_dim) > 1 and op not in left_out else ():
            yield op, mesh_dim, Pair.of(before + source + after, before + target + after, shape)


def square_of(size_bytes: int, itemsize: int, num_ranks: int) -> tuple[int, int]:
    """Return the nearly square shape of about `size_bytes` whose sides are multiples of `num_ranks`."""
    side = max(round(math.sqrt(size_bytes / itemsize) / num_ranks), 1) * num_ranks
    other_side = max(round(size_bytes / itemsize / side / num_ranks), 1) * num_ranks
    return side, other_side


def _exchange_sides(mesh_ndim: int) -> list[tuple[str, str]]:
    """Return whole-mesh layouts before and after that differ in how much each rank receives, copies and adds.

    If the source has a Partial, only pairs that one exchange can move are returned. The choice does not depend on
    predictions.
    """
    rows, columns, replicated = "S(0)" * mesh_ndim, "S(1)" * mesh_ndim, "R" * mesh_ndim
    sides = [(rows, columns), (rows, replicated), (columns, rows), (columns, replicated)]
    sides += [("P(sum)" * mesh_ndim, after) for after in (rows, columns)]
    if num_others := mesh_ndim - 1:
        sides += [
            ("S(0)" + "R" * num_others, "R" * num_others + "S(1)"),
            ("S(0)" + "S(1)" * num_others, "S(1)" + "S(0)" * num_others),
            ("P(sum)" + "S(0)" * num_others, "S(1)" + "S(0)" * num_others),
        ]
    return sides


def _exchange(pair: Pair, context: RankContext) -> Exchange:
    assert pair.source.state is not None and pair.target.state is not None
    return plan_exchange(pair.source.state, pair.target.state, pair.shape, context.mesh_shape)


def _case_spec(dtype: str, op: str, mesh_dim: str, pair: Pair, held_out: bool, context: RankContext) -> CaseSpec:
    params = {
        "op": op,
        "mesh_dim": mesh_dim,
        "source": str(pair.source),
        "target": str(pair.target),
        "dtype": dtype,
        "shape": list(pair.shape),
        "held_out": held_out,
    }
    case = Case(f"calibrate/{dtype}{shape_text(pair.shape)}/{op}/{mesh_dim}/{pair}", "calibrate", params)
    planner = DIRECT if op == DIRECT else "greedy"
    experiment = Experiment(pair, planner, dtype, op == NATIVE_ALL_TO_ALL, lambda: context)
    fields_of = partial(_fields, op, mesh_dim)
    if op == PARTITION:
        return CaseSpec(case, partial(_open_partition, experiment, mesh_dim, fields_of))
    return CaseSpec(case, partial(open_pair, experiment, fields_of))


def _fields(
    op: str, mesh_dim: str, experiment: Experiment, planned: PlannedRedistribution, context: RankContext
) -> dict[str, Any]:
    """Return the fields of the row of a step or the direct exchange, without its times."""
    num_messages = 0
    if op == DIRECT:
        payload_numel, num_copies, num_messages = _exchange(experiment.pair, context).load()
        group_size, backend_op = context.mesh.size(), "+".join(planned.executed_as)
    elif op == PARTITION:
        payload_numel, num_copies = math.prod(experiment.pair.shape), 0
        group_size, backend_op = context.size(mesh_dim), "none"
    else:
        (step,) = planned.steps
        payload_numel, num_copies, group_size = step.payload_numel, step.num_copies, step.group_size
        backend_op = "none" if step.op is None else executed_as(op, context, experiment.native)
    return {
        "payload_bytes": payload_numel * TORCH_DTYPES[experiment.dtype].itemsize,
        "group_size": group_size,
        "mesh_dim": mesh_dim,
        "wire_bytes": planned.wire_bytes,
        "backend_op": backend_op,
        "counters": {"num_copies": num_copies, "num_messages": num_messages},
    }


@contextlib.contextmanager
def _open_partition(experiment: Experiment, mesh_dim: str, fields_of: FieldsOf) -> Iterator[OpenedCase]:
    context = experiment.context()
    full = experiment.full.to(context.device)
    number = context.mesh_dims.index(mesh_dim)
    planned = PlannedRedistribution(lambda: partition(full, context.mesh, number), "", (), (), 0, 0, (0.0, 0.0))
    yield opened(experiment, planned, context, fields_of)


def compute_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield matmuls per dtype and size, attention per shape, elementwise operators and collectives per size."""
    count = scenario.compute
    if not count:
        return
    on_accelerator = is_accelerator(context.device.type)
    sizes = OF_ACCELERATOR if on_accelerator else OF_CPU
    for dtype, sides in sizes.matmul_sides.items():
        for side in sides[:count]:
            make = partial(_matmul, side, TORCH_DTYPES[dtype], sizes.call_flops)
            yield _compute_spec(f"matmul_{dtype}", str(side), make, context)
    for num_bytes in sizes.memory_bytes[:count]:
        yield _compute_spec("memory", str(num_bytes), partial(_elementwise, num_bytes, sizes.call_bytes), context)
    if not on_accelerator:
        yield _compute_spec("new_block", str(NEW_BLOCK_BYTES), partial(_new_block, sizes.call_bytes), context)
    for shape, is_causal in product(sizes.attention_shapes[:count], (True, False) if on_accelerator else (True,)):
        name, suffix = "x".join(map(str, shape)), "" if is_causal else "_full"
        about = shape, is_causal, TORCH_DTYPES[sizes.attention_dtype], sizes.call_flops
        yield _compute_spec(f"attention{suffix}", name, partial(_attention, *about), context)
        yield _compute_spec(f"attention_backward{suffix}", name, partial(_attention_backward, *about), context)
    if on_accelerator:
        yield _compute_spec("host", str(HOST_LAYERS), _host_work, context)
        for part in OVERLAP if context.mesh.size() > 1 else ():
            yield _compute_spec("overlap", part, partial(_overlap, part), context)
    for lies, group_size, stride in _groups_measured(context.mesh.size(), context.hosts):
        for op in COLLECTIVES:
            for size_bytes in sizes.payload_bytes[:count]:
                yield _collective_spec(op, lies, group_size, stride, size_bytes, context)


def _groups_measured(num_ranks: int, hosts: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (placement on hosts, "" for one host; ranks; stride) of the groups in which collectives are timed.

    Neighbouring ranks of every size; on several hosts also groups with other placements.
    """
    neighbours = [(size, 1) for size in range(2, num_ranks + 1) if num_ranks % size == 0]
    if len(set(hosts)) < 2:
        return [("", *sizes) for sizes in neighbours]
    by_shape = {dim_shape(groups_of(*sizes, num_ranks), hosts): sizes for sizes in neighbours}
    for shape, size, stride in flattened({"all": num_ranks}, hosts):
        by_shape.setdefault(shape, (size, stride))
    return [(shape, *sizes) for shape, sizes in by_shape.items()]


class Work(NamedTuple):
    """Operators to time: `call` runs each once."""

    call: Callable[[], object]
    amount: int  # floating point operations or bytes of one operator
    num_operators: int  # number of operators per call
    # Repeats per call of the case. Ranks of one machine share its cores, caches and memory, so an operator's time
    # is that of the slowest rank while all ranks run it. Short operators repeat for longer than one time slice of the
    # scheduler.
    most: float


def _matmul(side: int, dtype: torch.dtype, call_flops: float, device: torch.device) -> Work:
    """Make a linear layer's three matmuls: its output, and the gradients of its input and of its weight."""
    inputs, weight, gradient = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))

    def call() -> None:
        torch.mm(inputs, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), inputs)

    return Work(call, 2 * side**3, 3, call_flops)


def _elementwise(num_bytes: int, call_bytes: float, device: torch.device) -> Work:
    """Make four operators of a model and its optimizer, each of which reads and writes `num_bytes` in total."""
    left, right = torch.randn(2, num_bytes // 12, device=device)
    tensor = torch.randn(num_bytes // 8, device=device)

    def call() -> None:
        left * right
        F.silu(tensor)
        left.lerp_(right, 0.5)
        tensor.clone()

    return Work(call, num_bytes, 4, call_bytes)


def _new_block(call_bytes: float, device: torch.device) -> Work:
    """Make an operator that writes a new block."""
    call = partial(torch.ones, NEW_BLOCK_BYTES // 4, device=device)
    return Work(call, NEW_BLOCK_BYTES, 1, call_bytes)


def _attention(
    shape: tuple[int, ...], is_causal: bool, dtype: torch.dtype, call_flops: float, device: torch.device
) -> Work:
    query, key, value = torch.randn(3, *shape, device=device).to(dtype)
    call = partial(F.scaled_dot_product_attention, query, key, value, is_causal=is_causal)
    return Work(call, _attention_flops(shape, is_causal), 1, call_flops)


def _attention_backward(
    shape: tuple[int, ...], is_causal: bool, dtype: torch.dtype, call_flops: float, device: torch.device
) -> Work:
    inputs = [tensor.requires_grad_() for tensor in torch.randn(3, *shape, device=device).to(dtype).unbind()]
    query, key, value = inputs
    output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    call = partial(torch.autograd.grad, output, inputs, torch.ones_like(output), retain_graph=True)
    return Work(call, _attention_flops(shape, is_causal) * 5 // 2, 1, call_flops)


def _attention_flops(shape: tuple[int, ...], is_causal: bool) -> int:
    """Return floating point operations of attention's forward; causal attention has half of them, as in recordings."""
    batch, heads, sequence, head_dim = shape
    return (2 if is_causal else 4) * batch * heads * sequence * sequence * head_dim


def _host_work(device: torch.device) -> Work:
    """Make forward and backward of a chain of small modules, which the device runs faster than the host issues them."""
    layers = [layer for _ in range(HOST_LAYERS) for layer in (torch.nn.Linear(64, 64, device=device), torch.nn.SiLU())]
    model, inputs = torch.nn.Sequential(*layers), torch.randn(64, 64, device=device)

    def call() -> None:
        torch.autograd.grad(model(inputs).sum(), [*model.parameters()])

    # Per layer addmm and silu, their gradients and those of weight and bias, except the first input's; then the sum and
    # its gradient of ones.
    num_operators = 6 * HOST_LAYERS - 1 + 2
    return Work(call, 1, num_operators, 4 * num_operators)


def _overlap(part: str, device: torch.device) -> Work:
    """Make matmuls, all-reduces of all ranks, or both at the same time."""
    left, right = torch.randn(2, OVERLAP_SIDE, OVERLAP_SIDE, device=device).to(torch.bfloat16)
    payload = torch.zeros(OVERLAP_BYTES // 4, device=device)
    num_messages, num_matmuls = OVERLAP_MESSAGES * (part != COMPUTE), OVERLAP_MATMULS * (part != COMMUNICATION)

    def call() -> None:
        works: list[Any] = [dist.all_reduce(payload, async_op=True) for _ in range(num_messages)]
        for _ in range(num_matmuls):
            torch.mm(left, right)
        for work in works:
            work.wait()

    return Work(call, 1, 1, 1)


def _compute_spec(what: str, size: str, make: Callable[[torch.device], Work], context: RankContext) -> CaseSpec:
    case = Case(f"compute/{what}/{size}", "compute", {"what": what, "size": size})
    return CaseSpec(case, partial(_open_work, make, context, what == "overlap"))


@contextlib.contextmanager
def _open_work(
    make: Callable[[torch.device], Work], context: RankContext, starts_together: bool
) -> Iterator[OpenedCase]:
    work, starts_on = make(context.device), dist.group.WORLD if starts_together else None
    repeats = max(round(work.most / work.amount / work.num_operators), 1)
    num_operators, mesh_dim = repeats * work.num_operators, "x".join(context.mesh_dims)
    yield _repeated(work.call, repeats, work.amount, num_operators, context.mesh.size(), mesh_dim, starts_on)


def _collective_spec(
    op: str, lies: str, group_size: int, stride: int, size_bytes: int, context: RankContext
) -> CaseSpec:
    params = {"what": "collective", "op": op, "group_size": group_size, "size_bytes": size_bytes}
    case = Case(f"compute/{op}/{lies or group_size}/{size_bytes}", "compute", {**params, "lies": lies})
    return CaseSpec(case, partial(_open_collective, op, group_size, stride, size_bytes, context))


@cache
def _strided_group(group_size: int, stride: int, world_size: int) -> Any:
    """Return this rank's group of `group_size` ranks, `stride` apart; collective, made once per process."""
    groups = [list(group) for group in groups_of(group_size, stride, world_size)]
    return dist.new_subgroups_by_enumeration(groups)[0] if len(groups) > 1 else dist.group.WORLD


@contextlib.contextmanager
def _open_collective(
    op: str, group_size: int, stride: int, size_bytes: int, context: RankContext
) -> Iterator[OpenedCase]:
    group = _strided_group(group_size, stride, context.mesh.size())
    sizes = sizes_of(op, size_bytes, "f32", group_size)
    inputs = torch.zeros(sizes.given, device=context.device)
    output = inputs if op in IN_PLACE else torch.zeros(sizes.got, device=context.device)
    repeats = min(max(CALL_PAYLOAD_BYTES // size_bytes, 1), MOST_REPEATS)
    call, num_bytes = partial(OPERATIONS[op], output, inputs, group), sizes.total * DTYPE_BYTES["f32"]
    yield _repeated(call, repeats, num_bytes, repeats, group_size, f"groups of {group_size}", group)


def _repeated(
    call: Callable[[], object],
    repeats: int,
    amount: int,
    num_operators: int,
    group_size: int,
    mesh_dim: str,
    starts_on: Any = None,
) -> OpenedCase:
    def run(_: object) -> None:
        for _ in range(repeats):
            call()

    counters = {"amount": amount, "repeats": num_operators}
    fields = {"group_size": group_size, "mesh_dim": mesh_dim, "counters": counters}
    return OpenedCase(run, lambda: None, fields=fields, starts_on=starts_on)
