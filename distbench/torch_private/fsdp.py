"""FSDP2's units, and the origin of current communication: FSDP, DTensor's redistribution, or a pipeline's stage."""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distbench.torch_private.collectives import CollectiveCall
from distbench.torch_private.probe import STAGES_AGREE, replaced, require


@dataclass(frozen=True)
class Label:
    """Origin of communication."""

    source: str  # "fsdp" or "redistribute"
    owner: str = (
        ""  # FSDP's name of the module whose parameters are communicated; empty for the root, and for a redistribution
    )
    redistribution: str = ""  # `"S(0)R->RR"`, one placement per mesh dim; empty for FSDP
    explicit: bool = True  # requested by a user or a parallel style, not by an operator


@dataclass(frozen=True)
class Message:
    """A pipeline stage's message of one microbatch; phase "forward" for activations, "backward" for gradients."""

    stage: int
    microbatch: int
    phase: str

    @property
    def owner(self) -> str:
        """Owner of the message as text for paths."""
        return f"stage{self.stage}.microbatch.{self.microbatch}"


# Methods of a stage that make messages, to the phase.
MESSAGES = {
    f"get_{way}_{what}_ops": phase
    for way, phase in (("fwd", "forward"), ("bwd", "backward"))
    for what in ("send", "recv")
}


class Labels:
    """The active labels, innermost last; `current` is None if neither FSDP nor DTensor communicates."""

    def __init__(self) -> None:
        self.stack: list[Label] = []
        self.messages: dict[int, Message] = {}  # by the `id` of the sent or received tensor

    @property
    def current(self) -> Label | None:
        """The innermost label."""
        return self.stack[-1] if self.stack else None

    @property
    def owner(self) -> str | None:
        """The module for which FSDP communicates, also through DTensor; None otherwise."""
        return next((label.owner for label in reversed(self.stack) if label.source == "fsdp"), None)

    @contextlib.contextmanager
    def on(self, label: Label) -> Iterator[None]:
        """Activate a label."""
        self.stack.append(label)
        try:
            yield
        finally:
            self.stack.pop()


@contextlib.contextmanager
def labelled_communication(names: Mapping[nn.Module, str]) -> Iterator[Labels]:
    """Track FSDP's and DTensor's communication while the context is open.

    Args:
        names: module to its name in the model; FSDP's own names are relative to its first module.
    """
    require("communication labels")
    require("autograd sequence numbers")
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import _api, _dispatch, _redistribute

    labels = Labels()
    with contextlib.ExitStack() as undo:

        def label_all(owner: Any, name: str, label_of: Callable[..., Label]) -> None:
            plain = getattr(owner, name)

            def labelled(*args: Any, **kwargs: Any) -> Any:
                with labels.on(label_of(*args)):
                    return plain(*args, **kwargs)

            undo.enter_context(replaced(owner, name, labelled))

        def named(modules: Sequence[nn.Module], own_name: str | None) -> Label:
            known = [names[module] for module in modules if module in names]
            return Label("fsdp", ", ".join(known) or own_name or "")

        for name in ("unshard", "post_backward"):
            label_all(FSDPParamGroup, name, lambda group, *_: named(group.modules, group._module_fqn))
        label_all(
            *(FSDPParam, "_get_grad_inner_tensor"),
            lambda parameter, *_: named(
                [parameter._module_info.module], (parameter._param_fqn or "").rpartition(".")[0]
            ),
        )
        for module in (_api, _dispatch, _redistribute):
            label_all(module, "redistribute_local_tensor", partial(_redistribution, module is not _dispatch))
        # Without the import, there is no pipeline.
        if (pipelining := sys.modules.get("torch.distributed.pipelining")) is not None:
            for name, phase in MESSAGES.items():
                plain = getattr(pipelining.PipelineStage, name)
                undo.enter_context(replaced(pipelining.PipelineStage, name, _noted(plain, labels, phase)))
        yield labels


def _noted(plain: Callable[..., Any], labels: Labels, phase: str) -> Callable[..., Any]:
    def noted(stage: Any, microbatch: int) -> Any:
        messages = plain(stage, microbatch)
        for message in messages:
            labels.messages[id(message.tensor)] = Message(stage.stage_index, microbatch, phase)
        return messages

    return noted


def _redistribution(explicit: bool, local: Any, *specs: Any) -> Label:
    texts = ["".join(map(_placement_text, spec.placements)) for spec in specs[:2]]
    return Label("redistribute", "", "->".join(texts), explicit)


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    if placement.is_partial():
        return f"P({placement.reduce_op})"
    mark = "S" if type(placement).__name__ == "Shard" else "_S"
    return f"{mark}({placement.dim})"


def next_autograd_position() -> int:
    """Return the sequence number of the next node of this thread's graph."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def autograd_position() -> int | None:
    """Return the sequence number of the node whose backward runs now; None outside of backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


