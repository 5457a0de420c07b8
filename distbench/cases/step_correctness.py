"""Check that a parallel step computes the same as one device: the allowed error, the message above that error, and
likely causes in the model, batch, loss or functions.
"""

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

from distbench.cases.optimizer_correctness import OptimizerCheck, of_differing_bits
from distbench.cases.single_device_reference import (
    F32,
    Difference,
    Differences,
    Reference,
    Rounding,
    compare,
    drawn_in_eval_mode,
    largest_of,
    lowest_precision,
    measured_rounding,
    reduction_rounding,
    reference_of,
    reference_of_parts,
)
from distbench.cases.trained_tensors import digests_of_gradients, fingerprint, part_of
from distbench.plans.batch import batch_of
from distbench.plans.model import Blueprint, as_built, tensors_of
from distbench.plans.training_step import ForwardStep, TrainingStep, UserStep
from distbench.plans.user_step import optimizers_of
from distbench.ranks.context import RankContext
from distbench.ranks.device import products_of_f32
from distbench.ranks.dtypes import default_dtype_kept, dtype_name
from distbench.ranks.failure import called_at, one_line, one_line_and_place, place_of
from distbench.spec import Scenario, UserError
from distbench.spec.devices import is_accelerator
from distbench.spec.mesh import BATCH_DIMS
from distbench.torch_private import (
    Unsupported,
    divide_factors,
    is_compiled,
    loses_gradients_of_pending_inputs,
    replaced,
)

T = TypeVar("T")
# Name of a parameter to the parameter's part on this rank, and the size of its gradient.
Gradients = Mapping[str, tuple[tuple[int, ...], float]]

# This is the label that F.cross_entropy ignores by default.
IGNORED = -100
# Relative tolerance that distinguishes a sum over ranks from other errors. A missing gradient has an error of its own
# size.
CLOSE, LOST = 1e-3, 0.99
# Relative errors that need no measurement of rounding, and relative errors allowed below f32 without a measurement.
TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 5e-2
# Correct plans had up to 1.8 times a gradient's measured rounding (60 of four models each, 3 seeds, f32 and bf16).
TIMES_ROUNDING = 3.0
# Maximum number of parts of the batch whose factors are solved for, and of elements of the gradient that is used.
MOST_PARTS, MOST_ELEMENTS = 16, 1_000_000
# The libraries read this variable, so this process cannot undo it.
FORCED = "NVIDIA_TF32_OVERRIDE"
F32_EPS = torch.finfo(F32).eps


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Run f32 products in full precision, which the check's allowed error assumes.

    Vendors' images and scenarios enable TF32 in several ways. torch has an older and a newer setting for TF32, and
    raises an error on reading either after writing the other.
    """
    newer = [(backend, backend.fp32_precision) for backend in products_of_f32()]
    older = None
    with contextlib.suppress(RuntimeError):
        older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
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


@dataclass(frozen=True)
class Finding:
    """The result for one part of a step. Errors are relative to the part's largest value, or to `relative_to`."""

    what: str
    error: float
    allowed: float
    because: str
    relative_to: str = "relative"
    rounding: float | None = None

    @property
    def is_wrong(self) -> bool:
        """Return whether the error exceeds the allowed error."""
        return not self.error <= self.allowed

    @property
    def excess(self) -> float:
        """Return the sort key of findings of one kind."""
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)

    def __str__(self) -> str:
        if not math.isfinite(self.error):
            return f"{self.what} is missing, is not a number, or has another shape than one device's"
        difference = f"{self.what} differs from one device's by {self.error:.2e} ({self.relative_to})"
        return f"{difference}; {self.allowed:.0e} is allowed, {self.because}"


