"""Parts of a plan that replace a module's forward: computing activations again in backward, and torch.compile."""

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distbench.spec import CompilePlan, DdpPlan
from distbench.spec.devices import is_accelerator
from distbench.worker.plans.patterns import matching_modules
from distbench.worker.torch_internals import Skipped, async_tp_options, gradients_fused, require_fusing

# Backends that generate nothing, so they need no compiler.
TRACING_ONLY = ("eager", "aot_eager")


def recompute_modules(model: nn.Module, patterns: Iterable[str], context_fn: Callable[[], Any] | None = None) -> None:
    """Keep only the inputs of the matching modules; their activations are computed again in backward.

    With a `context_fn`, as `torch.utils.checkpoint` takes it, also what that keeps.

    The forward is replaced and not the module, so parameters keep their names and hooks (TP's before, FSDP's later)
    stay outside of what is computed again.
    """
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": context_fn} if context_fn else {})
    for module in matching_modules(patterns, model).values():
        module.forward = partial(checkpoint, module.forward, **options)  # type: ignore[method-assign]


def compile_modules(model: nn.Module, plan: CompilePlan, device: torch.device, tp_mesh: Any = None) -> None:
    """Compile the forward of the matching modules, each on its own; Skipped where the backend cannot work here.

    Args:
        tp_mesh: the 1-D mesh of tensor parallel, for `async_tp`.
    """
    options = async_tp_options(tp_mesh) if plan.async_tp and tp_mesh is not None else None
    if reason := why_not(plan.backend, device):
        raise Skipped(f"torch.compile with backend {plan.backend!r}: {reason}")
    for module in matching_modules(plan.modules, model).values():
        module.forward = torch.compile(module.forward, backend=plan.backend, options=options)  # type: ignore[method-assign]


BUCKET_MB = 25.0  # torch's, of DDP


def require_fusable(plan: DdpPlan, device: torch.device) -> None:
    """Raise Skipped where backward is to be compiled and cannot be, here or by this torch."""
    if plan.fuse is None:
        return
    if reason := why_not("inductor", device):
        raise Skipped(f"DdpPlan(fuse={plan.fuse!r}) has inductor compile backward: {reason}")
    require_fusing()


def fused(plan: DdpPlan | None) -> contextlib.AbstractContextManager[None]:
    """The context of forward and backward in which gradients are fused, where the plan says so."""
    if plan is None or plan.fuse is None:
        return contextlib.nullcontext()
    return gradients_fused(plan.fuse, BUCKET_MB if plan.bucket_cap_mb is None else plan.bucket_cap_mb)


def known_backends() -> list[str]:
    """Names that torch.compile takes."""
    return [*torch.compiler.list_backends(), *TRACING_ONLY]


def why_not(backend: str, device: torch.device) -> str | None:
    """What a compile backend lacks on this machine; None when it can work."""
    if backend in TRACING_ONLY:
        return None
    if is_accelerator(device.type):
        return None if find_spec("triton") else "triton is not installed"
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    if not any(shutil.which(name) for name in names):
        return f"there is no C++ compiler ({', '.join(names)}); install one, or use backend aot_eager"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        return f"there is no Python.h in {include}; install Python's development files"
    return None
