"""Cases of the links between ranks: pairs at a time, groups of each mesh dim, and what each rank computes alone."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distbench.runs.run_file import DTYPE_BYTES, Case
from distbench.spec import Scenario
from distbench.worker.links.computing_cases import computing_cases
from distbench.worker.links.link_rounds import LinkRound, link_rounds
from distbench.worker.links.tcp_segments import Segments, segments_so_far
from distbench.worker.rank.dtypes import TORCH_DTYPES
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase, first_difference
from distbench.worker.rank.rank_context import RankContext

GROUP, MAX_PASSES = "links", 10
DTYPE, PERIOD = "f32", 251
# A message that takes long enough to tell bandwidth, and a product that takes long enough to tell a rank's speed.
SIZE_BYTES, MATMUL_SIZE = {"cpu": 1 << 20}, {"cpu": 512}
SIZE_BYTES_ELSEWHERE, MATMUL_SIZE_ELSEWHERE = 1 << 26, 4096
SMALL_BYTES = 4
# Of a turn: a stretch has a level of its own, which further samples do not tell.
SMALL_SAMPLES, LARGE_SAMPLES = 10, 2


def link_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """For each `Links`: two cases a round of pairs (a small message, a large one), one a mesh dim with several groups,
    and those of what each rank computes; all take turns."""
    for links in scenario.links:
        kind = context.device.type
        hosts = context.gather(os.uname().nodename)
        size_bytes = links.size_bytes or SIZE_BYTES.get(kind, SIZE_BYTES_ELSEWHERE)
        for number, one in enumerate(link_rounds(hosts)):
            for size in (SMALL_BYTES, size_bytes):
                yield _round_case(number, one, size, hosts, context)
        for mesh_dim in context.mesh_dims:
            if 1 < context.size(mesh_dim) < context.mesh.size():
                yield _group_case(mesh_dim, size_bytes, hosts, context)
        matmul_size = links.matmul_size or MATMUL_SIZE.get(kind, MATMUL_SIZE_ELSEWHERE)
        yield from computing_cases(matmul_size, links.burst_s, hosts, GROUP, MAX_PASSES, context)


def _spec(case: Case, opener: Any, most_samples: int) -> CaseSpec:
    return CaseSpec(case, opener, GROUP, MAX_PASSES, keeps_ranks=True, most_samples=most_samples)


def _round_case(number: int, one: LinkRound, size_bytes: int, hosts: list[str], context: RankContext) -> CaseSpec:
    numel = size_bytes // DTYPE_BYTES[DTYPE]
    params = {
        "op": "send_recv",
        "dtype": DTYPE,
        "size_bytes": numel * DTYPE_BYTES[DTYPE],
        "round": number,
        "level": one.level,
        "pairs": [list(pair) for pair in one.pairs],
        "hosts": hosts,
    }
    case = Case(f"links/{DTYPE}[{numel}]/send_recv/round{number}", "links", params)
    most = SMALL_SAMPLES if size_bytes == SMALL_BYTES else LARGE_SAMPLES
    return _spec(case, partial(_open_round, dict(_both_ways(one)), numel, context), most)


def _both_ways(one: LinkRound) -> Iterator[tuple[int, int]]:
    for first, second in one.pairs:
        yield first, second
        yield second, first


@contextlib.contextmanager
def _open_round(partners: dict[int, int], numel: int, context: RankContext) -> Iterator[OpenedCase]:
    partner = partners.get(context.rank)
    mine, got = _tag(context.rank, numel).to(context.device), torch.zeros(numel, device=context.device)

    def exchange() -> None:
        if partner is None:
            return
        ops = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, got, partner)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def check() -> str | None:
        got.zero_()
        exchange()
        return None if partner is None else first_difference(got.cpu(), _tag(partner, numel))

    fields = {"payload_bytes": numel * DTYPE_BYTES[DTYPE], "group_size": 2}
    # All ranks start, whoever waits in this round too: NCCL sets its communicator up once all of a group have called.
    opened = _opened(lambda _: exchange(), check, fields, mine.nbytes + got.nbytes, dist.group.WORLD)
    opened.after = partial(_segments_since, segments_so_far(), context)
    yield opened


def _segments_since(before: Segments | None, context: RankContext) -> dict[str, list[int]]:
    """Return the segments that each rank's host has sent and sent again since, in rank order; nothing where unknown."""
    now = segments_so_far()
    told = context.gather((now.sent - before.sent, now.again - before.again) if before and now else None)
    if any(one is None for one in told):
        return {}
    return {"tcp_segments": [sent for sent, _ in told], "tcp_segments_again": [again for _, again in told]}


def _tag(rank: int, numel: int) -> torch.Tensor:
    """Element i is (i + 3 rank) mod a prime, so that a wrong rank or offset shows."""
    return (torch.arange(numel) + 3 * rank).remainder(PERIOD).to(TORCH_DTYPES[DTYPE])


def _group_case(mesh_dim: str, size_bytes: int, hosts: list[str], context: RankContext) -> CaseSpec:
    numel = max(size_bytes // DTYPE_BYTES[DTYPE] // context.size(mesh_dim), 1) * context.size(mesh_dim)
    number = context.mesh_dims.index(mesh_dim)
    ranks = context.mesh.mesh.movedim(number, -1).reshape(-1, context.size(mesh_dim))
    params = {
        "op": "all_reduce",
        "dtype": DTYPE,
        "mesh_dim": mesh_dim,
        "size_bytes": numel * DTYPE_BYTES[DTYPE],
        "groups": ranks.tolist(),
        "hosts": hosts,
    }
    case = Case(f"links/{DTYPE}[{numel}]/all_reduce/{mesh_dim}", "links", params)
    return _spec(case, partial(_open_group, mesh_dim, numel, context), LARGE_SAMPLES)


@contextlib.contextmanager
def _open_group(mesh_dim: str, numel: int, context: RankContext) -> Iterator[OpenedCase]:
    group, size = context.mesh.get_group(mesh_dim), context.size(mesh_dim)
    ones = torch.ones(numel, device=context.device)

    def check() -> str | None:
        ones.fill_(1.0)
        dist.all_reduce(ones, group=group)
        difference = first_difference(ones.cpu(), torch.full((numel,), float(size)))
        ones.zero_()
        return difference

    fields = {"payload_bytes": ones.nbytes, "group_size": size, "mesh_dim": mesh_dim}
    ones.zero_()  # whose sums stay finite, however often
    yield _opened(lambda _: dist.all_reduce(ones, group=group), check, fields, ones.nbytes, group)


def _opened(call: Any, check: Any, fields: dict[str, Any], held_bytes: int, starts_on: Any) -> OpenedCase:
    return OpenedCase(call, check, fields=fields, stays_open=True, held_bytes=held_bytes, starts_on=starts_on)
