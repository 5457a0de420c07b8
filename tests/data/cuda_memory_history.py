"""Three training steps on a CUDA device: what its allocator was asked for and gave back, and what it reserved, as JSON.

Run alone, so that nothing else has memory. The history's entries are those of torch.cuda.memory._snapshot().
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

memory: Any = torch.cuda.memory


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    for _ in range(3):
        F.mse_loss(model(batch), batch).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a pool of its own
            torch.empty(48 << 20, dtype=torch.uint8, device="cuda").zero_()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS takes its workspace once
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, requested = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["requested_bytes.all.current"]
    memory._record_memory_history(max_entries=1_000_000, stacks="python", context=None)
    blocks = [
        part for _ in range(6) for part in (nn.Linear(1536, 6144), nn.GELU(), nn.Linear(6144, 1536), nn.LayerNorm(1536))
    ]
    model = nn.Sequential(*blocks).cuda()
    steps(model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(2048, 1536, device="cuda"))
    torch.cuda.synchronize()
    (entries,) = [trace for trace in memory._snapshot()["device_traces"] if trace]
    streams: dict[int, int] = {}
    numbers: dict[int, int] = {}
    events = []
    for entry in entries:
        if entry["action"] == "alloc":
            numbers[entry["addr"]] = len(events)
            events.append((len(events), entry["size"], streams.setdefault(entry["stream"], len(streams))))
        elif entry["action"] == "free_completed" and entry["addr"] in numbers:
            events.append((numbers.pop(entry["addr"]), 0, 0))
    print(
        json.dumps(
            {
                "events": events,
                # What was there before (cuBLAS' workspace) is not in the history.
                "max_reserved_bytes": torch.cuda.max_memory_reserved() - before,
                "max_requested_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"] - requested,
            }
        )
    )


if __name__ == "__main__":
    main()
