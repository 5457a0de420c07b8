"""What this machine can run, and what to do about what it cannot. torch is asked in a process of its own."""

from typing import Any

from distbench.ask_child import ask_child
from distbench.environment import gpu_count, host_facts
from distbench.spec.errors import UserError

TIMEOUT_S = 300.0
TORCH_ADVICE = "install torch 2.11 to 2.13 (pip install 'torch>=2.11,<2.14')"


def examine() -> dict[str, Any]:
    """Facts of the host and of torch, and a list of checks, each with `name`, `ok`, `found` and `advice`."""
    host = host_facts()
    try:
        checks = ask_child("distbench.worker.examine", timeout_s=TIMEOUT_S)
    except UserError as error:
        checks = [{"name": "torch", "ok": False, "found": str(error), "advice": TORCH_ADVICE}]
        return {"host": host, "checks": checks, "usable": False}
    return {"host": host, "checks": [*checks, _gpu_check(checks)], "usable": _usable(checks)}


def _gpu_check(checks: list[dict[str, Any]]) -> dict[str, Any]:
    seen = gpu_count()
    cuda = next(check["ok"] for check in checks if check["name"] == "CUDA")
    if seen and not cuda:
        return {
            "name": "GPUs of this host",
            "ok": False,
            "found": str(seen),
            "advice": "install a torch built for CUDA",
        }
    return {"name": "GPUs of this host", "ok": True, "found": str(seen), "advice": ""}


def _usable(checks: list[dict[str, Any]]) -> bool:
    needed = {"torch version", "torch.distributed", "gloo"}
    return all(check["ok"] for check in checks if check["name"] in needed)


def lines_of(found: dict[str, Any]) -> list[str]:
    """The findings as lines for a terminal."""
    host = found["host"]
    memory_gb = (host["memory_bytes"] or 0) / 1e9
    lines = [f"{host['machine']}: {host['cpu_model']}, {host['num_cpus']} CPUs, {memory_gb:.0f} GB", ""]
    width = max(len(check["name"]) for check in found["checks"])
    for check in found["checks"]:
        mark = "ok" if check["ok"] else "MISSING"
        lines.append(f"{mark:<8}{check['name']:<{width}}  {check['found']}")
        if not check["ok"] and check["advice"]:
            lines.append(f"{'':<8}-> {check['advice']}")
    verdict = "This machine can run distbench." if found["usable"] else "This machine cannot run distbench yet."
    return [*lines, "", verdict]
