"""An operator on DTensors under placements of its inputs, and the redistributions that it causes."""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from distbench.observe.module_attribution import Communication, communications_of
from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.dtypes import dtype_name
from distbench.ranks.failure import blamed, one_line
from distbench.ranks.measure import Stamp, no_stamp
from distbench.records.bus_bandwidth import wire_bytes
from distbench.records.run_file import Case
from distbench.redistribute.expected_shards import Layout, dtensor_under, own_shard, parse_placement
from distbench.redistribute.planners import check_planners, planning_switch
from distbench.spec import DTensorOperator, ParallelPlan, Scenario, UserError
from distbench.spec.placements import TORCH_PLANNERS
from distbench.torch_private import SHARDED_INDICES, Skipped, require

PHASES = ("forward", "backward")
# Relative to the largest compared value.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
TOLERANCE_OF_OTHERS = 2e-2
# The beginning of min_cost's error message if its graph lacks a placement, such as the masked Partial of an embedding.
NO_PATH = "No path found"
# The beginning of the error message in the backward of indexing with sharded indices on torch 2.11.
UNEVEN_VALUES = "shape mismatch: value tensor"


@dataclass(frozen=True)
class OneDevice:
    """Result of an operator on one device, and the gradients of its inputs for a given `gradient` of the result."""

    inputs: tuple[torch.Tensor, ...]
    result: torch.Tensor
    gradient: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


