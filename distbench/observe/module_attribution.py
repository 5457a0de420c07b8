"""Each collective of a step with its phase, source, mesh dim, owning module and redistribution, as rows of a trace.

Each module records autograd's sequence number when its forward begins and ends. A node of backward has the number of
its forward, so the innermost module around that number owns the node's collectives. Collectives of a hook on a finished
gradient belong to the parameter's module. Collectives after the model, or before backward reaches the model, belong to
the loss. Collectives in the optimizer's phase belong to the optimizer.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distbench.plans.training_step import SCHEDULE
from distbench.plans.user_step import OTHER
from distbench.ranks.context import RankContext
from distbench.ranks.dtypes import dtype_name
from distbench.ranks.measure import Call
from distbench.records.bus_bandwidth import wire_bytes
from distbench.records.run_file import COMPUTING_COLUMNS, PHASE_COLUMNS, TRACE_COLUMNS
from distbench.spec import ParallelPlan
from distbench.spec.plan import LOSS, ULYSSES
from distbench.torch_private import (
    BACKEND_OPS,
    CollectiveCall,
    Label,
    Labels,
    Message,
    accepts_no_hooks,
    autograd_position,
    finished_parameter,
    issued_collectives,
    labelled_communication,
    next_autograd_position,
)


class RunningModules:
    """The running module: in forward the innermost module, in backward the module of the node's forward.

    Each thread numbers its nodes. If checkpointing recomputes a forward on autograd's thread, as on accelerators, nodes
    of backward still have the numbers of the first forward, from the thread of this object.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._stack: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._thread = threading.get_ident()

    @property
    def has_run(self) -> bool:
        """Return whether a module's forward has ended."""
        return bool(self._spans)

    def is_after(self, position: int | None) -> bool:
        """Return whether a node was created after the forward of all modules, and belongs to the loss."""
        return position is not None and position >= max(end for _, end, _ in self._spans)

    def holder_of(self, parameter: object) -> str | None:
        """Return the name of the module of a parameter, empty for the root, None if no module has the parameter."""
        if parameter is None or self._model is None:
            return None
        parameters = self._model.named_parameters()
        return next((name.rpartition(".")[0] for name, candidate in parameters if candidate is parameter), None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, name: str, *_: object) -> None:
        """Begin a module's forward."""
        self._stack.append((name, next_autograd_position()))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, *_: object) -> None:
        """End the innermost module's forward."""
        name, start = self._stack.pop()
        if threading.get_ident() == self._thread:
            self._spans.append((start, next_autograd_position(), name))

    @property
    def running(self) -> str | None:
        """The innermost module whose forward runs."""
        return self._stack[-1][0] if self._stack else None

    def owner(self, running: str | None, position: int | None) -> str | None:
        """Return the running module, or the module of the node with this sequence number; empty for the root, None if
        unknown."""
        if running is not None or position is None:
            return running
        around = [(end - start, name) for start, end, name in self._spans if start <= position < end]
        return min(around)[1] if around else None


@contextlib.contextmanager
def running_modules(model: nn.Module | None) -> Iterator[RunningModules]:
    """Add the outermost hooks to every module, so that collectives in hooks of a parallel style belong to the
    module. Collectives of a module that accepts no hooks belong to the module around it."""
    modules = RunningModules(model)
    with contextlib.ExitStack() as hooks:
        without_hooks: tuple[str, ...] = ()
        for name, module in model.named_modules() if model is not None else ():
            if accepts_no_hooks(module):
                without_hooks += (f"{name}." if name else "",)
            if f"{name}.".startswith(without_hooks):
                continue
            hooks.enter_context(module.register_forward_pre_hook(partial(modules.enter, name), prepend=True))
            hooks.enter_context(module.register_forward_hook(modules.leave, always_call=True))
        yield modules


UNKNOWN_GROUP = "?"
# Owners that are not modules, in addition to LOSS.
OPTIMIZER, STEP = "(optimizer)", "(step)"
OWN_PHASES = {"optimizer": OPTIMIZER, OTHER: STEP}
# With find_unused_parameters, flags of parameters with a gradient on some rank: DDP's only all-reduce of i32.
USED_PARAMETERS = "DDP used parameters"


@dataclass(frozen=True)
class Communication:
    """One collective of a step.

    Args:
        phase: "forward", "backward" or "optimizer"; "other" for the rest of a user's step; "call" without a step.
        source: "fsdp", "ddp", "pp", "cp", "ep", "tp", "redistribute" (DTensor over other mesh dims), "autograd", or
        "model".
        kind: as in CollectiveCall, like `op` and `dtype`.
        mesh_dim: name of the mesh dim, or names joined by "x"; "?" for a group that is not a mesh dim.
        payload_bytes: nccl-tests' S.
        owner: the module's name, empty for the root, or LOSS, OPTIMIZER or STEP.
        owner_known: whether the owner was determined.
        redistribution: `"S(0)R->RR"`, empty for other collectives.
        explicit: whether the user requested the redistribution, rather than an operator. None for other collectives.
        group: sorted global ranks of the group, joined by commas. For a message, the sender and the receiver.
    """

    phase: str
    source: str
    kind: str
    op: str
    mesh_dim: str
    group_size: int
    dtype: str
    payload_bytes: int
    owner: str
    owner_known: bool
    redistribution: str
    explicit: bool | None
    group: str