@dataclass(frozen=True)
class Allowance:
    """Errors that are allowed to a step."""

    tolerance: float  # relative error that needs no measurement
    loss_tolerance: float  # the same for the loss
    because: str  # origin of the tolerance
    # whether the scenario sets the tolerance; rounding then only identifies gradients that consist of rounding
    is_named: bool = False
    rounding: Rounding | None = None  # of one device's step, if it was measured
    gradient_scale: float = 1.0  # the factor that the plan applies to gradients
    reduction: float = 0.0  # relative error of a gradient's sum over ranks, which one device does not have

    def judged(self, differences: Differences) -> list[Finding]:
        """Return findings on the loss, the gradient farthest above its limit, and the output, each if compared."""
        loss_rounding, output_rounding = (self.rounding.loss, self.rounding.output) if self.rounding else (0.0, 0.0)
        findings = []
        if differences.loss is not None:
            findings.append(self._part("the loss", differences.loss, self.loss_tolerance, loss_rounding))
        if gradients := self._gradients(differences.gradients):
            findings.append(max(gradients, key=lambda finding: finding.excess))
        if differences.output is not None:
            findings.append(self._part("the output", differences.output, self.tolerance, output_rounding))
        return findings

    def _part(self, what: str, difference: Difference, tolerance: float, rounding: float) -> Finding:
        return self._bounded(what, difference, tolerance, rounding / difference.size if difference.size else 0.0)

    def _gradients(self, differences: dict[str, Difference]) -> list[Finding]:
        largest = max((difference.size for difference in differences.values()), default=0.0)
        apart = self.rounding.gradients if self.rounding else {}
        roundings = {
            name: apart[name] * abs(self.gradient_scale) / difference.size
            for name, difference in differences.items()
            if name in apart and difference.size
        }
        typical = statistics.median(roundings.values()) if roundings else 0.0
        return [
            self._gradient(name, difference, largest, roundings.get(name, 0.0), typical)
            for name, difference in differences.items()
        ]

    def _gradient(
        self, name: str, difference: Difference, largest: float, own_rounding: float, typical: float
    ) -> Finding:
        """Return the finding on one gradient. The unit of a gradient within rounding is the largest gradient.

        Rounding means the rounding of the gradient, or f32's rounding of the largest gradient. One gradient's measured
        rounding may be small by chance, so the typical rounding is the minimum.
        """
        part, share = f"the gradient of {name}", difference.size / largest if largest else 1.0
        rounding = (max(own_rounding, typical) + self.reduction) if own_rounding or typical else 0.0
        if share <= F32_EPS or TIMES_ROUNDING * rounding >= 1:
            to_largest = Difference(difference.apart, largest)
            unit = "relative to the largest gradient, because it is only rounding on one device"
            finding = self._bounded(part, to_largest, self.tolerance, typical + self.reduction)
            return replace(finding, relative_to=unit)
        least = max(self.tolerance, F32_EPS / share)
        return replace(self._bounded(part, difference, least, rounding), rounding=rounding or None)

    def _bounded(self, what: str, difference: Difference, tolerance: float, rounding: float) -> Finding:
        """Allow `tolerance`, or a multiple of the `rounding` if that is larger; both are relative errors."""
        because, noise = self.because, 0.0 if self.is_named else TIMES_ROUNDING * rounding
        if noise > tolerance and self.rounding is not None:
            because = f"{TIMES_ROUNDING:g} times its rounding on one device, measured by {self.rounding.by}"
        error = difference.apart / difference.size if difference.size else (math.inf if difference.apart else 0.0)
        return Finding(what, error, max(tolerance, noise), because)


@dataclass
class SideEffects:
    """Side effects of forward and loss, observed while they run."""

    backward_at: str | None = None  # `file:line` of a backward call in them
    optimizer: str | None = None  # class of an optimizer that steps in them, and the place
    has_forward: bool = False  # whether the model's own forward ran
    default_dtype: torch.dtype = F32  # torch's default dtype after the step

    @contextlib.contextmanager
    def of(self, step: TrainingStep) -> Iterator[Callable[[], None]]:
        """Observe a step; yield the function to call at the end of each phase."""
        # A pipeline's schedule has no phases and takes no functions that could have side effects; the user's own step
        # runs backward and optimizers.
        has_phases = step.pipeline is None and not isinstance(step, UserStep)
        is_forward = has_phases

        def stamp() -> None:
            nonlocal is_forward
            is_forward = not is_forward and has_phases

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
            # Only DDP needs a hook, and a hook would recompile compiled modules.
            self.has_forward = step.plan.ddp is None or step.plan.compile is not None
            if not self.has_forward:
                undo.callback(step.model.register_forward_pre_hook(entered).remove)
            yield stamp
        self.default_dtype = torch.get_default_dtype()

    def causes(self, step: TrainingStep) -> Iterator[str]:
        """Yield sentences on a backward call in forward or loss, and on a default dtype that a step has changed."""
        if self.backward_at is not None:
            yield (
                f"forward or loss runs backward ({self.backward_at}), and the step's backward adds its gradients "
                "again; return the loss, and leave backward to distbench"
            )
        if self.default_dtype != step.default_dtype:
            was, now = (str(dtype).removeprefix("torch.") for dtype in (step.default_dtype, self.default_dtype))
            yield (
                f"a step changes torch's default dtype from {was} to {now}, and so the dtype of later tensors; call "
                f"set_default_dtype(torch.{was}) at the end of the step, or pass dtypes explicitly"
            )


