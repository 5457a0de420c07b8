"""Trial of plans: check a plan, run one step on a fake process group with shapes only, and report failures."""

import contextlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distbench.cases.collective import collective_cases
from distbench.cases.single_device_reference import model_on_device
from distbench.cases.step import NEEDS_A_BATCH, parameter_bytes, step_case
from distbench.cases.step_correctness import caller_of, of_forward
from distbench.plans.batch import batch_of, loss_of
from distbench.plans.fsdp import policies_of
from distbench.plans.model import blueprint, place_attributes, tensors_of, unregistered
from distbench.plans.module_patterns import matching_modules, styles_by_module
from distbench.plans.plan_check import problems
from distbench.plans.training_step import TrainingStep, UserStep, of_other_phases, step_of
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.dtypes import dtype_name
from distbench.ranks.failure import one_line_and_place
from distbench.spec import DdpPlan, Job, ParallelPlan, Scenario, UserError
from distbench.spec.job import Variant, mesh_of
from distbench.spec.mesh import BATCH_DIMS, mesh_size
from distbench.spec.plan import SCHEDULES
from distbench.spec.printable_text import listed
from distbench.torch_private import NeedsValues, ShapesOnly, Skipped, Unsupported, fake_ranks, reduction_dtype, require
from distbench.worker.rank_session import declared, load_scenario, variant_label

# A smaller model that fails with shapes only is run again with values, because the model may need values.
MAX_REPEATED = 20_000_000
# A model with fewer parameters and batch elements is always run with values.
SMALL = 2_000_000
# Errors from a missing index that another rank would have sent; out-of-bounds memory that FSDP2 freed is a real error.
NO_INDEX = re.compile(r"IndexError|(?<!selected index k )out of (range|bounds)(?! for storage)")
# Maximum number of parts of a batch for the comparison of gradients.
MOST_PARTS = 8
TOO_LARGE = "and the model is too large to be tried with values"


@dataclass(frozen=True)
class Rehearsal:
    """The result of trying a step."""

    problems: tuple[str, ...] = ()  # problems of the plan's application, or of the step
    why_not: str | None = None  # reason why the step was not tried; None if tried, or if the plan failed
    parameter_bytes: int = 0  # bytes of this rank's parameters
    phases: tuple[str, ...] = ()  # of one step, if it was tried


def rank_of(mesh: DeviceMesh, seed: int, device: str = "cpu") -> RankContext:
    """Return this rank's context on the mesh of a fake process group."""
    assert dist.group.WORLD is not None
    return RankContext(dist.get_rank(), torch.device(device), mesh, "gloo", dist.group.WORLD, seed)


def rehearse(scenario: Scenario, context: RankContext, with_step: bool = True) -> Rehearsal:
    """Apply the plan, which was checked against the mesh before, then with `with_step` run forward, loss and backward
    of this rank. Raise Skipped if a part of the plan has no effect on this machine.
    """
    shapes, missing = None, ""
    try:
        shapes = ShapesOnly()
    except Unsupported as reason:
        missing = str(reason)
    assert scenario.build_model is not None

    def without_memory(model: nn.Module, context: RankContext, built: Any, *_: object) -> None:
        if shapes is not None:
            with shapes.on():
                model.to_empty(device=context.device)
                place_attributes(model, built, context.device, values=False)

    built = blueprint(scenario.build_model, context.seed, with_values=False)
    num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
    try:
        for option in scenario.plan.ddp.configure if scenario.plan.ddp is not None else ():
            require(option)
        # DDP's buckets need values, and any shapes are valid for them.
        plain = replace(scenario, plan=replace(scenario.plan, ddp=None))
        step = step_of(plain, context, built, without_memory)
    except Skipped:
        raise
    except (UserError, Unsupported) as error:
        return Rehearsal((str(error),))
    except Exception as error:  # errors of plans that pass plan_check
        return Rehearsal((f"torch rejects the plan: {one_line_and_place(error)}",))
    held_bytes = parameter_bytes(step.model)
    if shapes is None or not with_step:
        return Rehearsal((), missing, held_bytes)
    if step.has_buckets and num_parameters > MAX_REPEATED:
        return Rehearsal((), f"DDP's buckets need values, {TOO_LARGE}", held_bytes)
    tried = _tried(step, shapes.on, scenario.plan.ddp, caller_of(scenario))
    problems, failed = tried.problems, bool(tried.problems or tried.why_not)
    if failed and num_parameters > MAX_REPEATED:
        problems = tuple(f"{problem} (tried with shapes only)" for problem in problems)
    elif failed or _is_small(step, num_parameters):
        tried = _tried_with_values(plain, context, scenario.plan.ddp)
        # Without a failure before, ignore a missing index that another rank would have sent.
        problems = tuple(problem for problem in tried.problems if failed or not NO_INDEX.search(problem))
    return replace(tried, problems=problems, parameter_bytes=held_bytes)


