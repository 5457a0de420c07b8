"""The ranks of bench_fidelity: distbench's own meter and a bare loop, in turn, on the same buffers and group."""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from distbench.cases.collective import OPERATIONS, _all_gather, _reduce_scatter
from distbench.ranks.context import RankContext
from distbench.ranks.device import HostClock, calm_scheduler
from distbench.ranks.measure import Meter, RankGroup
from distbench.spec import Job, Settings
from distbench.worker.rank_session import connected_ranks

# Size to (turns, iterations a turn): short turns in random order, so that both see the same weather.
SIZES = {1024: (100, 20), 2**20: (300, 10), 2**24: (100, 6)}
WARM_UP = 2
OPS = ("all_gather", "reduce_scatter", "all_to_all")


def buffers(op: str, size_bytes: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, input) of a collective of S bytes; both sides use the same, as where memory lies costs a few percent."""
    total, share = size_bytes // 4, size_bytes // 4 // num_ranks
    return torch.zeros(share if op == "reduce_scatter" else total), torch.ones(share if op == "all_gather" else total)


def bare_loop(call: Callable[[], object], count: int) -> list[float]:
    """What an engineer would write in ten lines: barrier, clock, collective, clock; then the slowest rank of each."""
    for _ in range(WARM_UP):
        call()
    taken = []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def compare(op: str, size_bytes: int, context: RankContext) -> tuple[float, float]:
    """distbench's median over the bare loop's, and the bare loop's over its own, turn and turn about."""
    turns, count = SIZES[size_bytes]
    settings = Settings(warmup_iterations=WARM_UP, min_samples=count, max_samples=count, max_case_s=0.0)
    meter = Meter(RankGroup(context.control, context.device), HostClock(), settings, shared_clock=True)
    output, given = buffers(op, size_bytes, context.mesh.size())
    group = context.mesh.get_group("tp")
    operation = OPERATIONS[op]
    torchs = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": dist.all_to_all_single}[op]

    def ours(stamp: Callable[[], None]) -> object:
        return operation(output, given, group)

    def bare() -> object:
        return torchs(output, given)

    sides = ["distbench", "bare", "bare again"]
    taken: dict[str, list[float]] = {side: [] for side in sides}
    order = random.Random(f"{op} {size_bytes}")  # the same on every rank
    for _ in range(turns):
        order.shuffle(sides)
        for who in sides:
            loop = bare_loop(bare, count) if who != "distbench" else None
            samples = loop or meter.measure(ours, (), meter.warm_up(ours)).samples_s
            taken[who].extend(samples)
    ours, theirs, again = (statistics.median(taken[who]) for who in ("distbench", "bare", "bare again"))
    return ours / theirs, again / theirs


def main(out: Path) -> None:
    """Every op and size; rank 0 writes the rows."""
    job = Job("", "", "", __file__, [], [], {"tp": int(os.environ["WORLD_SIZE"])}, "cpu", Settings(), "", "", 60.0, 0.0)
    calm_scheduler("cpu")
    with connected_ranks(job) as ranks:
        rows = [(op, size_bytes, *compare(op, size_bytes, ranks.context)) for op in OPS for size_bytes in SIZES]
        if ranks.context.rank == 0:
            out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
