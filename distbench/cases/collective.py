"""Collectives over one mesh dim, all of its groups at once, on data tagged with rank and offset; other ways of a
collective, and uneven all-to-alls.
"""

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distbench.ranks.case_protocol import CaseSpec, OpenedCase, first_difference
from distbench.ranks.context import RankContext
from distbench.ranks.dtypes import TORCH_DTYPES
from distbench.records.bus_bandwidth import busbw_factor
from distbench.records.run_file import DTYPE_BYTES, Case
from distbench.redistribute.expected_shards import tagged
from distbench.spec import Collectives, Scenario, UserError
from distbench.spec.devices import WAY_BACKENDS, is_accelerator
from distbench.spec.expert_loads import Matrix, matrix_of, traffic_of
from distbench.torch_private import BACKEND_OPS, Skipped, coalesced

Operation = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]

# torch 2.13 renamed the single-tensor forms; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _parts(whole: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return a rank's part of a buffer for each rank of the group."""
    return list(whole.chunk(dist.get_world_size(group)))


def _scatter(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    parts = _parts(given, group) if dist.get_rank(group) == 0 else None
    dist.scatter(output, parts, group=group, group_src=0)


def _gather(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    parts = _parts(output, group) if dist.get_rank(group) == 0 else None
    dist.gather(given, parts, group=group, group_dst=0)


def _to_next(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next rank and receive from the previous rank, as nccl-tests' sendrecv."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        output.copy_(given)
        return
    sent = dist.P2POp(dist.isend, given, group=group, group_peer=(rank + 1) % size)
    got = dist.P2POp(dist.irecv, output, group=group, group_peer=(rank - 1) % size)
    for work in dist.batch_isend_irecv([sent, got]):
        work.wait()


OPERATIONS: dict[str, Operation] = {
    "all_gather": lambda output, given, group: _all_gather(output, given, group=group),
    "reduce_scatter": lambda output, given, group: _reduce_scatter(output, given, group=group),
    "all_to_all": lambda output, given, group: dist.all_to_all_single(output, given, group=group),
    "all_reduce": lambda output, _, group: dist.all_reduce(output, group=group),
    "broadcast": lambda output, _, group: dist.broadcast(output, group=group, group_src=0),
    "scatter": _scatter,
    "gather": _gather,
    "send_recv": _to_next,
}
IN_PLACE = ("all_reduce", "broadcast")
REDUCING = ("all_reduce", "reduce_scatter")
UNEVEN = "all_to_all_v"
PLAIN = "plain"
NUM_COALESCED = 4


def _messages(outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send one tensor to each rank and receive one from each, by messages; empty tensors are not sent."""
    rank, ops = dist.get_rank(group), []
    for peer, (output, sent) in enumerate(zip(outputs, given, strict=True)):
        if peer == rank:
            output.copy_(sent)
            continue
        if sent.numel():
            ops.append(dist.P2POp(dist.isend, sent, group=group, group_peer=peer))
        if output.numel():
            ops.append(dist.P2POp(dist.irecv, output, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


def _all_parts(given: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the part for this rank of every rank's buffer, (ranks, share), by a native all-to-all."""
    parts = torch.empty_like(given)
    dist.all_to_all_single(parts, given, group=group)
    return parts.unflatten(0, (dist.get_world_size(group), -1))


def _reduced_by_rs_ag(output: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup) -> None:
    share = output.new_empty(output.numel() // dist.get_world_size(group))
    _reduce_scatter(share, output, group=group)
    _all_gather(output, share, group=group)


def _reduced_by_messages(output: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup) -> None:
    every = output.new_empty(dist.get_world_size(group), output.numel())
    _messages(every.unbind(), [output] * len(every), group)
    torch.sum(every, 0, out=output)


def _reduced_by_all_to_all(output: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup) -> None:
    _all_gather(output, _all_parts(output, group).sum(0), group=group)


def _reduced_coalesced(output: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup) -> None:
    with coalesced(group):
        for part in output.chunk(NUM_COALESCED):
            dist.all_reduce(part, group=group)


def _scattered_by_all_to_all(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    torch.sum(_all_parts(given, group), 0, out=output)


def _scattered_by_all_reduce(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    whole = given.clone()
    dist.all_reduce(whole, group=group)
    output.copy_(_parts(whole, group)[dist.get_rank(group)])


def _gathered_by_all_to_all(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(output, given.repeat(dist.get_world_size(group)), group=group)


def _exchanged_by_all_gather(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    size = dist.get_world_size(group)
    every = given.new_empty(size * given.numel())
    _all_gather(every, given, group=group)
    torch.index_select(every.view(size, size, -1), 1, torch.tensor([dist.get_rank(group)], device=given.device),
                       out=output.view(size, 1, -1))  # fmt: skip


def _broadcast_by_scatter(output: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup) -> None:
    share = output.new_empty(output.numel() // dist.get_world_size(group))
    _scatter(share, output, group)
    _all_gather(output, share, group=group)


def _broadcast_by_messages(output: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup) -> None:
    is_root, nothing = dist.get_rank(group) == 0, output.new_empty(0)
    others = [output if is_root else nothing] * (dist.get_world_size(group) - 1)
    sources = [nothing if is_root else output, *[nothing] * len(others)]
    _messages(sources, [nothing, *others], group)


# Collective to its ways besides plain. Own buffers are part of a way's time.
WAYS: dict[str, dict[str, Operation]] = {
    "all_reduce": {
        "rs_ag": _reduced_by_rs_ag,
        "send_recv": _reduced_by_messages,
        "all_to_all": _reduced_by_all_to_all,
        "coalesced": _reduced_coalesced,
    },
    "all_gather": {
        "send_recv": lambda output, given, group: _messages(
            _parts(output, group), [given] * dist.get_world_size(group), group
        ),
        "all_to_all": _gathered_by_all_to_all,
    },
    "reduce_scatter": {"all_to_all": _scattered_by_all_to_all, "all_reduce": _scattered_by_all_reduce},
    "all_to_all": {
        "send_recv": lambda output, given, group: _messages(_parts(output, group), _parts(given, group), group),
        "all_gather": _exchanged_by_all_gather,
    },
    "broadcast": {"scatter_ag": _broadcast_by_scatter, "send_recv": _broadcast_by_messages},
}


class Sizes(NamedTuple):
    """Numbers of elements of a case's buffers: of S, of a rank's input and of its output."""

    total: int
    given: int
    got: int


def sizes_of(op: str, size_bytes: int, dtype: str, group_size: int) -> Sizes:
    """Return the numbers of elements for S bytes, rounded down to a multiple of the group's size as in nccl-tests."""
    total = max(size_bytes // DTYPE_BYTES[dtype] // group_size, 1) * group_size
    share = total // group_size
    given = share if op in ("all_gather", "gather") else total
    return Sizes(total, given, got=share if op in ("reduce_scatter", "scatter") else total)


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
    if op in ("all_gather", "gather"):
        whole = torch.cat([give(other_rank, share) for other_rank in range(group_size)])
        return whole if op == "all_gather" or rank == 0 else torch.zeros_like(whole)
    if op == "all_to_all":
        own_part = slice(rank * share, (rank + 1) * share)
        return torch.cat([give(other_rank, sizes.total)[own_part] for other_rank in range(group_size)])
    if op in ("broadcast", "scatter"):
        whole = give(0, sizes.total)
        return whole if op == "broadcast" else whole[rank * share : (rank + 1) * share]
    if op == "send_recv":
        return give((rank - 1) % group_size, sizes.total)
    tags = (tag(op, other_rank, sizes.total, group_size, torch.float32) for other_rank in range(group_size))
    total = sum(tags, torch.zeros(sizes.total, dtype=torch.float32))
    if op == "reduce_scatter":
        total = total[rank * share : (rank + 1) * share]
    return total.to(dtype)


def collective_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield a case per op, dtype, mesh dim of more than one rank, size and way of the scenario's sweeps.

    Raises:
        UserError: an op, dtype, way or load is unknown, or a traffic matrix is not valid.
    """
    for sweep in scenario.collectives:
        known_ops = (*OPERATIONS, UNEVEN)
        for label, names, known_names in (("collective", sweep.ops, known_ops), ("dtype", sweep.dtypes, TORCH_DTYPES)):
            if unknown := [name for name in names if name not in known_names]:
                raise UserError(f"{label} {unknown[0]!r} is unknown; use {', '.join(known_names)}")
        for size in sweep.sizes_bytes:
            if type(size) is not int or size < 1:
                raise UserError(f"collective size {size!r} is not a number of bytes; use whole numbers, 1 or more")
        # One rank alone does not communicate; a mesh of one rank measures the cost of a call.
        mesh_dims = [mesh_dim for mesh_dim in context.mesh_dims if context.size(mesh_dim) > 1] or context.mesh_dims
        for op, dtype, mesh_dim in itertools.product(sweep.ops, sweep.dtypes, mesh_dims):
            for size_bytes in sweep.sizes_bytes:
                if op == UNEVEN:
                    yield _uneven_case(sweep, dtype, mesh_dim, size_bytes, context)
                else:
                    yield from _even_cases(sweep, op, dtype, mesh_dim, size_bytes, context)


def _even_cases(
    sweep: Collectives, op: str, dtype: str, mesh_dim: str, size_bytes: int, context: RankContext
) -> Iterator[CaseSpec]:
    sizes = sizes_of(op, size_bytes, dtype, context.size(mesh_dim))
    params = {"op": op, "dtype": dtype, "mesh_dim": mesh_dim, "size_bytes": size_bytes}
    case_id = f"collective/{dtype}[{sizes.total}]/{op}/{mesh_dim}"
    opened = partial(_open, op, dtype, mesh_dim, sizes, context)
    if not sweep.ways:
        yield CaseSpec(Case(case_id, "collective", params), partial(opened, OPERATIONS[op]))
    for name, way in _ways_of(sweep, op).items():
        case = Case(f"{case_id}/{name}", "collective", {**params, "variant": name})
        yield CaseSpec(case, partial(opened, way, name), group=case_id)


def _ways_of(sweep: Collectives, op: str) -> dict[str, Operation]:
    """Return the sweep's ways of an op by name. Raise UserError for an unknown way, and an own way without effect."""
    built_in = {PLAIN: OPERATIONS[op], **WAYS.get(op, {}), **dict.fromkeys(WAY_BACKENDS, OPERATIONS[op])}
    for name in sweep.own_ways:
        if name in built_in:
            raise UserError(f"own_ways has {name!r}, which is a built-in way of {op}; use another name")
        if name not in sweep.ways:
            raise UserError(f"own_ways has {name!r}, but ways does not; add {name!r} to ways")
    known = {**built_in, **sweep.own_ways}
    if unknown := [name for name in sweep.ways if name not in known]:
        raise UserError(f"way {unknown[0]!r} of {op} is unknown; use {', '.join(known)}")
    return {name: known[name] for name in sweep.ways}


@contextlib.contextmanager
def _open(
    op: str, dtype: str, mesh_dim: str, sizes: Sizes, context: RankContext, operation: Operation, way: str = ""
) -> Iterator[OpenedCase]:
    group = context.mesh.get_group(mesh_dim)
    rank, group_size = dist.get_rank(group), dist.get_world_size(group)
    torch_dtype = TORCH_DTYPES[dtype]
    mine = tag(op, rank, sizes.given, group_size, torch_dtype).to(context.device)
    output = mine.clone() if op in IN_PLACE else torch.zeros(sizes.got, dtype=torch_dtype, device=context.device)
    used = _group_of_backend(way, group, context) if way in WAY_BACKENDS else group

    def check() -> str | None:
        output.copy_(mine if op in IN_PLACE else torch.zeros_like(output))
        returned = operation(output, mine, used)
        got = returned if way and returned is not None else output
        if not isinstance(got, torch.Tensor):
            advice = "return the result, or None with the result in `output`"
            return f"way {way!r} returned {type(got).__name__}; {advice}"
        return _difference(got.cpu(), expected(op, rank, sizes, group_size, torch_dtype), op, group_size)

    payload_bytes = sizes.total * DTYPE_BYTES[dtype]
    fields: dict[str, Any] = {
        "payload_bytes": payload_bytes,
        "wire_bytes": round(payload_bytes * busbw_factor(op, group_size)),
        "group_size": group_size,
        "mesh_dim": mesh_dim,
        "backend_op": BACKEND_OPS.get((context.backend, op), op) if way in ("", PLAIN) else op,
    }
    held_bytes = mine.nbytes + output.nbytes if way else None
    yield OpenedCase(
        lambda _: operation(output, mine, used),
        check,
        fields=fields,
        starts_on=group,
        stays_open=bool(way),
        held_bytes=held_bytes,
    )
    if used is not group:
        dist.destroy_process_group(used)


def _group_of_backend(name: str, group: dist.ProcessGroup, context: RankContext) -> dist.ProcessGroup:
    """Return a group of the same ranks over a backend of WAY_BACKENDS. Raise Skipped if this run cannot have it."""
    if not is_accelerator(context.device.type):
        raise Skipped(f"backend {name} needs an accelerator, but this run is on {context.device.type}")
    if name == "torchcomms" and importlib.util.find_spec(name) is None:
        raise Skipped(f"backend {name} needs the package {name}, which is not installed")
    if name != "torchcomms" and not dist.is_backend_available(name):
        raise Skipped(f"backend {name} is not in torch {torch.__version__}")
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend=name, use_local_synchronization=True)


def _uneven_case(sweep: Collectives, dtype: str, mesh_dim: str, size_bytes: int, context: RankContext) -> CaseSpec:
    num_ranks = context.size(mesh_dim)
    if other_ways := [*sweep.own_ways, *(name for name in sweep.ways if name != PLAIN)]:
        raise UserError(f"way {other_ways[0]!r} of {UNEVEN} is not valid; use only {PLAIN!r}, without own_ways")
    if sweep.matrix is not None:
        label = Path(sweep.matrix).name if isinstance(sweep.matrix, str) else "matrix"
        exchanges = [matrix_of(sweep.matrix, num_ranks)]
    else:
        label = sweep.load if not Path(sweep.load).suffix else Path(sweep.load).name
        # A row has at least one element, so a small size has fewer rows.
        most_tokens = max(1, size_bytes // DTYPE_BYTES[dtype] // max(1, sweep.top_k))
        num_tokens = min(sweep.num_tokens, most_tokens)
        exchanges = traffic_of(sweep.load, num_ranks, sweep.num_experts, sweep.top_k, num_tokens)
    # Loads are compared per exchange, so all of them need about equally many exchanges without a barrier.
    exchanges *= -(-sweep.num_exchanges // len(exchanges))
    params = {"op": UNEVEN, "dtype": dtype, "mesh_dim": mesh_dim, "size_bytes": size_bytes, "variant": label}
    group = f"collective/{dtype}[{size_bytes // DTYPE_BYTES[dtype]}]/{UNEVEN}/{mesh_dim}"
    case = Case(f"{group}/{label}", "collective", params)
    opened = partial(_open_uneven, exchanges, dtype, mesh_dim, size_bytes, context)
    return CaseSpec(case, opened, group=group, keeps_ranks=True)


@contextlib.contextmanager
def _open_uneven(
    exchanges: list[Matrix], dtype: str, mesh_dim: str, size_bytes: int, context: RankContext
) -> Iterator[OpenedCase]:
    group = context.mesh.get_group(mesh_dim)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    torch_dtype, itemsize = TORCH_DTYPES[dtype], DTYPE_BYTES[dtype]
    sent = [list(matrix[rank]) for matrix in exchanges]
    received = [[row[rank] for row in matrix] for matrix in exchanges]
    num_rows = sum(sum(map(sum, matrix)) for matrix in exchanges)
    width = max(1, round(size_bytes * num_ranks * len(exchanges) / num_rows / itemsize))

    def rows_of(sender: int) -> torch.Tensor:
        most = max(sum(matrix[sender]) for matrix in exchanges)
        return tag(UNEVEN, sender, most * width, num_ranks, torch_dtype).view(most, width)

    mine = rows_of(rank).to(context.device)
    output = torch.zeros(max(map(sum, received)), width, dtype=torch_dtype, device=context.device)
    calls: list[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]] = [
        (output[: sum(got)], mine[: sum(gave)], got, gave) for got, gave in zip(received, sent, strict=True)
    ]

    def call(_: object) -> None:
        for arguments in calls:
            dist.all_to_all_single(*arguments, group=group)

    def check() -> str | None:
        rows = [rows_of(sender) for sender in range(num_ranks)]
        for matrix, arguments in zip(exchanges, calls, strict=True):
            arguments[0].zero_()
            dist.all_to_all_single(*arguments, group=group)
            starts = [sum(matrix[sender][:rank]) for sender in range(num_ranks)]
            parts = [rows[sender][at : at + matrix[sender][rank]] for sender, at in enumerate(starts)]
            if problem := first_difference(arguments[0].cpu(), torch.cat(parts)):
                return problem
        return None

    totals = [[sum(column) for column in zip(*matrix, strict=True)] for matrix in exchanges]
    rows_sent, rows_received = (
        [sum(of_rank) for of_rank in zip(*by_exchange, strict=True)]
        for by_exchange in ([[*map(sum, matrix)] for matrix in exchanges], totals)
    )
    # The busiest rank of each exchange, not of all exchanges together: a hot set that moves has no busiest rank.
    most = [max(*map(sum, matrix), *received) for matrix, received in zip(exchanges, totals, strict=True)]
    away = [
        max(sum(line) - line[at] for lines in (matrix, zip(*matrix, strict=True)) for at, line in enumerate(lines))
        for matrix in exchanges
    ]
    fields = {
        "payload_bytes": round(num_rows / num_ranks * width * itemsize),
        "wire_bytes": sum(away) * width * itemsize,
        "group_size": num_ranks,
        "mesh_dim": mesh_dim,
        "backend_op": UNEVEN,
        "counters": {
            "rows_sent": rows_sent,
            "rows_received": rows_received,
            "max_over_mean": sum(most) * num_ranks / num_rows,
            "num_exchanges": len(exchanges),
        },
    }
    held_bytes = mine.nbytes + output.nbytes
    yield OpenedCase(call, check, fields=fields, starts_on=group, stays_open=True, held_bytes=held_bytes)


def _difference(got: torch.Tensor, expected_part: torch.Tensor, op: str, group_size: int) -> str | None:
    exact = op not in REDUCING or group_size * (tag_period(op, group_size) - 1) <= 256
    if got.dtype != expected_part.dtype:
        return f"the result has dtype {got.dtype}, expected {expected_part.dtype}"
    if (
        not exact
        and got.shape == expected_part.shape
        and torch.allclose(got.float(), expected_part.float(), rtol=group_size * 2.0**-8, atol=0)
    ):
        return None
    return first_difference(got, expected_part)
