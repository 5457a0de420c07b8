"""Whether a parallel step computes what one device computes: the measured rounding error, how far off it may be, the
sentence where it is."""

import contextlib
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distbench.cases import causes_of_wrong
from distbench.cases.single_device_reference import (
    Difference,
    Differences,
    Reference,
    cast_floats,
    compare,
    drawn_in_eval_mode,
    largest,
    model_on_device,
    reference_of,
    reference_of_parts,
    run_step,
)
from distbench.plans.batch import batch_of
from distbench.plans.model import Blueprint, tensors_of
from distbench.plans.training_step import ForwardStep, TrainingStep
from distbench.ranks.context import RankContext, default_dtype_kept, dtype_name
from distbench.ranks.device import products_of_f32
from distbench.ranks.failure import called_at, one_line, one_line_and_place, place_of
from distbench.spec import Scenario, UserError
from distbench.spec.devices import is_accelerator
from distbench.spec.mesh import BATCH_DIMS
from distbench.torch_private import (
    Unsupported,
    divide_factors,
    is_compiled,
    loses_gradients_of_pending_inputs,
    reduction_dtype,
    replaced,
)

# What rounding does to a step on one device: the measure of what a plan's errors may be.

F32 = torch.float32
# FSDP's units: the name that each had in the model as it was built, and its mixed precision policy; the deepest first.
Units = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Rounding:
    """By how much one device's step changes when it is rounded otherwise: largest absolute differences.

    Args:
        by: how it was measured, to follow "measured by ".
        loss: of the loss.
        gradients: parameter name to that of its gradient.
        output: of the output; 0 where it is not one tensor.
    """

    by: str
    loss: float
    gradients: dict[str, float]
    output: float


def measured_rounding(scenario: Scenario, context: RankContext, reference: Reference, units: Units = ()) -> Rounding:
    """Rank 0 computes the step once more, rounded otherwise; of `reference` only the differences are left.

    A model of less than f32 is computed in f32; one under a mixed precision policy in what the policy says; any other
    with each parameter moved by one unit in its last place, or in that of what it computes in, under autocast say. That
    takes the memory and the time of the reference, and runs where the reference runs; f32 against f64 tells the same
    (tests/cases/test_step_check.py). Two halves of the batch against the whole were seen to tell up to fifty times too
    little: each sample is rounded alike in both.

    Args:
        units: FSDP's, with their policies (`TrainingStep.units`).

    Raises:
        Exception: whatever the model raises in another precision.
    """
    model = model_on_device(scenario, context, reference.built, reference.values)
    by, dtype = _round_otherwise(model, units, reference.computed_in)
    differences = reference.gradients

    def subtract(name: str, finished: torch.Tensor) -> None:
        if name in differences:
            differences[name] -= finished

    step = run_step(scenario, context, model, reference.batch, subtract if differences else None, dtype)
    apart = 0.0 if step.output is None or reference.output is None else largest(step.output - reference.output)
    return Rounding(
        by,
        abs(step.loss - reference.loss),
        {name: largest(difference) for name, difference in differences.items()},
        apart,
    )


def lowest_precision(model: nn.Module, units: Units, computed_in: torch.dtype = F32) -> torch.dtype:
    """The least precise dtype of a model's parameters, of what the policies of its units name, and of what one device
    was seen to compute in (`Reference.computed_in`); f32 at best."""
    policy_dtypes = [getattr(policy, f"{part}_dtype") for _, policy in units for part in ("param", "reduce", "output")]
    return _lowest([_held(model), computed_in, *policy_dtypes])


def reduction_rounding(model: nn.Module, units: Units, num_ranks: int) -> float:
    """What summing gradients over data parallel ranks costs them, relative: it grows with the root of their number.

    One device sums none. Each term, and each partial sum of a ring, is rounded to the dtype that gradients travel in.
    """
    if not units:
        return 0.0
    dtypes: list[torch.dtype | None] = [reduction_dtype(policy, _held(model)) for _, policy in units]
    return torch.finfo(_lowest(dtypes)).eps / 2 * math.sqrt(num_ranks)