def _is_small(step: TrainingStep, num_parameters: int) -> bool:
    """Return whether a step is fast on this machine's CPU, whose kernels also check properties such as dtypes."""
    numel = sum(tensor.numel() for _, tensor in tensors_of(step.batch.tree))
    is_here = step.microbatches and all(leaf.device.type == "cpu" for _, leaf in tensors_of(step.microbatches[0]))
    return bool(is_here) and num_parameters <= min(MAX_REPEATED, SMALL) and numel <= SMALL


def _tried_with_values(scenario: Scenario, context: RankContext, ddp: DdpPlan | None) -> Rehearsal:
    try:
        step = step_of(scenario, context)
    except UserError as error:
        return Rehearsal((str(error),))
    tried = _tried(step, contextlib.nullcontext, ddp, caller_of(scenario))
    plan = scenario.step_plan
    is_other = plan.ep or plan.cp or plan.pipeline or callable(plan.tp) or scenario.step
    is_compared = plan.fsdp is not None and not is_other
    lacking = [parameter for parameter in step.model.parameters() if parameter.requires_grad and parameter.grad is None]
    if lacking and is_compared and not (tried.problems or tried.why_not or scenario.inference):
        return replace(tried, problems=_of_some_parts_only(scenario, step, context))
    return tried


def _of_some_parts_only(scenario: Scenario, step: TrainingStep, context: RankContext) -> tuple[str, ...]:
    """Report a parameter with a gradient on some ranks only, depending on the data (an expert without tokens)."""
    _, count = context.index(BATCH_DIMS)
    model = model_on_device(scenario, context, step.built)
    names_of_parts: list[set[str]] = []
    for part in range(min(count, MOST_PARTS)):
        model.zero_grad(set_to_none=True)
        loss_of(scenario, model, step.batch.part(part, count, context.device)).backward()
        names_of_parts.append({name for name, parameter in model.named_parameters() if parameter.grad is not None})
        if odd := sorted(names_of_parts[0] ^ names_of_parts[-1]):
            some, none = (0, part) if odd[0] in names_of_parts[0] else (part, 0)
            return (
                f"parameter {odd[0]} gets a gradient from part {some} of the batch but not from part {none}; FSDP2 "
                "sums the gradients of all ranks, so ranks would wait for each other. Use the parameter in each part "
                "(add 0 times its sum to the loss), or add it to FsdpPlan(ignored=...)",
            )
    return ()


