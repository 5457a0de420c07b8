"""Execution of a plan on one rank: forward, backward, asynchronously and in compiled code."""

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.forward_ad import unpack_dual
from torch.fx import has_side_effect

from distbench.planning.cost_profile import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, CUT, PARTITION, REDUCE_SCATTER
from distbench.planning.placement_states import Box, Move, State, box_of
from distbench.planning.redistribution_plans import Plan
from distbench.redistribute.direct import ExchangeOnRank, Transit, finished, shape_of
from distbench.spec.errors import UserError

# torch 2.13 renamed the single-tensor forms; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Step = Callable[[torch.Tensor], Transit]
_on_rank: "WeakKeyDictionary[Plan, tuple[tuple[int, ...], list[Step]]]" = WeakKeyDictionary()  # source's shape, steps
# Plans by key, because a compiled graph has only texts and numbers as arguments. Inductor keeps graphs on disk for
# other processes, so a key is a digest (`key_of`). Of equal plans the newest is kept, whose process groups exist.
_plans: dict[str, Plan] = {}
GRADIENT = "'"  # at the end of a key: the plan's `backward`


@overload
def execute(local: torch.Tensor, plan: Plan, *, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def execute(local: torch.Tensor, plan: Plan, *, async_op: Literal[True]) -> "Pending": ...
@overload
def execute(local: torch.Tensor, plan: Plan, *, async_op: bool) -> "torch.Tensor | Pending": ...
def execute(local: torch.Tensor, plan: Plan, *, async_op: bool = False) -> "torch.Tensor | Pending":
    """Return this rank's shard of the target layout; every rank of the mesh must call it.

    The result is differentiable: backward executes `plan.backward`. In compiled code the plan is one operator.
    Outside of compiled code, the result of a plan without communication may share `local`'s storage; write to a copy.

    Args:
        local: this rank's shard of the source layout, which must not be written to until the result is there. For
            Partial, this rank's part.
        async_op: return a `Pending` at once, while the first exchange is in progress.

    Raises:
        UserError: the plan was made without a DeviceMesh, or `local` is not a dense tensor of the source layout's shape
            (a DTensor has `to_local()`), or has a dtype that the reduce op of a Partial does not support.
    """
    if not isinstance(plan, Plan):
        raise UserError(f"plan is a {type(plan).__name__}; make a plan with distbench.redistribute.plan")
    if plan.mesh is None:
        raise UserError("the plan was made for sizes of a mesh; give distbench.redistribute.plan a DeviceMesh")
    if torch.compiler.is_compiling():
        if async_op:
            raise UserError("async_op does not work in compiled code; leave async_op out")
        return torch.ops.distbench.redistribute(local, plan.key)  # type: ignore[no-any-return]
    if async_op:
        return Pending(local, plan)
    with unchecked():
        # Autograd's function binds its signature in each call, which takes about as long as the exchange's Python code.
        if not getattr(local, "requires_grad", True) and unpack_dual(local).tangent is None:
            return Pending(local, plan).result()
        return _Executed.apply(local, plan, None)  # type: ignore[no-any-return]


class Pending:
    """A redistribution in progress; `wait` returns its result."""

    def __init__(self, local: torch.Tensor, plan: Plan) -> None:
        self._local, self._plan = local, plan
        _require_shape(local, plan)
        _require_dtype(local.dtype, plan)
        with torch.no_grad(), unchecked():
            given = local.detach()
            if given.is_conj() or given.is_neg():  # lazily, without memory to send
                given = given.resolve_conj().resolve_neg()
            self._transit = _transit(given.view(_moved_as(local.dtype, plan)), plan)
            self._early: torch.Tensor | None = None
            try:
                next(self._transit)
            except StopIteration as end:
                self._early = end.value

    def wait(self) -> torch.Tensor:
        """Return this rank's shard of the target layout, after all steps."""
        with unchecked():
            return _Executed.apply(self._local, self._plan, self)  # type: ignore[no-any-return]

    def result(self) -> torch.Tensor:
        """Finish the steps; return the result without a gradient."""
        if self._early is None:
            self._early = finished(self._transit)
        # A view, because autograd must not see an input as an output.
        return self._early.view(self._local.dtype)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._plan


class _Executed(torch.autograd.Function):
    # torch.func needs a forward without context, which gets tensors without its wrappers.
    @staticmethod
    def forward(local: torch.Tensor, plan: Plan, pending: Pending | None) -> torch.Tensor:
        return (pending or Pending(local, plan)).result()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.plan = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return execute(gradients[0], _plan_of_gradient(ctx.plan)), None, None


def _plan_of_gradient(plan: Plan) -> Plan:
    ops = {op for _, op in (*plan.source.partials, *plan.target.partials)}
    if ops - {"sum"}:
        raise UserError(f"the gradient of a Partial of {' and '.join(sorted(ops))} is not supported; use P(sum)")
    return plan.backward


@cache
def _define_operator() -> None:
    """Define the operator of compiled code, on first use, because its definition takes as long as this import."""
    operator = torch.library.custom_op("distbench::redistribute", _run_by_key, mutates_args=())
    operator.register_fake(_empty_result)
    operator.register_autograd(_backward_by_key, setup_context=_remember)
    # Else inductor removes the operator on ranks that use no element of its result, and the other ranks wait.
    has_side_effect(torch.ops.distbench.redistribute.default)


def _plan_of_key(key: str) -> Plan:
    plan = _plans[key.rstrip(GRADIENT)]
    for _ in range(key.count(GRADIENT)):
        plan = _plan_of_gradient(plan)
    return plan


def _run_by_key(local: torch.Tensor, plan_key: str) -> torch.Tensor:
    return Pending(local, _plan_of_key(plan_key)).result().clone(memory_format=torch.contiguous_format)


def _empty_result(local: torch.Tensor, plan_key: str) -> torch.Tensor:
    plan = _plan_of_key(plan_key)
    _require_shape(local, plan)
    return local.new_empty(shape_of(_box(plan, plan.target)))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.plan = _plan_of_key(inputs[1])


def _backward_by_key(ctx: Any, gradient: torch.Tensor) -> Any:
    return torch.ops.distbench.redistribute(gradient, _plan_of_gradient(ctx.plan).key), None


def _transit(local: torch.Tensor, plan: Plan) -> Transit:
    for step in _on_rank[plan][1]:
        local = yield from step(local)
    return local


def _require_shape(local: torch.Tensor, plan: Plan) -> None:
    if not isinstance(local, torch.Tensor) or hasattr(local, "to_local") or local.layout is not torch.strided:
        kind = type(local).__name__ if getattr(local, "layout", torch.strided) is torch.strided else "sparse tensor"
        raise UserError(f"local is a {kind}; give the rank's dense tensor (a DTensor's is x.to_local())")
    if plan not in _on_rank:
        raise UserError(f"rank {dist.get_rank()} is not in the mesh; execute the plan on the mesh's ranks only")
    if local.shape != _on_rank[plan][0]:
        raise UserError(
            f"the local tensor has shape {tuple(local.shape)}, but layout {plan.source} of {plan.problem.shape} has "
            f"{_on_rank[plan][0]} on this rank; give the shard of the source layout"
        )


def _require_dtype(dtype: torch.dtype, plan: Plan) -> None:
    """Raise UserError on all ranks, before the first message."""
    for _, op in (*plan.source.partials, *plan.target.partials):
        if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            raise UserError(f"parts of an average of {dtype} cannot be combined; use a floating-point dtype")
        if op in ("min", "max") and dtype.is_complex:
            raise UserError(f"{dtype} has no {op}; use P(sum) or P(avg)")


# gloo rejects these dtypes.
_MOVED_AS = {
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def _moved_as(dtype: torch.dtype, plan: Plan) -> torch.dtype:
    """Return the dtype to move elements as: one of the same size for those that collectives reject."""
    if plan.source.partials or plan.target.partials:
        return dtype
    return torch.uint8 if dtype.is_floating_point and dtype.itemsize == 1 else _MOVED_AS.get(dtype, dtype)


def unchecked() -> contextlib.AbstractContextManager[Any]:
    """Return a context without spmd_types' type checks, which know no operator of this package."""
    spmd = sys.modules.get("spmd_types")
    return spmd.no_typecheck() if spmd is not None else contextlib.nullcontext()


def _box(plan: Plan, state: State) -> Box:
    return box_of(state, plan.problem.shape, plan.problem.mesh_shape, tuple(plan.mesh.get_coordinate()))


def _steps_of(plan: Plan) -> list[Step]:
    steps: list[Step] = []
    state = plan.source
    for step in plan.steps:
        if isinstance(step.does, Move):
            steps.append(_MoveOnRank(plan, step.does, state, step.target))
        else:
            group = plan.mesh.get_group(0) if plan.mesh.ndim == 1 else None
            peers = [plan.ranks.index(rank) for rank in dist.get_process_group_ranks(group or dist.group.WORLD)]
            steps.append(ExchangeOnRank(step.does, plan.ranks.index(dist.get_rank()), peers, group))
        state = step.target
    return steps


_IDENTITY = {"sum": 0, "bxor": 0, "product": 1}
_REDUCE_OPS = {"avg": dist.ReduceOp.SUM, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR}
_REDUCE_OPS |= {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "min", "max", "product", "bxor")}


class _MoveOnRank:
    """One step over one mesh dim on this rank. Uneven shards are padded to the length of the first, longest shard."""

    def __init__(self, plan: Plan, move: Move, source: State, target: State) -> None:
        self._move, mesh_dim, problem = move, move.mesh_dim, plan.problem
        coordinate = tuple(plan.mesh.get_coordinate())
        self._index, self._size = coordinate[mesh_dim], problem.mesh_shape[mesh_dim]
        self._group = plan.mesh.get_group(mesh_dim)
        self._op = dict((*source.partials, *target.partials)).get(mesh_dim, "")
        # The boxes of each rank of the group, before and after.
        self._before, self._after = (
            [
                box_of(
                    state,
                    problem.shape,
                    problem.mesh_shape,
                    (*coordinate[:mesh_dim], peer, *coordinate[mesh_dim + 1 :]),
                )
                for peer in range(self._size)
            ]
            for state in (source, target)
        )

    def __call__(self, local: torch.Tensor) -> Transit:
        """Return this rank's part of the step."""
        move, own = self._move, self._after[self._index]
        if move.op == CUT:
            # A copy only where the part is not contiguous, as in spmd_types' own call.
            return self._part(local, self._index).contiguous()
        if move.op == PARTITION:
            keeps = self._index == 0 or self._op not in _IDENTITY
            return local.clone() if keeps else torch.full_like(local, _IDENTITY[self._op])
        if move.op not in (ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER):
            filled = local.new_zeros(shape_of(own))
            at = self._before[self._index][move.source_dim][0] - own[move.source_dim][0]
            filled.narrow(move.source_dim, at, local.shape[move.source_dim]).copy_(local)
            return filled
        # All ranks of a group agree on an empty tensor, because they differ along one tensor dim only.
        if self._size == 1 or not any(math.prod(shape_of(box)) for box in (*self._before, *self._after)):
            return local.reshape(shape_of(own))
        run = {ALL_GATHER: self._gather, ALL_TO_ALL: self._exchange, ALL_REDUCE: self._reduce}
        return (yield from run.get(move.op, self._reduce_scatter)(local))

    def _part(self, local: torch.Tensor, peer: int) -> torch.Tensor:
        """Return the view of a peer's share along the target's tensor dim."""
        dim = self._move.target_dim
        start, stop = self._after[peer][dim]
        return local.narrow(dim, start - self._before[self._index][dim][0], stop - start)

    def _gather(self, local: torch.Tensor) -> Transit:
        dim, lengths = self._move.source_dim, [box[self._move.source_dim] for box in self._before]
        sizes = [stop - start for start, stop in lengths]
        padded = _padded(local, dim, sizes[0])
        gathered = local.new_empty((self._size * padded.shape[0], *padded.shape[1:]))
        work: Any = _all_gather(gathered, padded, group=self._group, async_op=True)
        yield
        work.wait()
        if dim == 0 and sizes[-1] == sizes[0]:
            return gathered
        parts = gathered.unflatten(0, (self._size, padded.shape[0]))
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim=dim)

    def _exchange(self, local: torch.Tensor) -> Transit:
        dim, own = self._move.source_dim, shape_of(self._after[self._index])
        sent = [self._part(local, peer).reshape(-1) for peer in range(self._size)]
        shapes = [(*own[:dim], stop - start, *own[dim + 1 :]) for start, stop in (box[dim] for box in self._before)]
        received = list(map(math.prod, shapes))
        buffer = local.new_empty(sum(received))
        splits = received, [part.numel() for part in sent]
        work: Any = dist.all_to_all_single(buffer, torch.cat(sent), *splits, group=self._group, async_op=True)
        yield
        work.wait()
        return torch.cat(
            [part.view(shape) for part, shape in zip(buffer.split(received), shapes, strict=True)], dim=dim
        )

    def _reduce(self, local: torch.Tensor) -> Transit:
        total = local.clone(memory_format=torch.contiguous_format)
        work: Any = dist.all_reduce(total, _REDUCE_OPS[self._op], group=self._group, async_op=True)
        yield
        work.wait()
        return self._averaged(total)

    def _reduce_scatter(self, local: torch.Tensor) -> Transit:
        dim = self._move.target_dim
        parts = [self._part(local, peer) for peer in range(self._size)]
        longest, is_even = parts[0].shape[dim], parts[-1].shape[dim] == parts[0].shape[dim]
        if dim == 0 and is_even:
            given = local.contiguous()
        else:
            given = torch.cat([_padded(part, dim, longest) for part in parts])
        share = local.new_empty((given.shape[0] // self._size, *given.shape[1:]))
        work: Any = _reduce_scatter(share, given, _REDUCE_OPS[self._op], group=self._group, async_op=True)
        yield
        work.wait()
        return self._averaged(share.narrow(dim, 0, parts[self._index].shape[dim]).contiguous())

    def _averaged(self, total: torch.Tensor) -> torch.Tensor:
        return total.div_(self._size) if self._op == "avg" else total


def _padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return the tensor with zeros at the end of a tensor dim, up to a length."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor.contiguous()
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def key_of(plan: Plan, mesh: Any, ranks: Sequence[int], gradients: Sequence[State]) -> str:
    """Return a digest of what a plan does on this rank, and of the layouts of its gradients."""
    layouts = [*map(str, gradients)]
    does = plan.planner, plan.path, plan.problem, mesh.device_type, [*ranks], mesh.get_coordinate(), layouts
    return hashlib.sha256(repr(does).encode()).hexdigest()[:20]


def bound(plan: Plan, mesh: Any, ranks: Sequence[int], key: str, plan_backward: Callable[[], Plan]) -> Plan:
    """Return a plan that can be executed on a DeviceMesh.

    Args:
        ranks: global ranks of the mesh, row-major.
        key: from `key_of`; of the plan of a gradient, the key of its forward with GRADIENT.
        plan_backward: may run while torch traces a graph, in which no tensor has values.
    """
    _define_operator()
    ready = replace(plan, mesh=mesh, ranks=tuple(ranks), plan_backward=plan_backward, key=key)
    if not key.endswith(GRADIENT):
        _plans[key] = ready
    if mesh.get_coordinate() is not None:
        _on_rank[ready] = shape_of(_box(ready, ready.source)), _steps_of(ready)
    return ready