def _held(model: nn.Module) -> torch.dtype:
    return _lowest([parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()])


def _lowest(dtypes: list[torch.dtype | None]) -> torch.dtype:
    return max(
        [F32, *(candidate for candidate in dtypes if candidate is not None)], key=lambda dtype: torch.finfo(dtype).eps
    )


def _round_otherwise(model: nn.Module, units: Units, computed_in: torch.dtype) -> tuple[str, torch.dtype | None]:
    """Change a model with its values; how, and what a batch's floats are to be cast to."""
    model_dtype = _held(model)
    if model_dtype != F32:
        model.float()
        return f"computing in f32 instead of {dtype_name(model_dtype)}", F32
    if (
        lowest := _lowest([dtype for _, policy in units for dtype in (policy.param_dtype, policy.output_dtype)])
    ) != F32:
        _apply_policies(model, units)
        return f"computing in {dtype_name(lowest)} instead of f32", None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
                unit = max(torch.finfo(dtype).eps for dtype in (parameter.dtype, computed_in))
                parameter.addcmul_(parameter, signs.to(parameter.device, parameter.dtype), value=unit)
    of = "its" if computed_in == F32 else f"{dtype_name(computed_in)}'s"
    return f"moving each parameter by one unit in {of} last place", None


def _apply_policies(model: nn.Module, units: Units) -> None:
    """What FSDP's mixed precision does to a unit, on one device: its parameters, inputs and output are cast."""
    done: set[int] = set()
    modules = dict(model.named_modules())
    for name, policy in units:
        if (unit := modules.get(name)) is None:  # a wrapper that the function of the user's own made
            continue
        parameters = [parameter for parameter in unit.parameters() if id(parameter) not in done]
        done |= {id(parameter) for parameter in parameters}
        for parameter in parameters:
            parameter.data = cast_floats(parameter.data, policy.param_dtype)
        if policy.cast_forward_inputs:
            unit.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), with_kwargs=True)
        unit.register_forward_hook(partial(_cast_output, policy.output_dtype))


