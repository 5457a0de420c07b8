"""`python -m distbench.worker.children.torch_checks`: what this torch can do, as JSON for `distbench doctor`."""

import json
import re
from typing import Any

import torch
import torch.distributed as dist

from distbench.worker.rank.device import accelerator_checks
from distbench.worker.torch_internals import probe

OLDEST, NEWEST = (2, 11), (2, 13)


def checks() -> list[dict[str, Any]]:
    """Each check as name, ok, found and advice."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    distributed = dist.is_available()
    rows = [
        _row("torch version", OLDEST <= version <= NEWEST, torch.__version__, "install torch 2.11 to 2.13"),
        _row("torch.distributed", distributed, str(distributed), "install a torch built with distributed"),
        _row("gloo", distributed and dist.is_gloo_available(), "CPU backend", "install a torch built with gloo"),
        *accelerator_checks(),
    ]
    for found in probe():
        internal = found.internal
        advice = f"cases that need {internal.feature} come out as unsupported; use torch 2.11 to 2.13"
        rows.append(_row(internal.name, found.missing is None, found.missing or internal.feature, advice))
    return rows


def _row(name: str, ok: bool, found: str, advice: str) -> dict[str, Any]:
    return {"name": name, "ok": bool(ok), "found": found, "advice": advice}


if __name__ == "__main__":
    print(json.dumps(checks()))
