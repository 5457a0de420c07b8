"""Declarations of a scenario: a model, its plan, its training step, and further cases.

torch objects pass through untouched (hence `Any`): a scenario builds them, the worker uses them.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from distbench.spec.checked_dataclass import Declared
from distbench.spec.errors import UserError
from distbench.spec.plan import ParallelPlan

# Fields of a plan and of its FsdpPlan, and setters of FsdpPlan(configure=...), that only training reads.
_TRAINING_PLAN = ("loss_parallel", "checkpoint", "checkpoint_context", "ddp", "microbatches", "state_dict")
_TRAINING_FSDP = ("prefetch_backward", "sync_each_microbatch", "all_reduce_each_microbatch", "reshard_each_microbatch")
_TRAINING_SETTERS = (
    *("set_unshard_in_backward", "set_all_reduce_hook", "set_custom_reduce_scatter", "set_gradient_divide_factor"),
)
COLLECTIVE_OPS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
LABORATORY_SUITES = ("pairs", "partials", "shard_orders", "uneven", "flattened", "backward", "strided")
DTYPES = ("f32", "bf16", "f16", "f64")


@dataclass(frozen=True)
class Collectives(Declared):
    """Every op x size x dtype over every mesh dim, all groups of a mesh dim at once.

    Args:
        ops: names from COLLECTIVE_OPS.
        sizes_bytes: S as nccl-tests has it: the full gathered or scattered buffer, or the per-rank buffer.
        dtypes: names from DTYPES.
    """

    ops: tuple[str, ...] = COLLECTIVE_OPS
    sizes_bytes: tuple[int, ...] = (1024, 65536, 4194304)
    dtypes: tuple[str, ...] = ("f32",)


@dataclass(frozen=True)
class Redistributions(Declared):
    """DTensor redistributions of one global shape over the whole mesh, by each planner.

    Args:
        pairs: (source, target), each one placement per mesh dim: `("S(0)", "R")`.
        dtype: a name from DTYPES.
        planners: names from PLANNERS. None given: greedy and min_cost, and with a profile also calibrated, and direct
            for the pairs that it can move.
        native_all_to_all: on CPU, run DTensor's all-to-alls as such; torch runs all-gathers there.
    """

    shape: tuple[int, ...]
    pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    dtype: str = "f32"
    planners: tuple[str, ...] = ()
    native_all_to_all: bool = False


@dataclass(frozen=True)
class Laboratory(Declared):
    """One suite of redistributions over the whole mesh; the pairs follow from the mesh of the run.

    Other fields are as for Redistributions.

    Args:
        suite: a name from LABORATORY_SUITES.
        sizes_bytes: sizes of the global tensor, about; suites on awkward shapes use the first, or choose their own.
        max_pairs: pairs at most, at each size; above it a sample, pairs that differ by names only last. 0: all.
        planners: names from PLANNERS. None given: all that can move the pair; calibrated only with a profile.
    """

    suite: str
    sizes_bytes: tuple[int, ...] = (262144, 8388608)
    max_pairs: int = 30
    dtype: str = "f32"
    planners: tuple[str, ...] = ()
    native_all_to_all: bool = False


@dataclass(frozen=True)
class Calibration(Declared):
    """Every step that DTensor's redistributions are made of, over every mesh dim, and the direct exchange.

    Args:
        sizes_bytes: sizes of the global tensor; lines are fitted to these.
        held_out_bytes: sizes of the global tensor by which lines are judged.
    """

    sizes_bytes: tuple[int, ...]
    held_out_bytes: tuple[int, ...] = ()
    dtype: str = "f32"


@dataclass(frozen=True)
class DTensorOperator(Declared):
    """An operator on DTensors, forward and backward, under placements of its inputs, by each planner.

    Args:
        name: its name in case ids and tables.
        call: `(*inputs) -> tensor`, the timed function, of DTensors. A plain tensor that it returns must be
            the whole result on every rank.
        make_inputs: makes the whole inputs on the CPU, the same on every rank; those of a floating dtype get gradients.
        placements: the ways to lay the inputs, each one text per input, with one placement per mesh dim:
            `("S(0)R", "RS(1)")`.
        one_device: the same of plain whole tensors; None where `call` takes those.
        planners: as for Redistributions, without direct.
    """

    name: str
    call: Callable[..., Any]
    make_inputs: Callable[[], Sequence[Any]]
    placements: tuple[tuple[str, ...], ...]
    one_device: Callable[..., Any] | None = None
    planners: tuple[str, ...] = ()


@dataclass(frozen=True)
class Links(Declared):
    """Every pair of ranks, the groups of each mesh dim, and each rank's own speed, to find slow ranks and links.

    Args:
        size_bytes: of a large message; 0 for one that suits the device.
        matmul_size: rows and columns of the product that each rank computes; 0 for one that suits the device.
        burst_s: seconds that a rank computes for at a time: some periods of a limit on its CPU, which are 0.1 s.
    """

    size_bytes: int = 0
    matmul_size: int = 0
    burst_s: float = 0.25


@dataclass(frozen=True)
class Scenario(Declared):
    """What one variant of a scenario measures. Every part is optional.

    Args:
        build_model: makes the model; called under the meta device, so it must not read parameter values. A model with
            buffers is built a second time with its buffers on the CPU, under the run's seed.
        make_batch: the global batch on the CPU, the same on every rank: `(inputs, targets)`, or tensors in any dict,
            tuple or dataclass.
        batch_dims: which tensor dim of the batch's tensors is split over data parallel ranks: one for all, or glob
            pattern over their names (keys, fields and positions joined by dots) to one, None for whole; None for tensor
            dim 0 of every tensor that is as long there as the first one.
        sequence_dims: likewise over context parallel ranks; None for the plan's `seq_dim`.
        loss: `(output, targets) -> scalar`, a mean over the batch; None where the model's output has or is its loss.
        call: `(model, batch) -> loss`, forward and loss of a rank's part of the batch, in the place of `loss`. Without
            it a dict goes to the model by keyword, and of `(inputs, targets)` the inputs do.
        inference: run forward alone, under `torch.inference_mode()`: no loss, backward or optimizer. The model, or
            `call`, returns logits: a tensor, an output that has `logits`, or the first tensor of whatever it is.
        make_cache: with `inference`, `(model, batch) -> cache`, called before anything is timed with the parallel model
            and the rank's part of the batch: empty for prefill, filled by running the model on a prompt for decode.
            `call` is then `(model, batch, cache) -> logits`; it runs many times, so it must leave the cache as long as
            it was.
        parallelize: `(model, mesh) -> model or None`, a function of your own that lays the model (on the meta device)
            over the whole mesh, in the place of the plan's `tp`; it may make meshes and process groups of its own. The
            plan's other parts follow; `ParallelPlan.loss_parallel` applies to it too.
        gradient_divide_factor: the divisor, under `parallelize`, of gradients summed over data parallel ranks; None for
            the number of these ranks, by which FSDP and DDP divide by default.
        after_materialize: `(model, mesh) -> None`, called once the parameters have memory and their initial values: for
            gradient hooks, or for values of your own.
        optimizer: `parameters -> optimizer`; without it and `make_optimizers` there is no optimizer phase.
        make_optimizers: `model -> optimizer`, or a dict or list of optimizers, schedulers, scalers and averages of
            parameters, in the place of `optimizer`. The model is the parallel one, with the parameter names of
            `build_model`. Without `step`, `step()` of each runs after backward, in this order.
        step: `(model, batch, optimizers) -> loss`, or a dict of name to loss: the whole training step on a rank's part
            of the batch, with backward and optimizers, in the place of `loss` and `call`. `optimizers` is what
            `make_optimizers` or `optimizer` returned. distbench does not clear gradients between two calls.
        period: calls of `step` after which it repeats, where it alternates; a sample is that many calls.
        laboratories: suites of the planner study: redistributions whose values are checked, by several planners.
        calibrations: sweeps that a cost profile is fitted to.
        operators: operators on DTensors, and the redistributions that each one needs.
        links: measurements that find slow ranks and links.
        calls: name to a function of yours, `DeviceMesh -> call` or `DeviceMesh -> (call, check)`, called on every rank.
            `call()` is timed until it returns. `check()` runs once afterwards; it asserts, or returns None or True
            where this rank's result is right, False or a sentence where it is wrong. Without it nothing is checked.
        plugins: kind of case of an installed plug-in to its declaration, in the form that the plug-in documents.
        compute: operators on every rank at once, and collectives in groups of every size: how many sizes of each to
            time, smallest first; 0 for none.
        num_tokens: tokens in a global batch, where it is of tokens, or `batch -> number`; rates are samples/s where it
            is None.
        tolerance: relative error allowed to the loss and to each gradient, where the plan computes in less than the
            model's precision in a way of its own; None for 1e-5 or what rounding does to the model on one device.
    """

    called_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("build_model", "make_batch"), ()),
        "loss": ("output", "targets"),
        **dict.fromkeys(("call", "make_cache"), ("model", "batch")),
        **dict.fromkeys(("parallelize", "after_materialize"), ("model", "mesh")),
        "optimizer": ("parameters",),
        "make_optimizers": ("model",),
        "step": ("model", "batch", "optimizers"),
        "num_tokens": ("batch",),
    }

    build_model: Callable[[], Any] | None = None
    make_batch: Callable[[], Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    call: Callable[..., Any] | None = None
    inference: bool = False
    make_cache: Callable[[Any, Any], Any] | None = None
    parallelize: Callable[[Any, Any], Any] | None = None
    after_materialize: Callable[[Any, Any], None] | None = None
    gradient_divide_factor: float | None = None
    batch_dims: int | Mapping[str, int | None] | None = None
    sequence_dims: int | Mapping[str, int | None] | None = None
    optimizer: Callable[[Any], Any] | None = None
    make_optimizers: Callable[[Any], Any] | None = None
    step: Callable[[Any, Any, Any], Any] | None = None
    period: int = 1
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    collectives: tuple[Collectives, ...] = ()
    redistributions: tuple[Redistributions, ...] = ()
    laboratories: tuple[Laboratory, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    operators: tuple[DTensorOperator, ...] = ()
    links: tuple[Links, ...] = ()
    calls: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    plugins: Mapping[str, Any] = field(default_factory=dict)
    compute: int = 0
    num_tokens: int | Callable[[Any], int] | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        """Check fields that contradict each other, too."""
        super().__post_init__()
        self._check_inference()
        if hasattr(self.build_model, "named_parameters") and not isinstance(self.build_model, type):
            problem = f"Scenario.build_model is a {type(self.build_model).__qualname__}"
            raise TypeError(f"{problem}; give a function that makes one, which is called under the meta device")
        if isinstance(self.loss, type):
            kind = self.loss.__qualname__
            raise TypeError(f"Scenario.loss is the class {kind}; give one of it, {kind}(), or a function")
        if self.parallelize is not None and self.plan.tp is not None:
            raise TypeError("Scenario has parallelize and a plan with tp, which it would replace; drop one of them")
        if self.gradient_divide_factor is not None and not self.gradient_divide_factor > 0:
            raise TypeError(f"Scenario.gradient_divide_factor is {self.gradient_divide_factor}; give a number above 0")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise TypeError(f"Scenario.tolerance is {self.tolerance}; give a relative error, 0 or more")
        if self.call is not None and self.loss is not None:
            raise TypeError("Scenario has both call and loss; call makes the loss too, so drop one of them")
        if self.optimizer is not None and self.make_optimizers is not None:
            raise TypeError("Scenario has both optimizer and make_optimizers; drop one of them")
        self._check_step()

    def _check_step(self) -> None:
        """Raise TypeError if another part of the scenario does what `step` does."""
        if self.period < 1 or (self.step is None and self.period > 1):
            without = " without step" if self.step is None else ""
            problem = f"Scenario.period is {self.period}{without}"
            raise TypeError(f"{problem}; give the number of calls of step after which it repeats, 1 or more")
        if self.step is None:
            return
        parts = {
            **{name: getattr(self, name) is not None for name in ("loss", "call")},
            "inference": self.inference,
            "plan.microbatches": self.plan.microbatches > 1,
            "plan.pipeline": self.plan.pipeline is not None,
        }
        if given := [name for name, is_given in parts.items() if is_given]:
            raise TypeError(
                f"Scenario has both step and {given[0]}; step runs the whole training step, so drop one of them"
            )

    def _check_inference(self) -> None:
        """Raise UserError if a forward-only scenario has a part that needs gradients, or another one a cache."""
        if not self.inference:
            if self.make_cache is not None:
                problem = "make_cache is for a forward-only scenario"
                raise UserError(f"{problem}; use Scenario(inference=True) or leave it out")
            return
        names = [
            name
            for name in ("loss", "optimizer", "make_optimizers", "gradient_divide_factor")
            if getattr(self, name) is not None
        ]
        parts = ["a loss" if name == "loss" else name for name in names]
        parts += [f"plan.{name}" for name in self.plan.changed_fields() if name in _TRAINING_PLAN]
        if (fsdp := self.plan.fsdp) is not None:
            parts += [f"plan.fsdp.{name}" for name in fsdp.changed_fields() if name in _TRAINING_FSDP]
            parts += [f"plan.fsdp.configure[{name!r}]" for name in fsdp.configure if name in _TRAINING_SETTERS]
        if parts:
            problem = f"Scenario(inference=True) runs forward alone, but this scenario has {', '.join(parts)}"
            raise UserError(f"{problem}; leave {'it' if len(parts) == 1 else 'them'} out")
        if self.plan.cp is not None and self.plan.cp.seq_dim < 1:
            problem = "a forward-only scenario has the batch in tensor dim 0"
            raise UserError(f"{problem}, so CpPlan(seq_dim=0) is not a sequence")
        if self.make_cache is not None and self.call is None:
            problem = "a scenario with make_cache needs call(model, batch, cache)"
            raise UserError(f"{problem}, which gives the cache to the model")

    def arguments_of(self, name: str) -> tuple[str, ...]:
        """Return the arguments of a field's function; `call` gets a cache where the scenario makes one."""
        return (*super().arguments_of(name), *(("cache",) if name == "call" and self.make_cache else ()))

    @property
    def step_plan(self) -> ParallelPlan:
        """The plan of a step, with `parallelize` as its `tp`."""
        return self.plan if self.parallelize is None else replace(self.plan, tp=self.parallelize)