def _tried(
    step: TrainingStep,
    on: Callable[[], contextlib.AbstractContextManager[None]],
    ddp: DdpPlan | None,
    caller: str,
) -> Rehearsal:
    """Try one step."""
    tracker = _ForwardTracker(step.model, step.plan, "the step" if isinstance(step, UserStep) else "the loss")
    # Compilation would take longer than everything else, and is part of the run.
    stance = torch.compiler.set_stance("force_eager") if step.plan.compiles else contextlib.nullcontext()
    try:
        with on(), stance:
            step.forward_backward(tracker.stamp)
            tracker.problems += _without_gradient(step.model, ddp)
            phases = step.phases  # observes whether the user's own step repeats with its period
        if ddp is not None and caller:
            tracker.problems += of_forward(caller, tracker.has_run, "DDP prepares its reductions")
        # Most optimizers read the value of a counter, which does not justify a repetition with values.
        with contextlib.suppress(NeedsValues), on():
            tracker.phase = "the optimizer"
            step.optimize()
    except Skipped:
        raise
    except NeedsValues as reason:
        return Rehearsal((), f"{tracker.where()} {reason}, {TOO_LARGE}")
    except UserError as error:
        return Rehearsal((str(error) if isinstance(step, UserStep) else f"{tracker.where()} cannot run: {error}",))
    except Unsupported as error:
        return Rehearsal((f"{tracker.where()} cannot run: {error}",))
    except Exception as error:
        why = f"{one_line_and_place(error)}{step.batch.guessed()}{unregistered(step.built)}"
        if caller and "DTensor" in why:
            why = "; ".join([why, *of_forward(caller, tracker.has_run, "FSDP gathers parameters")])
        return Rehearsal((f"{tracker.where()} cannot run: {why}",))
    return Rehearsal(tuple(tracker.problems), phases=phases)


def _without_gradient(model: nn.Module, ddp: DdpPlan | None) -> list[str]:
    """Return a sentence on the parameters for which DDP would wait forever."""
    if ddp is None or ddp.find_unused_parameters or ddp.static_graph:
        return []
    ignored = {id(tensor) for module in matching_modules(ddp.ignored, model).values() for tensor in module.parameters()}
    lacking = [
        name
        for name, tensor in model.named_parameters()
        if tensor.requires_grad and tensor.grad is None and id(tensor) not in ignored
    ]
    if not lacking:
        return []
    problem = f"parameter {listed(lacking, 1)} gets no gradient, but DDP waits for its gradient"
    return [f"{problem}; use DdpPlan(find_unused_parameters=True), or freeze the parameter (requires_grad_(False))"]


class _ForwardTracker:
    """Tracker of the running module and its inputs, also after the model has raised."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, after_model: str) -> None:
        self.problems: list[str] = []
        self._after_model = after_model
        self._styles = {name: style for _, name, _, style in styles_by_module(plan, model)}
        self._at: list[str] = []
        self.phase = "the model"
        self.has_run = False  # whether the whole model has run, not only parts
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def where(self) -> str:
        """Return the innermost module with a running forward, with its style and inputs, or the phase."""
        return self._at[-1] if self._at else self.phase

    def stamp(self) -> None:
        """Mark the end of forward and loss, or of backward."""
        self.phase = "backward"

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.has_run = self.has_run or not name
        style = self._styles.get(name)
        where = f"{name or 'the root'}{f' under {type(style).__name__}' if style is not None else ''}"
        texts = [*map(_text, inputs), *(f"{key}={_text(value)}" for key, value in keywords.items())]
        given = " and ".join(texts) or "nothing"
        self._at.append(f"{where}, given {given},")
        inner = getattr(style, "prepare_module_input", style)
        self.problems += [
            f"{where} has a layout for input {key!r}, but got {given} without this name"
            for key in getattr(inner, "input_kwarg_layouts", None) or ()
            if key not in keywords
        ]

    def _leave(self, module: nn.Module, inputs: object, output: Any) -> None:
        self._at.pop()
        if not self._at:
            self.phase = f"{self._after_model}, given {_text(output)},"


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    text = f"{dtype_name(value.dtype)}{shape_text(value.shape)}"
    return f"{text} as {''.join(map(str, value.placements))}" if hasattr(value, "placements") else text


SEARCH_S = 15.0  # CPU seconds for the search of meshes that work, for all variants of a scenario together
MANY = 16  # largest mesh dim for which every size is tried


def _plan_problems(job: Job) -> Iterator[dict[str, Any]]:
    """Yield `label` and `problems` of each variant.

    With problems, `works` is a mesh that was tried without problems, or null. Without problems, `skipped` is a reason,
    or there are `num_parameters`, `parameter_bytes` per rank, `advice` (sentences), `step` (the parts that run), and
    `not_tried` (the reason why no step was tried, or null).
    """
    find = partial(_mesh_that_works, job, time.process_time() + SEARCH_S, [])
    function = load_scenario(Path(job.file), job.scenario)
    for variant in job.variants:
        yield {"label": variant_label(job, variant), **_of_variant(function, variant, job, find)}


def all_plan_problems(records: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return one entry per variant of each job, as from `_plan_problems`."""
    return [[*_plan_problems(Job.from_record(record))] for record in records]