class TracedRow(NamedTuple):
    """One collective of one traced step, with times in seconds of this rank's clock, None if not measured."""

    what: Communication
    issued_s: float | None = None
    completed_s: float | None = None
    exposed_s: float | None = None


class Traced(NamedTuple):
    """One traced step of one rank."""

    start_s: float
    ends_s: list[float]  # of each phase
    cpu_s: float
    rows: list[TracedRow]
    working: Sequence[tuple[float, float]] = ()  # on the stages of a pipeline


def tables(steps: Sequence[Traced], phases: Sequence[str], context: RankContext, clock_shared: bool) -> dict[str, Any]:
    """Return the steps, phases and rows of all ranks in the format of the trace record."""
    by_rank: list[Sequence[Traced]] = context.gather(steps)
    lengths, phase_rows, rows, working = [], [], [], []
    for number, ranks in enumerate(zip(*by_rank, strict=True)):
        if all(traced.ends_s for traced in ranks):
            lengths.append(max(traced.ends_s[-1] - traced.start_s for traced in ranks))
        last_in = max(traced.start_s for traced in ranks)
        for rank, traced in enumerate(ranks):
            zero = last_in if clock_shared else traced.start_s
            starts = [traced.start_s, *traced.ends_s]
            phase_rows += [
                [rank, number, phase, begun - zero, ended - zero]
                for phase, begun, ended in zip(phases, starts, traced.ends_s, strict=False)
            ]
            working += [[rank, number, begun - zero, ended - zero] for begun, ended in traced.working]
            seen: Counter[str] = Counter()
            for communication, issued_s, completed_s, exposed_s in traced.rows:
                kind = communication.kind
                values = {
                    **vars(communication),
                    "rank": rank,
                    "step": number,
                    "seq": seen[communication.group],
                    "backend_op": BACKEND_OPS.get((context.backend, kind), kind),
                    "wire_bytes": wire_bytes(kind, communication.payload_bytes, communication.group_size),
                    "issued_s": None if issued_s is None else issued_s - zero,
                    "completed_s": None if completed_s is None else completed_s - zero,
                    "exposed_s": exposed_s,
                }
                seen[communication.group] += 1
                rows.append([values[name] for name in TRACE_COLUMNS])
    return {
        "num_steps": len(steps),
        # The lengths of all steps or no length, so that the n-th length belongs to the n-th step.
        "steps_s": lengths if len(lengths) == len(steps) else [],
        "phases": {"columns": PHASE_COLUMNS, "rows": phase_rows},
        "columns": TRACE_COLUMNS,
        "rows": rows,
        **({"computing": {"columns": COMPUTING_COLUMNS, "rows": working}} if working else {}),
    }


def communications_of(
    call: Call, phases: Sequence[str], plan: ParallelPlan, context: RankContext, model: nn.Module | None = None
) -> list[Communication]:
    """Return every collective of one call in the order of issue. All ranks of a real group must call this together.

    Args:
        call: the function to run once, which stamps the end of each phase. Its first run must be earlier, because of
        set-up.
        phases: names of the stamps. If empty, the only phase is "call".
        plan: the plan with the mesh dims of tensor and context parallel.
        model: the model whose modules own the collectives, if any.
    """
    communications: list[Communication] = []
    with (
        tracked_collectives(model, phases, plan, [context.mesh]) as tracker,
        issued_collectives(
            lambda issued: communications.append(tracker.communication(issued, tracker.issue_context(issued)))
        ),
    ):
        call(tracker.stamp)
    return communications


class IssueContext(NamedTuple):
    """The state at the issue of a collective, from which its owner is derived later."""

    phase: str
    label: Label | None  # of FSDP or DTensor, if one of these issues the collective
    fsdp_owner: str | None  # the module for which FSDP communicates
    module: str | None  # the innermost module whose forward has begun
    position: int | None  # the sequence number of the node whose backward runs
    finished: str | None = None  # the module of the parameter whose gradient is finished, and whose hooks run
    turn: int = 0  # phases that have ended before
    message: Message | None = None  # of a pipeline