class StepCheck:
    """Check of one step, which all ranks call together; `counters` then has the results.

    The check restarts the step. `built` is the model on the meta device, unless a plan has changed that model.
    """

    def __init__(
        self, step: TrainingStep, scenario: Scenario, context: RankContext, built: Blueprint | None = None
    ) -> None:
        self._step, self._scenario, self._context, self._built = step, scenario, context, built
        self.counters: dict[str, Any] = {}
        self._seen = SideEffects()
        self._computed_in = F32

    def __call__(self) -> str | None:
        """Return the problem of the step as a sentence; None if it is correct."""
        with full_precision():
            return self._checked()

    def _checked(self) -> str | None:
        step, context = self._step, self._context
        is_full = context.check == "full"
        step.restart()
        values = step.own_values()  # before a backward that steps an optimizer in its hooks
        loss, output = _run(step, is_full, self._seen)
        if stepped := next(filter(None, context.gather(self._seen.optimizer)), None):
            return (
                f"forward or loss steps an optimizer ({stepped}); return the loss, and pass the optimizer to "
                "Scenario(optimizer=...)"
            )
        has_gradients = is_full and not isinstance(step, ForwardStep)
        scale = step.gradient_scale if has_gradients else None
        has_optimizer = has_gradients and step.optimizer is not None
        stepped_with = scale if has_optimizer else None
        arguments = self._scenario, context, has_gradients, values, self._built, stepped_with
        reference = self._alone(partial(reference_of, *arguments))
        self._computed_in = context.gather(reference.computed_in)[0]
        # Kernels of an accelerator may add in any order.
        has_bits = has_optimizer and not is_accelerator(context.device.type)
        bits = digests_of_gradients(step.model) if has_bits else {}
        is_own_step = isinstance(step, UserStep)
        is_given = has_optimizer and not is_own_step
        differences = compare(step.model, loss, reference, context, scale, output, is_given)
        allowance = self._allowance(reference)
        findings = allowance.judged(differences)
        # Small errors need no cause. Random numbers and missing values are not rounding.
        if not differences.is_random and any(each.is_wrong and math.isfinite(each.error) for each in findings):
            allowance = self._measured(allowance, reference)
            findings = allowance.judged(differences)
        self.counters = _counters(differences, findings)
        wrong = next((finding for finding in findings if finding.is_wrong), None)
        if has_optimizer and (wrong is None or (is_own_step and wrong.what.startswith("the gradient"))):
            tolerance = self._allowance(reference).tolerance
            check = OptimizerCheck(step, self._scenario, context, reference, tolerance)
            problem = check() or next(of_differing_bits(context.gather(bits), "gradients"), None)
            # In the user's own step, gradients after backward show whether the step is correct so far.
            is_right = is_own_step and not self._are_wrong(allowance, differences, check.differences)
            if wrong is None or is_right:
                self.counters |= check.counters
                return problem
        if wrong is None:
            return None
        return "; ".join([str(wrong), *self._likely_causes(differences, loss, reference, allowance)])

    def _are_wrong(
        self, allowance: Allowance, kept: Differences, after_backward: Sequence[Mapping[str, Difference]]
    ) -> bool:
        """Return whether a gradient is wrong after a backward; a scaled loss may set its size."""
        for differences in self._merged(after_backward):
            sizes = {name: kept.gradients[name].size or each.size for name, each in differences.items()}
            scaled = {
                name: Difference(each.apart * sizes[name] / each.size, sizes[name]) if each.size else each
                for name, each in differences.items()
            }
            if any(finding.is_wrong for finding in allowance.judged(Differences(None, None, scaled))):
                return True
        return False

    def _merged(self, after_backward: Sequence[Mapping[str, Difference]]) -> Iterator[dict[str, Difference]]:
        """Yield the largest differences of each backward over all ranks."""
        for by_rank in zip(*self._context.gather(after_backward), strict=True):
            names = dict.fromkeys(name for each in by_rank for name in each)
            yield {name: largest_of([each[name] for each in by_rank if name in each]) for name in names}

    def _alone(self, compute: Callable[[], T]) -> T:
        """Run `compute` on rank 0 while the others wait; an error is raised on all ranks, so that no rank waits."""
        computed, failure, raised = None, None, None
        try:
            computed = compute()
        except Exception as error:
            failure = error
            is_ours = isinstance(error, UserError | Unsupported)
            message = f"the reference step on one device raises {one_line_and_place(error)}"
            raised = (type(error), str(error)) if is_ours else (RuntimeError, message)
        if (first := next(filter(None, self._context.gather(raised)), None)) is not None:
            raise first[0](first[1]) from failure
        assert computed is not None
        return computed

    def _allowance(self, reference: Reference) -> Allowance:
        model, units, scale = reference.built.model, self._step.units, self._step.gradient_scale
        if (tolerance := self._scenario.tolerance) is not None:
            return Allowance(tolerance, tolerance, "the scenario's tolerance", is_named=True, gradient_scale=scale)
        if is_accelerator(self._context.device.type) and os.environ.get(FORCED) == "1":
            because, low = f"with {FORCED}=1, which rounds every product to TF32", LOW_PRECISION_TOLERANCE
            return Allowance(low, low, because, gradient_scale=scale)
        lowest = lowest_precision(model, units, self._computed_in)
        for_loss = TOLERANCE if lowest == F32 else torch.finfo(lowest).eps
        reduction = reduction_rounding(model, units, self._step.num_data_parallel)
        because = f"as for every {dtype_name(lowest)} step"
        return Allowance(TOLERANCE, for_loss, because, gradient_scale=scale, reduction=reduction)

    def _measured(self, allowance: Allowance, reference: Reference) -> Allowance:
        """Add one device's rounding, unless it cannot be measured."""
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
        tolerance = TOLERANCE if lowest == F32 else LOW_PRECISION_TOLERANCE
        because = f"{allowance.because}, because rounding could not be measured ({why_not})"
        return replace(allowance, tolerance=tolerance, loss_tolerance=tolerance, because=because)

    def _likely_causes(
        self, differences: Differences, loss: float | None, reference: Reference, allowance: Allowance
    ) -> list[str]:
        step, scenario, is_random = self._step, self._scenario, differences.is_random
        num_parts = self._context.index(BATCH_DIMS)[1] * scenario.plan.microbatches
        batch, again = batch_of(scenario), batch_of(scenario)
        is_unsaid = scenario.parallelize is not None and scenario.gradient_divide_factor is None
        compiled = next((name for name, module in step.model.named_modules() if is_compiled(module)), None)
        errors = (each.apart / each.size for each in differences.gradients.values() if each.size)
        random = _dropout_of(reference.built.model) if is_random else None
        in_eval_mode = self._drawn_in_eval_mode(reference) if is_random else None
        # The comparison may have replaced the gradients.
        step.restart()
        rerun = loss if is_random else _run(step, False)[0]
        own = fingerprint(batch.tree), held_gradients(step.model), scales_of(step.optimizer)
        prints, gradients, scales = zip(*self._context.gather(own), strict=True)
        may_couple = not is_random and num_parts > 1 and not isinstance(step, ForwardStep)
        is_coupled, factors = False, list[float]()
        if may_couple:
            is_coupled, factors = self._compared_with_parts(differences, loss, reference, allowance, num_parts)
        has_ddp = scenario.plan.ddp is not None
        caller = caller_of(scenario)
        causes = [
            *_of_model(random, in_eval_mode, differences.batch_statistics, num_parts),
            *self._seen.causes(step),
            *of_forward(caller, self._seen.has_forward or not (has_ddp and caller), "DDP prepares its reductions"),
            *of_loss(differences.mean_loss, differences.expected_loss, num_parts),
            *_of_labels(dict(tensors_of(batch.tree)), batch.split_dims, num_parts),
            *of_batches(step.batch.tree, batch.tree, again.tree, prints),
            *of_scales(scales),
            *of_compiled(compiled, max(errors, default=0), loses_gradients_of_pending_inputs),
            *_of_factors(divide_factors(step.model) if is_unsaid else set(), step.num_data_parallel),
            *of_replicas([] if is_random else gradients, has_ddp),
            *of_another_run(loss, rerun),
        ]
        if not causes and is_coupled:
            causes = [
                "the loss or the model couples the samples of a batch, as in a contrastive loss, a router's auxiliary "
                "loss, a norm over the batch or a mean over a count that differs between parts (this step equals one "
                f"device's step on each of the {num_parts} parts of the batch, but not on the whole batch); compute "
                "the loss per sample, or gather the coupled values from all ranks"
            ]
        loss_function = "the loss" if scenario.loss is None else f"loss ({place_of(scenario.loss)})"
        causes = causes or [*of_part_factors(factors, caller or loss_function)]
        causes = causes or [*filter(None, [batch.guessed().removeprefix("; ")])]
        return [f"the likely cause: {cause}" for cause in causes]

    def _drawn_in_eval_mode(self, reference: Reference) -> str | None:
        context = self._context

        def drawn() -> tuple[str | None]:
            return (drawn_in_eval_mode(self._scenario, context, reference) if context.rank == 0 else None,)

        try:
            cause: str | None = context.gather(self._alone(drawn))[0][0]
        except Exception:
            return None
        return cause

    def _compared_with_parts(
        self, differences: Differences, loss: float | None, reference: Reference, allowance: Allowance, num_parts: int
    ) -> tuple[bool, list[float]]:
        """Compare the step with the mean of one device's steps on each part of the batch.

        Return whether they are equal, and the factor of each part's gradients in the step; [] if no factors fit.
        """
        context, scale = self._context, self._step.gradient_scale if differences.gradients else None
        is_solved = scale is not None and self._step.pipeline is None and num_parts <= MOST_PARTS
        parameters = as_built(self._step.model, reference.built) if is_solved else {}
        sizes = {name: math.prod(reference.shapes[name]) for name, each in parameters.items() if each.requires_grad}
        name = max((name for name in sizes if sizes[name] <= MOST_ELEMENTS), key=sizes.__getitem__, default="")
        arguments = self._scenario, context, reference, num_parts, name
        try:
            of_parts, of_each = self._alone(partial(reference_of_parts, *arguments))
            gradient: Any = parameters[name].grad if name else None
            has_gradient = all(context.gather(gradient is not None))
            if has_gradient and hasattr(gradient, "full_tensor"):
                gradient = gradient.full_tensor()
        except Exception:
            return False, []
        factors = part_factors(gradient.detach().cpu() / scale, of_each) if has_gradient and of_each else []
        again = compare(self._step.model, loss, of_parts, context, scale)
        return not any(finding.is_wrong for finding in allowance.judged(again)), context.gather(factors)[0]


