"""A plan applied to a model: TP or the user's function, then activation checkpointing, compile and FSDP.

CP wraps each step instead (see training_step).
"""

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distbench.plans.fsdp import Sharded, replicate, shard_fully
from distbench.plans.model import mapped, named_refusal, owners_of, tensors_of
from distbench.plans.module_patterns import (
    annotations_by_parameter,
    is_of_transformers,
    matching_modules,
    styles_by_module,
    styles_by_parameter,
)
from distbench.ranks.context import RankContext
from distbench.ranks.failure import blamed, place_of
from distbench.redistribute.expected_shards import own_shard
from distbench.spec import CompilePlan, CpPlan, ParallelPlan, Scenario, UserError
from distbench.spec.devices import is_accelerator
from distbench.spec.mesh import BATCH_DIMS
from distbench.spec.plan import LOSS_CHUNKS
from distbench.torch_private import (
    PENDING,
    Skipped,
    Unsupported,
    async_tp_options,
    compiler_errors,
    context_parallel,
    flatten_mesh,
    forget_layouts,
    is_pending,
    keep_compiled_graphs_apart,
    keep_gradients_of_pending_inputs,
    require,
    waited_for,
    whole_sequence,
)

# Backends that generate no code, so they need no compiler.
TRACING_ONLY = ("eager", "aot_eager")


def parallelize(
    model: nn.Module, plan: ParallelPlan, context: RankContext, user_function: Callable[[Any, Any], Any] | None = None
) -> tuple[nn.Module, Sharded]:
    """Apply a checked plan to a model on the meta device; parameters become DTensors, still without memory.

    Raises Skipped if a part of the plan has no effect on this machine, such as tensor parallel over one rank, which
    would only add DTensor's dispatch and DTensor's loss. `user_function` is the scenario's `parallelize`, which gets
    the whole mesh and replaces the plan's `tp`.
    """
    annotate_parameters(model, plan, context)
    tp_dims = [name for name in plan.tp_dims if name in context.mesh_dims]
    if user_function is not None:
        model = _parallel_by(user_function, model, context.mesh)
    elif callable(plan.tp) and tp_dims:
        model = _parallel_by(plan.tp, model, context.mesh[tuple(tp_dims)])
    elif plan.tp is not None and any(context.size(name) > 1 for name in tp_dims):
        model = _tensor_parallel(model, plan, context, tp_dims)
    if plan.ep and (ep_dims := [name for name in plan.ep_dims if name in context.mesh_dims]):
        _expert_parallel(model, plan, context, ep_dims)
    if plan.fsdp is not None and plan.fsdp.spmd_mesh:
        onto_spmd_mesh(model, context)
    recompute_modules(model, plan.checkpoint, plan.checkpoint_context)
    if plan.compile is not None:
        tp_mesh = flatten_mesh(context.mesh, tp_dims) if plan.compile.async_tp and tp_dims else None
        compile_modules(model, plan.compile, context.device, tp_mesh)
    if plan.ddp is not None:
        return model, replicate(model, plan.ddp, context)
    return model, shard_fully(model, plan.fsdp, context) if plan.fsdp is not None else Sharded()


def _parallel_by(function: Callable[[Any, Any], Any], model: nn.Module, mesh: Any) -> nn.Module:
    """Apply the user's function to a model and mesh. Raise UserError if the function raises or returns no model."""
    try:
        with blamed("parallelize", function):
            changed = function(model, mesh)
    except UserError as error:
        if "meta tensors" not in str(error):
            raise
        instead = "for code that needs values (DistributedDataParallel), use replicate(model) or after_materialize"
        raise UserError(f"{error} (the model is on the meta device in parallelize); {instead}") from error
    if changed is not None and not isinstance(changed, nn.Module):
        problem = f"parallelize ({place_of(function)}) returns {type(changed).__name__}"
        raise UserError(f"{problem}; return the model, or None after a change in place")
    return model if changed is None else changed