def _of_variant(
    function: Callable[..., Scenario], variant: Variant, job: Job, find: Callable[[Scenario], Mapping[str, int] | None]
) -> dict[str, Any]:
    """Return one entry of `_plan_problems`, also after errors of the scenario's code, because other variants need
    entries."""
    try:
        scenario = declared(function, variant)
        answer = answer_on(mesh_of(variant, job.mesh), scenario, job)
        step_fails = answer.pop("step_fails", False)
        if problems := answer["problems"]:
            may_fit = step_fails or all("mesh dim" in problem for problem in problems)
            answer["works"] = find(scenario) if may_fit else None
        return answer
    except UserError as error:
        return {"problems": [str(error)]}
    except (Exception, SystemExit) as error:
        return {"problems": [f"the scenario raises {one_line_and_place(error)}"]}


def answer_on(shape: Mapping[str, int], scenario: Scenario, job: Job) -> dict[str, Any]:
    """Return a variant's entry on a mesh of this shape, without `works`: rank 0's entry, or another rank's problems."""
    with fake_ranks(shape) as mesh:
        answer = answer_of(scenario, rank_of(mesh, job.settings.seed, job.device))
    phases = answer.pop("phases", ())
    if "parameter_bytes" not in answer:
        return answer
    tried_ranks = _other_ranks(scenario, shape, answer["num_parameters"])
    for rank in dict.fromkeys([*tried_ranks, *_ranks_of_a_function(scenario, shape)]):
        with fake_ranks(shape, rank=rank) as mesh:
            context = rank_of(mesh, job.settings.seed, job.device)
            rehearsal = rehearse(scenario, context, with_step=rank in tried_ranks)
        problems = [f"on rank {rank}: {problem}" for problem in rehearsal.problems]
        if scenario.step is not None and not problems and rehearsal.phases and rehearsal.phases != phases:
            problems = [of_other_phases(scenario.step, rank, rehearsal.phases, phases)]
        if problems:
            return {"problems": problems, "step_fails": True}
    if caller_of(scenario) and not scenario.inference and not answer["not_tried"]:
        answer["step"] += f" as {_ranks_text([0, *tried_ranks])} of {mesh_size(shape)}"
    return answer


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _other_ranks(scenario: Scenario, shape: Mapping[str, int], num_parameters: int) -> list[int]:
    """Return the ranks whose step may fail although rank 0's step works.

    For inference, this is the last rank (rank 0 may get the whole of an indivisible token); in a pipeline, the first
    rank with the last stage and the loss; for `step` and `call`, if the model is not large, rank 1 and the last.
    """
    size, pipeline = mesh_size(shape), scenario.step_plan.pipeline
    if scenario.inference:
        return [size - 1]
    if pipeline is None and size > 1 and num_parameters <= MAX_REPEATED and caller_of(scenario):
        return sorted({1, size - 1})
    if pipeline is None or SCHEDULES[pipeline.schedule].is_v or shape[pipeline.mesh_dim] == 1:
        return []
    names = list(shape)
    stride = math.prod(shape[name] for name in names[names.index(pipeline.mesh_dim) + 1 :])
    return [(shape[pipeline.mesh_dim] - 1) * stride]