def _run(
    step: TrainingStep, is_full: bool, side_effects: SideEffects | None = None
) -> tuple[float | None, torch.Tensor | None]:
    """Return a step's loss, and its output if that is compared. The loss is None without backward, and on ranks before
    a pipeline's last stage.
    """
    if isinstance(step, ForwardStep):
        return None, step.whole_output()
    step.kept_outputs = [] if step.unshards_output and is_full else None
    with default_dtype_kept(), (side_effects or SideEffects()).of(step) as stamp:
        loss = step.forward_backward(stamp)
    return None if loss is None else float(loss), torch.cat(step.kept_outputs) if step.kept_outputs else None


def _counters(differences: Differences, findings: list[Finding]) -> dict[str, Any]:
    """Return the counters of a row: `tolerance` is the error allowed to `worst_grad`, to the loss if no gradients were
    compared, or to the output if there is no loss.
    """
    by_part = {finding.what.partition(" of ")[0]: finding for finding in findings}
    loss, gradient, output = (by_part.get(part) for part in ("the loss", "the gradient", "the output"))
    counters: dict[str, Any] = {}
    if loss is not None:
        counters |= {"loss": differences.mean_loss, "loss_rel_error": loss.error}
    counters["tolerance"] = next(filter(None, (gradient, loss, output))).allowed
    if gradient is not None:
        counters |= {"grad_rel_error": gradient.error, "worst_grad": gradient.what.removeprefix("the gradient of ")}
        if gradient.rounding is not None:
            counters["grad_rounding"] = gradient.rounding
    if output is not None:
        counters["output_rel_error"] = output.error
    return counters


