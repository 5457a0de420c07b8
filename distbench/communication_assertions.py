"""Assertions on the communication of code in tests: `with distbench.communication(model) as seen:`.

These are the collectives that c10d dispatches in this process, on real and fake process groups. Collectives of compiled
code and of DDP's reducer are included. Owners are determined as in a traced step (`observe/module_attribution.py`).
"""

import contextlib
import fnmatch
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distbench.judge.communication_signature import ROOT, Signature, compare_with_stored, counted
from distbench.observe.module_attribution import (
    UNKNOWN_GROUP,
    Communication,
    IssueContext,
    tracked_collectives,
)
from distbench.plans.user_step import OTHER
from distbench.spec import ParallelPlan
from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import write_whole
from distbench.torch_private import (
    FAMILIES,
    OTHERS,
    CollectiveCall,
    around_backward,
    average_on_fake_group,
    issued_collectives,
    unit_meshes,
)

PHASES = ("forward", "backward", "optimizer", OTHER)
CASE = "communication"
_WITH_HOOK: WeakSet[nn.Module] = WeakSet()
_OPEN_BLOCK = threading.Lock()


class CollectiveCount(int):
    """Number of collectives or bytes; a failed assertion on the number prints the counted collectives."""

    collectives: tuple[Communication, ...]
    question: str

    @classmethod
    def of(cls, value: int, collectives: Sequence[Communication], question: str) -> "CollectiveCount":
        """Return the number of these collectives or of their bytes."""
        count = cls(value)
        count.collectives, count.question = tuple(collectives), question
        return count

    def explanation(self) -> list[str]:
        """Return lines for a failed assertion: the counted collectives by path, with their modules."""
        counts = counted([vars(each) for each in self.collectives], fold_layers=False)
        lines = [f"{count} x {path.text()}" for path, count in counts.items()]
        return [f"{int(self)} {self.question}", *(f"  {line}" for line in lines or ["no collective"])]

    def __repr__(self) -> str:
        return "\n".join(self.explanation())


class SeenCommunication:
    """The collectives of a `with distbench.communication(...)` block on this rank, in order of issue.

    Attributes:
        collectives: each with phase, kind, mesh dim, group, dtype, payload bytes and owner.
    """

    def __init__(self, modules: Sequence[str], mesh: dict[str, int], folder: Path, update: bool) -> None:
        self.collectives: list[Communication] = []
        self._modules, self._mesh, self._folder, self._update = modules, mesh, folder, update

    def count(
        self, kind: str | None = None, *, on: str | None = None, module: str | None = None, phase: str | None = None
    ) -> CollectiveCount:
        """Count collectives.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", ...; None for all.
            on: name of the mesh dim, several joined by "x"; "?" for groups of no mesh dim.
            module: glob pattern of the names of owners, "(root)" for the model itself; `*` matches dots, too.
            phase: "forward", "backward" (recomputation included), "optimizer" or "other" (between backward
                and optimizer: clipping).

        Raises:
            UserError: the kind, mesh dim, module or phase is unknown, so that a misspelt name is not counted as 0.
        """
        collectives, question = self._selected(kind, on, module, phase)
        return CollectiveCount.of(len(collectives), collectives, question)

    def bytes(
        self, kind: str | None = None, *, on: str | None = None, module: str | None = None, phase: str | None = None
    ) -> CollectiveCount:
        """Sum the payload bytes (nccl-tests' size S) of the same collectives as `count`."""
        collectives, question = self._selected(kind, on, module, phase)
        return CollectiveCount.of(sum(each.payload_bytes for each in collectives), collectives, f"bytes of {question}")

    def matches(self, file: str | Path) -> bool:
        """Return True if the collectives equal the collectives in a file of `write`.

        Raises:
            AssertionError: lists each difference with module, phase, collective, mesh dim and bytes.
            UserError: the file does not exist or is not a signature.
        """
        file = self._folder / file
        if self._update:
            if dist.get_rank() == 0:
                self.write(file)
            return True
        if not file.exists():
            raise UserError(
                f"{file} does not exist; write the file once with seen.write(...), or run pytest --distbench-update"
            )
        comparison = compare_with_stored(file, self._signature())
        if comparison.exit_code == 1:
            lines = [f"  {sentence}" for sentences in comparison.changed.values() for sentence in sentences]
            raise AssertionError("\n".join([f"the communication differs from {file}:", *lines]))
        if comparison.uncompared:
            raise UserError("; ".join(comparison.uncompared))
        return True

    def write(self, file: str | Path) -> None:
        """Write the collectives as a signature file for `matches`; call it on one rank."""
        file = self._folder / file
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, self._signature().to_text())

    def _signature(self) -> Signature:
        paths = counted([vars(each) for each in self.collectives])
        return Signature(CASE, self._mesh, torch.__version__, {CASE: paths}, has_peaks=False)

    def _selected(
        self, kind: str | None, on: str | None, module: str | None, phase: str | None
    ) -> tuple[list[Communication], str]:
        seen_kinds = {each.kind for each in self.collectives}
        _require("kind of collective", kind, {*FAMILIES, *OTHERS, *seen_kinds})
        joined = {"x".join(dims) for count in range(1, len(self._mesh) + 1) for dims in combinations(self._mesh, count)}
        _require("mesh dim", on, {*joined, UNKNOWN_GROUP, *(each.mesh_dim for each in self.collectives)})
        _require("phase", phase, PHASES)
        owners = {*map(_owner, self.collectives), *(name or ROOT for name in self._modules)}
        if module is not None and not fnmatch.filter(owners, module):
            _require("module", module, owners)
        selected = [
            each
            for each in self.collectives
            if kind in (None, each.kind)
            and on in (None, each.mesh_dim)
            and phase in (None, each.phase)
            and (module is None or fnmatch.fnmatchcase(_owner(each), module))
        ]
        words = [
            kind or ("collective" if len(selected) == 1 else "collectives"),
            f"over {on}" if on else "",
            f"of {module}" if module else "",
            phase or "",
        ]
        return selected, " ".join(word if word != phase else f"in {phase}" for word in words if word)


