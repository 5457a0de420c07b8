"""Check that an optimizer on sharded parameters computes the same as on one device: the allowed error, likely causes.

All ranks step the optimizer with one device's gradients, so rounding of the gradients, which Adam would turn into whole
updates, does not count.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distbench.cases.single_device_reference import (
    F32,
    Difference,
    Reference,
    Stepped,
    gradient_differences,
    largest,
    model_on_device,
    run_step,
)
from distbench.cases.trained_tensors import (
    NUM_STEPS,
    Trained,
    buffers_of,
    fingerprint,
    has_copies,
    options_of,
    own_part,
    part_of,
    step_alone,
    trained_tensors,
)
from distbench.plans.model import as_built, local_part
from distbench.plans.training_step import TrainingStep, UserStep
from distbench.plans.user_step import made_optimizers
from distbench.ranks.context import RankContext
from distbench.ranks.device import random_states
from distbench.redistribute.expected_shards import shard_of
from distbench.spec import Scenario
from distbench.torch_private import around_backward, each_operator, tensors_in

# Units in a tensor's last place: torch's kernels may round an operator differently on a shard.
UNITS = 2
# Allowed relative error of batch statistics, which forward rounds.
STATISTICS_TOLERANCE = 1e-3
TIMES_ROUNDING = 3.0
NUM_DRAWS = 2
# The number of elements that are shared at once. A larger tensor is shared alone.
BUCKET = 4_000_000
# Relative tolerance for the identification of a cause. It must be large, because decay also applies to the updates, and
# a wrong part changes in each step.
CLOSE, DECAY_CLOSE, PART_CLOSE = 1e-2, 5e-2, 0.1


@dataclass(frozen=True)
class Signs:
    """Properties of a rank's wrong tensor that identify a cause."""

    is_unchanged: bool = False
    is_permuted: bool = False  # right values in other places
    other_part: tuple[int, ...] | None = None  # index along each mesh dim of the rank whose values these are
    scale: float | None = None  # its change is this multiple of the expected one
    decay: float | None = None  # it is off by this multiple of its own value


@dataclass(frozen=True)
class Change:
    """Largest absolute error, expected value and expected change of a tensor, and the eps of its dtype."""

    apart: float
    size: float
    moved: float
    eps: float
    signs: Signs | None = None

    def allowed(self, tolerance: float) -> float:
        """Return the absolute error that is allowed without a measurement of rounding."""
        return UNITS * self.eps * self.size + tolerance * self.moved

    @property
    def is_known(self) -> bool:
        """Return whether the error is finite."""
        return math.isfinite(self.apart)


def label_kind(label: str) -> str:
    """Return the kind of a tensor: "exp_avg" for "exp_avg of norm.weight", "" for a parameter."""
    return label.rpartition(" of ")[0]