def _tensor_parallel(model: nn.Module, plan: ParallelPlan, context: RankContext, tp_dims: list[str]) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    shared = [owners for owners in owners_of(model).values() if len(owners) > 1]
    mesh, config = flatten_mesh(context.mesh, tp_dims), getattr(model, "config", None)
    styles = {name: (pattern, style) for pattern, name, _, style in styles_by_module(plan, model)}
    for name, style in styles_by_parameter(plan, model).items():
        holder, _, attribute = name.rpartition(".")
        pattern = styles[holder][0] if holder in styles else name
        with named_refusal(f"TP pattern {pattern!r}", holder, model.get_submodule(holder)):
            style.shard_param(model.get_submodule(holder), attribute, mesh)
    for name, (pattern, style) in styles.items():
        with named_refusal(f"TP pattern {pattern!r}", name, model.get_submodule(name)):
            if not is_of_transformers(style):
                model = parallelize_module(model, mesh, {name: style})
                continue
            module = model.get_submodule(name)
            if config is not None and not hasattr(module, "config"):
                module.config = getattr(config, "get_text_config", lambda: config)()  # read by styles of MLA
            style.install_forward(module, mesh)
    # Each holder of a shared parameter got its own DTensor. Holders with equal layouts then share one DTensor again.
    for (_, module, attribute), *other_holders in shared:
        parameter = getattr(module, attribute)
        for _, other_module, name in other_holders:
            if getattr(getattr(other_module, name), "placements", None) == getattr(parameter, "placements", None):
                other_module.register_parameter(name, parameter)
    # SequenceParallel replaces a module's parameters by parameters that would require gradients.
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def _expert_parallel(model: nn.Module, plan: ParallelPlan, context: RankContext, ep_dims: list[str]) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    with_tp = plan.ep_tp_dim is not None and plan.ep_tp_dim in context.mesh_dims
    mesh = context.mesh[(*ep_dims, str(plan.ep_tp_dim))] if with_tp else flatten_mesh(context.mesh, ep_dims)
    for pattern, style in plan.ep.items():
        for name, module in matching_modules((pattern,), model).items():
            with named_refusal(f"EP pattern {pattern!r}", name, module):
                parallelize_module(module, mesh, style)


