"""The steps that redistributions are made of, each timed alone as DTensor runs it: what a cost profile is fitted to."""

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from functools import partial as bind
from typing import Any

import torch
import torch.distributed as dist

from distbench.costmodel.lines import DIRECT, NATIVE_ALL_TO_ALL
from distbench.planning import parse_state, plan_exchange
from distbench.runs.run_file import DTYPE_BYTES, Case
from distbench.spec import Calibration, Scenario, UserError
from distbench.worker.cases.redistribution import dtensor_of
from distbench.worker.rank.dtypes import TORCH_DTYPES, shape_text
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase, first_difference
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.redistribute.expected_shards import cut, parse_placement, tagged
from distbench.worker.redistribute.planners import exchange_load, executed_as, planned_redistribution
from distbench.worker.torch_internals import partition

# Op to the placements of its mesh dim before and after: tensor dim 0 is contiguous, tensor dim 1 must be copied round.
STEPS = {
    "all_gather": (("S(0)", "R"), ("S(1)", "R")),
    "reduce_scatter": (("P(sum)", "S(0)"), ("P(sum)", "S(1)")),
    "all_reduce": (("P(sum)", "R"),),
    "all_to_all": (("S(0)", "S(1)"), ("S(1)", "S(0)")),
    NATIVE_ALL_TO_ALL: (("S(0)", "S(1)"), ("S(1)", "S(0)")),
    "cut": (("R", "S(0)"), ("R", "S(1)")),
    "partition": (("R", "P(sum)"),),
}
Placements = tuple[str, ...]


