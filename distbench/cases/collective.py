"""Collectives over one mesh dim, all of its groups at once, on data tagged with rank and offset."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distbench.ranks.case_protocol import CaseSpec, OpenedCase, first_difference
from distbench.ranks.context import TORCH_DTYPES, RankContext
from distbench.records.bus_bandwidth import busbw_factor
from distbench.records.run_file import DTYPE_BYTES, Case
from distbench.redistribute.expected_shards import tagged
from distbench.spec import Scenario, UserError
from distbench.torch_private import BACKEND_OPS

Operation = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]

# torch 2.13 renamed the single-tensor forms; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


OPERATIONS: dict[str, Operation] = {
    "all_gather": lambda output, given, group: _all_gather(output, given, group=group),
    "reduce_scatter": lambda output, given, group: _reduce_scatter(output, given, group=group),
    "all_to_all": lambda output, given, group: dist.all_to_all_single(output, given, group=group),
    "all_reduce": lambda output, _, group: dist.all_reduce(output, group=group),
    "broadcast": lambda output, _, group: dist.broadcast(output, group=group, group_src=0),
}
IN_PLACE = ("all_reduce", "broadcast")
REDUCING = ("all_reduce", "reduce_scatter")


class Sizes(NamedTuple):
    """Numbers of elements of a case's buffers: of S, of a rank's input and of its output."""

    total: int
    given: int
    got: int


def sizes_of(op: str, size_bytes: int, dtype: str, group_size: int) -> Sizes:
    """Return the numbers of elements for S bytes, rounded down to a multiple of the group's size as in nccl-tests."""
    total = max(size_bytes // DTYPE_BYTES[dtype] // group_size, 1) * group_size
    share = total // group_size
    return Sizes(total, given=share if op == "all_gather" else total, got=share if op == "reduce_scatter" else total)


def tag_period(op: str, group_size: int) -> int:
    """Return the prime period of tags whose sum over `group_size` ranks is exact in bfloat16 (integers up to 256).

    Above 51 ranks no period of 5 or more gives an exact sum, and the check allows for rounding.
    """
    limit = 256 // group_size + 1 if op in REDUCING else 251
    return next(prime for prime in (251, 127, 83, 61, 41, 31, 23, 17, 13, 11, 7, 5) if prime <= limit or prime == 5)


def tag(op: str, rank: int, numel: int, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the input of `rank` of a group: element i is (i + 3 rank) mod a prime, to show a wrong rank or offset."""
    return tagged((numel,), dtype, tag_period(op, group_size), shift=3 * rank)


def expected(op: str, rank: int, sizes: Sizes, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the expected output of `rank` of the group, computed from the tags alone."""
    give = partial(tag, op, group_size=group_size, dtype=dtype)
    share = sizes.total // group_size
    if op == "all_gather":
        return torch.cat([give(other_rank, share) for other_rank in range(group_size)])
    if op == "all_to_all":
        own_part = slice(rank * share, (rank + 1) * share)
        return torch.cat([give(other_rank, sizes.total)[own_part] for other_rank in range(group_size)])
    if op == "broadcast":
        return give(0, sizes.total)
    tags = (tag(op, other_rank, sizes.total, group_size, torch.float32) for other_rank in range(group_size))
    total = sum(tags, torch.zeros(sizes.total, dtype=torch.float32))
    if op == "reduce_scatter":
        total = total[rank * share : (rank + 1) * share]
    return total.to(dtype)


def collective_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield a case per op, dtype, mesh dim and size of the scenario's sweeps; UserError for an unknown op or dtype."""
    for sweep in scenario.collectives:
        for label, names, known_names in (("collective", sweep.ops, OPERATIONS), ("dtype", sweep.dtypes, TORCH_DTYPES)):
            if unknown := [name for name in names if name not in known_names]:
                raise UserError(f"{label} {unknown[0]!r} is unknown; use {', '.join(known_names)}")
        for size in sweep.sizes_bytes:
            if type(size) is not int or size < 1:
                raise UserError(f"collective size {size!r} is not a number of bytes; use whole numbers, 1 or more")
        for op, dtype, mesh_dim in itertools.product(sweep.ops, sweep.dtypes, context.mesh_dims):
            for size_bytes in sweep.sizes_bytes:
                sizes = sizes_of(op, size_bytes, dtype, context.size(mesh_dim))
                params = {"op": op, "dtype": dtype, "mesh_dim": mesh_dim, "size_bytes": size_bytes}
                case = Case(f"collective/{dtype}[{sizes.total}]/{op}/{mesh_dim}", "collective", params)
                yield CaseSpec(case, partial(_open, op, dtype, mesh_dim, sizes, context))


@contextlib.contextmanager
def _open(op: str, dtype: str, mesh_dim: str, sizes: Sizes, context: RankContext) -> Iterator[OpenedCase]:
    group = context.mesh.get_group(mesh_dim)
    rank, group_size = dist.get_rank(group), dist.get_world_size(group)
    torch_dtype = TORCH_DTYPES[dtype]
    mine = tag(op, rank, sizes.given, group_size, torch_dtype).to(context.device)
    output = mine.clone() if op in IN_PLACE else torch.zeros(sizes.got, dtype=torch_dtype, device=context.device)
    operation = OPERATIONS[op]

    def check() -> str | None:
        output.copy_(mine if op in IN_PLACE else torch.zeros_like(output))
        operation(output, mine, group)
        return _difference(output.cpu(), expected(op, rank, sizes, group_size, torch_dtype), op, group_size)

    payload_bytes = sizes.total * DTYPE_BYTES[dtype]
    fields: dict[str, Any] = {
        "payload_bytes": payload_bytes,
        "wire_bytes": round(payload_bytes * busbw_factor(op, group_size)),
        "group_size": group_size,
        "mesh_dim": mesh_dim,
        "backend_op": BACKEND_OPS.get((context.backend, op), op),
    }
    yield OpenedCase(lambda _: operation(output, mine, group), check, fields=fields, starts_on=group)


def _difference(got: torch.Tensor, expected_part: torch.Tensor, op: str, group_size: int) -> str | None:
    exact = op not in REDUCING or group_size * (tag_period(op, group_size) - 1) <= 256
    if not exact and torch.allclose(got.float(), expected_part.float(), rtol=group_size * 2.0**-8, atol=0):
        return None
    return first_difference(got, expected_part)
