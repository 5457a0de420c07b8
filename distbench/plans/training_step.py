"""A step of a parallel model on this rank: training, the user's own function, or forward only; its saved state."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from distbench.plans.batch import batch_of, forward, loss_of
from distbench.plans.fsdp import Sharded, average_whole_gradients, data_parallel_size
from distbench.plans.model import (
    Blueprint,
    as_built,
    blueprint,
    kind_of,
    load_initial_values,
    local_part,
    mapped,
    materialise,
    require_as_built,
    tensors_of,
)
from distbench.plans.module_patterns import styles_by_module
from distbench.plans.parallelize import (
    parallelize,
    planned_loss,
    sequence_sharded,
    shards_sequence,
    unshard_outputs,
)
from distbench.plans.pipeline import LocalStage, LocalStages, Pipeline, inputs_and_targets, local_stages
from distbench.plans.user_step import (
    OTHER,
    ObservedCall,
    Phase,
    StepWatch,
    call_step,
    kept_gradients,
    loss_of_step,
    made_optimizers,
    observed_call,
    optimizers_of,
    period_of,
    require_optimizers,
    steppable,
    torch_optimizers,
)
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.failure import blamed, one_line, place_of
from distbench.spec import Scenario, UserError
from distbench.spec.devices import DEVICES, device_of, known_device
from distbench.spec.mesh import BATCH_DIMS
from distbench.torch_private import (
    Skipped,
    divide_factors,
    hooked_parameters,
    steps_until_buckets_stay,
    storages_of,
    sum_then_divide,
    unit_policies,
    whole_sequence,
)

State = tuple[dict[str, Any], dict[str, Any]]


def saved_state(model: nn.Module, optimizer: Any) -> State:
    """Copy this rank's parameters, buffers and optimizer state to host memory."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, torch_optimizers(optimizer))
    return _copied(of_model), _copied(of_optimizer)


