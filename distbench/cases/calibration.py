"""The steps that redistributions are made of, each timed alone as DTensor runs it: what a cost profile is fitted to."""

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from distbench.cases.redistribution import Experiment, FieldsOf, open_pair, opened
from distbench.planning.cost_profile import DIRECT, NATIVE_ALL_TO_ALL, PARTITION, ZERO_FILL
from distbench.planning.direct_exchange import Exchange, plan_exchange
from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import TORCH_DTYPES, RankContext, shape_text
from distbench.records.run_file import DTYPE_BYTES, Case
from distbench.redistribute.expected_shards import Pair
from distbench.redistribute.planners import PlannedRedistribution, check_planners, executed_as
from distbench.spec import Calibration, Scenario, UserError
from distbench.spec.devices import is_accelerator
from distbench.spec.mesh import flattened
from distbench.torch_private import ZERO_FILLS, lacks, partition

# Op to the placements of its mesh dim before and after: tensor dim 0 is contiguous, tensor dim 1 must be copied round.
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


def calibration_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Every step over every mesh dim of two ranks or more, and the exchange, at every size; in random order.

    On several hosts also over groups that lie on them otherwise than those of any mesh dim here.

    All groups of a mesh dim run at once. The order is random so that a machine that grows slower or faster over the
    minutes does not favour an op or a size. UserError for an unknown dtype, or a mesh of one rank.
    """
    for sweep in scenario.calibrations:
        check_planners((), sweep.dtype, context.profile)
        if context.mesh.size() == 1:
            raise UserError("one rank has nobody to communicate with; give a mesh of two ranks or more, as --mesh tp=2")
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
    """Where there are several hosts: a mesh dim, called by its shape, and its mesh, for groups that this mesh lacks."""
    if len(set(context.hosts)) < 2:
        return []
    num_ranks, contexts = len(context.hosts), []
    mesh = dict(zip(context.mesh_dims, context.mesh_shape, strict=True))
    for name, size, stride in flattened(mesh, context.hosts):
        sizes = {"outer": num_ranks // size // stride, name: size, "inner": stride}
        sizes = {dim: count for dim, count in sizes.items() if count > 1}
        other_mesh = init_device_mesh(context.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        contexts.append((name, replace(context, mesh=other_mesh)))
    return contexts


def _pairs(shape: tuple[int, int], context: RankContext) -> Iterator[tuple[str, str, Pair]]:
    """(op, mesh dim, pair) of every step over each mesh dim of two ranks or more, and exchanges that communicate."""
    for mesh_dim in context.mesh_dims:
        yield from _steps(mesh_dim, shape, context)
    for source, target in exchange_sides(len(context.mesh_dims)):
        pair = Pair.of(source, target, shape)
        if _exchange(pair, context).transfers:
            yield DIRECT, "x".join(context.mesh_dims), pair


def _steps(mesh_dim: str, shape: tuple[int, int], context: RankContext) -> Iterator[tuple[str, str, Pair]]:
    """(op, mesh dim, pair) of every step over a mesh dim, if that has two ranks or more."""
    number = context.mesh_dims.index(mesh_dim)
    if context.size(mesh_dim) > 1:
        before, after = "R" * number, "R" * (len(context.mesh_dims) - number - 1)
        for op, sides in STEPS.items():
            # Only on CPU does DTensor run anything else than the native one.
            if op == NATIVE_ALL_TO_ALL and is_accelerator(context.device.type):
                continue
            if op != ZERO_FILL or lacks(ZERO_FILLS) is None:
                for source, target in sides:
                    yield op, mesh_dim, Pair.of(before + source + after, before + target + after, shape)


def square_of(size_bytes: int, itemsize: int, num_ranks: int) -> tuple[int, int]:
    """The shape nearest to a square of this size whose sides any set of mesh dims shards evenly."""
    side = max(round(math.sqrt(size_bytes / itemsize) / num_ranks), 1) * num_ranks
    other_side = max(round(size_bytes / itemsize / side / num_ranks), 1) * num_ranks
    return side, other_side


def exchange_sides(mesh_ndim: int) -> list[tuple[str, str]]:
    """Whole-mesh layouts before and after that differ in how much each rank receives, copies and adds.

    From Partial only such as are moved by one exchange, whatever is predicted.
    """
    rows, columns, replicated = "S(0)" * mesh_ndim, "S(1)" * mesh_ndim, "R" * mesh_ndim
    sides = [
        (before, after)
        for before, after in itertools.permutations((rows, columns, replicated), 2)
        if before != replicated
    ]
    sides += [("P(sum)" * mesh_ndim, after) for after in (rows, columns)]
    if mesh_ndim > 1:
        num_others = mesh_ndim - 1
        sides += [
            ("S(0)" + "R" * num_others, "R" * num_others + "S(1)"),
            ("S(0)" + "S(1)" * num_others, "S(1)" + "S(0)" * num_others),
        ]
        sides += [("P(sum)" + "S(0)" * num_others, "S(1)" + "S(0)" * num_others)]
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
    """What the row of a step, or of the direct exchange, says besides its times."""
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
