"""What a step communicates: each collective with its phase, source, mesh dim, owning module and redistribution.

Each module notes autograd's sequence number when its forward begins and ends. A node of backward carries the number
that its forward had, so the innermost module around that number owns what the node communicates. What a hook on a
finished gradient communicates belongs to the parameter's module; what runs after the model or before backward reaches
it to the loss; and in the optimizer's phase all is the optimizer's.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import nn

from distbench.spec import ParallelPlan
from distbench.spec.parallel import ULYSSES
from distbench.worker.plans.training_step import SCHEDULE
from distbench.worker.rank.dtypes import dtype_name
from distbench.worker.rank.measure import Call
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import (
    CollectiveCall,
    Label,
    Labels,
    Message,
    autograd_position,
    each_collective,
    finished_parameter,
    labelled_communication,
)
from distbench.worker.tracing.communication import LOSS, OPTIMIZER, UNKNOWN_GROUP, USED_PARAMETERS, Communication
from distbench.worker.tracing.running_modules import RunningModules, running_modules


def communications_of(
    call: Call, phases: Sequence[str], plan: ParallelPlan, context: RankContext, model: nn.Module | None = None
) -> list[Communication]:
    """Every collective of one call, in the order of issue; all ranks of a real group must do this together.

    Args:
        call: what to run, once; it stamps the end of each phase. A first run also sets things up: run it before.
        phases: what it stamps; none counts as one phase named "call".
        plan: names the mesh dims of tensor and context parallel.
        model: whose modules own what is communicated, if there is one.
    """
    found: list[Communication] = []
    with (
        tracked_collectives(model, phases, plan, context) as tracker,
        each_collective(lambda issued: found.append(tracker.communication(issued, tracker.issue_context(issued)))),
    ):
        call(tracker.stamp)
    return found


class IssueContext(NamedTuple):
    """What is known at the moment a collective is issued; its owner is derived from this later.

    Args:
        label: which of FSDP and DTensor issues it.
        fsdp_owner: the module for which FSDP communicates.
        module: the innermost module whose forward has begun.
        position: the sequence number of the node whose backward runs.
        finished: the module of the parameter whose gradient has just been finished, and whose hooks run.
        turn: phases that have ended before.
        message: of a pipeline, where it is one.
    """

    phase: str
    label: Label | None
    fsdp_owner: str | None
    module: str | None
    position: int | None
    finished: str | None = None
    turn: int = 0
    message: Message | None = None


class CollectiveTracker:
    """Follows a call's phases, labels and modules, and attributes each collective to its owner."""

    def __init__(
        self, phases: Sequence[str], labels: Labels, modules: "RunningModules", plan: ParallelPlan, context: RankContext
    ) -> None:
        self._names = iter(phases or ("call",))
        self._phase = next(self._names)
        self._labels, self._modules, self._plan = labels, modules, plan
        self._groups, self._rank = _mesh_dims_by_ranks(context), context.rank
        self._turn, self._buckets = 0, Counter[int]()

    def stamp(self) -> None:
        """A phase has ended."""
        self._turn += 1
        self._phase = next(self._names, self._phase)

    def issue_context(self, call: CollectiveCall | None = None) -> IssueContext:
        """What runs now, with the collective that is issued; cheap."""
        module = self._modules.running
        position = autograd_position() if module is None else None
        finished = self._modules.holder_of(finished_parameter()) if module is None else None
        label, owner = self._labels.current, self._labels.owner
        message = None if call is None or call.peer is None else self._labels.messages.get(call.tensor_id)
        phase = self._phase if self._phase != SCHEDULE else _pass_of(call, label, message)
        return IssueContext(phase, label, owner, module, position, finished, self._turn, message)

    def owner_of(self, issued_in: IssueContext) -> str | None:
        """The module for which something was issued, empty for the root; or LOSS, OPTIMIZER, None where none is
        known."""
        if issued_in.fsdp_owner is not None:
            return issued_in.fsdp_owner
        if issued_in.phase == "optimizer":
            return OPTIMIZER
        if issued_in.finished is not None:
            return issued_in.finished
        owner = self._modules.owner(issued_in.module, issued_in.position)
        if owner is not None or not self._modules.has_run:
            return owner
        if issued_in.phase == "forward" or self._modules.is_after(issued_in.position):
            return LOSS
        return None

    def communication(self, call: CollectiveCall, issued_in: IssueContext) -> Communication:
        """One collective, with its owner; in the order of issue."""
        phase, label = issued_in.phase, issued_in.label
        ranks = tuple(sorted(call.ranks))
        mesh_dim = self._groups.get(ranks, UNKNOWN_GROUP)
        source = _source(label, mesh_dim, phase, self._plan)
        owner = self.owner_of(issued_in)
        if issued_in.message is not None:
            source, owner = "pp", issued_in.message.owner
        if source == "ddp" and phase == "backward" and call.kind == "all_reduce":
            owner = USED_PARAMETERS if call.dtype == torch.int32 else self._next_bucket(issued_in.turn)
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
            group=",".join(map(str, ranks if call.peer is None else self._ends(call))),
        )

    def _next_bucket(self, turn: int) -> str:
        """The reducer starts its buckets in their order."""
        self._buckets[turn] += 1
        return f"DDP bucket {self._buckets[turn] - 1}"

    def _ends(self, call: CollectiveCall) -> tuple[int | None, ...]:
        return (self._rank, call.peer) if call.kind == "send" else (call.peer, self._rank)