def load_state(model: nn.Module, optimizer: Any, state: State) -> None:
    """Load this rank's part of a saved state."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    of_model, of_optimizer = state
    set_state_dict(model, torch_optimizers(optimizer), model_state_dict=of_model, optim_state_dict=of_optimizer)


def round_trip(model: nn.Module, optimizer: Any) -> tuple[int, str | None]:
    """Save the state, overwrite parameters, load the state; return its bytes on this rank, and a problem or None."""
    state = saved_state(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).fill_(torch.nan)
    load_state(model, optimizer, state)
    saved, loaded = (
        [local_part(tensor) for tensor in _tensors(each)] for each in (state, saved_state(model, optimizer))
    )
    num_wrong = sum(not torch.equal(*pair) for pair in zip(saved, loaded, strict=True))
    wrong = f"{num_wrong} tensors of the loaded state differ from the saved tensors" if num_wrong else None
    return sum(local.numel() * local.element_size() for local in saved), wrong


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [tensor for part in parts for tensor in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


STATE_PHASES = ("save", "load")
SCHEDULE = "schedule"  # the phase of a pipeline's forward and backward, which alternate
Stamp = Callable[[], None]


def state_of(made: Any) -> list[Any]:
    """Return the state of optimizers, averages and scalers, as nested containers; [] for None.

    The state is each object's `state`, else its attributes, such as tensors of an average or a scaler.
    """
    contents: list[Any] = []
    for value in optimizers_of(made).values():
        state = getattr(value, "state", None)
        if isinstance(state, Mapping):
            contents += [dict(part) if isinstance(part, Mapping) else part for part in state.values()]
        elif isinstance(value, nn.Module):
            contents += [*value.parameters(), *value.buffers()]
        else:
            contents.append(dict(vars(value)) if hasattr(value, "__dict__") and not torch.is_tensor(value) else value)
    return contents


class TrainingStep:
    """The parallel model with its batch on this rank; `built` is the model on the meta device, if it exists."""

    def __init__(
        self,
        scenario: Scenario,
        context: RankContext,
        built: Blueprint | None = None,
        give_memory: Callable[..., None] = materialise,
    ) -> None:
        if missing := [package for package in scenario.needs if find_spec(package) is None]:
            raise Skipped(f"{missing[0]} is not installed; run pip install {missing[0]}")
        scenario = replace(scenario, loss=planned_loss(scenario, context.device))
        assert scenario.build_model and scenario.make_batch
        self.plan = plan = scenario.step_plan
        self._context, self._scenario = context, scenario
        self.built = built = built or blueprint(scenario.build_model, context.seed)
        self.batch = batch_of(scenario)
        self.model, self.sharded, stages = self._laid_out()
        where = f" ({place_of(scenario.parallelize)})" if scenario.parallelize else ""
        require_as_built(self.model, built, where)
        hooked = hooked_parameters(self.model)
        self._give_memory(give_memory, where)
        if lost_hooks := sorted(hooked - hooked_parameters(self.model)):
            raise UserError(
                f"parallelize{where} sets a hook on parameter {lost_hooks[0]}, which is lost when the model gets "
                "memory; set hooks in after_materialize=fn, called as fn(model, mesh)"
            )
        average_whole_gradients(self.model, self.sharded, plan.fsdp, context)
        self._finish_model()
        if not known_device(device_of(context.backend)).scales_sums:
            sum_then_divide(self.model)
        self.pipeline: Pipeline | None = None
        if isinstance(self.model, LocalStages):
            assert scenario.loss is not None
            self.pipeline = Pipeline(self.model, stages, plan, context, scenario.loss)
        self._num_bucket_steps = steps_until_buckets_stay(self.model)
        # The whole output is kept while the check compares it with one device's.
        self.unshards_output = unshard_outputs(self.model, plan.cp, context)
        self.kept_outputs: list[torch.Tensor] | None = None
        index, count = context.index(BATCH_DIMS)
        parts = 1 if self.pipeline is not None else plan.microbatches  # torch's schedule splits the batch
        places = range(index * parts, (index + 1) * parts)
        self.microbatches = [self.batch.part(place, count * parts, context.device) for place in places]
        self._make_optimizers()
        self.default_dtype = torch.get_default_dtype()

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases whose ends a step stamps, in order."""
        turns = (SCHEDULE,) if self.pipeline is not None else ("forward", "backward") * len(self.microbatches)
        return (*turns, *(("optimizer",) if self.optimizer is not None else ()), *self._state_phases)

    @property
    def _state_phases(self) -> tuple[str, ...]:
        return STATE_PHASES if self.plan.state_dict else ()

    def _make_optimizers(self) -> None:
        # An optimizer, or several and other state by name; see `optimizers_of`.
        self.optimizer = made_optimizers(self._scenario, self.model)
        require_optimizers(self._scenario, self.optimizer, self.model)

    def _give_memory(self, give_memory: Callable[..., None], where: str) -> None:
        offloaded = self.plan.fsdp is not None and self.plan.fsdp.offload is not None
        try:
            give_memory(self.model, self._context, self.built, torch.device("cpu") if offloaded else None)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            if not where:
                raise
            raise UserError(
                f"the model of parallelize{where} cannot be given memory ({one_line(error)}); leave parameters "
                "to fully_shard and the styles, and memory to distbench"
            ) from error

    def _laid_out(self) -> tuple[nn.Module, Sharded, list[LocalStage]]:
        """Return the parallel model without memory; for a pipeline, this rank's stages under the rest of the plan."""
        plan, context, user_function = self.plan, self._context, self._scenario.parallelize
        if plan.pipeline is None:
            return *parallelize(self.built.model, plan, context, user_function), []
        if self._scenario.call is not None or self._scenario.after_materialize is not None:
            raise UserError("a pipeline supports neither call nor after_materialize; leave both out, and give loss")
        count = self._context.index(BATCH_DIMS)[1] * plan.microbatches
        example = self.batch.part(0, count, torch.device("meta"))
        inputs, _ = inputs_and_targets(example, self._scenario.loss is not None)
        stages = local_stages(self.built.model, plan, context, inputs)
        held_names = {name for stage in stages.values() for name, _ in stage.module.named_parameters()}
        done = {index: parallelize(stage.module, plan, context, user_function) for index, stage in stages.items()}
        counters = {name: value for _, sharded in done.values() for name, value in sharded.counters.items()}
        roots = [root for _, sharded in done.values() for root in sharded.roots]
        names = tuple(name for name in self.built.parameters if name in held_names)
        model = LocalStages({index: module for index, (module, _) in done.items()}, names)
        return model, Sharded(roots, (), counters), list(stages.values())

    def _finish_model(self) -> None:
        self._own: dict[str, torch.Tensor] = {}
        if (hook := self._scenario.after_materialize) is not None:
            with blamed("after_materialize", hook):
                hook(self.model, self._context.mesh)
            self._own = {name: local_part(tensor).clone() for name, tensor in self.model.named_parameters()}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        lacking = next((name for name, tensor in tensors if tensor.is_meta), None)
        if lacking and (function := hook or self._scenario.parallelize) is not None:
            problem = f"parameter {lacking} of the parallel model is still on the meta device"
            raise UserError(f"{problem} ({place_of(function)}); leave allocation to distbench")

    def forward_backward(self, stamp: Stamp = lambda: None) -> torch.Tensor | None:
        """Run forward and backward on this rank's part of the batch.

        Returns the loss, a mean over that part, or None on a rank of a pipeline without the last stage.
        """
        if self.pipeline is not None:
            loss = self.pipeline.run(self.microbatches[0])
            stamp()
            return loss
        losses = []
        for turn, batch in enumerate(self.microbatches, start=1):
            self._sync_gradients(turn == len(self.microbatches))
            losses.append(self._one_microbatch(batch, stamp))
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def _one_microbatch(self, batch: Any, stamp: Stamp) -> torch.Tensor:
        def keep(output: Any) -> None:
            # An output kept through backward would raise the step's peak memory.
            if self.kept_outputs is not None:
                self.kept_outputs.append(output.detach())

        with self._sharded_sequence(batch) as own_batch:
            loss: Any = loss_of(self._scenario, self.model, own_batch, keep)
            stamp()
            self._require_learning(loss)
            (loss / len(self.microbatches) if len(self.microbatches) > 1 else loss).backward()
            stamp()
        loss = loss.detach()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    def _require_learning(self, loss: torch.Tensor) -> None:
        if loss.requires_grad:
            return
        function = self._scenario.call or self._scenario.loss
        where = f" ({place_of(function)})" if function is not None else ""
        learns = any(parameter.requires_grad for parameter in self.model.parameters())
        why = "it was detached, or no parameter was used" if learns else "no parameter has requires_grad"
        raise UserError(
            f"the loss{where} does not depend on a trainable parameter ({why}); use Scenario(inference=True) to time "
            "forward only"
        )

    @contextlib.contextmanager
    def _sharded_sequence(self, batch: Any) -> Iterator[Any]:
        """Enter what the plan needs around forward and backward; yields this rank's share of a part of the batch."""
        with contextlib.ExitStack() as entered:
            batch = self._own_sequence(batch, entered)
            if self.plan.loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                entered.enter_context(loss_parallel())
            yield batch

    def _own_sequence(self, batch: Any, entered: contextlib.ExitStack) -> Any:
        """Return a part of the batch with this rank's share of the sequence; shard buffers until `entered` closes."""
        plan = self.plan.cp
        if plan is None or not shards_sequence(plan, self._context):
            return batch
        batch = mapped(batch, lambda _, tensor: tensor.clone())
        dims = self.batch.sequence_dims_of(plan)
        # Targets remain whole if the output is gathered.
        target_name = "1" if plan.unshard_output and self._scenario.loss is not None else None
        shared = [(tensor, dims[name]) for name, tensor in tensors_of(batch) if name in dims and name != target_name]
        entered.enter_context(sequence_sharded(self.model, plan, self._context, shared))
        return batch

    def _sync_gradients(self, is_last: bool) -> None:
        fsdp, data_parallel = self.plan.fsdp, self.plan.ddp or self.plan.fsdp
        if data_parallel is None:
            return
        for root in self.sharded.roots:
            if not data_parallel.sync_each_microbatch:
                root.set_requires_gradient_sync(is_last)
            if fsdp is not None and not fsdp.all_reduce_each_microbatch:
                root.set_requires_all_reduce(is_last)
            if fsdp is not None and not fsdp.reshard_each_microbatch:
                root.set_reshard_after_backward(is_last)

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the keys and values that a forward-only step keeps between runs."""
        return []

    @property
    def has_buckets(self) -> bool:
        """Return whether DDP reduces its gradients."""
        return self._num_bucket_steps > 0

    @property
    def num_setup_steps(self) -> int:
        """Return the number of first steps whose communication differs from later steps.

        DDP makes its buckets in the first step, and rebuilds them later in the order in which gradients finished.
        """
        return max(self._num_bucket_steps, 1)

    @property
    def units(self) -> list[tuple[str, Any]]:
        """Return FSDP's units of the plan or the user's function, deepest first and the root last.

        Each unit has its name in the model as built, and its mixed precision policy.
        """
        names = {id(module): name for name, module in self.built.modules.items()}
        policies, modules = unit_policies(self.model), self.model.named_modules()
        units = [(names.get(id(module), name), policies[module]) for name, module in modules if module in policies]
        return sorted(units, key=lambda unit: -unit[0].count(".") if unit[0] else 1)

    @property
    def num_data_parallel(self) -> int:
        """Number of ranks over which gradients are summed, which is also the divisor unless the plan sets another
        divisor.
        """
        if self.plan.fsdp is not None and self._scenario.gradient_divide_factor is None:
            return data_parallel_size(self.plan.fsdp, self._context)
        cp = (self.plan.cp.mesh_dim,) if self.plan.cp is not None else ("cp",)
        return self._context.index((*BATCH_DIMS, *cp))[1]

    @property
    def gradient_scale(self) -> float:
        """Return the factor that the plan applies to gradients: other than 1 only if the plan sets a divide factor."""
        fsdp, factor = self.plan.fsdp, self._scenario.gradient_divide_factor
        setters = fsdp.configure if fsdp is not None else ()
        # torch's current name, or its old name.
        if factor is None and any(setter.endswith("_divide_factor") for setter in setters):
            factor = min(divide_factors(self.model))
        return 1.0 if factor is None else self.num_data_parallel / factor

    def __call__(self, stamp: Stamp) -> None:
        """Run one whole step, and clear the gradients at its end."""
        self.forward_backward(stamp)
        self.finish(stamp)

    def finish(self, stamp: Stamp) -> None:
        """Run the rest of a step after forward and backward, and clear the gradients."""
        self.optimize()
        # A user's optimizer may lack zero_grad, so zero_grad is not called.
        self.model.zero_grad(set_to_none=True)
        if self.optimizer is not None:
            stamp()
        self._save_and_load(stamp)

    def optimize(self) -> None:
        """Step every optimizer and scheduler, in order of creation."""
        for optimizer in steppable(self.optimizer):
            optimizer.step()

    def _save_and_load(self, stamp: Stamp) -> None:
        if self.plan.state_dict:
            state = saved_state(self.model, self.optimizer)
            stamp()
            load_state(self.model, self.optimizer, state)
            stamp()

    def restart(self) -> None:
        """Clear gradients; restore the initial parameters, and the default dtype from before the first step."""
        torch.set_default_dtype(self.default_dtype)
        self.model.zero_grad(set_to_none=True)
        load_initial_values(self.model, self._context, self.built)
        parameters = dict(self.model.named_parameters())
        for name, value in self._own.items():
            local_part(parameters[name]).copy_(value)

    def start_anew(self) -> None:
        """Restart with new optimizers."""
        self.restart()
        self._make_optimizers()

    def own_values(self) -> dict[str, torch.Tensor] | None:
        """Return the whole parameters after `restart` on rank 0's CPU, if the scenario sets values itself.

        All ranks must call this together; one parameter is gathered at a time.
        """
        if not self._own:
            return None
        values = {}
        for name, parameter in as_built(self.model, self.built).items():
            tensor: Any = parameter.detach()
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self._context.rank == 0:
                values[name] = full.cpu().clone()
        return values


MOST_CALLS = 16  # within which a step must repeat


def _in_words(names: Sequence[str]) -> str:
    return ", ".join(name for name in names if name != OTHER)


def of_other_phases(step: Callable[..., Any], rank: int, phases: Sequence[str], of_rank_0: Sequence[str]) -> str:
    """Return the sentence on a step of the user that runs other phases on a rank than on rank 0."""
    own, other = _in_words(phases), _in_words(of_rank_0)
    if own == other:
        own, other = ", ".join(phases), ", ".join(of_rank_0)
    return f"step ({place_of(step)}) runs {own} on rank {rank} and {other} on rank 0; run the same phases on every rank"


class UserStep(TrainingStep):
    """The scenario's own step: `period` calls of the function, with the phases of each call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self._scenario.step is not None
        self._place = place_of(self._scenario.step)
        self._watch = StepWatch(self._scenario.step)
        # For each observed call of a period: its phases, and whether the end of each phase is stamped.
        self._calls: tuple[tuple[Phase, ...], ...] = ()

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in which operators run, over all calls of a period; the first access runs calls."""
        if not self._calls:
            self._observe()
        stamped = [phase.name for phases in self._calls for phase in phases if phase.has_operators]
        return (*stamped, *self._state_phases)

    def __call__(self, stamp: Stamp) -> None:
        """Run one period."""
        _ = self.phases
        self._period(stamp)
        self._save_and_load(stamp)

    def forward_backward(self, stamp: Stamp = lambda: None) -> torch.Tensor:
        """Run one period; each parameter then has the gradient of its optimizer's first step.

        Returns the mean of the calls' losses, each a mean over this rank's part of the batch.
        """
        with kept_gradients(self.model, self.optimizer) as kept:
            losses = [loss_of_step(self._call(lambda _: None)) for _ in range(self._scenario.period)]
        self._require_backward()
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        return torch.stack(losses).mean()

    def optimize(self) -> None:
        """Do nothing, because the step runs its optimizers."""

    def restart(self) -> None:
        """Restore the initial parameters, and make new optimizers, because a step may depend on optimizer state."""
        super().restart()
        self._make_optimizers()

    def start_anew(self) -> None:
        """Restart, and run periods until a scaler that skips the first steps no longer skips a step."""
        self.restart()
        for _ in range(MOST_CALLS):
            if not self._calls or self._period(lambda: None, is_strict=False):
                break

    def _require_backward(self) -> None:
        if not self._watch.has_backward:
            raise UserError(
                f"step ({self._place}) runs no backward; call loss.backward() in step, or use Scenario(inference=True)"
            )

    def _call(self, end: Callable[[str], None]) -> Any:
        with self._sharded_sequence(self.microbatches[0]) as batch, self._watch.of_call(end):
            return call_step(self._scenario, self.model, batch, self.optimizer)

    def _period(self, stamp: Stamp, is_strict: bool = True) -> bool:
        """Run one period, and return whether its phases equal the observed phases. If they differ and `is_strict` is
        set, raise UserError.
        """
        is_same = True
        for phases in self._calls:
            ended: list[str] = []

            def end(name: str, phases: tuple[Phase, ...] = phases, ended: list[str] = ended) -> None:
                if phases[len(ended) : len(ended) + 1] == (Phase(name, True),):
                    stamp()
                ended.append(name)

            self._call(end)
            is_same = is_same and ended == [phase.name for phase in phases]
            if is_strict and not is_same:
                raise UserError(
                    f"step ({self._place}) runs {_in_words(ended)} in this call, but ran "
                    f"{_in_words([phase.name for phase in phases])} in earlier calls; declare Scenario(period=...), "
                    "the number of calls after which the step repeats"
                )
        return is_same

    def _observe(self) -> None:
        """Run calls until they repeat and a period ends."""
        given = self._scenario.period
        for _ in range(max(self._num_bucket_steps, 1) * given):  # these set up state and communication
            self._call(lambda _: None)
        calls: list[list[ObservedCall]] = []  # by rank
        period = None
        while period is None and len(calls) < MOST_CALLS:
            calls.append(self._context.gather(observed_call(self._call)))
            self._require_equal_phases(calls[-1])
            period = period_of([tuple(call) for call in calls])
            if period and torch_optimizers(self.optimizer) and not any(call[0].stepped_ids for call in calls[-period:]):
                period = None  # gradients accumulate over more calls
        if (
            period is None
        ):  # No optimizer steps, or operators depend on values, such as operators of experts on their tokens.
            period = period_of([tuple(call) for call in calls]) or period_of([call[0].names for call in calls])
        self._require_backward()
        if period is None:
            raise UserError(
                f"step ({self._place}) does not repeat within {MOST_CALLS} calls; run the same phases in each call"
            )
        if given % period:
            raise UserError(
                f"step ({self._place}) repeats with a period of {period} calls; declare Scenario(period={period}), so "
                "that each sample has a whole period"
            )
        while len(calls) % given:
            calls.append(self._context.gather(observed_call(self._call)))
        self._calls = tuple(
            tuple(
                Phase(of_ranks[0].name, any(phase.has_operators for phase in of_ranks))
                for of_ranks in zip(*(call.phases for call in by_rank), strict=True)
            )
            for by_rank in calls[-given:]
        )

    def _require_equal_phases(self, calls: list[ObservedCall]) -> None:
        odd = next((rank for rank, call in enumerate(calls) if call.names != calls[0].names), None)
        if odd is not None:
            assert self._scenario.step is not None
            raise UserError(of_other_phases(self._scenario.step, odd, calls[odd].names, calls[0].names))


def cache_of(scenario: Scenario, model: Any, batch: Any) -> Any:
    """Make the scenario's cache for a model and a part of the batch; None if it has no cache."""
    return None if scenario.make_cache is None else scenario.make_cache(model, batch)


