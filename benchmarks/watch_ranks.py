"""The ranks of bench_watch: blocks of steps with and without `distbench.watch`, and watched loops with a late rank."""

import contextlib
import io
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import distbench
from benchmarks.bench_watch import BLOCK, LATE_S, NUM_LATE, NUM_QUIET, SIDES, TRIAL_EVERY, TRIAL_STEPS, TURNS
from distbench.ranks.device import calm_scheduler

SEED, WIDTH, LAYERS, BATCH = 20261124, 128, 2, 16


def step_of(model: nn.Module) -> Callable[[], None]:
    """A training step on random inputs."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)

    def step() -> None:
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp() -> Callable[[], None]:
    """DDP in buckets of a layer each."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return step_of(DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.05))


def fsdp_and_tp(mesh: DeviceMesh) -> Callable[[], None]:
    """FSDP2 per layer over dp, and TP over tp."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    plan = {str(number): (RowwiseParallel() if number % 2 else ColwiseParallel()) for number in range(LAYERS)}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    return step_of(fully_shard(model, mesh=mesh["dp"]))


def blocks(step: Callable[[], None]) -> dict[str, dict[str, list[float]]]:
    """Seconds on rank 0, and CPU seconds of all ranks, of each block of BLOCK steps by side.

    A watched block has one sampled step, its last.
    """
    rng = random.Random(SEED)
    result = {what: {side: list[float]() for side in SIDES} for what in ("wall", "cpu")}
    with quiet(), distbench.watch(every=BLOCK) as watch:
        for _ in range(2 * BLOCK):
            step()
            watch.step()
        for _ in range(TURNS):
            for side in rng.sample(SIDES, len(SIDES)):
                dist.barrier()
                start_s, cpu_s = time.monotonic(), time.process_time()
                for _ in range(BLOCK):
                    step()
                    if side == "watched":
                        watch.step()
                dist.barrier()
                result["wall"][side].append(time.monotonic() - start_s)
                cpu = torch.tensor(time.process_time() - cpu_s)
                dist.all_reduce(cpu)
                result["cpu"][side].append(float(cpu))
    return result


def trials(step: Callable[[], None]) -> list[dict[str, Any]]:
    """Which ranks watched loops name, in random order; in NUM_LATE of them a rank sleeps before each step."""
    rng, rank = random.Random(SEED), dist.get_rank()
    sleepers = [rng.randrange(dist.get_world_size()) for _ in range(NUM_LATE)]
    rows = []
    for sleeper in rng.sample([*sleepers, *[-1] * NUM_QUIET], NUM_LATE + NUM_QUIET):
        with quiet(), distbench.watch(TRIAL_EVERY) as watch:
            for _ in range(TRIAL_STEPS):
                time.sleep(LATE_S if rank == sleeper else 0)
                step()
                watch.step()
        rows.append({"sleeper": sleeper, "late": [[late.rank, late.group, late.late_s] for late in watch.late]})
    return rows


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Drop the printed lines."""
    return contextlib.redirect_stderr(io.StringIO())


def main(out: Path) -> None:
    """All loops; rank 0 writes what was measured."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    calm_scheduler("cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    of_ddp = ddp()
    result: dict[str, Any] = {"DDP": blocks(of_ddp), "FSDP2 x TP": blocks(fsdp_and_tp(mesh)), "trials": trials(of_ddp)}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