class OptimizerCheck:
    """Check of an optimizer's steps with one device's gradients; all ranks call the check after backward."""

    def __init__(
        self, step: TrainingStep, scenario: Scenario, context: RankContext, reference: Reference, tolerance: float
    ) -> None:
        self._step, self._scenario, self._context, self._reference = step, scenario, context, reference
        self._tolerance = tolerance
        self._parameters: dict[str, Any] = dict(as_built(step.model, reference.built))
        self.counters: dict[str, Any] = {}
        self.differences: list[dict[str, Difference]] = []  # of gradients after each backward of the user's own step

    def __call__(self) -> str | None:
        """Return the problem as a sentence; None if the steps are correct or cannot be compared."""
        context, states = self._context, self._run()
        is_random = any(not torch.equal(*pair) for pair in zip(*states, strict=True))
        trained, shared = self._trained(), self._shared_facts()
        rows = context.gather((self._changes(trained, shared), self._digests(trained, shared), is_random))
        changes, digests, random_ranks = zip(*rows, strict=True)
        if shared.why_not is not None:
            self.counters["optimizer_check"] = f"not compared with one device: {shared.why_not}"
        wrong = self._judged(changes, shared)
        problems = [*([wrong[1]] if wrong else []), *of_differing_bits(digests)]
        if not problems:
            return None
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        causes = [
            *of_options(shared.options, context.gather(options_of(self._step.optimizer, names))),
            *of_random(random_ranks),
            *(self._of_tensors(wrong[0], trained, changes) if wrong else ()),
        ]
        return "; ".join([*problems, *(f"the likely cause: {cause}" for cause in causes[:1])])

    def _run(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Copy every tensor that new optimizers change, and step them; return the random states before and after."""
        step, device = self._step, self._context.device
        if isinstance(step, UserStep):
            step.restart()
        else:
            step.optimizer = made_optimizers(self._scenario, step.model)
        gradients = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        self._gradients = {name: _on_cpu(gradient) for name, gradient in gradients.items()}
        self._before = {label: _on_cpu(each.tensor) for label, each in self._trained().items()}
        states = random_states(device)
        if isinstance(step, UserStep):
            self._run_own_step()
            return states, random_states(device)
        for _ in range(NUM_STEPS):
            for name, gradient in gradients.items():
                local_part(gradient).copy_(self._gradients[name])
                self._parameters[name].grad = gradient
            step.optimize()
        return states, random_states(device)

    def _run_own_step(self) -> None:
        """Run a period of the user's own step, each backward of which leaves one device's gradients."""
        step, context, turns = self._step, self._context, count()

        def give() -> None:
            turn, backwards = next(turns), self._reference.backwards
            gradients = backwards[turn] if turn < len(backwards) else {}
            differences = gradient_differences(step.model, self._reference, gradients, context, is_given=True)
            self.differences.append(differences)
            # The last gradients before a step clears them.
            own = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
            self._gradients |= {name: _on_cpu(gradient) for name, gradient in own.items()}

        with around_backward(lambda: None, give):
            step.forward_backward()

    def _trained(self) -> dict[str, Trained]:
        step = self._step
        return trained_tensors(self._parameters, step.optimizer, step.model) | buffers_of(
            step.model, self._reference.built
        )

    def _shared_facts(self) -> "Facts":
        stepped = self._reference.stepped or Stepped()
        shapes = [(label, tuple(tensor.shape)) for label, tensor in stepped.tensors.items()]
        facts: Facts = self._context.gather(Facts(shapes, stepped.options, stepped.statistics, stepped.why_not))[0]
        return facts

    def _changes(self, trained: Mapping[str, Trained], shared: "Facts") -> dict[str, Change]:
        changes = {}
        for bucket in _buckets(shared.shapes):
            flat = torch.empty(sum(math.prod(shape) for _, shape in bucket))
            if self._reference.stepped is not None:
                torch.cat([self._reference.stepped.tensors[label].reshape(-1) for label, _ in bucket], out=flat)
            dist.broadcast(flat, src=0, group=self._context.control)
            pieces = flat.split([math.prod(shape) for _, shape in bucket])
            for (label, shape), piece in zip(bucket, pieces, strict=True):
                if label in trained and (change := self._change(label, trained[label], piece.view(shape))) is not None:
                    changes[label] = change
        named = {label for label, _ in shared.shapes}
        for name, parameter in self._parameters.items():
            if name not in named and shared.why_not is None:  # frozen, and one device keeps it
                own, before = local_part(parameter).cpu().float(), self._before[name].float()
                changes[name] = Change(_apart(own, before), largest(before), 0.0, 0.0)
        return changes

    def _change(self, label: str, trained: Trained, whole: torch.Tensor) -> Change | None:
        parts = own_part(trained, whole, self._parameters)
        if parts is None:
            return None
        own, expected = parts[0].cpu().float(), parts[1]
        if own.shape != expected.shape:
            return Change(math.inf, largest(whole), 0.0, 0.0)
        before = self._before.get(label)
        if before is None or before.shape != expected.shape:
            # A new state tensor begins with zeros or with the values of the parameter.
            initial = self._before.get(trained.owner)
            before = torch.zeros_like(expected)
            if initial is not None and initial.shape == expected.shape and _is_nearer(expected, initial.float()):
                before = initial
        before = before.float()
        change = Change(
            _apart(own, expected),
            largest(whole),
            largest(expected - before),
            torch.finfo(trained.tensor.dtype).eps,
        )
        if change.apart <= change.allowed(self._tolerance) or not change.is_known:
            return change
        return replace(change, signs=self._signs(trained, own, whole, expected, before))

    def _signs(
        self, trained: Trained, own: torch.Tensor, whole: torch.Tensor, expected: torch.Tensor, before: torch.Tensor
    ) -> Signs:
        off = own - expected
        limit = largest(off)
        noise = UNITS * torch.finfo(trained.tensor.dtype).eps * largest(whole) * math.sqrt(own.numel())
        holder = trained.tensor if hasattr(trained.tensor, "placements") else self._parameters.get(trained.owner)
        is_permuted = (
            own.numel() > 1 and _apart(own.reshape(-1).sort()[0], expected.reshape(-1).sort()[0]) < CLOSE * limit
        )
        return Signs(
            is_unchanged=torch.equal(own, before),
            is_permuted=is_permuted,
            other_part=_other_part(own, whole, holder, limit),
            scale=_multiple(own - before, expected - before, CLOSE, noise),
            decay=_multiple(off, (before + expected) / 2, DECAY_CLOSE, 0.0),
        )

    def _digests(self, trained: Mapping[str, Trained], shared: "Facts") -> dict[tuple[str, tuple[int, ...]], str]:
        """Map labels and parts to hashes. The map has the tensors that other ranks hold too."""
        digests = {}
        compared = dict(shared.shapes)
        for label, each in trained.items():
            is_owned = bool(each.owner) and not hasattr(each.tensor, "placements")
            holder = self._parameters[each.owner] if is_owned else each.tensor
            is_whole = tuple(each.tensor.shape) == compared.get(label) and label not in self._reference.built.buffers
            if has_copies(holder) and (each.owner or hasattr(each.tensor, "placements") or is_whole):
                digests[label, part_of(holder)] = fingerprint(local_part(each.tensor))
        return digests

    def _judged(self, changes: Sequence[Mapping[str, Change]], shared: "Facts") -> tuple[str, str] | None:
        """Return the label of the tensor farthest above its limit, parameters first, and a sentence on it."""
        labels = dict.fromkeys(label for each in changes for label in each)
        merged = {label: _merged([each[label] for each in changes if label in each]) for label in labels}
        allowed = {
            label: STATISTICS_TOLERANCE * change.size if label in shared.statistics else change.allowed(self._tolerance)
            for label, change in merged.items()
        }
        reasons = dict.fromkeys(merged, "as for every optimizer")
        if any(change.apart > allowed[label] and change.is_known for label, change in merged.items()):
            rounding, method = self._rounding()
            ratios = {label: rounding[label] / merged[label].moved for label in rounding if _moved(merged.get(label))}
            typical = {
                kind: statistics.median(value for label, value in ratios.items() if label_kind(label) == kind)
                for kind in {label_kind(label) for label in ratios}
            }
            for label, ratio in ratios.items():
                bound = TIMES_ROUNDING * max(ratio, typical[label_kind(label)]) * merged[label].moved
                if bound > allowed[label]:
                    allowed[label] = bound
                    reasons[label] = f"{TIMES_ROUNDING:g} times its rounding on one device, measured by {method}"
        if not merged:
            return None

        def excess(label: str) -> tuple[bool, bool, float]:
            change, bound = merged[label], allowed[label]
            ratio = change.apart / bound if bound else (math.inf if change.apart else 0.0)
            return not change.apart <= bound, label in self._names, ratio

        worst = max(merged, key=excess)
        change, bound = merged[worst], allowed[worst]
        unit, relative_to = (change.moved, "change") if change.moved else (change.size or 1.0, "size")
        parameters = [label for label in merged if label in self._names]
        nearest = max(parameters, key=excess, default=worst)
        of_nearest = merged[nearest].moved or merged[nearest].size or 1.0
        self.counters |= {
            "worst_param": nearest,
            "param_rel_error": merged[nearest].apart / of_nearest,
            "param_tolerance": allowed[nearest] / of_nearest,
        }
        if change.apart <= bound:
            return None
        steps = "the step" if isinstance(self._step, UserStep) else f"{NUM_STEPS} optimizer steps"
        begin = f"after {steps}, {worst}"
        if not change.is_known:
            return worst, f"{begin} has another shape than one device's, or is not a number"
        error = f"differs from one device's by {change.apart / unit:.2e} (relative to its {relative_to})"
        return worst, f"{begin} {error}; {bound / unit:.0e} is allowed, {reasons[worst]}"

    @property
    def _names(self) -> set[str]:
        return set(self._reference.built.parameters)

    def _rounding(self) -> tuple[dict[str, float], str]:
        """Return the effect of rounding on each tensor, from rank 0."""
        result: tuple[dict[str, float], str] | None = None
        if self._context.rank == 0:
            try:
                result = measured_rounding_of_steps(
                    self._scenario, self._context, self._reference, self._step.gradient_scale
                )
            except Exception:
                result = {}, "nothing: it could not be measured"
        rounding: tuple[dict[str, float], str] = self._context.gather(result)[0]
        return rounding

    def _of_tensors(
        self, worst: str, trained: Mapping[str, Trained], changes: Sequence[Mapping[str, Change]]
    ) -> Iterator[str]:
        """Yield likely causes by the pattern of the wrong tensors; all ranks must call this together."""
        wrong = [{label: change.signs for label, change in each.items() if change.signs} for each in changes]
        yield from of_signs(worst, wrong)
        is_local = all(self._context.gather(self._is_of_shards(trained, changes[self._context.rank], wrong)))
        norm = math.sqrt(sum(float(each.float().square().sum()) for each in self._gradients.values()))
        yield from of_scales(wrong, self._context.gather(norm), is_local)
        if is_local:
            yield (
                "each rank's optimizer treats its shards as whole tensors, for example in a norm, a factored second "
                "moment or a product of matrices; compute with DTensors, or gather the shards first"
            )
        yield from of_decay(worst, wrong)

    def _is_of_shards(
        self, trained: Mapping[str, Trained], changes: Mapping[str, Change], wrong: Sequence[Mapping[str, Signs]]
    ) -> bool:
        """Return whether this rank's wrong tensors equal the same optimizer's on the shards as plain tensors."""
        if isinstance(self._step, UserStep):
            return False
        shards = nn.Module()
        for name in self._gradients:
            *path, last = name.split(".")
            holder = shards
            for part in path:
                if not hasattr(holder, part):
                    holder.register_module(part, nn.Module())
                holder = getattr(holder, part)
            holder.register_parameter(last, nn.Parameter(self._before[name].clone()))
        try:
            alone, _ = step_alone(self._scenario, shards, self._gradients, 1.0)
        except Exception:
            return False
        for label in wrong[self._context.rank]:
            own, other = local_part(trained[label].tensor).cpu().float(), alone.get(label)
            if other is None or other.tensor.shape != own.shape:
                return False
            if _apart(own, other.tensor.detach().float()) > PART_CLOSE * changes[label].apart:
                return False
        return True


@dataclass(frozen=True)
class Facts:
    """Results of one device's steps that every rank needs."""

    shapes: list[tuple[str, tuple[int, ...]]]
    options: dict[str, dict[str, Any]]
    statistics: frozenset[str]
    why_not: str | None


def measured_rounding_of_steps(
    scenario: Scenario, context: RankContext, reference: Reference, scale: float
) -> tuple[dict[str, float], str]:
    """Step again, with each gradient and parameter moved by one unit in its last place.

    A unit is in the optimizer's least precise dtype. Returns the largest difference of each tensor over several
    random draws, and the method.
    """
    assert reference.stepped is not None
    rounding: dict[str, float] = {}
    lowest, draw, num_draws = F32, 0, NUM_DRAWS
    while draw < num_draws:
        generator = torch.Generator().manual_seed(draw)
        eps = torch.finfo(lowest).eps
        model = model_on_device(scenario, context, reference.built, reference.values)
        with torch.no_grad():
            for parameter in model.parameters():
                _move(parameter, torch.finfo(parameter.dtype).eps, generator)
        gradients = {name: _move(each.clone(), eps, generator) for name, each in reference.gradients.items()}
        dtypes: set[torch.dtype] = set()

        def note(func: Any, args: Any, kwargs: Any, dtypes: set[torch.dtype] = dtypes) -> Any:
            result = func(*args, **kwargs)
            dtypes.update(tensor.dtype for tensor in tensors_in(result) if tensor.is_floating_point())
            return result

        with each_operator(note):
            if scenario.step is None:
                trained, _ = step_alone(scenario, model, gradients, scale)
            else:
                trained = _own_step_rounded(scenario, context, model, reference, eps, generator)
        seen = max([F32, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)
        if seen != lowest:
            lowest, num_draws = seen, num_draws + 1
        for label, expected in reference.stepped.tensors.items():
            if label in trained:
                apart = largest(trained[label].tensor.detach().cpu().float() - expected)
                rounding[label] = max(rounding.get(label, 0.0), apart)
        draw += 1
    return rounding, "moving each gradient by one unit in its last place"


def _own_step_rounded(
    scenario: Scenario,
    context: RankContext,
    model: nn.Module,
    reference: Reference,
    eps: float,
    generator: torch.Generator,
) -> dict[str, Trained]:
    """Run the user's own step on one device; after each backward, set the earlier gradients, each moved."""
    turns = count()

    def give() -> None:
        for name, gradient in reference.backwards[next(turns)].items():
            parameter = model.get_parameter(name)
            if parameter.grad is not None:
                parameter.grad.copy_(_move(gradient.clone(), eps, generator))

    step = run_step(scenario, context, model, reference.batch, lambda *_: None, after_backward=give)
    return trained_tensors(dict(model.named_parameters()), step.made, model)


def _move(tensor: torch.Tensor, eps: float, generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return tensor.addcmul_(tensor, signs.to(tensor.device, tensor.dtype), value=eps)


def of_options(expected: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Compare the options of each parameter's group with one device's."""
    for rank, options in enumerate(by_rank):
        for name, group in options.items():
            alone = expected.get(name)
            if alone is None:
                continue
            for key in sorted(group.keys() & alone.keys()):
                if group[key] != alone[key]:
                    yield (
                        f"the optimizer's {key} of {name} is {group[key]} on rank {rank} and {alone[key]} on one "
                        "device; make the same parameter groups on every rank"
                    )
                    return
        for name in sorted(expected.keys() - options.keys() if len(options) else ()):
            if len(by_rank) and all(name not in each for each in by_rank):
                yield f"one device has {name} in a parameter group, but the parallel model does not"
                return


def of_random(is_random: Sequence[bool]) -> Iterator[str]:
    """Report an optimizer that draws random numbers on ranks."""
    if any(is_random):
        yield (
            f"the optimizer draws random numbers on rank {list(is_random).index(True)}, but not on one device; draw "
            "them from a generator with the same seed on every rank"
        )


def of_differing_bits(digests_by_rank: Sequence[Mapping[Any, str]], what: str = "values") -> Iterator[str]:
    """Compare the bits of tensors that have the same part on several ranks."""
    first: dict[Any, tuple[int, str]] = {}
    for rank, digests in enumerate(digests_by_rank):
        for key, digest in digests.items():
            first_rank, first_digest = first.setdefault(key, (rank, digest))
            if digest != first_digest:
                yield (
                    f"ranks {first_rank} and {rank} hold the same part of {key[0]} with different {what}, so the "
                    "copies diverge; compute equal values, or share them by a collective"
                )
                return


def of_signs(worst: str, wrong: Sequence[Mapping[str, Signs]]) -> Iterator[str]:
    """Report tensors that are unchanged, have values of another place, or have another step count."""
    for label in dict.fromkeys([worst, *(label for signs in wrong for label in signs)]):
        here = [(rank, signs[label]) for rank, signs in enumerate(wrong) if label in signs]
        if unchanged := [rank for rank, signs in here if signs.is_unchanged]:
            yield f"the optimizer never changes {label} on {_ranks(unchanged)}; update {label} on every rank"
        if moved := next(((rank, signs.other_part) for rank, signs in here if signs.other_part is not None), None):
            yield f"rank {moved[0]} holds the part of {label} that belongs to the rank at {list(moved[1])} of its mesh"
        if permuted := [rank for rank, signs in here if signs.is_permuted]:
            yield f"{_ranks(permuted)} has the right values of {label} in the wrong places of its shard"
    for rank, signs in enumerate(wrong):
        for label, each in signs.items():
            if label_kind(label).endswith("step") and each.scale is not None:
                name = label.rpartition(" of ")[2]
                yield (
                    f"the optimizer's step count of {name} on rank {rank} is {each.scale:g} times one device's; step "
                    "the optimizer once per training step"
                )
                return


def of_scales(wrong: Sequence[Mapping[str, Signs]], norms: Sequence[float], is_local: bool) -> Iterator[str]:
    """Report updates that differ from one device's by one factor per rank; `norms` has each rank's gradient norm."""
    by_kind: dict[str, list[float]] = {}
    for kind in dict.fromkeys(label_kind(label) for signs in wrong for label in signs):
        scales = [[each.scale for label, each in signs.items() if label_kind(label) == kind] for signs in wrong]
        known = [factor for factor in map(_factor, scales) if factor is not None]
        if len(known) == len(wrong) and max(abs(factor - 1) for factor in known) > CLOSE:
            by_kind[kind] = known
    if not by_kind:
        return
    # Adam's updates hide most of a factor. Its second moment has the square of the factor.
    moments = [known for kind, known in by_kind.items() if kind] or [*by_kind.values()]
    factors = min(moments, key=lambda known: max(abs(factor - 1) for factor in known))
    text = ", ".join(f"{factor:.3g} on rank {rank}" for rank, factor in enumerate(factors[:4]))
    if max(factors) - min(factors) <= CLOSE * max(map(abs, factors)):
        text = f"{factors[0]:.3g} on every rank"
    products = [factor * norm for factor, norm in zip(factors, norms, strict=True)]
    is_by_norm = (
        min(factors) > 0 and max(products) < (1 + CLOSE) * min(products) and max(norms) > (1 + CLOSE) * min(norms)
    )
    if is_local or is_by_norm:
        yield (
            "each rank clips or scales by the norm of its own shards, which multiplies one device's changes by "
            f"{text}; use "
            "clip_grad_norm_ of the DTensors, or sum the squares over ranks"
        )
    else:
        yield (
            f"all changes are one device's multiplied by one factor ({text}), such as a learning rate, a loss scale, a "
            "clipping coefficient, a momentum or a second step; compute the same value on every rank as on one device"
        )


def _factor(scales: Sequence[float | None]) -> float | None:
    """Return the factor that all tensors of a rank share; None if they do not."""
    known = [scale for scale in scales if scale is not None] if scales else [1.0]
    if len(known) < len(scales) or max(known) - min(known) > 2 * CLOSE * max(map(abs, known)):
        return None
    return statistics.median(known)


def of_decay(worst: str, wrong: Sequence[Mapping[str, Signs]]) -> Iterator[str]:
    """Report a tensor whose error is a multiple of its values."""
    decay = next((signs[worst].decay for signs in wrong if worst in signs), None)
    if decay is not None:
        yield (
            f"{worst} has an error of {decay:.2g} times its own value, because weight decay applies either on the "
            "ranks or on one device; choose parameter groups by name, not by the shape of a shard"
        )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8]))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _multiple(tensor: torch.Tensor, of: torch.Tensor, close: float, noise: float) -> float | None:
    """Return the factor between two tensors up to noise of norm `noise`; None without a factor."""
    square, norm = float(of.square().sum()), float(tensor.norm())
    if not square or not norm:
        return 0.0 if square and not norm else None
    factor = float((tensor * of).sum()) / square
    return factor if float((tensor - factor * of).norm()) < close * norm + noise else None


def _other_part(own: torch.Tensor, whole: torch.Tensor, holder: Any, off: float) -> tuple[int, ...] | None:
    placements = getattr(holder, "placements", ())
    if not placements or holder.shape != whole.shape:
        return None
    sizes = tuple(holder.device_mesh.mesh.shape)
    here = tuple(holder.device_mesh.get_coordinate())
    for coordinate in product(*map(range, sizes)):
        other = shard_of(whole, placements, sizes, coordinate)
        if coordinate != here and other.shape == own.shape and _apart(own, other) < PART_CLOSE * off:
            return coordinate
    return None


def _moved(change: Change | None) -> float:
    return 0.0 if change is None else change.moved


def _is_nearer(expected: torch.Tensor, initial: torch.Tensor) -> bool:
    return largest(expected - initial) < largest(expected)


def _merged(changes: Sequence[Change]) -> Change:
    return Change(*(max(getattr(each, part) for each in changes) for part in ("apart", "size", "moved", "eps")))


def _apart(own: torch.Tensor, expected: torch.Tensor) -> float:
    apart = largest(own - expected)
    return apart if math.isfinite(apart) else math.inf


def _on_cpu(tensor: Any) -> torch.Tensor:
    return local_part(tensor).to("cpu", copy=True)


def _buckets(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    bucket: list[tuple[str, tuple[int, ...]]] = []
    count = 0
    for label, shape in shapes:
        if bucket and count + math.prod(shape) > BUCKET:
            yield bucket
            bucket, count = [], 0
        bucket.append((label, shape))
        count += math.prod(shape)
    if bucket:
        yield bucket