def operator_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield one case per operator, input placements and planner; planners are adjacent, in random order.

    Raises UserError for inputs that are not tensors, and for placements that do not fit the inputs or the mesh.
    """
    order = random.Random(context.seed)
    for operator in scenario.operators:
        planners = list(operator.planners or (*TORCH_PLANNERS, *(["calibrated"] if context.profile else [])))
        check_planners(planners, "f32", context.profile)
        inputs = _inputs_of(operator, context.seed)
        dtype = dtype_name(next((tensor for tensor in inputs if tensor.is_floating_point()), inputs[0]).dtype)
        shapes = ",".join(shape_text(tensor.shape) for tensor in inputs)
        for texts in operator.placements:
            layouts = _layouts(operator, texts, inputs, context)
            laid = ",".join(map(str, layouts))
            group = f"operator/{dtype}{shapes}/{operator.name}/{laid}"
            order.shuffle(planners)
            for planner in planners:
                params = {"op": operator.name, "source": laid, "planner": planner, "dtype": dtype}
                case = Case(f"{group}/{planner}", "operator", params)
                # The cases have no group, so their times get no verdict. Only the planners' redistributions are
                # compared.
                yield CaseSpec(case, partial(_open, operator, layouts, planner, context))


def _inputs_of(operator: DTensorOperator, seed: int) -> tuple[torch.Tensor, ...]:
    with torch.random.fork_rng(devices=[]), blamed("make_inputs", operator.make_inputs):
        torch.manual_seed(seed)
        inputs = tuple(operator.make_inputs())
    if not inputs or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        kinds = ", ".join(type(tensor).__name__ for tensor in inputs) or "nothing"
        raise UserError(f"operator {operator.name!r}: make_inputs returned {kinds}; return one tensor or more")
    return inputs


def _layouts(
    operator: DTensorOperator, texts: Sequence[str], inputs: Sequence[torch.Tensor], context: RankContext
) -> list[Layout]:
    subject = f"operator {operator.name!r}, placements {', '.join(texts)}"
    if len(texts) != len(inputs):
        raise UserError(f"{subject}: there are {len(inputs)} inputs; give placements for each input")
    layouts = []
    for text, tensor in zip(texts, inputs, strict=True):
        layout = None
        with contextlib.suppress(ValueError, IndexError):
            layout = Layout.of(text, tensor.ndim)
        if layout is None or (layout.state is None and not layout.is_strided):
            shape = shape_text(tensor.shape)
            raise UserError(f"{subject}: {text!r} does not fit shape {shape}; write S(0)R or RP(sum)")
        if (count := len(layout.placements)) != len(context.mesh_dims):
            raise UserError(f"{subject}: {text} has {count} mesh dims, but the mesh has {len(context.mesh_dims)}")
        for placement in layout.placements:
            parse_placement(str(placement))
        layouts.append(layout)
    return layouts


@contextlib.contextmanager
def _open(
    operator: DTensorOperator, layouts: Sequence[Layout], planner: str, context: RankContext
) -> Iterator[OpenedCase]:
    reference = _one_device(operator, context.seed)
    leaves = [
        dtensor_under(full, layout, context).requires_grad_(full.is_floating_point())
        for full, layout in zip(reference.inputs, layouts, strict=True)
    ]
    run = OperatorRun(operator.call, leaves, reference.gradient)
    with planning_switch(planner, context.profile, context) as switch:
        try_once(run, planner)
        issued = communications_of(run, PHASES, ParallelPlan(), context)
        yield OpenedCase(
            run,
            partial(_difference, run, reference),
            PHASES,
            fields=_row_fields(run, issued, context),
            stays_open=True,
            held_bytes=sum(full.numel() * full.element_size() for full in (*reference.inputs, reference.result)) * 2,
            pause=switch.off,
            resume=switch.on,
        )


def try_once(run: "OperatorRun", planner: str) -> None:
    """Run the operator once.

    Raises:
        Skipped: the planner has no path to the placements that the operator requires of an input.
        Unsupported: this version of torch is too old for the operator.
    """
    try:
        run(no_stamp)
    except (AssertionError, RuntimeError) as error:
        if str(error).startswith(NO_PATH):
            raise Skipped(f"torch's {planner} cannot run this operator: {one_line(error)}") from error
        if str(error).startswith(UNEVEN_VALUES):
            require(SHARDED_INDICES)  # torch 2.11 shards the gradient of the result but not the indices
        raise


class OperatorRun:
    """Run the forward of an operator, then its backward from a given gradient in the layout of the result."""

    def __init__(self, call: Callable[..., Any], leaves: Sequence[Any], gradient: torch.Tensor) -> None:
        self._call, self._leaves, self._whole_gradient = call, leaves, gradient
        self._wanted = [leaf for leaf in leaves if leaf.requires_grad]
        self._gradient: Any = None
        self.result: Any = None
        self.gradients: tuple[Any, ...] = ()

    def __call__(self, stamp: Stamp) -> None:
        """Run once; stamps the end of forward and of backward."""
        self.result, self.gradients = None, ()
        result = self._call(*self._leaves)
        stamp()
        if self._gradient is None:
            self._gradient = _gradient_like(result, self._whole_gradient)
        gradients = torch.autograd.grad(result, self._wanted, self._gradient) if self._wanted else ()
        stamp()
        self.result, self.gradients = result.detach(), gradients


def _gradient_like(result: Any, whole: torch.Tensor) -> Any:
    """Return the result's gradient in the layout that a next operator without redistribution would produce."""
    if not isinstance(result, DTensor):
        return whole.to(result.device)
    mesh, placements = result.device_mesh, _reduced(result)
    local = own_shard(whole, placements, mesh).contiguous().to(result.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _reduced(tensor: DTensor) -> list[Any]:
    return [Replicate() if placement.is_partial() else placement for placement in tensor.placements]


def _one_device(operator: DTensorOperator, seed: int) -> OneDevice:
    """Run the operator on whole tensors on the CPU, the same on every rank."""
    inputs = _inputs_of(operator, seed)
    leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    call = operator.one_device or operator.call
    with blamed(f"operator {operator.name!r} on one device", call):
        result = call(*leaves)
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.randn(result.shape, generator=generator, dtype=result.dtype)
        with_gradient = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(result, with_gradient, gradient) if with_gradient else ()
    return OneDevice(inputs, result.detach(), gradient, tuple(gradients))


def _difference(run: OperatorRun, whole: OneDevice) -> str | None:
    """Run again and return the problem of this rank's part of the result and gradients; None if correct."""
    run(no_stamp)
    parts = [("the result", run.result, whole.result)]
    for place, gradients in enumerate(zip(run.gradients, whole.gradients, strict=True)):
        parts.append((f"the gradient of input {place}", *gradients))
    # Compare all parts on every rank, as reducing a part is collective.
    differences = [_part_difference(*part) for part in parts]
    return next(filter(None, differences), None)


def _part_difference(what: str, got: Any, expected: torch.Tensor) -> str | None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    if isinstance(got, DTensor):
        # DTensor reduces pending partial values; the part of each rank is computed here.
        placements = _reduced(got)
        if list(got.placements) != placements:
            got = got.redistribute(got.device_mesh, placements)
        expected = own_shard(expected, placements, got.device_mesh)
        got = got.to_local()
    got = got.cpu()
    if got.shape != expected.shape:
        return f"{what} has shape {tuple(got.shape)} on this rank instead of {tuple(expected.shape)}"
    error = float((got - expected).abs().max()) if got.numel() else 0.0
    allowed = TOLERANCES.get(expected.dtype, TOLERANCE_OF_OTHERS) * max(largest, torch.finfo(torch.float32).tiny)
    if math.isfinite(error) and error <= allowed:
        return None
    return f"{what} differs from one device's by {error:.1e} (relative); {allowed:.1e} is allowed"


def _row_fields(run: OperatorRun, issued: Sequence[Communication], context: RankContext) -> dict[str, Any]:
    """Return an operator's row without its times: the layout of its result, and the redistributions on the way."""
    counters: dict[str, Any] = {
        "result": _laid(run.result),
        "gradients": ", ".join(map(_laid, run.gradients)),
        "num_collectives": len(issued),
        "num_implicit": sum(communication.explicit is False for communication in issued),
    }
    for phase in PHASES:
        rows = [communication for communication in issued if communication.phase == phase]
        sent = [wire_bytes(row.kind, row.payload_bytes, row.group_size) for row in rows]
        counters[f"{phase}_pays"] = "; ".join(map(_payment, rows))
        counters[f"{phase}_wire_bytes"] = sum(filter(None, sent))
    return {
        "wire_bytes": sum(counters[f"{phase}_wire_bytes"] for phase in PHASES),
        "group_size": context.mesh.size(),
        "mesh_dim": "x".join(context.mesh_dims),
        "backend_op": "+".join(communication.kind for communication in issued) or "none",
        "counters": counters,
    }


def _laid(tensor: Any) -> str:
    if not isinstance(tensor, DTensor):
        return "whole"
    # The text of a masked Partial includes a shape, which is not part of the placement.
    texts = (str(placement).partition(", ") for placement in tensor.placements)
    return "".join(f"{text})" if more else text for text, more, _ in texts)


def _payment(issued: Communication) -> str:
    """`S(0)R->RR: all_gather dp_shard`; requested redistributions have a mark."""
    moved = f"{issued.redistribution}: " if issued.redistribution else ""
    mark = " (explicit)" if issued.explicit else ""
    return f"{moved}{issued.kind} {issued.mesh_dim}{mark}"
