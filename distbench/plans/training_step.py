"""A step of a parallel model on this rank, of training or forward only; its state, saved and loaded."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
from distbench.plans.parallelize import parallelize, sequence_sharded, shards_sequence, unshard_outputs
from distbench.plans.pipeline import LocalStage, LocalStages, Pipeline, inputs_and_targets, local_stages
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.failure import blamed, one_line, place_of
from distbench.spec import Scenario, UserError
from distbench.spec.devices import DEVICES, device_of, known_device
from distbench.spec.mesh import BATCH_DIMS
from distbench.torch_private import (
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

    of_model, of_optimizer = get_state_dict(model, () if optimizer is None else optimizer)
    return _copied(of_model), _copied(of_optimizer)


def load_state(model: nn.Module, optimizer: Any, state: State) -> None:
    """Load this rank's part of a saved state."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    of_model, of_optimizer = state
    set_state_dict(
        model, () if optimizer is None else optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer
    )


def round_trip(model: nn.Module, optimizer: Any) -> tuple[int, str | None]:
    """Save, spoil every parameter, load. Return the state's bytes on this rank, and the problem or None."""
    state = saved_state(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).fill_(torch.nan)
    load_state(model, optimizer, state)
    saved, loaded = (
        [local_part(tensor) for tensor in _tensors(each)] for each in (state, saved_state(model, optimizer))
    )
    num_wrong = sum(not torch.equal(*pair) for pair in zip(saved, loaded, strict=True))
    wrong = f"{num_wrong} tensors of the loaded state differ from the saved ones" if num_wrong else None
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


def state_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's `state`, or its attributes if it has none; [] without an optimizer."""
    if optimizer is None:
        return []
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return [dict(vars(optimizer))]
    return [dict(value) if isinstance(value, Mapping) else value for value in state.values()]