def calibration_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Every step over every mesh dim of two ranks or more, and the exchange, at every size; in random order.

    All groups of a mesh dim run at once. The order is random so that a machine that grows slower or faster over the
    minutes does not favour an op or a size.

    Raises:
        UserError: an unknown dtype, or a mesh on which nobody speaks.
    """
    for sweep in scenario.calibrations:
        if sweep.dtype not in TORCH_DTYPES:
            raise UserError(f"dtype {sweep.dtype!r} is unknown; use {', '.join(TORCH_DTYPES)}")
        if context.mesh.size() == 1:
            raise UserError("one rank has nobody to speak to; give a mesh of two ranks or more, as --mesh tp=2")
        case_specs = list(_cases(sweep, context))
        random.Random(context.seed).shuffle(case_specs)
        yield from case_specs


def _cases(sweep: Calibration, context: RankContext) -> Iterator[CaseSpec]:
    for size_bytes in (*sweep.sizes_bytes, *sweep.held_out_bytes):
        shape = square_of(size_bytes, DTYPE_BYTES[sweep.dtype], context.mesh.size())
        held_out = size_bytes in sweep.held_out_bytes
        for number, mesh_dim in enumerate(context.mesh_dims):
            if context.size(mesh_dim) == 1:
                continue
            for op, pairs in STEPS.items():
                # Only on CPU does DTensor run anything else than the native one.
                if op != NATIVE_ALL_TO_ALL or context.device.type == "cpu":
                    for source, target in pairs:
                        sides = (_along(number, source, context), _along(number, target, context))
                        yield _case_spec(sweep.dtype, shape, op, mesh_dim, sides, held_out, context)
        for pair in exchange_pairs(len(context.mesh_dims)):
            if not _communicates(pair, shape, context):
                continue
            yield _case_spec(sweep.dtype, shape, DIRECT, "x".join(context.mesh_dims), pair, held_out, context)


def square_of(size_bytes: int, itemsize: int, num_ranks: int) -> tuple[int, int]:
    """The shape nearest to a square of this size whose sides any set of mesh dims cuts evenly."""
    side = max(round(math.sqrt(size_bytes / itemsize) / num_ranks), 1) * num_ranks
    other = max(round(size_bytes / itemsize / side / num_ranks), 1) * num_ranks
    return side, other


def exchange_pairs(mesh_ndim: int) -> list[tuple[Placements, Placements]]:
    """Whole-mesh pairs that differ in how much each rank receives, and in how contiguous it is."""
    uniform = [(text,) * mesh_ndim for text in ("S(0)", "S(1)", "R")]
    pairs = [(before, after) for before, after in itertools.permutations(uniform, 2) if before != uniform[2]]
    if mesh_ndim > 1:
        rest = mesh_ndim - 1
        pairs.append((("S(0)", *["R"] * rest), (*["R"] * rest, "S(1)")))
        pairs.append((("S(0)", *["S(1)"] * rest), ("S(1)", *["S(0)"] * rest)))
    return pairs


def _communicates(pair: tuple[Placements, Placements], shape: tuple[int, int], context: RankContext) -> bool:
    source, target = (parse_state("".join(placements), len(shape)) for placements in pair)
    return bool(plan_exchange(source, target, shape, context.mesh_shape).transfers)


def _along(number: int, text: str, context: RankContext) -> Placements:
    return tuple(text if dim == number else "R" for dim in range(len(context.mesh_dims)))


def _case_spec(
    dtype: str,
    shape: tuple[int, int],
    op: str,
    mesh_dim: str,
    sides: tuple[Placements, Placements],
    held_out: bool,
    context: RankContext,
) -> CaseSpec:
    source, target = map("".join, sides)
    params = {
        "op": op,
        "mesh_dim": mesh_dim,
        "source": source,
        "target": target,
        "dtype": dtype,
        "shape": list(shape),
        "held_out": held_out,
    }
    case = Case(f"calibrate/{dtype}{shape_text(shape)}/{op}/{mesh_dim}/{source}->{target}", "calibrate", params)
    opened = _partition if op == "partition" else _exchange if op == DIRECT else _step
    return CaseSpec(case, bind(opened, TORCH_DTYPES[dtype], shape, op, mesh_dim, sides, context))


@contextlib.contextmanager
def _step(
    dtype: torch.dtype, shape: Any, op: str, mesh_dim: str, sides: tuple[Placements, Placements], context: RankContext
) -> Iterator[OpenedCase]:
    full = tagged(shape, dtype)
    after = [parse_placement(text) for text in sides[1]]
    native = op == NATIVE_ALL_TO_ALL
    with planned_redistribution("greedy", dtensor_of(full, sides[0], context), after, context, native) as planned:
        (step,) = planned.steps
        fields = _fields(step.payload_numel * dtype.itemsize, step.num_copies, step.group_size, mesh_dim)
        local = {} if step.op is None else {"backend_op": executed_as(op, context, native)}

        def check() -> str | None:
            wanted = cut(full, after, context.mesh_shape, context.coordinate)
            return first_difference(planned.local_result().cpu(), wanted)

        yield OpenedCase(lambda _: planned.call(), check, fields={**fields, **local, "wire_bytes": planned.wire_bytes})


@contextlib.contextmanager
def _exchange(
    dtype: torch.dtype, shape: Any, op: str, mesh_dim: str, sides: tuple[Placements, Placements], context: RankContext
) -> Iterator[OpenedCase]:
    full = tagged(shape, dtype)
    after = [parse_placement(text) for text in sides[1]]
    source = dtensor_of(full, sides[0], context)
    payload_numel, num_copies = exchange_load(source, after, context)
    with planned_redistribution(DIRECT, source, after, context, native=True) as planned:
        fields = _fields(payload_numel * dtype.itemsize, num_copies, context.mesh.size(), mesh_dim)
        fields |= {"wire_bytes": planned.wire_bytes, "backend_op": "all_to_all"}

        def check() -> str | None:
            wanted = cut(full, after, context.mesh_shape, context.coordinate)
            return first_difference(planned.local_result().cpu(), wanted)

        yield OpenedCase(lambda _: planned.call(), check, fields=fields)


@contextlib.contextmanager
def _partition(
    dtype: torch.dtype, shape: Any, op: str, mesh_dim: str, sides: tuple[Placements, Placements], context: RankContext
) -> Iterator[OpenedCase]:
    full = tagged(shape, dtype).to(context.device)
    number = context.mesh_dims.index(mesh_dim)

    def check() -> str | None:
        total = partition(full, context.mesh, number).clone()
        dist.all_reduce(total, group=context.mesh.get_group(mesh_dim))
        close = torch.allclose(total, full, rtol=1e-2)
        return None if close else first_difference(total.cpu(), full.cpu())

    fields = _fields(full.numel() * dtype.itemsize, 0, context.size(mesh_dim), mesh_dim)
    yield OpenedCase(lambda _: partition(full, context.mesh, number), check, fields=fields)


def _fields(payload_bytes: int, num_copies: float, group_size: int, mesh_dim: str) -> dict[str, Any]:
    return {
        "payload_bytes": payload_bytes,
        "group_size": group_size,
        "mesh_dim": mesh_dim,
        "wire_bytes": 0,
        "backend_op": "none",
        "counters": {"num_copies": num_copies},
    }