class CollectiveTracker:
    """Tracker of a call's phases, labels and modules, which attributes each collective to its owner."""

    def __init__(
        self,
        phases: Sequence[str],
        labels: Labels,
        modules: "RunningModules",
        plan: ParallelPlan,
        meshes: Sequence[DeviceMesh],
    ) -> None:
        self._names = iter(phases or ("call",))
        self._phase = next(self._names)
        self._labels, self._modules, self._plan = labels, modules, plan
        self._groups, self._rank = mesh_dims_by_ranks(meshes), dist.get_rank()
        self._turn, self._buckets = 0, Counter[int]()

    def stamp(self) -> None:
        """End a phase."""
        self._turn += 1
        self._phase = next(self._names, self._phase)

    def issue_context(self, call: CollectiveCall | None = None) -> IssueContext:
        """Return the running module, label and phase. This is cheap."""
        module = self._modules.running
        position = autograd_position() if module is None else None
        finished = self._modules.holder_of(finished_parameter()) if module is None else None
        label, owner = self._labels.current, self._labels.owner
        message = None if call is None or call.peer is None else self._labels.messages.get(call.tensor_id)
        phase = self._phase if self._phase != SCHEDULE else _pass_of(call, label, message)
        return IssueContext(phase, label, owner, module, position, finished, self._turn, message)

    def owner_of(self, issued_in: IssueContext) -> str | None:
        """Return the module that issued a collective, empty for the root, or LOSS, OPTIMIZER or STEP, None if
        unknown."""
        if issued_in.fsdp_owner is not None:
            return issued_in.fsdp_owner
        if issued_in.phase in OWN_PHASES:
            return OWN_PHASES[issued_in.phase]
        if issued_in.finished is not None:
            return issued_in.finished
        owner = self._modules.owner(issued_in.module, issued_in.position)
        if owner is not None or not self._modules.has_run:
            return owner
        if issued_in.phase == "forward" or self._modules.is_after(issued_in.position):
            return LOSS
        return None

    def communication(self, call: CollectiveCall, issued_in: IssueContext) -> Communication:
        """Return one collective with its owner. Call this in the order of issue."""
        phase, label = issued_in.phase, issued_in.label
        ranks = tuple(sorted(call.ranks))
        mesh_dim = self._groups.get(ranks, UNKNOWN_GROUP)
        source = _source(label, mesh_dim, phase, self._plan)
        owner = self.owner_of(issued_in)
        if issued_in.message is not None:
            source, owner = "pp", issued_in.message.owner
        if source == "ddp" and phase == "backward" and call.kind == "all_reduce":
            owner = USED_PARAMETERS
            if call.dtype != torch.int32:
                # The reducer starts buckets in order.
                owner = f"DDP bucket {self._buckets[issued_in.turn]}"
                self._buckets[issued_in.turn] += 1
        ends = (self._rank, call.peer) if call.kind == "send" else (call.peer, self._rank)
        return Communication(
            phase=phase,
            source=source,
            kind=call.kind,
            op=call.op,
            mesh_dim=mesh_dim,
            group_size=len(ranks) if call.peer is None else 2,
            dtype=dtype_name(call.dtype),
            payload_bytes=call.payload_numel * call.dtype.itemsize,
            owner=owner or "",
            owner_known=owner is not None,
            redistribution=label.redistribution if label else "",
            explicit=label.explicit if label and label.redistribution else None,
            group=",".join(map(str, ranks if call.peer is None else ends)),
        )


def _pass_of(call: CollectiveCall | None, label: Label | None, message: Message | None) -> str:
    """Return "forward" or "backward" in a pipeline schedule: autograd and FSDP's reduction of gradients mean
    backward."""
    if message is not None:
        return message.phase
    is_reduced = call and call.kind in ("reduce_scatter", "all_reduce") and label and label.source == "fsdp"
    return "backward" if is_reduced or autograd_position() is not None else "forward"


@contextlib.contextmanager
def tracked_collectives(
    model: nn.Module | None, phases: Sequence[str], plan: ParallelPlan, meshes: Sequence[DeviceMesh]
) -> Iterator[CollectiveTracker]:
    """Track one call on the groups of the meshes."""
    names = {module: name for name, module in model.named_modules()} if model is not None else {}
    with labelled_communication(names) as labels, running_modules(model) as modules:
        yield CollectiveTracker(phases, labels, modules, plan, meshes)


def _source(label: Label | None, mesh_dim: str, phase: str, plan: ParallelPlan) -> str:
    if label and label.source == "fsdp":
        return "fsdp"
    own_dims = {
        "cp": plan.cp.mesh_dim if plan.cp is not None else None,
        "ddp": "x".join(plan.ddp.mesh_dims) if plan.ddp is not None else None,
        "ep": "x".join(plan.ep_dims) if plan.ep else None,
    }
    part = next((part for part, part_dim in own_dims.items() if part_dim == mesh_dim), None)
    # Ulysses exchanges heads and sequence by DTensor.
    if part and (not label or (part == "cp" and plan.cp is not None and plan.cp.rotate == ULYSSES)):
        return part
    if (plan.tp is not None or plan.shard_params) and set(mesh_dim.split("x")) <= set(plan.tp_dims):
        return "tp"
    if label:
        return label.source
    return "autograd" if phase == "backward" else "model"


def mesh_dims_by_ranks(meshes: Sequence[DeviceMesh]) -> dict[tuple[int, ...], str]:
    """Map the sorted ranks of this rank's group, for every choice of mesh dims, to the names of the fewest mesh
    dims."""
    by_ranks: dict[tuple[int, ...], str] = {}
    for mesh in meshes:
        names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        for count in range(1, len(names) + 1):
            for chosen in combinations(range(len(names)), count):
                index = tuple(slice(None) if dim in chosen else at for dim, at in enumerate(coordinate))
                ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
                by_ranks.setdefault(ranks, "x".join(names[dim] for dim in chosen))
    return by_ranks
