"""Loops watched by `distbench.watch` on gloo; rank 0 writes what each of them found as JSON. Flight Recorder's dumps of
all ranks stand next to it."""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import distbench
from distbench import loop_watch

LATE_S = 0.05
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)


def watched(body, every=1, mesh=None):
    """What rank 0 saw and printed; `body(watch)` is the loop."""
    printed, raised, start_s = io.StringIO(), "", time.monotonic()
    with contextlib.redirect_stderr(printed):
        try:
            with distbench.watch(every, mesh=mesh) as watch:
                body(watch)
        except ZeroDivisionError as error:
            raised = str(error)
    took_s = time.monotonic() - start_s
    late = [[late.rank, late.group, late.num_last, late.num_samples, late.late_s] for late in watch.late]
    return {"late": late, "printed": printed.getvalue(), "raised": raised, "took_s": took_s}


def reducing(num_steps, sleeper=None, last=lambda step: False):
    """Two all-reduces per step, before which one rank sleeps."""

    def body(watch):
        for step in range(num_steps):
            if last(step):
                return
            time.sleep(LATE_S if rank == sleeper else 0)
            dist.all_reduce(torch.ones(8))
            dist.all_reduce(torch.ones(8))
            watch.step()

    return body


def raises(step):
    """Rank 3 raises, and the others end their loops without it."""
    if step == 15 and rank == 3:
        raise ZeroDivisionError("of the user")
    return step == 15


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def on_mesh(watch):
    """Rank 1 is late at its tp group, rank 2 at its dp group; their partners arrive late elsewhere because of them."""
    for _ in range(13):
        time.sleep(LATE_S if rank == 1 else 0)
        dist.all_reduce(torch.ones(8), group=mesh.get_group("tp"))
        time.sleep(LATE_S if rank == 2 else 0)
        dist.all_reduce(torch.ones(8), group=mesh.get_group("dp"))
        watch.step()


def ddp(watch):
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.02)
    for _ in range(13):
        model(torch.ones(4, 64)).sum().backward()
        time.sleep(LATE_S if rank == 2 else 0)  # after the last collective, as a log or an optimizer
        watch.step()


found = {
    "sleeper": watched(reducing(25, sleeper=2), every=2),
    "2-D": watched(on_mesh, mesh=mesh),
    "ddp": watched(ddp),
    "raised": watched(reducing(30, sleeper=1, last=raises)),
    "few": watched(reducing(3)),
    "no step": watched(lambda watch: dist.all_reduce(torch.ones(1))),
}


try:
    with distbench.watch() as watch:
        watch.step()
    watch.step()
except distbench.UserError as error:
    found["after"] = str(error)


def uneven(watch):
    """Rank 3 calls step() less often; collectives are equal."""
    for step in range(12):
        time.sleep(LATE_S if rank == 0 else 0)
        dist.all_reduce(torch.ones(8))
        if rank != 3 or step < 8:
            watch.step()


found["uneven"] = watched(uneven)


def leaves_late(watch):
    """Rank 2 stays in the block, as a rank that hangs."""
    reducing(12, sleeper=1)(watch)
    time.sleep(6 if rank == 2 else 0)


loop_watch.EXIT_S = 1.0
found["leaves late"] = watched(leaves_late)
recorded = dist.new_group(group_desc="recorded")
for _ in range(40):
    time.sleep(LATE_S / 5 if rank == 3 else 0)
    dist.all_reduce(torch.ones(8), group=recorded)
out = Path(sys.argv[1])
for name, dump in (("pickle", "_dump_fr_trace"), ("json", "_dump_fr_trace_json")):
    (out.parent / name).mkdir(exist_ok=True)
    dumped = getattr(torch._C._distributed_c10d, dump)()
    (out.parent / name / f"trace_{rank}").write_bytes(dumped if isinstance(dumped, bytes) else dumped.encode())
if rank == 0:
    out.write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
