"""Who issues communication now: FSDP for which module, or DTensor for which redistribution."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from distbench.worker.torch_internals.probe import require


@dataclass(frozen=True)
class Label:
    """Who communicates.

    Args:
        source: "fsdp" or "redistribute".
        owner: FSDP's name of the module whose parameters it moves; empty for the root, and for a redistribution.
        redistribution: `"S(0)R->RR"`, placements one a mesh dim; empty for FSDP.
        explicit: whether the redistribution was asked for, by a user or a parallel style, or comes from an operator.
    """

    source: str
    owner: str = ""
    redistribution: str = ""
    explicit: bool = True


class Labels:
    """The labels in force, innermost last; `current` is None where neither FSDP nor DTensor communicates."""

    def __init__(self) -> None:
        self.stack: list[Label] = []

    @property
    def current(self) -> Label | None:
        """The innermost."""
        return self.stack[-1] if self.stack else None

    @property
    def owner(self) -> str | None:
        """The module for which FSDP communicates, also through DTensor; None where it does not."""
        return next((label.owner for label in reversed(self.stack) if label.source == "fsdp"), None)

    @contextlib.contextmanager
    def on(self, label: Label) -> Iterator[None]:
        """Have a label in force."""
        self.stack.append(label)
        try:
            yield
        finally:
            self.stack.pop()


@contextlib.contextmanager
def labelled_communication() -> Iterator[Labels]:
    """Keep track of FSDP's and DTensor's communication while the context is open.

    Raises:
        Unsupported: torch's FSDP or DTensor is not the one we know.
    """
    require("communication labels")
    require("autograd sequence numbers")
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import _api, _dispatch, _redistribute

    labels = Labels()
    with contextlib.ExitStack() as undo:
        for name in ("unshard", "post_backward"):
            _replace(undo, FSDPParamGroup, name, _fsdp(labels, getattr(FSDPParamGroup, name), _group_owner))
        name = "_get_grad_inner_tensor"
        _replace(undo, FSDPParam, name, _fsdp(labels, getattr(FSDPParam, name), _parameter_owner))
        for module in (_api, _dispatch, _redistribute):
            plain = module.redistribute_local_tensor
            _replace(undo, module, "redistribute_local_tensor", _dtensor(labels, plain, module is not _dispatch))
        yield labels


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _fsdp(labels: Labels, method: Callable[..., Any], owner: Callable[[Any], str]) -> Callable[..., Any]:
    def labelled(self: Any, *args: Any, **kwargs: Any) -> Any:
        with labels.on(Label("fsdp", owner(self))):
            return method(self, *args, **kwargs)

    return labelled


def _group_owner(group: Any) -> str:
    return group._module_fqn or ""


def _parameter_owner(parameter: Any) -> str:
    return (parameter._param_fqn or "").rpartition(".")[0]


def _dtensor(labels: Labels, function: Callable[..., Any], explicit: bool) -> Callable[..., Any]:
    def redistribute_local_tensor(local: Any, current: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        texts = ["".join(map(_placement_text, spec.placements)) for spec in (current, target)]
        with labels.on(Label("redistribute", "", "->".join(texts), explicit)):
            return function(local, current, target, *args, **kwargs)

    return redistribute_local_tensor


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    if placement.is_partial():
        return f"P({placement.reduce_op})"
    mark = "S" if type(placement).__name__ == "Shard" else "_S"
    return f"{mark}({placement.dim})"


def next_autograd_position() -> int:
    """The sequence number that the next node of this thread's graph will carry."""
    position: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return position


def autograd_position() -> int | None:
    """The sequence number of the node whose backward runs now; None outside of backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
