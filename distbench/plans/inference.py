"""A forward pass of a parallel model with its batch on this rank: prefill, one decode step with a KV cache, or any
other."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from distbench.plans.batch import forward
from distbench.plans.model import Blueprint, kind_of, materialise, tensors_of
from distbench.plans.module_patterns import styles_by_module
from distbench.plans.parallelize import shards_sequence
from distbench.plans.training_step import Stamp, TrainingStep
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.failure import place_of
from distbench.spec import Scenario, UserError
from distbench.spec.devices import DEVICES
from distbench.torch_private import storages_of, whole_sequence

# What a forward pass gives: the model's output as one tensor, and the cache that it works on.

LOGITS = "logits"  # as models of transformers call them


def cache_of(scenario: Scenario, model: Any, batch: Any) -> Any:
    """The cache that the scenario makes for a model and a part of the batch; None where it has none."""
    return None if scenario.make_cache is None else scenario.make_cache(model, batch)


def output_of(scenario: Scenario, model: Any, batch: Any, cache: Any = None) -> torch.Tensor:
    """The output of a forward pass, when it is there: a collective that it still waits for is part of the pass.

    The scenario's `call` runs it where there is one; else a dict or a tuple goes to the model as its arguments.

    Raises:
        UserError: there is no tensor in what comes out.
    """
    if scenario.make_cache is not None:
        assert scenario.call is not None
        output = scenario.call(model, batch, cache)
    elif scenario.call is not None:
        output = scenario.call(model, batch)
    else:
        output = forward(model, batch)
    logits = output.get(LOGITS) if isinstance(output, Mapping) else getattr(output, LOGITS, None)
    tensor = next((candidate for _, candidate in tensors_of(output if logits is None else logits)), None)
    if tensor is None:
        who = f"call ({place_of(scenario.call)})" if scenario.call else f"the model ({type(model).__name__})"
        raise UserError(f"{who} returns {kind_of(output)}, with inference=True it must return logits, a tensor")
    return _there(tensor)


def _there(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if hasattr(local, "wait"):  # one that a functional collective has yet to fill
        local = local.wait()
    return tensor if hasattr(tensor, "to_local") else local


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a cache, whatever it is made of: containers, modules, objects with attributes; each once."""
    seen_ids: set[int] = set()
    return list(_tensors_in(value, seen_ids))


def _tensors_in(value: Any, seen_ids: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen_ids:
        return
    seen_ids.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item, seen_ids)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item, seen_ids)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors_in(vars(value), seen_ids)


# A forward pass of a parallel model with its batch on this rank: prefill, one decode step, or any other.


def forward_alone(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """`torch.inference_mode()`, or where a device is simulated `torch.no_grad()`: its attention has a kernel under
    autograd's key alone, which inference mode passes over."""
    return torch.inference_mode() if device.type in DEVICES else torch.no_grad()


class ForwardStep(TrainingStep):
    """The forward pass alone; its one phase is `forward`.

    The cache is made by the first run, or before it by `start_anew`, all ranks together: no timed pass pays for it.
    """

    def __init__(
        self,
        scenario: Scenario,
        context: RankContext,
        built: Blueprint | None = None,
        give_memory: Callable[..., None] = materialise,
    ) -> None:
        super().__init__(scenario, context, built, give_memory)
        self.phases = ("forward",)
        self._cache: Any = None
        self._has_run = False
        self._has_cache = scenario.make_cache is None

    def forward(self, stamp: Stamp = lambda: None, is_whole: bool = False) -> torch.Tensor:
        """The output of this rank's part of the batch; where not `is_whole`, as the ranks have it in shards."""
        with forward_alone(self._context.device), contextlib.ExitStack() as entered:
            self._provide_cache()
            batch = self.own_sequence(self.microbatches[0], entered)
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
        """The same: nothing goes backward."""
        return self.forward(stamp)

    def __call__(self, stamp: Stamp) -> None:
        """One whole pass."""
        self.forward(stamp)

    def whole_output(self) -> torch.Tensor:
        """One pass's output, no longer sharded; one that may be changed."""
        return self.forward(is_whole=True).clone()

    def restart(self) -> None:
        """Back to the initial parameters; the cache is made anew by the next run."""
        for root in self.sharded.roots:
            root.reshard()
        super().restart()
        self._cache, self._has_cache = None, self._scenario.make_cache is None

    def start_anew(self) -> None:
        """The same, and the cache is made at once."""
        self.restart()
        with forward_alone(self._context.device):
            self._provide_cache()

    @contextlib.contextmanager
    def _parts_seen(self) -> Iterator[None]:
        """In the first pass, refuse parts of a sequence that is too short to be split; later ones run without hooks."""
        with contextlib.ExitStack() as hooks:
            for _, name, module, style in () if self._has_run else styles_by_module(self.plan, self.model):
                if type(style).__name__ == "SequenceParallel":
                    hook = module.register_forward_pre_hook(partial(_require_elements, name), prepend=True)
                    hooks.callback(hook.remove)
            self._has_run = True
            yield

    def _provide_cache(self) -> None:
        if not self._has_cache:
            self._cache = cache_of(self._scenario, self.model, self.microbatches[0])
            self._has_cache = True

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """What the cache holds."""
        return tensors_in(self._cache)

    @property
    def cache_bytes(self) -> int:
        """Bytes that this rank's cache takes."""
        return sum(storages_of(self.cache_tensors).values())


def _require_elements(name: str, _: object, inputs: Any) -> None:
    for _, tensor in tensors_of(inputs):
        if not tensor.numel():
            shape = shape_text(tensor.shape)
            problem = (
                f"{name} is given {shape}, a part of the sequence without a token: it has fewer than there are ranks"
            )
            raise UserError(f"{problem}; leave sequence parallel out of the plan for one token (decode)")


def step_of(
    scenario: Scenario,
    context: RankContext,
    built: Blueprint | None = None,
    give_memory: Callable[..., None] = materialise,
) -> TrainingStep:
    """The step that a scenario declares: of training, or forward alone."""
    kind = ForwardStep if scenario.inference else TrainingStep
    return kind(scenario, context, built, give_memory)