def _of_model(
    random: str | None, in_eval_mode: str | None, batch_statistics: str | None, num_parts: int
) -> Iterator[str]:
    """Yield the module that draws random numbers, in train mode or in eval mode too, or computes statistics over a part
    of a batch, on ranks or micro-batches.
    """
    if in_eval_mode is not None:
        yield (
            f"{in_eval_mode} draws different random numbers on each rank, even in eval mode; draw them in make_batch "
            "from a seeded generator, and use them from the batch"
        )
    elif random is not None:
        yield (
            f"{random} draws different random numbers on each rank; return model.eval() from build_model, or set p=0 "
            "for dropout"
        )
    if batch_statistics is not None and num_parts > 1:
        yield (
            f"{batch_statistics} computes statistics over one of {num_parts} parts of the batch; return model.eval() "
            "from build_model, or use a norm over single samples"
        )


def of_loss(loss: float | None, expected: float, num_parts: int) -> Iterator[str]:
    """Compare the mean of all parts' losses with one device's loss."""
    if not math.isfinite(expected):
        yield f"one device's loss is {expected}; check the model's sizes and its batch"
    elif loss is not None and num_parts > 1 and expected and abs(loss * num_parts / expected - 1) < CLOSE:
        yield f"the loss is a sum over a batch of {num_parts} parts; return a mean"