def wrap(train_step: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a `call` for a method such as Lightning's `training_step`: `Scenario(call=wrap(Model.training_step))`.

    It runs inside the model's own `forward`, where FSDP and DDP gather parameters and prepare reductions, also where it
    calls parts of the model only. Further arguments, such as Lightning's `batch_idx`, are 0. Of a dict that it returns,
    the loss is `"loss"`.
    """
    parameters = inspect.signature(train_step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.kind in positional and one.default is inspect.Parameter.empty]
    further = (0,) * (len(required) - 2)

    @functools.wraps(train_step)
    def call(model: Any, batch: Any) -> Any:
        own = vars(model).get("forward")

        def restore() -> None:
            if own is None:
                vars(model).pop("forward", None)
            else:
                model.forward = own

        def forward(*args: Any) -> Any:
            restore()  # the method may call the model
            return train_step(model, *args)

        model.forward = forward
        try:
            returned = model(batch, *further)
        finally:
            restore()
        return returned["loss"] if isinstance(returned, Mapping) else returned

    call.__signature__ = inspect.signature(lambda model, batch: None)  # type: ignore[attr-defined]  # not the method's
    return call


def placement_pairs(
    mesh_ndim: int,
    sources: Sequence[str] = ("R", "S(0)", "S(1)", "P(sum)"),
    targets: Sequence[str] = ("R", "S(0)", "S(1)"),
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return every (source, target) pair of placements on a mesh of `mesh_ndim` mesh dims, source != target."""
    every_pair = itertools.product(*(itertools.product(texts, repeat=mesh_ndim) for texts in (sources, targets)))
    return tuple((source, target) for source, target in every_pair if source != target)


def scenario(
    *,
    mesh: Mapping[str, int],
    axes: Mapping[str, tuple[Any, ...]] | None = None,
    quick: Mapping[str, Any] | None = None,
    quick_mesh: Mapping[str, int] | None = None,
    tags: tuple[str, ...] = (),
) -> Callable[[Callable[..., Scenario]], Callable[..., Scenario]]:
    """Mark a function as a scenario. All arguments must be literals: they are read from the source, not run.

    Args:
        mesh: mesh dim name to size, the default mesh.
        axes: parameter name to the values it takes when the user sets none; all combinations run.
        quick: parameter name to the value it takes under --quick.
        quick_mesh: the default mesh under --quick, where that is a smaller one.
        tags: words to find it by; with "profile", a profile.json in the current folder is used without --profile.
    """
    return lambda function: function
