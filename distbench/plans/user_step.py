"""The user's own training step: its optimizers by name, loss, phases and period."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distbench.plans.model import kind_of
from distbench.ranks.failure import blamed, called_at, one_line, place_of, raised_at
from distbench.spec import Scenario, UserError
from distbench.spec.printable_text import listed
from distbench.torch_private import around_backward, each_operator

FREED = "out of bounds for storage of size 0"  # torch's words
OTHER = "other"  # the phase of other work, after a backward or an optimizer


def made_optimizers(scenario: Scenario, model: nn.Module) -> Any:
    """Return the optimizer, or the dict of optimizers, that the scenario's function makes; None without a function.

    Raises:
        UserError: `make_optimizers` raises.
    """
    if scenario.make_optimizers is None:
        return None if scenario.optimizer is None else scenario.optimizer(model.parameters())
    with blamed("make_optimizers", scenario.make_optimizers):
        try:
            return scenario.make_optimizers(model)
        except (AttributeError, KeyError, ValueError) as error:  # such as for a parameter that the model does not have
            names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            where = raised_at(error) or place_of(scenario.make_optimizers)
            raise UserError(
                f"make_optimizers raises {one_line(error)} ({where}); use parameters that the model trains "
                f"({listed(names, 6)})"
            ) from error


def optimizers_of(made: Any, name: str = "") -> dict[str, Any]:
    """Return optimizers and other state in the result of `made_optimizers`, by keys and positions joined by dots.

    A single optimizer is "optimizer"; {} for None.
    """
    if not isinstance(made, Mapping | list | tuple):
        return {} if made is None else {name or "optimizer": made}
    items = made.items() if isinstance(made, Mapping) else enumerate(made)
    parts = [optimizers_of(value, f"{name}.{key}" if name else str(key)) for key, value in items]
    return {path: value for part in parts for path, value in part.items()}


def steppable(made: Any) -> list[Any]:
    """Return the optimizers and schedulers in the result of `made_optimizers`."""
    return [value for value in optimizers_of(made).values() if callable(getattr(value, "step", None))]


def torch_optimizers(made: Any) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers in the result of `made_optimizers`."""
    return [value for value in optimizers_of(made).values() if isinstance(value, torch.optim.Optimizer)]


def require_optimizers(scenario: Scenario, made: Any, model: nn.Module) -> None:
    """Raise UserError for no optimizer, for an optimizer of another model, or if `state_dict=True` cannot save it."""
    field = "optimizer" if scenario.make_optimizers is None else "make_optimizers"
    make = getattr(scenario, field)
    if make is None:
        return
    problem = f"{field} ({place_of(make)}) returns {kind_of(made)}"
    if not steppable(made):
        advice = "return an optimizer of the given parameters"
        if scenario.make_optimizers is not None:
            advice = "return an optimizer, or a dict or list of optimizers, schedulers, scalers and averages"
        raise UserError(f"{problem}, which has no step(); {advice}")
    if scenario.plan.state_dict and not torch_optimizers(made):
        raise UserError(
            f"{problem}, which state_dict=True cannot save; use a subclass of torch.optim.Optimizer, or leave "
            "state_dict out"
        )
    own = {id(parameter) for parameter in model.parameters()}
    for name, optimizer in optimizers_of(made).items():
        held = _parameters_of(optimizer)
        is_stale = any(parameter.is_meta for parameter in held) and not all(each.is_meta for each in model.parameters())
        if held and (is_stale or not any(id(parameter) in own for parameter in held)):
            which = "parameters from before the parallel model" if is_stale else "no parameter of the parallel model"
            raise UserError(
                f"{field} ({place_of(make)}) returns {name!r}, which has {which}; use parameters of the given model"
            )


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", None)
    return [parameter for group in groups or () for parameter in group["params"]]


def call_step(scenario: Scenario, model: nn.Module, batch: Any, made: Any) -> Any:
    """Call the scenario's step once; return its loss or dict of losses.

    Raises:
        UserError: the step returns another value.
    """
    assert scenario.step is not None
    try:
        returned = scenario.step(model, batch, made)
    except RuntimeError as error:
        if FREED not in str(error):
            raise
        raise UserError(
            f"step ({raised_at(error) or place_of(scenario.step)}) differentiates a gradient, but FSDP frees "
            "parameters after the first backward; call model.set_reshard_after_backward(False) before "
            "torch.autograd.grad(..., create_graph=True), and model.set_reshard_after_backward(True) after it"
        ) from error
    losses = [*returned.values()] if isinstance(returned, Mapping) else [returned]
    if not (losses and all(map(_is_number, losses))):
        kind = f"a tensor of shape {list(returned.shape)}" if isinstance(returned, torch.Tensor) else kind_of(returned)
        what = f"step ({place_of(scenario.step)}) returns {'nothing' if returned is None else kind}"
        raise UserError(f"{what}; return one number as loss, or a dict of names to losses")
    return returned


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, float)