def _of_labels(tensors: Mapping[str, torch.Tensor], split_dims: Mapping[str, int], num_parts: int) -> Iterator[str]:
    """Report the first tensor whose parts, split along its tensor dim, have unequal numbers of ignored labels."""
    for name, tensor_dim in split_dims.items():
        parts = tensors[name].chunk(num_parts, tensor_dim) if tensors[name].dtype == torch.int64 else ()
        if len({int((part == IGNORED).sum()) for part in parts}) > 1:
            yield (
                f"the {num_parts} parts of {name} have unequal numbers of {IGNORED}, which cross entropy ignores, so "
                "the mean of the parts' losses is not the loss of the batch; use the sum, divided by a constant"
            )
            return


def of_batches(used: Any, made: Any, made_again: Any, prints: Sequence[str]) -> Iterator[str]:
    """Compare the batch of a step, two batches made after the step, and each rank's `fingerprint` of a batch."""
    odd = next((rank for rank, digest in enumerate(prints) if digest != prints[0]), None)
    if (name := _differing(made, made_again)) is not None:
        yield f"make_batch makes a different {name} in each call and on each rank; draw {name} from a seeded generator"
    elif odd is not None:
        yield f"make_batch makes a different batch on rank {odd} than on rank 0; make the same batch on every rank"
    elif (name := _differing(used, made)) is not None:
        yield f"a step changes {name} of its batch in place, and the next step uses the changed values; change a copy"


def _differing(tree: Any, other: Any) -> str | None:
    other_tensors = dict(tensors_of(other))
    for name, tensor in tensors_of(tree):
        if name not in other_tensors or not torch.equal(tensor.cpu(), other_tensors[name].cpu()):
            return f"tensor {name}".strip()
    return None


def held_gradients(model: nn.Module) -> Gradients:
    """Map this rank's parameter names to the part of the parameter on this rank, and the size of its gradient."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        placements = getattr(gradient, "placements", ())
        if gradient is None or any(placement.is_partial() for placement in placements):
            continue
        local = gradient.to_local() if placements else gradient
        gradients[name] = part_of(gradient), float(local.detach().norm())
    return gradients


def of_replicas(gradients_by_rank: Sequence[Gradients], has_ddp: bool = False) -> Iterator[str]:
    """Compare the ranks' `held_gradients`: gradients of the same part of a parameter must be equal.

    With DDP, parameters that DDP ignores or that forward did not use are skipped.
    """
    instead = "remove it from DdpPlan(ignored=...)" if has_ddp else "shard it (fully_shard), use replicate(model)"
    first: dict[Any, tuple[int, float]] = {}
    for rank, gradients in enumerate(gradients_by_rank):
        for name, (part, size) in gradients.items():
            first_rank, first_size = first.setdefault((name, part), (rank, size))
            if abs(size - first_size) > CLOSE * max(size, first_size):
                yield (
                    f"ranks {first_rank} and {rank} hold the same part of {name} with different gradients, which "
                    f"are not summed; {instead}, or average the gradients in a hook from after_materialize"
                )
                return


def scales_of(made: Any) -> dict[str, float]:
    """Return the scale of each gradient scaler, by its name among the optimizers."""
    named = optimizers_of(made).items()
    return {name: float(value.get_scale()) for name, value in named if hasattr(value, "get_scale")}


def of_scales(by_rank: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Compare the ranks' scales of gradient scalers."""
    for rank, scales in enumerate(by_rank):
        for name, scale in scales.items():
            if scale != by_rank[0].get(name):
                yield (
                    f"scaler {name!r} has the scale {by_rank[0].get(name)} on rank 0 and {scale} on rank {rank}; give "
                    "every rank the same init_scale, and share the overflow flag by an all-reduce"
                )
                return


