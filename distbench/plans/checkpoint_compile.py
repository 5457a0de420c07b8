"""Parts of a plan that replace a module's forward: computing activations again in backward, and torch.compile."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distbench.plans.model import mapped, tensors_of
from distbench.plans.module_patterns import matching_modules
from distbench.spec import CompilePlan
from distbench.spec.devices import is_accelerator
from distbench.torch_private import (
    PENDING,
    Skipped,
    Unsupported,
    async_tp_options,
    compiler_errors,
    forget_layouts,
    is_pending,
    keep_compiled_graphs_apart,
    keep_gradients_of_pending_inputs,
    require,
    waited_for,
)

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

    What a collective of TP still has to fill is waited for before compiled code is given it, as that would do first:
    torch 2.12 to 2.15 drop the gradient of such an input (pytorch PR 191113), and torch 2.11 to 2.13 do not wait for it
    in a DTensor (pytorch issue 180614).

    Args:
        tp_mesh: the 1-D mesh of tensor parallel, for `async_tp`.
    """
    options = async_tp_options(tp_mesh) if plan.async_tp and tp_mesh is not None else None
    if reason := why_not(plan.backend, device):
        raise Skipped(f"torch.compile with backend {plan.backend!r}: {reason}")
    require(PENDING)
    keep_gradients_of_pending_inputs()
    keep_compiled_graphs_apart()
    # The mask of a row-wise embedding that an earlier model's compilation left there is a tensor of another fake mode.
    forget_layouts()
    for name, module in matching_modules(plan.modules, model).items():
        compiled = torch.compile(module.forward, backend=plan.backend, options=options)
        module.forward = _entered(compiled, name)  # type: ignore[method-assign]


def _entered(compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Compiled code as a module of that name calls it."""

    @wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        args, kwargs = tuple(map(_waited, args)), {key: _waited(value) for key, value in kwargs.items()}
        try:
            return compiled(*args, **kwargs)
        except compiler_errors() as error:
            problem = f"torch {torch.__version__} does not compile {name or 'the whole model'} under this plan"
            why = " ".join(str(error).partition("\n\n")[0].split())
            raise Unsupported(f"{problem} ({why}); name other modules in CompilePlan, or leave compile out") from error

    return forward


def _waited(value: Any) -> Any:
    # What nothing is pending in stays the same object: a cache that the module writes to, say.
    if not any(is_pending(tensor) for _, tensor in tensors_of(value)):
        return value
    return mapped(value, lambda _, tensor: waited_for(tensor))


def fused_modules(model: nn.Module, plan: CompilePlan | None) -> tuple[str, ...]:
    """Names of the modules whose operators a compiler makes into kernels of its own; of a whole model its children."""
    if plan is None or plan.backend in TRACING_ONLY:
        return ()
    names = tuple(matching_modules(plan.modules, model))
    return tuple(name for name, _ in model.named_children()) if "" in names else names


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
