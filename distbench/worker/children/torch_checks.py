"""`python -m distbench.worker.children.torch_checks`: what this torch can do, as JSON for `distbench doctor`."""

import json
from typing import Any

import torch
import torch.distributed as dist

from distbench.spec.devices import ACCELERATORS, built_for, known_device
from distbench.spec.versions import OLDEST, SUPPORTED, outside_of_support, release
from distbench.worker.rank.device import Accelerator, nccl_version
from distbench.worker.rank.failure import one_line
from distbench.worker.torch_internals import needs_newer, probe


def checks() -> list[dict[str, Any]]:
    """Each check as name, ok, found and advice."""
    version, outside = torch.__version__, outside_of_support(torch.__version__)
    distributed = dist.is_available()
    rows = [
        # A newer torch is worth a warning; what it really lacks the rows below show.
        _row("torch version", not outside, version, outside)
        | ({} if release(version) < OLDEST else {"mark": "warning"}),
        _row("torch.distributed", distributed, str(distributed), "install a torch built with distributed"),
        _row("gloo", distributed and dist.is_gloo_available(), "CPU backend", "install a torch built with gloo"),
        *accelerator_checks(),
    ]
    for found in probe():
        internal = found.internal
        too_old = needs_newer(internal.feature)
        advice = f"cases that need {internal.feature} are reported as unsupported"
        row = _row(
            internal.name,
            found.missing is None,
            found.missing or internal.feature,
            advice if too_old else f"{advice}; use {SUPPORTED}",
        )
        rows.append(row | {"mark": "TOO OLD"} if too_old else row)
    return rows


def accelerator_checks() -> list[dict[str, Any]]:
    """The accelerator that most have, and whatever else torch has devices of, each with its backend; `device` is
    torch's name of it."""
    found = []
    for place, name in enumerate(ACCELERATORS):
        used = Accelerator(name)
        if place and not used.is_available:
            continue
        backend, shown = used.backend, used.platform.upper()
        devices = f"{used.num_devices} x {_name_of(used)}, {shown} {used.version}" if used.is_available else ""
        has_backend = dist.is_available() and dist.is_backend_available(backend)
        version = nccl_version() if has_backend and backend == known_device(ACCELERATORS[0]).backend else None
        wanted = shown if used.is_available else built_for(name)
        advice = f"to measure GPUs, install a torch built for {wanted} and its driver"
        told = f"{shown} backend{f', version {version}' if version else ''}"
        rows = [
            _row(shown, used.is_available, devices or f"no {shown} device", advice),
            _row(backend.upper(), has_backend, told, advice),
        ]
        found += [row | {"device": name} for row in rows]
    return found


def _name_of(used: Accelerator) -> str:
    """Of its first device, or why that does not answer: one whose driver hangs on to it, or that fell off the bus."""
    try:
        return used.name_of(0)
    except RuntimeError as error:
        return f"devices that do not answer ({one_line(error)})"


def _row(name: str, ok: bool, found: str, advice: str) -> dict[str, Any]:
    return {"name": name, "ok": bool(ok), "found": found, "advice": advice}


if __name__ == "__main__":
    print(json.dumps(checks()))