class TrainingStep:
    """The parallel model with its batch on this rank; `built` is the model on the meta device, if it exists."""

    def __init__(
        self,
        scenario: Scenario,
        context: RankContext,
        built: Blueprint | None = None,
        give_memory: Callable[..., None] = materialise,
    ) -> None:
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
                f"parallelize{where} gives parameter {lost_hooks[0]} a hook, which is lost when the model gets memory; "
                "set it in after_materialize=fn, fn(model, mesh)"
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
        # A whole output can be compared with one device's: it is kept while the check requests it.
        self.unshards_output = unshard_outputs(self.model, plan.cp, context)
        self.kept_outputs: list[torch.Tensor] | None = None
        index, count = context.index(BATCH_DIMS)
        parts = 1 if self.pipeline is not None else plan.microbatches  # torch's schedule splits it
        places = range(index * parts, (index + 1) * parts)
        self.microbatches = [self.batch.part(place, count * parts, context.device) for place in places]
        self.optimizer = scenario.optimizer(self.model.parameters()) if scenario.optimizer else None
        self._require_optimizer()
        turns = (SCHEDULE,) if self.pipeline is not None else ("forward", "backward") * len(self.microbatches)
        self.phases: tuple[str, ...] = (*turns, "optimizer") if self.optimizer else turns
        self.phases += STATE_PHASES if plan.state_dict else ()
        self.default_dtype = torch.get_default_dtype()

    def _give_memory(self, give_memory: Callable[..., None], where: str) -> None:
        offloaded = self.plan.fsdp is not None and self.plan.fsdp.offload is not None
        try:
            give_memory(self.model, self._context, self.built, torch.device("cpu") if offloaded else None)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            if not where:
                raise
            raise UserError(
                f"the model that parallelize{where} makes cannot be given memory: {one_line(error)}; leave parameters "
                "to fully_shard and the styles, and memory to distbench"
            ) from error

    def _laid_out(self) -> tuple[nn.Module, Sharded, list[LocalStage]]:
        """The parallel model without memory; of a pipeline its stages on this rank, each under the rest of the plan."""
        plan, context, user_function = self.plan, self._context, self._scenario.parallelize
        if plan.pipeline is None:
            return *parallelize(self.built.model, plan, context, user_function), []
        if self._scenario.call is not None or self._scenario.after_materialize is not None:
            raise UserError(
                "a pipeline's stages take neither call nor after_materialize; leave them out, and give loss"
            )
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
            raise UserError(f"{problem} ({place_of(function)}); leave it to distbench, which allocates every parameter")

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
            # Keeping it through backward would raise the step's peak memory.
            if self.kept_outputs is not None:
                self.kept_outputs.append(output.detach())

        with contextlib.ExitStack() as entered:
            batch = self._own_sequence(batch, entered)
            if self.plan.loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                entered.enter_context(loss_parallel())
            loss: Any = loss_of(self._scenario, self.model, batch, keep)
            stamp()
            self._require_learning(loss)
            (loss / len(self.microbatches) if len(self.microbatches) > 1 else loss).backward()
            stamp()
        loss = loss.detach()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    def _require_optimizer(self) -> None:
        optimizer, make = self.optimizer, self._scenario.optimizer
        if optimizer is None or make is None:
            return
        problem = f"optimizer ({place_of(make)}) returns {kind_of(optimizer)}"
        if not callable(getattr(optimizer, "step", None)):
            raise UserError(f"{problem}, which has no step(); return an optimizer of the parameters that it is given")
        if self.plan.state_dict and not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"{problem}, which state_dict=True cannot save: torch saves subclasses of torch.optim.Optimizer; "
                "derive it from that, or leave state_dict out"
            )

    def _require_learning(self, loss: torch.Tensor) -> None:
        if loss.requires_grad:
            return
        function = self._scenario.call or self._scenario.loss
        where = f" ({place_of(function)})" if function is not None else ""
        learns = any(parameter.requires_grad for parameter in self.model.parameters())
        why = "it was detached, or no parameter was used" if learns else "no parameter has requires_grad"
        raise UserError(
            f"the loss{where} does not depend on a trainable parameter: {why}; use Scenario(inference=True) to time "
            "forward only"
        )

    def _own_sequence(self, batch: Any, entered: contextlib.ExitStack) -> Any:
        """A part of the batch with this rank's share of the sequence; buffers are sharded until `entered` closes."""
        plan = self.plan.cp
        if plan is None or not shards_sequence(plan, self._context):
            return batch
        batch = mapped(batch, lambda _, tensor: tensor.clone())
        dims = self.batch.sequence_dims_of(plan)
        # Targets stay whole if the output is gathered.
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
        """Return the keys and values that a forward-only step keeps from one run to the next."""
        return []

    @property
    def has_buckets(self) -> bool:
        """Return whether DDP reduces its gradients."""
        return self._num_bucket_steps > 0

    @property
    def num_setup_steps(self) -> int:
        """Return the number of first steps whose communication differs from later ones.

        DDP makes its buckets in the first step, and rebuilds them later in the order in which gradients finished.
        """
        return max(self._num_bucket_steps, 1)

    @property
    def units(self) -> list[tuple[str, Any]]:
        """Return FSDP's units, by the plan or by the user's function: deepest first, the root last.

        Each has its name when the model was built and its mixed precision policy.
        """
        names = {id(module): name for name, module in self.built.modules.items()}
        policies, modules = unit_policies(self.model), self.model.named_modules()
        units = [(names.get(id(module), name), policies[module]) for name, module in modules if module in policies]
        return sorted(units, key=lambda unit: -unit[0].count(".") if unit[0] else 1)

    @property
    def num_data_parallel(self) -> int:
        """Number of ranks over which gradients are summed, which is also the divisor unless the plan sets another."""
        if self.plan.fsdp is not None and self._scenario.gradient_divide_factor is None:
            return data_parallel_size(self.plan.fsdp, self._context)
        cp = (self.plan.cp.mesh_dim,) if self.plan.cp is not None else ("cp",)
        return self._context.index((*BATCH_DIMS, *cp))[1]

    @property
    def gradient_scale(self) -> float:
        """Return the factor that the plan applies to gradients: other than 1 only if it sets its own divide factor."""
        fsdp, factor = self.plan.fsdp, self._scenario.gradient_divide_factor
        setters = fsdp.configure if fsdp is not None else ()
        # Under torch's current name or its old one.
        if factor is None and any(setter.endswith("_divide_factor") for setter in setters):
            factor = min(divide_factors(self.model))
        return 1.0 if factor is None else self.num_data_parallel / factor

    def __call__(self, stamp: Stamp) -> None:
        """Run one whole step, gradients cleared at its end."""
        self.forward_backward(stamp)
        if self.optimizer is not None:
            self.optimizer.step()
        # Not the optimizer's own zero_grad, which a user's optimizer may lack.
        self.model.zero_grad(set_to_none=True)
        if self.optimizer is not None:
            stamp()
        if self.plan.state_dict:
            state = saved_state(self.model, self.optimizer)
            stamp()
            load_state(self.model, self.optimizer, state)
            stamp()

    def restart(self) -> None:
        """Restore the initial parameters, no gradients, and the default dtype from before the first step."""
        torch.set_default_dtype(self.default_dtype)
        self.model.zero_grad(set_to_none=True)
        load_initial_values(self.model, self._context, self.built)
        parameters = dict(self.model.named_parameters())
        for name, value in self._own.items():
            local_part(parameters[name]).copy_(value)

    def start_anew(self) -> None:
        """Restart with a new optimizer."""
        self.restart()
        if self._scenario.optimizer is not None:
            self.optimizer = self._scenario.optimizer(self.model.parameters())

    def own_values(self) -> dict[str, torch.Tensor] | None:
        """Return the whole parameters after `restart` on rank 0's CPU, where the scenario sets values itself.

        Collective, one parameter at a time.
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


def cache_of(scenario: Scenario, model: Any, batch: Any) -> Any:
    """Make the scenario's cache for a model and a part of the batch; None if it has no cache."""
    return None if scenario.make_cache is None else scenario.make_cache(model, batch)


def output_of(scenario: Scenario, model: Any, batch: Any, cache: Any = None) -> torch.Tensor:
    """Return the output of a forward pass. A collective that it still waits for is part of the pass.

    The scenario's `call` runs it if given; otherwise a dict or a tuple is passed to the model as its arguments.

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
        raise UserError(f"{who} returns {kind_of(output)}, inference=True requires logits, a tensor")
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
    """The forward pass alone. The first run or `start_anew` makes its cache, so no timed pass includes that."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.phases = ("forward",)
        self._cache: Any = None
        self._has_cache, self._has_run = self._scenario.make_cache is None, False

    def forward(self, stamp: Stamp = lambda: None, is_whole: bool = False) -> torch.Tensor:
        """Return the output of this rank's part of the batch; sharded as the ranks have it unless `is_whole`."""
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
        """Run forward; there is no backward."""
        return self.forward(stamp)

    def __call__(self, stamp: Stamp) -> None:
        """Run one whole pass."""
        self.forward(stamp)

    def whole_output(self) -> torch.Tensor:
        """Return one pass's output, gathered, as a tensor that may be changed."""
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
                    f"{name} gets {shape_text(empty.shape)}, a part of the sequence without a token: there are fewer "
                    "tokens than ranks; leave sequence parallel out of the plan for one token (decode)"
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
    return (ForwardStep if scenario.inference else TrainingStep)(scenario, context, *args)