def output_of(scenario: Scenario, model: Any, batch: Any, cache: Any = None) -> torch.Tensor:
    """Return the output of a forward pass, including any collective that the output still waits for.

    The scenario's `call`, if given, runs the pass; otherwise a dict or a tuple is passed to the model as its arguments.

    Raises:
        UserError: the output has no tensor.
    """
    if scenario.make_cache is not None:
        assert scenario.call is not None
        output = scenario.call(model, batch, cache)
    elif scenario.call is not None:
        output = scenario.call(model, batch)
    else:
        output = forward(model, batch)
    # Models of transformers are called this way.
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    tensor = next((candidate for _, candidate in tensors_of(output if logits is None else logits)), None)
    if tensor is None:
        who = f"call ({place_of(scenario.call)})" if scenario.call else f"the model ({type(model).__name__})"
        raise UserError(f"{who} returns {kind_of(output)}, but inference=True requires logits, a tensor")
    # A collective that a tensor still waits for is part of the pass.
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.wait() if hasattr(local, "wait") else local
    return tensor if hasattr(tensor, "to_local") else local


def forward_alone(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return `torch.inference_mode()`, or `torch.no_grad()` on a simulated device.

    Attention of a simulated device has its kernel under autograd's key only, which inference mode skips.
    """
    return torch.inference_mode() if device.type in DEVICES else torch.no_grad()


def _cached_tensors(value: Any, seen_ids: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache of any type (containers, modules, objects with attributes), each once."""
    if id(value) in seen_ids:
        return
    seen_ids.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _cached_tensors(item, seen_ids)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _cached_tensors(item, seen_ids)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _cached_tensors(vars(value), seen_ids)


class ForwardStep(TrainingStep):
    """The forward pass alone. The first run or `start_anew` makes the cache, so timed passes do not make it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cache: Any = None
        self._has_cache, self._has_run = self._scenario.make_cache is None, False

    @property
    def phases(self) -> tuple[str, ...]:
        """The only phase."""
        return ("forward",)

    def forward(self, stamp: Stamp = lambda: None, is_whole: bool = False) -> torch.Tensor:
        """Return the output of this rank's part of the batch; the output remains sharded unless `is_whole`."""
        with forward_alone(self._context.device), contextlib.ExitStack() as entered:
            self._provide_cache()
            batch = self._own_sequence(self.microbatches[0], entered)
            with self._parts_seen():
                output: Any = output_of(self._scenario, self.model, batch, self._cache)
            stamp()
            if is_whole and hasattr(output, "full_tensor"):
                output = output.full_tensor()
            plan = self.plan.cp
            if is_whole and plan is not None and shards_sequence(plan, self._context) and not plan.unshard_output:
                output = whole_sequence(output, self._context.mesh[plan.mesh_dim], plan.seq_dim)
        return output

    def forward_backward(self, stamp: Stamp = lambda: None) -> torch.Tensor:
        """Run forward without backward."""
        return self.forward(stamp)

    def __call__(self, stamp: Stamp) -> None:
        """Run one whole pass."""
        self.forward(stamp)

    def whole_output(self) -> torch.Tensor:
        """Return one pass's output, gathered, as a tensor that the caller may change."""
        return self.forward(is_whole=True).clone()

    def restart(self) -> None:
        """Restore the initial parameters; the next run makes a new cache."""
        for root in self.sharded.roots:
            root.reshard()
        super().restart()
        self._cache, self._has_cache = None, self._scenario.make_cache is None

    def start_anew(self) -> None:
        """Restore the initial parameters and make a new cache."""
        self.restart()
        with forward_alone(self._context.device):
            self._provide_cache()

    @contextlib.contextmanager
    def _parts_seen(self) -> Iterator[None]:
        """In the first pass, reject sequences that are too short to be split; later passes run without hooks."""

        def require_elements(name: str, _: object, inputs: Any) -> None:
            empty = next((tensor for _, tensor in tensors_of(inputs) if not tensor.numel()), None)
            if empty is not None:
                raise UserError(
                    f"{name} gets {shape_text(empty.shape)}, a part of the sequence without a token, because there are "
                    "fewer tokens than ranks; leave sequence parallel out of the plan for one token (decode)"
                )

        with contextlib.ExitStack() as hooks:
            for _, name, module, style in () if self._has_run else styles_by_module(self.plan, self.model):
                if type(style).__name__ == "SequenceParallel":
                    hook = module.register_forward_pre_hook(partial(require_elements, name), prepend=True)
                    hooks.callback(hook.remove)
            self._has_run = True
            yield

    def _provide_cache(self) -> None:
        if not self._has_cache:
            self._cache = cache_of(self._scenario, self.model, self.microbatches[0])
            self._has_cache = True

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the cache."""
        return list(_cached_tensors(self._cache, set()))

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's cache."""
        return sum(storages_of(self.cache_tensors).values())


def step_of(scenario: Scenario, context: RankContext, *args: Any) -> TrainingStep:
    """Make the step that a scenario declares, of training or forward only; further arguments are `TrainingStep`'s."""
    kind = ForwardStep if scenario.inference else UserStep if scenario.step is not None else TrainingStep
    return kind(scenario, context, *args)
