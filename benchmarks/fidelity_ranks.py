"""The ranks of bench_fidelity: distbench's own meter and a bare loop, in turn, on the same buffers and group."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from distbench.spec import Job, Settings
from distbench.worker.clocks import HostClock
from distbench.worker.measure import Meter, Ranks
from distbench.worker.place import Place
from distbench.worker.session import connected_ranks
from distbench.worker.workloads.collective import _all_gather, _bench, _reduce_scatter

# Size to (turns, iterations a turn): short turns, so that both see the same weather.
SIZES = {1024: (120, 40), 2**20: (100, 12), 2**24: (60, 6)}
OPS = ("all_gather", "reduce_scatter", "all_to_all")


def bare_call(op: str, size_bytes: int, num_ranks: int) -> Callable[[], object]:
    """The collective on buffers of its own, with torch's own function."""
    total, share = size_bytes // 4, size_bytes // 4 // num_ranks
    given = torch.ones(share if op == "all_gather" else total)
    got = torch.zeros(share if op == "reduce_scatter" else total)
    function = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": dist.all_to_all_single}[op]
    return lambda: function(got, given)


def bare_loop(call: Callable[[], object], count: int) -> list[float]:
    """What an engineer would write in ten lines: barrier, clock, collective, clock; then the slowest rank of each."""
    for _ in range(3):
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


def compare(op: str, size_bytes: int, place: Place) -> float:
    """distbench's meter over the bare loop, turn and turn about: the median over turns of the ratio of their medians.

    Neighbouring turns see the same weather; pooling all turns would compare what each happened to meet.
    """
    turns, count = SIZES[size_bytes]
    settings = Settings(warmup_iterations=3, min_samples=count, max_samples=count, max_case_s=0.0)
    meter = Meter(Ranks(place.control, place.device), HostClock(), settings, shared_clock=True)
    bare = bare_call(op, size_bytes, place.mesh.size())
    medians: dict[str, list[float]] = {"distbench": [], "bare": []}
    with _bench(op, "f32", "tp", size_bytes, place).open() as prepared:
        for turn in range(turns):
            for who in ("distbench", "bare") if turn % 2 else ("bare", "distbench"):
                if who == "bare":
                    samples = bare_loop(bare, count)
                else:
                    estimate_s = meter.warm_up(prepared.call)
                    samples = meter.measure(prepared.call, (), estimate_s).samples_s
                medians[who].append(statistics.median(samples))
    ratios = [ours / bare for ours, bare in zip(medians["distbench"], medians["bare"], strict=True)]
    return statistics.median(ratios)


def main(out: Path) -> None:
    """Every op and size; rank 0 writes the rows."""
    job = Job("", "", "", "", [], [], {"tp": int(os.environ["WORLD_SIZE"])}, "cpu", Settings(), "", "", 60.0, 0.0)
    with connected_ranks(job) as ranks:
        rows = [(op, size_bytes, compare(op, size_bytes, ranks.place)) for op in OPS for size_bytes in SIZES]
        if ranks.place.rank == 0:
            out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