@contextlib.contextmanager
def around_backward(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Call `begin` and `end` around each run of autograd's engine, by `backward` or `torch.autograd.grad`."""
    require("runs of autograd")
    plain: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            return plain(*args, **kwargs)
        finally:
            end()

    with replaced(torch.autograd, "_engine_run_backward", run):
        yield


def finished_parameter() -> torch.Tensor | None:
    """Return the parameter whose gradient autograd has finished and whose hooks run now; None elsewhere."""
    node: Any = torch._C._current_autograd_node()
    parameter: torch.Tensor | None = getattr(node, "variable", None)
    return parameter


def vote_on_fake_group(schedule: Any, group: Any, device: torch.device) -> None:
    """Make stages of a pipeline on a fake group use their given shapes.

    In the first step, torch exchanges messages on whether all stages have shapes. The method has another name since
    torch 2.15; torch 2.11 has no such exchange.
    """
    methods = ("_initialize_pipeline_distributed_state", "_warmup_p2p")
    method = next((name for name in methods if hasattr(schedule, name)), None)
    if method is None or group._get_backend(device).name() != "fake":
        return
    require(STAGES_AGREE)
    from torch.distributed.pipelining._utils import InferenceMode

    def decided(stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC
            # Communicators of single edges (torch 2.15) are this fake group.
            stage._p2p_edge_groups = defaultdict(lambda: group)

    setattr(schedule, method, decided)


def forget_step(schedule: Any) -> None:
    """Clear the state of a pipeline's schedule after a failed step, because the next step would use the remains."""
    for name in ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages"):
        getattr(schedule, name, set()).clear()


@contextlib.contextmanager
def messages_of_stages(issue: Callable[[Sequence[Any], Sequence[CollectiveCall]], list[Any]]) -> Iterator[None]:
    """Call `issue(tensors, messages of one batch)` instead of sends and receives of pipeline stages.

    The stages `wait()` for the results of `issue`, and nothing is sent.
    """
    if (schedules := sys.modules.get("torch.distributed.pipelining.schedules")) is None:
        yield  # there is no pipeline
        return
    require("simulated messages of pipelines")

    def issued(ops: Sequence[dist.P2POp], *_: Any, **__: Any) -> list[Any]:
        return issue([op.tensor for op in ops], [_message(op) for op in ops]) if ops else []

    with replaced(schedules, "_batch_p2p", issued), replaced(torch.random, "fork_rng", _fork_rng_of_any_device):
        yield


fork_rng = torch.random.fork_rng


def _fork_rng_of_any_device(devices: Any = None, *args: Any, **options: Any) -> Any:
    """`torch.random.fork_rng` for any device; schedules of torch 2.12 leave `device_type` at its default, CUDA."""
    types = {device.type for device in devices or () if isinstance(device, torch.device)}
    return fork_rng(devices, *args, **({"device_type": types.pop()} if len(types) == 1 else {}) | options)


def _message(op: dist.P2POp) -> CollectiveCall:
    kind, name = ("send", "c10d.send") if op.op is dist.isend else ("recv", "c10d.recv_")
    ranks = tuple(dist.get_process_group_ranks(op.group))
    return CollectiveCall(kind, name, ranks, op.tensor.dtype, op.tensor.numel(), op.peer, id(op.tensor))


def unit_policies(model: nn.Module) -> dict[nn.Module, Any]:
    """Map each unit of `fully_shard`, or of `replicate` on FSDP2's machinery, to its mixed precision policy."""
    return {module: state._mp_policy for module, state in _units(model)}


def reduction_dtype(policy: Any, held: torch.dtype) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces gradients under a mixed precision policy, for parameters of dtype `held`.

    Without `reduce_dtype` this is the parameters' dtype since torch 2.15, and the dtype of their all-gather before
    (`MixedPrecisionPolicy`).
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    gathered_in = held if hasattr(FSDPParam, "unsharded_grad_dtype") else policy.param_dtype
    dtype: torch.dtype = policy.reduce_dtype or gathered_in or held
    return dtype


def sum_then_divide(model: nn.Module) -> None:
    """Make FSDP2's units with their own divide factor sum gradients before they divide.

    Only NCCL divides by a number other than the group's size. Units without a reduce-scatter are left out, because
    torch would divide twice.
    """
    for group in _parameter_groups(model):
        size, factor = getattr(group.mesh_info, "shard_mesh_size", 1), group.gradient_divide_factor
        if factor is not None and size not in (1, factor):
            group.force_sum_reduction_for_comms = True


def divide_factors(model: nn.Module) -> set[float]:
    """Return the divisors that were set for the gradients of FSDP2's units."""
    factors = (group.gradient_divide_factor for group in _parameter_groups(model))
    return {float(factor) for factor in factors if factor is not None}


def unit_meshes(model: nn.Module) -> list[DeviceMesh]:
    """Return the meshes of FSDP2's units. Gathered parameters (after a forward without backward) have no mesh."""
    return [group.mesh_info.mesh for group in _parameter_groups(model)]


def _parameter_groups(model: nn.Module) -> Iterator[Any]:
    for _, state in _units(model):
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one
        yield from (group for group in groups if group is not None)


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if modules:
        require("units of FSDP2")
    for module in modules:
        yield module, module._get_fsdp_state()