def _cast_inputs(
    dtype: torch.dtype | None, _: nn.Module, given: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(cast_floats(value, dtype) for value in given), {
        key: cast_floats(value, dtype) for key, value in kwargs.items()
    }


def _cast_output(dtype: torch.dtype | None, _: nn.Module, given: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


T = TypeVar("T")

# Relative errors that ask for no measurement; and those allowed below f32 where rounding cannot be measured.
TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 5e-2
# Right plans came to 1.8 times a gradient's measured rounding (60 of four models each, 3 seeds, f32 and bf16).
TIMES_ROUNDING = 3.0
# Read by the libraries themselves, so that nothing in this process takes it back.
FORCED = "NVIDIA_TF32_OVERRIDE"
F32_EPS = torch.finfo(torch.float32).eps


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Products of f32 in f32: what a check allows is of that, and vendors' images and scenarios switch TF32 on in
    several ways.

    torch has an older and a newer way to say so, and refuses to read the one where the other was used.
    """
    newer = [(backend, backend.fp32_precision) for backend in products_of_f32()]
    older = _older_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        for backend, _ in newer:
            backend.fp32_precision = "ieee"
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            torch.backends.cudnn.allow_tf32 = older[1]
        for backend, before in newer:
            backend.fp32_precision = before


def _older_precision() -> tuple[str, bool] | None:
    """What the older way has; None where the newer one was used."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Finding:
    """A part of a step, judged. Errors are relative to its largest value, or what `relative_to` says."""

    what: str
    error: float
    allowed: float
    because: str
    relative_to: str = "relative"
    rounding: float | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether the error is more than what is allowed."""
        return not self.error <= self.allowed

    @property
    def excess(self) -> float:
        """What findings of one kind are ordered by."""
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)

    def __str__(self) -> str:
        if not math.isfinite(self.error):
            return f"{self.what} cannot be held against one device's: missing, of another shape, or not a number"
        off = f"{self.what} is {self.error:.2e} ({self.relative_to}) off one device's"
        return f"{off}; {self.allowed:.0e} is allowed, {self.because}"


@dataclass(frozen=True)
class Allowance:
    """How far off a step may be.

    Args:
        tolerance: relative error that asks for no measurement.
        loss_tolerance: likewise, of the loss.
        because: where the tolerance comes from.
        is_named: by the scenario; rounding then tells only which gradients are nothing else.
        rounding: of one device's step, if it was measured.
        gradient_scale: what the plan multiplies gradients by on purpose.
        reduction: relative error of a gradient's sum over ranks, which one device has not.
    """

    tolerance: float
    loss_tolerance: float
    because: str
    is_named: bool = False
    rounding: Rounding | None = None
    gradient_scale: float = 1.0
    reduction: float = 0.0

    def judged(self, differences: Differences) -> list[Finding]:
        """The loss, the gradient that is farthest off for what it may be, and the output, where they were compared."""
        measured = self.rounding
        findings = []
        if differences.loss is not None:
            of_loss = measured.loss if measured else 0.0
            findings.append(self._part("the loss", differences.loss, self.loss_tolerance, of_loss))
        if gradients := self._gradients(differences.gradients):
            findings.append(max(gradients, key=lambda finding: finding.excess))
        if differences.output is not None:
            findings.append(
                self._part("the output", differences.output, self.tolerance, measured.output if measured else 0.0)
            )
        return findings

    def _part(self, what: str, difference: Difference, tolerance: float, rounding: float) -> Finding:
        noise = TIMES_ROUNDING * rounding / difference.size if difference.size and not self.is_named else 0.0
        return self._bounded(what, difference, tolerance, noise)

    def _gradients(self, differences: dict[str, Difference]) -> list[Finding]:
        largest = max((difference.size for difference in differences.values()), default=0.0)
        roundings = self._relative_rounding(differences)
        typical = statistics.median(roundings.values()) if roundings else 0.0
        return [
            self._gradient(name, difference, largest, roundings.get(name, 0.0), typical)
            for name, difference in differences.items()
        ]

    def _relative_rounding(self, differences: dict[str, Difference]) -> dict[str, float]:
        if self.rounding is None:
            return {}
        scale = abs(self.gradient_scale)
        apart = self.rounding.gradients
        return {
            name: apart[name] * scale / difference.size
            for name, difference in differences.items()
            if name in apart and difference.size
        }

    def _gradient(
        self, name: str, difference: Difference, largest: float, own_rounding: float, typical: float
    ) -> Finding:
        """A gradient no larger than its own rounding, or than f32's of the largest one, is held against the largest.

        A single gradient's measured rounding may happen to be small, so that it counts as no less than the typical one.
        """
        part, share = f"the gradient of {name}", difference.size / largest if largest else 1.0
        rounding = (max(own_rounding, typical) + self.reduction) if own_rounding or typical else 0.0
        noise = TIMES_ROUNDING * rounding
        if share <= F32_EPS or noise >= 1:
            to_largest = Difference(difference.apart, largest)
            largest_noise = 0.0 if self.is_named else TIMES_ROUNDING * (typical + self.reduction)
            unit = "relative to the largest gradient: it is nothing but rounding on one device"
            return replace(self._bounded(part, to_largest, self.tolerance, largest_noise), relative_to=unit)
        least = max(self.tolerance, F32_EPS / share)
        return replace(
            self._bounded(part, difference, least, 0.0 if self.is_named else noise), rounding=rounding or None
        )

    def _bounded(self, what: str, difference: Difference, tolerance: float, noise: float) -> Finding:
        """`tolerance` or, where that is more, `noise`; relative errors both."""
        because = self.because
        if noise > tolerance and self.rounding is not None:
            because = f"{TIMES_ROUNDING:g} times its rounding on one device, measured by {self.rounding.by}"
        error = difference.apart / difference.size if difference.size else (math.inf if difference.apart else 0.0)
        return Finding(what, error, max(tolerance, noise), because)


@dataclass
class SideEffects:
    """What forward and loss do besides, seen while they run.

    Args:
        backward_at: `file:line` of a backward of their own.
        optimizer: class of an optimizer that they step, and where.
        has_forward: whether the model's own forward ran.
        default_dtype: torch's, after the step.
    """

    backward_at: str | None = None
    optimizer: str | None = None
    has_forward: bool = False
    default_dtype: torch.dtype = torch.float32

    @contextlib.contextmanager
    def of(self, step: TrainingStep) -> Iterator[Callable[[], None]]:
        """Watch a step; what to call at the end of each phase."""
        # A pipeline's schedule has no phases, and takes no functions that could do such things.
        is_forward = step.pipeline is None

        def stamp() -> None:
            nonlocal is_forward
            is_forward = not is_forward and step.pipeline is None

        plain = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if is_forward:
                self.backward_at = self.backward_at or called_at()
            plain(*args, **kwargs)

        def before_step(optimizer: Any, *_: object) -> None:
            if is_forward:
                self.optimizer = f"{type(optimizer).__name__}, {called_at()}"

        def entered(*_: object) -> None:
            self.has_forward = True

        with contextlib.ExitStack() as undo:
            undo.enter_context(replaced(torch.autograd, "backward", backward))
            undo.callback(register_optimizer_step_pre_hook(before_step).remove)
            # A hook would have compiled modules compiled again; nobody asks where there is no DDP.
            self.has_forward = step.plan.ddp is None or step.plan.compile is not None
            if not self.has_forward:
                undo.callback(step.model.register_forward_pre_hook(entered).remove)
            yield stamp
        self.default_dtype = torch.get_default_dtype()


class StepCheck:
    """The check of one step: collective, after which `counters` has what was found.

    Args:
        step: the parallel step; it starts anew.
        scenario: what one device computes as well.
        context: this rank's.
        built: the model on the meta device, where one exists that no plan has changed.
    """

    def __init__(
        self, step: TrainingStep, scenario: Scenario, context: RankContext, built: Blueprint | None = None
    ) -> None:
        self._step = step
        self._built = built
        self._scenario = scenario
        self._context = context
        self.counters: dict[str, Any] = {}
        self._seen = SideEffects()
        self._computed_in = torch.float32

    def __call__(self) -> str | None:
        """What is wrong with the step, as a sentence; None where nothing is."""
        with full_precision():
            return self._checked()

    def _checked(self) -> str | None:
        step, context = self._step, self._context
        is_full = context.check == "full"
        step.restart()
        values = step.own_values()  # before a backward that steps an optimizer in its hooks
        loss, output = _run(step, is_full, self._seen)
        if stepped := next(filter(None, context.gather(self._seen.optimizer)), None):
            problem = (
                f"forward and loss step an optimizer of their own ({stepped}), which is no part of a step's forward"
            )
            return f"{problem}; return the loss, and give the optimizer to Scenario(optimizer=...)"
        has_gradients = is_full and not isinstance(step, ForwardStep)
        reference = self._alone(partial(reference_of, self._scenario, context, has_gradients, values, self._built))
        self._computed_in = context.gather(reference.computed_in)[0]
        scale = step.gradient_scale if has_gradients else None
        differences = compare(step.model, loss, reference, context, scale, output)
        allowance = self._allowance(reference)
        findings = allowance.judged(differences)
        # Small errors need no reason. Numbers drawn at random are no rounding, nor is what is missing.
        if not differences.is_random and any(
            judged_finding.is_wrong and math.isfinite(judged_finding.error) for judged_finding in findings
        ):
            allowance = self._measured(allowance, reference)
            findings = allowance.judged(differences)
        self.counters = _counters(differences, findings)
        wrong = next((finding for finding in findings if finding.is_wrong), None)
        return (
            None
            if wrong is None
            else "; ".join([str(wrong), *self._likely_causes(differences, loss, reference, allowance)])
        )

    def _alone(self, compute: Callable[[], T]) -> T:
        """What rank 0 computes while the others wait; whatever is raised there is raised on all ranks, which stay
        together."""
        computed, failure, raised = None, None, None
        try:
            computed = compute()
        except Exception as error:
            failure = error
            is_ours = isinstance(error, UserError | Unsupported)
            message = f"one device's step, which this one is compared with, raises {one_line_and_place(error)}"
            raised = (type(error), str(error)) if is_ours else (RuntimeError, message)
        if (first := next(filter(None, self._context.gather(raised)), None)) is not None:
            raise first[0](first[1]) from failure
        assert computed is not None
        return computed

    def _allowance(self, reference: Reference) -> Allowance:
        model, units = reference.built.model, self._step.units
        if (tolerance := self._scenario.tolerance) is not None:
            return Allowance(tolerance, tolerance, "the scenario's tolerance", True, None, self._step.gradient_scale)
        lowest = lowest_precision(model, units, self._computed_in)
        for_loss = TOLERANCE if lowest == torch.float32 else torch.finfo(lowest).eps
        if is_accelerator(self._context.device.type) and os.environ.get(FORCED) == "1":
            because, low = f"as {FORCED}=1 rounds every product to TF32", LOW_PRECISION_TOLERANCE
            return Allowance(low, low, because, False, None, self._step.gradient_scale)
        reduction = reduction_rounding(model, units, self._step.num_data_parallel)
        because = f"as for every {dtype_name(lowest)} step"
        return Allowance(TOLERANCE, for_loss, because, False, None, self._step.gradient_scale, reduction)

    def _measured(self, allowance: Allowance, reference: Reference) -> Allowance:
        """With the rounding of one device, or without where that cannot be measured."""
        rounding, why_not = None, None
        if self._context.rank == 0:
            try:
                rounding = measured_rounding(self._scenario, self._context, reference, self._step.units)
            except Exception as error:
                why_not = one_line(error)
        rounding, why_not = self._context.gather((rounding, why_not))[0]
        if rounding is not None or allowance.is_named:
            return replace(allowance, rounding=rounding)
        lowest = lowest_precision(reference.built.model, self._step.units, self._computed_in)
        tolerance = TOLERANCE if lowest == torch.float32 else LOW_PRECISION_TOLERANCE
        because = f"{allowance.because}, as rounding could not be measured ({why_not})"
        return replace(allowance, tolerance=tolerance, loss_tolerance=tolerance, because=because)

    def _likely_causes(
        self, differences: Differences, loss: float | None, reference: Reference, allowance: Allowance
    ) -> list[str]:
        step, scenario = self._step, self._scenario
        num_parts = self._context.index(BATCH_DIMS)[1] * scenario.plan.microbatches
        batch, again = batch_of(scenario), batch_of(scenario)
        is_unsaid = scenario.parallelize is not None and scenario.gradient_divide_factor is None
        compiled = next((name for name, module in step.model.named_modules() if is_compiled(module)), None)
        errors = (one.apart / one.size for one in differences.gradients.values() if one.size)
        gathered = self._context.gather(
            (causes_of_wrong.fingerprint(batch.tree), causes_of_wrong.held_gradients(step.model))
        )
        random, in_eval_mode, is_coupled = None, None, False
        if differences.is_random:
            random = causes_of_wrong.dropout_of(reference.built.model)
            in_eval_mode = self._drawn_in_eval_mode(reference)
        elif num_parts > 1 and not isinstance(step, ForwardStep):
            is_coupled = self._is_mean_over_parts(differences, loss, reference, allowance, num_parts)
        step.restart()
        rerun = loss if differences.is_random else _run(step, False)[0]
        has_ddp = scenario.plan.ddp is not None
        call = f"call ({place_of(scenario.call)})" if scenario.call is not None else ""
        causes = [
            *causes_of_wrong.of_random(random, in_eval_mode),
            *causes_of_wrong.of_model(differences.batch_statistics, num_parts),
            *causes_of_wrong.of_own_backward(self._seen.backward_at),
            *causes_of_wrong.of_default_dtype(step.default_dtype, self._seen.default_dtype),
            *causes_of_wrong.of_forward(
                call, self._seen.has_forward or not (has_ddp and call), "DDP makes its reductions ready"
            ),
            *causes_of_wrong.of_loss(differences.mean_loss, differences.expected_loss, num_parts),
            *causes_of_wrong.of_labels(dict(tensors_of(batch.tree)), batch.split_dims, num_parts),
            *causes_of_wrong.of_batches(step.batch.tree, batch.tree, again.tree, [prints for prints, _ in gathered]),
            *causes_of_wrong.of_compiled(compiled, max(errors, default=0), loses_gradients_of_pending_inputs),
            *causes_of_wrong.of_factors(divide_factors(step.model) if is_unsaid else set(), step.num_data_parallel),
            *causes_of_wrong.of_replicas(
                [gradients for _, gradients in gathered if not differences.is_random], has_ddp
            ),
            *causes_of_wrong.of_another_run(loss, rerun),
        ]
        causes = causes or [*causes_of_wrong.of_coupled_samples(is_coupled, num_parts)]
        return [f"the likely cause: {one}" for one in causes or filter(None, [batch.guessed().removeprefix("; ")])]

    def _drawn_in_eval_mode(self, reference: Reference) -> str | None:
        context = self._context

        def drawn() -> tuple[str | None]:
            return (drawn_in_eval_mode(self._scenario, context, reference) if context.rank == 0 else None,)

        try:
            cause: str | None = context.gather(self._alone(drawn))[0][0]
        except Exception:
            return None
        return cause

    def _is_mean_over_parts(
        self, differences: Differences, loss: float | None, reference: Reference, allowance: Allowance, num_parts: int
    ) -> bool:
        """Whether the step is what one device computes of each part of the batch alone, on average."""
        context, scale = self._context, self._step.gradient_scale if differences.gradients else None
        try:
            of_parts = self._alone(partial(reference_of_parts, self._scenario, context, reference, num_parts))
        except Exception:
            return False
        again = compare(self._step.model, loss, of_parts, context, scale)
        return not any(finding.is_wrong for finding in allowance.judged(again))


def _run(
    step: TrainingStep, is_full: bool, side_effects: SideEffects | None = None
) -> tuple[float | None, torch.Tensor | None]:
    """A step's loss, and its output where that is compared; a forward-only one has no loss, nor have a pipeline's ranks
    but those of its last stage."""
    if isinstance(step, ForwardStep):
        return None, step.whole_output()
    step.kept_outputs = [] if step.unshards_output and is_full else None
    with default_dtype_kept(), (side_effects or SideEffects()).of(step) as stamp:
        loss = step.forward_backward(stamp)
    return None if loss is None else float(loss), torch.cat(step.kept_outputs) if step.kept_outputs else None


def _counters(differences: Differences, findings: list[Finding]) -> dict[str, Any]:
    """Of a row: `tolerance` is the error allowed to `worst_grad`, or to the loss where no gradients were compared, or
    to the output where there is no loss."""
    by_part = {
        finding.what if finding.what in ("the loss", "the output") else "gradient": finding for finding in findings
    }
    counters: dict[str, Any] = {}
    if (loss := by_part.get("the loss")) is not None:
        counters |= {"loss": differences.mean_loss, "loss_rel_error": loss.error}
    gradient = by_part.get("gradient")
    counters["tolerance"] = (gradient or loss or by_part["the output"]).allowed
    if gradient is not None:
        counters |= {"grad_rel_error": gradient.error, "worst_grad": gradient.what.removeprefix("the gradient of ")}
        if gradient.rounding is not None:
            counters["grad_rounding"] = gradient.rounding
    if "the output" in by_part:
        counters["output_rel_error"] = by_part["the output"].error
    return counters