def loss_of_step(returned: Any) -> torch.Tensor:
    """Return a step's loss as a tensor without dims; for a dict of losses, the sum."""
    losses = [*returned.values()] if isinstance(returned, Mapping) else [returned]
    return torch.stack([_detached(loss) for loss in losses]).sum()


def _detached(loss: Any) -> torch.Tensor:
    detached: Any = torch.as_tensor(loss).detach()
    return (detached.full_tensor() if hasattr(detached, "full_tensor") else detached).float().reshape(())


@contextlib.contextmanager
def kept_gradients(model: nn.Module, made: Any) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Yield a dict that gets a copy of each parameter's gradient when its optimizer first steps in the block.

    After the block, parameters without an optimizer of torch have the gradient of the last backward.
    """
    kept: dict[torch.Tensor, torch.Tensor] = {}
    after_backward: dict[torch.Tensor, torch.Tensor] = {}
    stepped = {parameter for optimizer in torch_optimizers(made) for parameter in _parameters_of(optimizer)}
    others = [parameter for parameter in model.parameters() if parameter not in stepped]

    def keep(optimizer: Any, *_: object) -> None:
        for parameter in _parameters_of(optimizer):
            if parameter.grad is not None and parameter not in kept:
                kept[parameter] = parameter.grad.detach().clone()

    def keep_others() -> None:
        for parameter in others:
            if parameter.grad is not None:
                after_backward[parameter] = parameter.grad.detach().clone()

    hook = register_optimizer_step_pre_hook(keep)
    try:
        with around_backward(lambda: None, keep_others):
            yield kept
    finally:
        hook.remove()
        for parameter, gradient in after_backward.items():
            kept.setdefault(parameter, gradient)


class StepWatch:
    """Observer of a step's calls; `end` is called with the name of each phase at the phase's end.

    A phase is "forward" until autograd's backward begins, "backward" while backward runs, "optimizer" while an
    optimizer of torch steps, and OTHER elsewhere. No phase begins inside a backward or an optimizer.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._place = place_of(function)
        self.has_backward = False
        self._stepped_ids: set[int] = set()

    @contextlib.contextmanager
    def of_call(self, end: Callable[[str], None]) -> Iterator[None]:
        """Observe one call."""
        depth = 0

        def enter(gap: str) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:
                end(gap)

        def leave(phase: str) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                end(phase)

        def begin_backward() -> None:
            self.has_backward = True
            self._stepped_ids.clear()
            enter("forward")

        def before_step(optimizer: Any, *_: object) -> None:
            enter(OTHER)
            if depth == 1:
                self._require_new(optimizer)

        with contextlib.ExitStack() as undo:
            undo.enter_context(around_backward(begin_backward, partial(leave, "backward")))
            undo.callback(register_optimizer_step_pre_hook(before_step).remove)
            undo.callback(register_optimizer_step_post_hook(lambda *_: leave("optimizer")).remove)
            yield
        end(OTHER)

    def _require_new(self, optimizer: Any) -> None:
        if id(optimizer) in self._stepped_ids:
            raise UserError(
                f"step ({self._place}) steps {type(optimizer).__name__} twice without a backward in between, the "
                f"second time at {called_at()}; step the optimizer once per backward"
            )
        self._stepped_ids.add(id(optimizer))


class Phase(NamedTuple):
    """A phase of one call, and whether an operator runs in it."""

    name: str
    has_operators: bool


class ObservedCall(NamedTuple):
    """One call of a step on this rank: its phases in order, a hash of its operators, and the optimizers that step."""

    phases: tuple[Phase, ...]
    operators: Hashable
    stepped_ids: tuple[int, ...]  # also inside of a backward

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the call's phases."""
        return tuple(phase.name for phase in self.phases)


def observed_call(call: Callable[[Callable[[str], None]], object]) -> ObservedCall:
    """Run `call(end)` and observe its operators; `call` must call `end` as `StepWatch` does."""
    operators: list[str] = []
    stepped_ids: list[int] = []
    counts: list[int] = []
    names: list[str] = []

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        if not func.is_view and func.namespace != "profiler":  # each optimizer begins with a mark for the profiler
            operators.append(str(func))
        return func(*args, **kwargs)

    def end(name: str) -> None:
        names.append(name)
        counts.append(len(operators))

    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: stepped_ids.append(id(optimizer)))
    try:
        with each_operator(handle):
            call(end)
    finally:
        hook.remove()
    before = [0, *counts]
    phases = [Phase(name, counts[place] > before[place]) for place, name in enumerate(names)]
    return ObservedCall(tuple(phases), hash(tuple(operators)), tuple(stepped_ids))


def period_of(calls: Sequence[Hashable]) -> int | None:
    """Return the smallest n for which the last n calls equal the n calls before; None if there is no n.

    >>> period_of(["a", "b", "a", "b"]), period_of(["first", "a", "a"]), period_of(["a", "b"])
    (2, 1, None)
    """
    for period in range(1, len(calls) // 2 + 1):
        if list(calls[-period:]) == list(calls[-2 * period : -period]):
            return period
    return None