def _owner(collective: Communication) -> str:
    return (collective.owner or ROOT) if collective.owner_known else "(unknown)"


def _own_name(owner: str) -> str:
    """Return the names of an owner as in the user's model, without torch's wrappers of compiled and checkpointed
    modules."""
    names = (re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)\b", "", name) for name in owner.split(", "))
    return ", ".join(name.removeprefix(".") for name in names)


def _require(what: str, given: str | None, allowed: Sequence[str] | set[str]) -> None:
    if given is not None and given not in allowed:
        raise UserError(f"{what} {given!r} is unknown ({nearest(given, sorted(allowed))})")


@contextlib.contextmanager
def communication(
    model: nn.Module | None = None, *, mesh: DeviceMesh | None = None, folder: Path | str = "", update: bool = False
) -> Iterator[SeenCommunication]:
    """Record every collective of the block on this rank: forward, backward, optimizer.

    Args:
        model: its modules own the collectives, and its DTensor parameters have the meshes.
        mesh: required if parameters are not DTensors (DDP, plain tensors) or the mesh has more mesh dims than theirs.
        folder: where relative files of `matches` and `write` are; the current folder if empty.
        update: let `matches` write its file on rank 0 instead of comparing.

    Raises:
        UserError: no process group exists, the model is not a module, or another block is open.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise UserError(f"communication() needs a torch.nn.Module, not {type(model).__name__}; give the model")
    if not dist.is_initialized():
        raise UserError(
            "communication() needs a process group; call torch.distributed.init_process_group first, with "
            'backend="fake" for a test in one process'
        )
    meshes = [mesh] if mesh is not None else _meshes_of(model)
    names = [_own_name(name) for name, _ in model.named_modules()] if model is not None else []
    sizes = {name: size for each in meshes for name, size in zip(each.mesh_dim_names or (), each.shape, strict=False)}
    seen = SeenCommunication(names, sizes, Path(folder), update)
    for module in model.modules() if model is not None else ():
        if isinstance(module, DistributedDataParallel) and module not in _WITH_HOOK:
            _WITH_HOOK.add(module)
            with contextlib.suppress(RuntimeError):  # a hook of the user's own
                average_on_fake_group(module, module.process_group)
    tracked = tracked_collectives(model, ("forward",), ParallelPlan(), meshes)
    with _only_block(), tracked as tracker, _phases(model) as phase_of:

        def on_issue(call: CollectiveCall) -> None:
            issued_in = tracker.issue_context(call)
            collective = tracker.communication(call, issued_in._replace(phase=phase_of(issued_in)))
            seen.collectives.append(replace(collective, owner=_own_name(collective.owner)))

        with issued_collectives(on_issue):
            yield seen


@contextlib.contextmanager
def _only_block() -> Iterator[None]:
    if not _OPEN_BLOCK.acquire(blocking=False):
        raise UserError("a communication() block is open already; end this block, or use its result for both")
    try:
        yield
    finally:
        _OPEN_BLOCK.release()


def _meshes_of(model: nn.Module | None) -> list[DeviceMesh]:
    if model is None:
        return []
    meshes = [each.device_mesh for each in model.parameters() if isinstance(each, DTensor)]
    return list(dict.fromkeys((*meshes, *unit_meshes(model))))


@contextlib.contextmanager
def _phases(model: nn.Module | None) -> Iterator[Callable[[IssueContext], str]]:
    """Yield a function from a collective's context to its phase, by the running code (as in `UserStep`)."""
    running: list[str] = []
    is_after_backward = False

    def begin(phase: str) -> Callable[..., None]:
        return lambda *_: running.append(phase)

    def end(*_: object) -> None:
        nonlocal is_after_backward
        running.pop()
        is_after_backward = True

    def begin_forward(*_: object) -> None:
        nonlocal is_after_backward
        is_after_backward = False

    def phase_of(issued_in: IssueContext) -> str:
        if running:
            return running[0]
        return OTHER if is_after_backward and issued_in.module is None else "forward"

    with around_backward(begin("backward"), end), contextlib.ExitStack() as hooks:
        hooks.callback(register_optimizer_step_pre_hook(begin("optimizer")).remove)
        hooks.callback(register_optimizer_step_post_hook(end).remove)
        if model is not None:
            hooks.callback(model.register_forward_pre_hook(begin_forward).remove)
        yield phase_of