def _pass_of(call: CollectiveCall | None, label: Label | None, message: Message | None) -> str:
    """Forward or backward, where they take turns: autograd's is backward's, and so is FSDP's reducing of gradients."""
    if message is not None:
        return message.phase
    is_reduced = call and call.kind in ("reduce_scatter", "all_reduce") and label and label.source == "fsdp"
    return "backward" if is_reduced or autograd_position() is not None else "forward"


@contextlib.contextmanager
def tracked_collectives(
    model: nn.Module | None, phases: Sequence[str], plan: ParallelPlan, context: RankContext
) -> Iterator[CollectiveTracker]:
    """Follow one call."""
    with labelled_communication() as labels, running_modules(model) as modules:
        yield CollectiveTracker(phases, labels, modules, plan, context)


def _source(label: Label | None, mesh_dim: str, phase: str, plan: ParallelPlan) -> str:
    if label and label.source == "fsdp":
        return "fsdp"
    own_dims = {
        "cp": plan.cp.mesh_dim if plan.cp is not None else None,
        "ddp": "x".join(plan.ddp.mesh_dims) if plan.ddp is not None else None,
        "ep": "x".join(plan.ep_dims) if plan.ep else None,
    }
    part = next((part for part, own in own_dims.items() if own == mesh_dim), None)
    # Ulysses exchanges heads and sequence by DTensor.
    if part and (not label or (part == "cp" and plan.cp is not None and plan.cp.rotate == ULYSSES)):
        return part
    if (plan.tp is not None or plan.shard_params) and set(mesh_dim.split("x")) <= set(plan.tp_dims):
        return "tp"
    if label:
        return label.source
    return "autograd" if phase == "backward" else "model"


def _mesh_dims_by_ranks(context: RankContext) -> dict[tuple[int, ...], str]:
    """This rank's group along every choice of mesh dims, by its sorted ranks; the fewest mesh dims name it."""
    names: Sequence[str] = context.mesh_dims
    found: dict[tuple[int, ...], str] = {}
    for count in range(1, len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            index = tuple(slice(None) if dim in chosen else at for dim, at in enumerate(context.coordinate))
            ranks = tuple(sorted(context.mesh.mesh[index].flatten().tolist()))
            found.setdefault(ranks, "x".join(names[dim] for dim in chosen))
    return found