def _ranks_of_a_function(scenario: Scenario, shape: Mapping[str, int]) -> list[int]:
    """Return ranks on which a user's function may fail alone: the first ranks, rank 0's neighbours along each mesh dim,
    and the last rank.
    """
    if not callable(scenario.step_plan.tp):
        return []
    size = mesh_size(shape)
    strides = itertools.accumulate(reversed([*shape.values()]), int.__mul__)
    return sorted({*range(1, min(size, MANY)), size - 1, *strides} & set(range(1, size)))


def answer_of(scenario: Scenario, context: RankContext) -> dict[str, Any]:
    """Return rank 0's entry of a variant, without `works`; `step_fails` if a step did not run.

    Raises:
        UserError: a collective of the scenario is not valid.
    """
    for _ in collective_cases(scenario, context):
        pass  # checks ops, ways, loads and matrices
    if scenario.build_model is None:
        return {"problems": [], "skipped": "the scenario declares no model, so no plan is checked"}
    if scenario.make_batch is None:
        return {"problems": [NEEDS_A_BATCH]}
    built, batch = blueprint(scenario.build_model, context.seed, with_values=False), batch_of(scenario)
    num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
    if sentences := problems(built.model, batch, scenario.step_plan, context):
        return {"problems": sentences}
    step_case(scenario, "the scenario", built, batch)
    try:
        rehearsal = rehearse(scenario, context)
    except Skipped as reason:
        return {"problems": [], "skipped": str(reason)}
    if rehearsal.problems:
        return {"problems": list(rehearsal.problems), "step_fails": True}
    sizes = {"num_parameters": num_parameters, "parameter_bytes": rehearsal.parameter_bytes}
    step = "forward runs" if scenario.inference else "forward, loss and backward run"
    step = step if scenario.step is None else "its own step runs"
    advice = [*_advice(scenario, built.model), *(f"the step omits {part}" for part in scenario.omits)]
    facts = {"step": step, "not_tried": rehearsal.why_not, "phases": rehearsal.phases}
    return {"problems": [], **facts, "advice": advice, **sizes}


def _advice(scenario: Scenario, model: nn.Module) -> list[str]:
    """Return notes on parts of the plan that work but may cost more than expected."""
    policies = policies_of(scenario.step_plan.fsdp) if scenario.step_plan.fsdp is not None else []
    parameter_dtype = next(
        (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32
    )
    policies = [
        policy for policy in policies if not policy.reduce_dtype and policy.param_dtype not in (None, parameter_dtype)
    ]
    if not policies:
        return []
    policy, own_name, gathered = policies[0], dtype_name(parameter_dtype), dtype_name(policies[0].param_dtype)
    return [
        f"mixed_precision sets no reduce_dtype: torch {torch.__version__} reduces gradients in "
        f"{dtype_name(reduction_dtype(policy, parameter_dtype))} (torch 2.15 and newer in {own_name}, older ones in "
        f"{gathered}); set reduce_dtype for the same bytes on every version"
    ]


def _mesh_that_works(
    job: Job, until: float, worked: list[dict[str, int]], scenario: Scenario
) -> Mapping[str, int] | None:
    """Return the largest mesh that passes this check, with mesh dims at most as large as given; None after the time
    limit.

    A mesh that worked for other variants is tried first.
    """
    for mesh in [*worked, *smaller_meshes(job.mesh)]:
        if time.process_time() > until:
            break
        if not answer_on(mesh, scenario, job)["problems"]:
            worked[:] = [mesh]
            return mesh
    return None


def smaller_meshes(given: Mapping[str, int]) -> list[dict[str, int]]:
    """Return meshes with smaller or equal mesh dims, most ranks first; for large mesh dims, only sizes that probably
    work."""
    sizes = [
        [size for size in range(1, most + 1) if most <= MANY or most % size == 0 or size & (size - 1) == 0]
        for most in given.values()
    ]
    meshes = [dict(zip(given, chosen, strict=True)) for chosen in itertools.product(*sizes)]
    return sorted((mesh for mesh in meshes if mesh != given), key=mesh_size, reverse=True)
