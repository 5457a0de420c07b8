"""Which gloo operation each collective really runs, from the profiler's spans; rank 0 writes JSON."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from distbench.cases.collective import OPERATIONS

dist.init_process_group("gloo")
group = dist.group.WORLD
found = {}
for name, operation in OPERATIONS.items():
    whole, half = torch.ones(64), torch.ones(32)
    output = half if name in ("reduce_scatter", "scatter") else whole.clone()
    given = half if name in ("all_gather", "gather") else whole
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        operation(output, given, group)
    found[name] = [
        event.key.removeprefix("gloo:") for event in profiler.key_averages() if event.key.startswith("gloo:")
    ]
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