def of_another_run(loss: float | None, again: float | None) -> Iterator[str]:
    """Compare a rank's loss from the initial values with the loss of a second run."""
    if loss is not None and again is not None and abs(loss - again) > CLOSE * max(abs(loss), abs(again)):
        yield (
            "the loss from the same values and batch differs between runs, because the model has state that is neither "
            "parameter nor buffer, or the step draws random numbers from Python, numpy or its own generator; draw "
            "random numbers in make_batch from a seeded generator"
        )


def caller_of(scenario: Scenario) -> str:
    """Return the name and place of the scenario's function that calls the model; "" if distbench calls it."""
    name = "call" if scenario.step is None else "step"
    function = getattr(scenario, name)
    return "" if function is None else f"{name} ({place_of(function)})"


def of_forward(caller: str, has_run: bool, what_it_does: str) -> Iterator[str]:
    """Report a scenario's function that did not run the model's forward, and the effect."""
    if not has_run:
        yield (
            f"{caller} bypasses the model's forward, in which {what_it_does}; call model(...), whose forward calls "
            "the model's parts"
        )


def of_compiled(module: str | None, error: float, loses_gradients: Callable[[], bool]) -> Iterator[str]:
    """Report a module that the user's code compiles, if this torch loses gradients of pending inputs; `error` is the
    largest relative error of a gradient.
    """
    if module is not None and error >= LOST and loses_gradients():
        yield (
            f"{module or 'the model'} is compiled, and torch {torch.__version__} drops the gradient of an input of "
            "compiled code while the input's tensor parallel collective is pending (pytorch PR 191113); compile by "
            "ParallelPlan(compile=CompilePlan(...)), which waits for such inputs first"
        )


def _of_factors(factors: set[float], num_ranks: int) -> Iterator[str]:
    if odd := sorted(factors - {num_ranks}):
        problem = f"parallelize divides gradients by {odd[0]:g}, but {num_ranks} ranks have data"
        yield f"{problem}; set gradient_divide_factor={odd[0]:g} to confirm the divisor"


def part_factors(gradient: torch.Tensor, of_parts: Sequence[torch.Tensor]) -> list[float]:
    """Return the factors f for which `gradient` is the mean over parts of f times the part's gradient; [] if it is not.

    The factors are the least squares solution.
    """
    columns = torch.stack([part.flatten().double() for part in of_parts], dim=1) / len(of_parts)
    wanted = gradient.flatten().double()
    if len(columns) <= len(of_parts) or not (wanted.isfinite().all() and columns.isfinite().all()):
        return []
    factors = torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
    error = (columns @ factors - wanted).norm() / wanted.norm()
    return factors.tolist() if float(error) < CLOSE else []


def of_part_factors(factors: Sequence[float], function: str) -> Iterator[str]:
    """Report ranks whose part of the batch has a factor other than 1."""
    if any(abs(factor - 1) > CLOSE for factor in factors):
        text = ", ".join(f"{round(factor, 3) + 0.0:g}" for factor in factors)
        yield (
            f"{function} multiplies the gradients of the {len(factors)} parts of the batch by {text}, such "
            "as by a loss scaled by the rank or by the number of ranks; use the same factor on ranks as on one device"
        )


def _dropout_of(model: nn.Module) -> str:
    """Return the first module with dropout in train mode, else a name for other sources of random numbers."""
    for name, module in model.named_modules():
        is_dropout = "Dropout" in type(module).__name__
        rates = {at: rate for at, rate in vars(module).items() if "drop" in at or (is_dropout and at == "p")}
        rate = next((rate for rate in rates.values() if isinstance(rate, float) and rate > 0), None)
        if module.training and rate is not None:
            return f"{name} ({type(module).__name__}, {rate:g})"
    return "the model"
