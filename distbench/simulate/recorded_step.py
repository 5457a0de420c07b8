"""A variant's step with its plan applied as in a measurement, recorded on the simulated device on one rank."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distbench.cases.step import step_case
from distbench.observe.module_attribution import CollectiveTracker, tracked_collectives
from distbench.plans.batch import batch_of
from distbench.plans.model import Blueprint, allocate, blueprint, place_attributes, tensors_of
from distbench.plans.parallelize import fused_modules, shards_sequence
from distbench.plans.plan_check import problems
from distbench.plans.training_step import Stamp, TrainingStep, state_of, step_of
from distbench.ranks.context import RankContext
from distbench.ranks.failure import one_line_and_place, raised_at
from distbench.simulate.operator_recorder import DEVICE_TYPE, Recorder, StageMessages, simulate_device
from distbench.simulate.recording import (
    MAX_RANKS,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    Head,
    Operator,
    PipelineFacts,
    Recording,
    StepBegun,
    ranks_of_pipeline,
)
from distbench.simulate.repeated_layers import NotRepeated, extended, repeated_layers
from distbench.spec import Scenario, UserError
from distbench.spec.assumptions import Assumption, assumption_text
from distbench.spec.plan import LOSS, ULYSSES
from distbench.spec.versions import outside_of_support
from distbench.torch_private import (
    KnownValues,
    NeedsValues,
    ShapesOnly,
    Unsupported,
    chunks_on_demand,
    equal_tensors_once,
    fake_ranks,
    forget_layouts_of_backward,
    is_strided_shard,
    meshes_with_values,
    replaced,
    tensors_in,
)

SEED = 0


class RecordedRank(NamedTuple):
    """One rank's step.

    Args:
        differing: ranks whose step may differ, with shards of other sizes or another part of the sequence.
        busier: the differing ranks with more work.
    """

    recording: Recording
    differing: tuple[int, ...]
    busier: tuple[int, ...] = ()


def recorded_ranks(
    scenario: Scenario,
    name: str,
    variant: str,
    mesh: Mapping[str, int],
    ranks: Sequence[int] | None,
    assume: Mapping[str, Assumption] | None = None,
    fewer: Scenario | None = None,
) -> list[Recording]:
    """Record the second step of the given ranks, and in a pipeline of all ranks with other stages.

    `ranks=None` means rank 0 and all ranks whose step differs. `fewer` and errors: see `recorded`.
    """
    by_rank: dict[int, RecordedRank] = {}
    waiting = [0] if ranks is None else list(ranks)
    while waiting:
        rank = waiting.pop(0)
        if rank in by_rank:
            continue
        by_rank[rank] = recorded(scenario, name, variant, mesh, rank, assume, fewer)
        if (facts := by_rank[rank].recording.head.pipeline) is not None:
            waiting += ranks_of_pipeline(mesh, facts.mesh_dim, rank)
        if ranks is None:
            waiting += by_rank[rank].differing
        if len(by_rank) + len({*waiting} - {*by_rank}) > MAX_RANKS:
            raise UserError(f"more than {MAX_RANKS} ranks would have to be recorded; use a smaller mesh")
    return [by_rank[rank].recording for rank in sorted(by_rank)]


def recorded(
    scenario: Scenario,
    name: str,
    variant: str,
    mesh: Mapping[str, int],
    rank: int = 0,
    assume: Mapping[str, Assumption] | None = None,
    fewer: Scenario | None = None,
    only_repeated: bool = False,
) -> RecordedRank:
    """Record the second step of a scenario on a mesh of any size; the first step sets up streams, caches and the
    optimizer.

    Args:
        fewer: the same scenario with only the first layers of its model. If these layers are equal to the others, only
            they are recorded, and the others are their repetitions; see `simulate.repeated_layers`.
        only_repeated: never record all layers.

    Raises:
        NotRepeated: `only_repeated`, and another layer may differ.
        UserError: the scenario has no step, its plan cannot work, or the step depends on values.
        Unsupported: this version of torch cannot simulate a device.
    """
    if scenario.build_model is None or scenario.make_batch is None:
        raise UserError(f"scenario {name!r} has no step to simulate; add build_model and make_batch")
    # Code for inductor is recorded operator by operator, and fused into kernels at replay.
    compile_plan, fuses_loss = scenario.plan.compile, scenario.plan.loss == "compiled"
    scenario = _uncompiled(scenario)
    assert scenario.build_model is not None
    device = simulate_device()
    with fake_ranks(mesh, DEVICE_TYPE, rank) as devices:
        assert dist.group.WORLD is not None
        context = RankContext(rank, device, devices, "nccl", dist.group.WORLD, SEED)
        built = blueprint(scenario.build_model, SEED, with_values=False)
        with ShapesOnly().on(), KnownValues(assume).on():
            batch = batch_of(scenario)
        if sentences := problems(built.model, batch, scenario.step_plan, context):
            raise UserError("; ".join(sentences))
        compiled = fused_modules(built.model, compile_plan)
        case = step_case(scenario, f"{name}/{variant}" if variant else name, built, batch)
        del batch  # Its values may take more memory than the whole recording.
        num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
        at_once, done = bool(compiled), None
        if fewer is not None and not assume:
            done = _repeated(scenario, built, _uncompiled(fewer), context, at_once)
        if done is None and only_repeated:
            raise NotRepeated("all layers have to be recorded")
        done = done or _recorded_step(scenario, built, context, at_once, assume or {})
    head = Head(
        scenario=name,
        variant=variant,
        mesh=dict(mesh),
        torch=torch.__version__,
        num_parameters=num_parameters,
        batch_size=case.params["batch_size"],
        num_tokens=case.params.get("num_tokens"),
        microbatches=scenario.plan.microbatches,
        phases=tuple(dict.fromkeys(done.phases)),
        compiled=(*compiled, LOSS) if fuses_loss else compiled,
        async_tp=compile_plan is not None and compile_plan.async_tp,
        rank=rank,
        case_id=case.id,
        params=case.params,
        pipeline=done.pipeline,
        assumed=(
            *(assumption_text(pattern, assumed) for pattern, assumed in (assume or {}).items()),
            *(f"the step omits {part}" for part in scenario.omits),
        ),
        recorded_layers=done.recorded_layers,
    )
    return RecordedRank(Recording(head, as_two_steps(done.events)), done.differing, done.busier)


def _uncompiled(scenario: Scenario) -> Scenario:
    loss = None if scenario.plan.loss == "compiled" else scenario.plan.loss
    return replace(scenario, plan=replace(scenario.plan, compile=None, loss=loss))


class _Done(NamedTuple):
    """A recorded step: `events` for `as_two_steps`; other fields as in `RecordedRank` and `Head`."""

    events: Sequence[Event]
    phases: tuple[str, ...]
    pipeline: PipelineFacts | None
    differing: tuple[int, ...]
    busier: tuple[int, ...]
    modules_of_blocks: Mapping[int, str]
    recorded_layers: int = 0


def _recorded_step(
    scenario: Scenario,
    built: Blueprint,
    context: RankContext,
    at_once: bool,
    assume: Mapping[str, Assumption],
    with_modules: bool = False,
) -> _Done:
    recorder, shapes, values = Recorder(at_once), ShapesOnly(), KnownValues(assume)
    if with_modules:
        recorder.modules_of_blocks = {}
    try:
        with _one_sentence_errors():
            step = _built(scenario, context, built, shapes, values, recorder)
            if with_modules and step.has_buckets:
                raise UserError("DDP's buckets have gradients of several layers")
            differing, busier = differing_ranks(step, step.batch.first, context), busier_ranks(step, context)
            _run(step, context, shapes, values, recorder)
            phases = step.phases  # The phases of the user's own step are known only after the step has run.
            pipeline = None if step.pipeline is None else PipelineFacts(**step.pipeline.facts)
            if unused := sorted({*assume} - values.used):
                raise UserError(
                    f"--assume {unused[0]!r} matches no module that chooses, masks or reads values that depend on "
                    "parameters; correct the pattern, or leave --assume out"
                )
    finally:
        with shapes.on():
            forget_layouts_of_backward(context.device)
    return _Done(recorder.events, phases, pipeline, differing, busier, recorder.modules_of_blocks or {})


def _repeated(
    scenario: Scenario, built: Blueprint, fewer: Scenario, context: RankContext, at_once: bool
) -> _Done | None:
    """Record the first layers, and repeat these; None if another layer may differ."""
    assert fewer.build_model is not None
    if scenario.step is not None or scenario.plan.pipeline is not None:
        return None
    try:
        few = blueprint(fewer.build_model, SEED, with_values=False)
        names = repeated_layers(built.model, few.model, scenario.plan, fewer.plan)
        done = _recorded_step(fewer, few, context, at_once, {}, with_modules=True)
        layers = {block: names.split(module)[1] for block, module in done.modules_of_blocks.items()}
        return done._replace(events=extended(done.events, layers, names), recorded_layers=names.few)
    except (NotRepeated, UserError, Unsupported):  # Errors of the whole model are raised by its own recording.
        return None


@contextlib.contextmanager
def _one_sentence_errors() -> Iterator[None]:
    """Raise UserError with the reason why a step cannot be simulated, for any error."""
    try:
        yield
    except Unsupported as error:
        # Errors of torch's fake tensors are reported at the place that turns fake tensors off.
        where = raised_at(error) or (raised_at(error.__cause__) if error.__cause__ else "") or raised_at(error, True)
        who = "its step " if isinstance(error, NeedsValues) else ""
        raise UserError(f"it cannot be simulated: {who}{error}{f' ({where})' if where else ''}") from error
    except UserError as error:
        raise UserError(f"it cannot be simulated: {error}") from error
    except Exception as error:
        untested = f" ({outside})" if (outside := outside_of_support(torch.__version__)) else ""
        raise UserError(
            f"it cannot be simulated, because its step raises {one_line_and_place(error)}{untested}"
        ) from error


def _built(
    scenario: Scenario, context: RankContext, built: Any, shapes: ShapesOnly, values: KnownValues, recorder: Recorder
) -> TrainingStep:
    """Make the step on tensors without values; apply the plan before parameters have memory on the simulated device."""

    def give_memory(model: nn.Module, context: RankContext, built: Any, device: torch.device | None) -> None:
        allocate(model, context, device)
        place_attributes(model, built, context.device, values=False)

    with shapes.on(), values.on(), recorder.on(), meshes_with_values(), chunks_on_demand():
        return step_of(scenario, context, built, give_memory)


def _run(step: TrainingStep, context: RankContext, shapes: ShapesOnly, values: KnownValues, recorder: Recorder) -> None:
    """Record the parts of which `as_two_steps` makes two steps.

    Setup takes a whole step only if the second step may differ from the first, as with DDP's buckets or a cache.
    """
    messages = StageMessages(recorder, context.rank)
    if recorder.modules_of_blocks is not None:
        for name, parameter in step.model.named_parameters():
            for block in _blocks(recorder, [parameter], ""):
                recorder.modules_of_blocks[block] = name.rpartition(".")[0]

    @contextlib.contextmanager
    def recording() -> Iterator[CollectiveTracker]:
        with (
            tracked_collectives(step.model, step.phases, step.plan, [context.mesh]) as tracker,
            shapes.on(),
            values.on(step.model),
            recorder.on(),
            messages.on(),
            meshes_with_values(),
        ):
            recorder.begin_step()
            yield tracker

    def with_operators(run: Callable[[Stamp], Any]) -> Any:
        gradients: dict[int, str] = {}
        with recording() as tracker:
            recorder.tracker = tracker

            def stamp() -> None:
                tensors = [*(parameter.grad for parameter in step.model.parameters()), *recorder.reducers.on_device]
                gradients.update(_blocks(recorder, tensors, "gradients"))
                tracker.stamp()

            done = run(stamp)
        recorder.annotate(gradients | _held_by(step, recorder))
        return done

    def with_two_optimizer_steps(stamp: Stamp) -> bool:
        """Return whether the next step would be the same."""
        before = _plain_attributes(step.model)
        step.forward_backward(stamp)
        # A module that counts its calls or sets itself up in the first call may do something else in the second.
        is_same = _plain_attributes(step.model) == before
        recorder.begin_step()
        with equal_tensors_once(), replaced(recorder, "watcher", recorder.tracker), replaced(recorder, "tracker", None):
            step.optimize()
        recorder.begin_step()
        try:
            step.finish(stamp)
        except Exception:  # An optimizer may need new gradients; an error of a whole step is raised by that step.
            step.model.zero_grad(set_to_none=True)
            is_same = False
        return is_same and would_repeat(recorder.events)

    if type(step) is TrainingStep and not (step.pipeline or step.has_buckets or step.plan.state_dict):
        if with_operators(with_two_optimizer_steps):
            return
    else:
        with recording() as recorder.watcher, equal_tensors_once():
            for _ in range(step.num_setup_steps):
                step(recorder.watcher.stamp)
    with_operators(step)


def _plain_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the modules' attributes that are numbers, texts or None."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def would_repeat(events: Sequence[Event]) -> bool:
    """Return whether the next step would repeat forward and backward, after which the optimizer ran twice.

    They may keep no memory but gradients, and the optimizer's first step may not end a wait that its second step lacks.
    """
    _, once, setup, again = _parts(events)
    made = {event.block for event in once if isinstance(event, Allocated)}
    recorded = {event.event for event in once if isinstance(event, EventRecorded)}
    freed = [event.block for event in (*once, *again) if isinstance(event, Freed)]
    return (
        made <= {*freed}
        and made >= {event.block for event in once if isinstance(event, Freed)}
        and not any(isinstance(event, Freed) and event.block in made for event in setup)
        and not any(isinstance(event, EventWaited) and event.event in recorded for event in setup)
    )


def as_two_steps(events: Sequence[Event]) -> list[Event]:
    """Return recorded parts as two steps, the first without operators.

    Args:
        events: memory before the steps, then parts that begin with StepBegun: forward and backward, the optimizer's
            first step, and its second step on the same gradients; or parts that end with a whole step.
    """
    before, *parts, last = _parts(events)
    first: list[Event] = [event for part in parts for event in part if not isinstance(event, Operator | Collective)]
    if len(parts) == 2:
        once, setup = parts
        made = {event.block for event in once if isinstance(event, Allocated)}
        offset = 1 + max((event.block for event in events if isinstance(event, Allocated)), default=0)
        memory = [event for event in once if isinstance(event, Allocated | Freed)]
        ends = [event for event in last if isinstance(event, Freed) and event.block in made]
        first = [event._replace(block=event.block + offset) for event in (*memory, *ends)]
        first[len(memory) : len(memory)] = setup
        last = [*once, *last]
    return [*before, StepBegun(1), *first, StepBegun(2), *last]


def _parts(events: Sequence[Event]) -> list[Sequence[Event]]:
    """Split events at each StepBegun, which is left out."""
    begun = [place for place, event in enumerate(events) if isinstance(event, StepBegun)]
    starts, ends = [0, *(place + 1 for place in begun)], [*begun, len(events)]
    return [events[start:end] for start, end in zip(starts, ends, strict=True)]


def _held_by(step: TrainingStep, recorder: Recorder) -> dict[int, str]:
    """Return the memory that a step holds between two runs: block to kind."""
    kinds: dict[str, Any] = {
        "batch": [tensor for _, tensor in tensors_of(step.microbatches)],
        "buffers": list(step.model.buffers()),
        "optimizer": state_of(step.optimizer),
        "parameters": list(step.model.parameters()),
    }
    if step.cache_tensors:
        kinds["cache"] = step.cache_tensors
    return {block: kind for kind, tensors in kinds.items() for block in _blocks(recorder, tensors, kind)}


def _blocks(recorder: Recorder, tree: Any, kind: str) -> dict[int, str]:
    """Map the blocks of a tree's tensors, and of this rank's parts of DTensors, to a kind."""
    tensors: list[Any] = tensors_in(tree)
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return {number: kind for tensor in local if (number := recorder.block_of(tensor)) is not None}


def differing_ranks(step: TrainingStep, inputs: torch.Tensor, context: RankContext) -> tuple[int, ...]:
    """Return ranks whose step may differ from rank 0's through smaller or no shards, or another part of the sequence.

    These are the last ranks along each mesh dim with differing ranks. These ranks have the least work, or for causal
    attention the most work.

    Args:
        inputs: inputs of the global batch, (batch, sequence, ...).
    """
    lengths: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for ranks, length in _cuts_of_parameters(step):
        lengths[ranks].add(length)
    # Sequence parallel modules split the sequence over the ranks of TP.
    dims = [name for name in step.plan.tp_dims if context.size(name) > 1]
    if step.plan.tp and inputs.ndim > 1 and len(dims) == 1:
        lengths[_ranks_along(context.mesh.mesh, context.mesh_dims.index(dims[0]))].add(inputs.shape[1])
    last_ranks = {rank for ranks, of_ranks in lengths.items() for rank in differing_along(ranks, of_ranks)[-1:]}
    return tuple(sorted({*last_ranks, *busier_ranks(step, context)}))


def busier_ranks(step: TrainingStep, context: RankContext) -> tuple[int, ...]:
    """Return ranks with more work than rank 0, which has the largest shards."""
    plan = step.plan.cp
    if plan is None or plan.rotate == ULYSSES or not shards_sequence(plan, context) or plan.balances:
        return ()
    # In causal attention, the first rank uses one block of keys, and the last rank all blocks.
    return (_ranks_along(context.mesh.mesh, context.mesh_dims.index(plan.mesh_dim))[-1],)


def differing_along(ranks: tuple[int, ...], lengths: Iterable[int]) -> list[int]:
    """Return the first rank with each set of shard sizes, by torch.chunk, that differs from the first rank's.

    >>> differing_along((0, 1, 2, 3), {10})
    [3]
    """
    first_ranks: dict[tuple[int, ...], int] = {}
    for place, rank in enumerate(ranks):
        chunks = ((length, -(-length // len(ranks))) for length in sorted(lengths))
        first_ranks.setdefault(tuple(min(max(length - place * chunk, 0), chunk) for length, chunk in chunks), rank)
    return [rank for rank in first_ranks.values() if rank != ranks[0]]


def _cuts_of_parameters(step: TrainingStep) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the ranks along a mesh dim, and the length that these ranks split."""
    for parameter in step.model.parameters():
        placements, mesh = getattr(parameter, "placements", ()), getattr(parameter, "device_mesh", None)
        # In the order of splits of a tensor dim: FSDP2, whose mesh dim is outer, cuts TP's shards.
        order = sorted(range(len(placements)), key=lambda mesh_dim: is_strided_shard(placements[mesh_dim]))
        local_shape = list(parameter.shape)
        for mesh_dim in order:
            tensor_dim = getattr(placements[mesh_dim], "dim", None)
            if mesh is not None and tensor_dim is not None:
                yield _ranks_along(mesh.mesh, mesh_dim), local_shape[tensor_dim]
                local_shape[tensor_dim] = -(-local_shape[tensor_dim] // mesh.size(mesh_dim))


def _ranks_along(mesh: torch.Tensor, mesh_dim: int) -> tuple[int, ...]:
    """Return the global ranks along one mesh dim, with index 0 along the others."""
    return tuple(mesh.movedim(mesh_dim, -1).reshape(-1, mesh.shape[mesh_dim])[0].tolist())
