"""`python -m distbench.worker.children.torch_checks`: what this torch can do, as JSON for `distbench doctor`."""

import json
import re
from typing import Any

import torch
import torch.distributed as dist

from distbench.worker.torch_internals import probe

OLDEST, NEWEST = (2, 11), (2, 13)
CUDA_ADVICE = "to measure GPUs, install a torch built for CUDA and its driver"


def checks() -> list[dict[str, Any]]:
    """Each check as name, ok, found and advice."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    distributed = dist.is_available()
    rows = [
        _row("torch version", OLDEST <= version <= NEWEST, torch.__version__, "install torch 2.11 to 2.13"),
        _row("torch.distributed", distributed, str(distributed), "install a torch built with distributed"),
        _row("gloo", distributed and dist.is_gloo_available(), "CPU backend", "install a torch built with gloo"),
        _row("CUDA", torch.cuda.is_available(), _devices(), CUDA_ADVICE),
        _row("NCCL", distributed and dist.is_nccl_available(), "CUDA backend", CUDA_ADVICE),
    ]
    for found in probe():
        internal = found.internal
        advice = f"cases that need {internal.feature} come out as unsupported; use torch 2.11 to 2.13"
        rows.append(_row(internal.name, found.missing is None, found.missing or internal.feature, advice))
    return rows


def _row(name: str, ok: bool, found: str, advice: str) -> dict[str, Any]:
    return {"name": name, "ok": bool(ok), "found": found, "advice": advice}


def _devices() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    print(json.dumps(checks()))