def annotate_parameters(model: nn.Module, plan: ParallelPlan, context: RankContext) -> None:
    """Convert parameters that match `shard_params` to DTensors over the plan's `tp_dim`, in the mesh's order."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh_dims = [name for name in context.mesh_dims if name in plan.tp_dims]
    if not mesh_dims:
        return
    mesh = context.mesh[tuple(mesh_dims)]
    owners = owners_of(model)
    parameters: dict[str, Any] = dict(model.named_parameters())
    for parameter_name, annotations in annotations_by_parameter(plan, model).items():
        tensor_dims = {mesh_dim: each.tensor_dim for each in annotations for mesh_dim in each.mesh_dims}
        placements = [Shard(tensor_dims[name]) if name in tensor_dims else Replicate() for name in mesh_dims]
        full = parameters[parameter_name]
        with torch.no_grad():
            local = own_shard(full, placements, mesh).contiguous()
        sharded = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=tuple(full.stride())
        )
        parameter = nn.Parameter(sharded, requires_grad=full.requires_grad)
        for _, module, attribute in owners[id(full)]:
            module.register_parameter(attribute, parameter)


def onto_spmd_mesh(model: nn.Module, context: RankContext) -> None:
    """Prepare a model on the meta device for DTensors of the whole mesh.

    Parameters and buffers are replicated over the mesh dims that do not shard them, inputs are split over data parallel
    ranks, and outputs are this rank's part.

    Raises:
        UserError: a parameter is a DTensor on a mesh that is not part of this mesh.
    """
    owners = owners_of(model)
    for name, parameter in list(model.named_parameters()):
        lifted = nn.Parameter(_on_whole_mesh(name, parameter, context), requires_grad=parameter.requires_grad)
        for _, module, attribute in owners[id(parameter)]:
            module.register_parameter(attribute, lifted)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _on_whole_mesh(name, buffer, context))

    def own_part(_: str, tensor: Any) -> Any:
        if not hasattr(tensor, "to_local"):
            return tensor
        if not tensor.ndim:
            raise UserError("spmd_mesh computes the loss from outputs, but the model returns a number; give loss")
        return tensor.redistribute(placements=_by_batch(context)).to_local()

    model.register_forward_pre_hook(lambda _, args, kwargs: _inputs_on_mesh(args, kwargs, context), with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: mapped(output, own_part))


def _on_whole_mesh(name: str, tensor: Any, context: RankContext) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = context.mesh
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tensor.device_mesh is mesh:
        return tensor.detach()
    placement_of = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False))
    if len(placement_of) < tensor.device_mesh.ndim or not placement_of.keys() <= set(context.mesh_dims):
        problem = f"spmd_mesh requires parameters on the mesh {'x'.join(context.mesh_dims)} or its mesh dims"
        raise UserError(
            f"{problem}, but {name} is on {'x'.join(placement_of) or 'a mesh without names'}; use the given mesh"
        )
    placements = [placement_of.get(mesh_dim, Replicate()) for mesh_dim in context.mesh_dims]
    shape, stride = tensor.shape, tuple(tensor.stride())
    return DTensor.from_local(tensor.to_local().detach(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _by_batch(context: RankContext, is_split: bool = True) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(0) if is_split and name in BATCH_DIMS else Replicate() for name in context.mesh_dims]


def _inputs_on_mesh(args: Any, kwargs: Any, context: RankContext) -> tuple[Any, Any]:
    """Convert inputs to DTensors: tensors of the first tensor's length as parts of the batch, others as replicas."""
    from torch.distributed.tensor import DTensor

    length = next((tensor.shape[0] for _, tensor in tensors_of([args, kwargs]) if tensor.ndim), None)

    def distributed(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        placements = _by_batch(context, tensor.ndim > 0 and tensor.shape[0] == length)
        return DTensor.from_local(tensor, context.mesh, placements, run_check=False)

    return mapped(args, distributed), mapped(kwargs, distributed)


def shards_sequence(plan: CpPlan | None, context: RankContext) -> bool:
    """Return whether a plan shards the sequence on this mesh."""
    return plan is not None and context.size(plan.mesh_dim) > 1


def sequence_sharded(
    model: nn.Module, plan: CpPlan, context: RankContext, batch: Sequence[tuple[torch.Tensor, int]]
) -> contextlib.AbstractContextManager[None]:
    """Context of forward, loss and backward with a sharded sequence.

    The batch's tensors, each with its sequence tensor dim, and the model's buffers are sharded in place. Buffers, but
    not the batch, are unsharded afterwards.
    """
    buffers = dict(model.named_buffers())
    tensors = [tensor for tensor, _ in batch]
    return context_parallel(
        context.mesh[plan.mesh_dim],
        [*tensors, *(buffers[name] for name in plan.buffers)],
        [*(tensor_dim for _, tensor_dim in batch), *plan.buffers.values()],
        plan.rotate,
        plan.balances,
        not_restored=tensors,
        kernel=plan.kernel,
    )


def unshard_outputs(model: nn.Module, plan: CpPlan | None, context: RankContext) -> bool:
    """Gather the model's output along the sequence, in its original order, by a hook on the model's root.

    Return True if the plan requests the gather and this mesh shards the sequence; otherwise add no hook.
    """
    if plan is None or not plan.unshard_output or not shards_sequence(plan, context):
        return False
    mesh, seq_dim = context.mesh[plan.mesh_dim], plan.seq_dim

    def unshard(_: nn.Module, args: Any, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor) or hasattr(output, "placements"):
            kind = type(output).__name__
            raise UserError(
                f"unshard_output gathers one plain tensor, but the model's output is a {kind}; leave unshard_output out"
            )
        return whole_sequence(output, mesh, seq_dim)

    model.register_forward_hook(unshard)
    return True


def recompute_modules(model: nn.Module, patterns: Iterable[str], context_fn: Callable[[], Any] | None = None) -> None:
    """Save only the inputs of the matching modules, and values that a `context_fn` of `torch.utils.checkpoint` saves.

    Backward computes the modules' activations again. The forward is replaced instead of the module, so parameters keep
    their names, and hooks (TP's before, FSDP's later) run outside of the recomputation.
    """
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": context_fn} if context_fn else {})
    for module in matching_modules(patterns, model).values():
        module.forward = partial(checkpoint, module.forward, **options)  # type: ignore[method-assign]


def compile_modules(model: nn.Module, plan: CompilePlan, device: torch.device, tp_mesh: Any = None) -> None:
    """Compile the forward of each matching module; Skipped if the backend cannot work on this machine.

    A call waits for pending TP collectives of its inputs before compiled code runs. If compiled code waited instead,
    torch 2.12 to 2.15 would drop the gradient of a pending input (pytorch PR 191113), and torch 2.11 to 2.13 would not
    wait for a DTensor (pytorch issue 180614). `tp_mesh` is the 1-D mesh of tensor parallel, for `async_tp`.
    """
    options = async_tp_options(tp_mesh) if plan.async_tp and tp_mesh is not None else None
    if reason := why_not(plan.backend, device):
        raise Skipped(f"torch.compile with backend {plan.backend!r}: {reason}")
    require(PENDING)
    keep_gradients_of_pending_inputs()
    keep_compiled_graphs_apart()
    # An earlier compilation leaves the mask of a row-wise embedding, a tensor of another fake mode.
    forget_layouts()
    for name, module in matching_modules(plan.modules, model).items():
        compiled = torch.compile(module.forward, backend=plan.backend, options=options)
        module.forward = _entered(compiled, name)  # type: ignore[method-assign]


def planned_loss(scenario: Scenario, device: torch.device) -> Callable[[Any, Any], Any] | None:
    """Return the scenario's loss, computed as `ParallelPlan.loss` states; Skipped if the backend cannot work here."""
    loss, plan = scenario.loss, scenario.plan
    if loss is None or plan.loss is None:
        return loss
    if plan.loss == "chunked":
        return wraps(loss)(partial(_in_chunks, loss))
    backend = plan.compile.backend if plan.compile is not None else "inductor"
    if reason := why_not(backend, device):
        raise Skipped(f"torch.compile with backend {backend!r}: {reason}")
    forget_layouts()
    return _entered(torch.compile(loss, backend=backend), "the loss", "leave ParallelPlan.loss out")


def _in_chunks(loss: Callable[[Any, Any], Any], output: Any, targets: Any) -> Any:
    """Return the mean of the loss over parts of the sequence, which is the loss if it is a mean over positions.

    Backward computes each part again, so one part at a time has memory beyond its output.

    Raises:
        UserError: output and targets have no common sequence.
    """
    length = output.shape[1] if torch.is_tensor(output) and output.ndim > 1 else 0
    if not (length and torch.is_tensor(targets) and targets.shape[:2] == output.shape[:2]):
        raise UserError(
            "ParallelPlan.loss='chunked' needs an output (batch, sequence, ...) and targets (batch, sequence, ...); "
            "leave ParallelPlan.loss out, or use 'compiled'"
        )
    parts = zip(output.chunk(LOSS_CHUNKS, 1), targets.chunk(LOSS_CHUNKS, 1), strict=True)
    losses = [checkpoint(loss, *part, use_reentrant=False) * (part[0].shape[1] / length) for part in parts]
    return torch.stack(losses).sum()


def _entered(
    compiled: Callable[..., Any], name: str, advice: str = "name other modules in CompilePlan, or leave compile out"
) -> Callable[..., Any]:
    """Wrap compiled code as the forward of the module with that name."""

    def waited(value: Any) -> Any:
        # Return values without a pending collective as is, such as a cache that the module writes to.
        if not any(is_pending(tensor) for _, tensor in tensors_of(value)):
            return value
        return mapped(value, lambda _, tensor: waited_for(tensor))

    @wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        args, kwargs = tuple(map(waited, args)), {key: waited(value) for key, value in kwargs.items()}
        try:
            return compiled(*args, **kwargs)
        except compiler_errors() as error:
            problem = f"torch {torch.__version__} does not compile {name or 'the whole model'} under this plan"
            why = " ".join(str(error).partition("\n\n")[0].split())
            raise Unsupported(f"{problem} ({why}); {advice}") from error

    return forward


def fused_modules(model: nn.Module, plan: CompilePlan | None) -> tuple[str, ...]:
    """Return names of the modules whose operators a compiler fuses into its own kernels; a whole model's children."""
    if plan is None or plan.backend in TRACING_ONLY:
        return ()
    names = tuple(matching_modules(plan.modules, model))
    return tuple(name for name, _ in model.named_children()) if "" in names else names


def known_backends() -> list[str]:
    """Return the backend names that torch.compile accepts."""
    return [*torch.compiler.list_backends(), *TRACING_ONLY]


def why_not(backend: str, device: torch.device) -> str | None:
    """Return the reason why a compile backend cannot work on this machine; None if it can."""
    if backend in TRACING_ONLY:
        return None
    if is_accelerator(device.type):
        return None if find_spec("triton") else "triton is not installed"
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    if not any(shutil.which(name) for name in names):
        return f"no C++ compiler is installed ({', '.join(names)}); install a compiler, or use backend aot_eager"
    include = Path(sysconfig.get_path("include"))
    has_header = (include / "Python.h").is_file()
    return None if has_header else f"{include} has no Python.h; install Python's development files"
