"""Declarations of a scenario: a model, its plan, its training step, and further cases.

torch objects have the type `Any`, because this module does not import torch: a scenario builds the objects, the worker
uses them.
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

# Fields of a plan and of its FsdpPlan, and setters of FsdpPlan(configure=...), that only affect training.
_TRAINING_PLAN = ("loss_parallel", "loss", "checkpoint", "checkpoint_context", "ddp", "microbatches", "state_dict")
_TRAINING_FSDP = ("prefetch_backward", "sync_each_microbatch", "all_reduce_each_microbatch", "reshard_each_microbatch")
_TRAINING_SETTERS = (
    *("set_unshard_in_backward", "set_all_reduce_hook", "set_custom_reduce_scatter", "set_gradient_divide_factor"),
)
COLLECTIVE_OPS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
LABORATORY_SUITES = ("pairs", "partials", "shard_orders", "uneven", "flattened", "backward", "strided")
DTYPES = ("f32", "bf16", "f16", "f64")
CHECKPOINT_WAYS = ("sync", "async", "async_process")


@dataclass(frozen=True)
class Collectives(Declared):
    """Collectives: every op x size x dtype over every mesh dim, with all groups of a mesh dim at the same time.

    Args:
        ops: names from COLLECTIVE_OPS, or scatter, gather, send_recv and all_to_all_v.
        sizes_bytes: size S of nccl-tests: the full gathered or scattered buffer, or the per-rank buffer. Of
            all_to_all_v, the mean over ranks of the rows that a rank sends, including to itself.
        dtypes: names from DTYPES.
        ways: other ways of the collectives, which are compared with the first way (see `cases.collective.WAYS`).
        own_ways: further names of `ways` to `(output, input, group) -> None or the result`. If a way returns None,
            `output` has its result. `output` of all_reduce and broadcast begins as a copy of `input`. Names differ from
            those of built-in ways.
        load: of all_to_all_v: a name of `spec.expert_loads.LOADS`, or the path of a recorded routing.
        matrix: of all_to_all_v, instead of `load`: the rows that each rank sends to each rank, as nested lists, an
            array or the path of a JSON file.
        num_experts: of a load: number of experts, in equal parts over the ranks of a group.
        top_k: of a load: number of experts per token.
        num_tokens: of a load: tokens per rank; fewer for a size with fewer elements than choices.
        num_exchanges: of all_to_all_v: smallest number of exchanges per iteration; whole periods of a load are run.
    """

    ops: tuple[str, ...] = COLLECTIVE_OPS
    sizes_bytes: tuple[int, ...] = (1024, 65536, 4194304)
    dtypes: tuple[str, ...] = ("f32",)
    ways: tuple[str, ...] = ()
    own_ways: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    load: str = "uniform"
    matrix: Any = None
    num_experts: int = 8
    top_k: int = 2
    num_tokens: int = 512
    num_exchanges: int = 1


@dataclass(frozen=True)
class Redistributions(Declared):
    """DTensor redistributions of one global shape over the whole mesh, by each planner.

    Args:
        pairs: (source, target), each with one placement per mesh dim, such as `("S(0)", "R")`.
        dtype: a name from DTYPES.
        planners: names from PLANNERS. By default greedy and min_cost; with a profile also calibrated, and direct for
            the pairs that it supports.
        native_all_to_all: run DTensor's all-to-alls on CPUs as all-to-alls; by default torch runs all-gathers instead.
    """

    shape: tuple[int, ...]
    pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    dtype: str = "f32"
    planners: tuple[str, ...] = ()
    native_all_to_all: bool = False


@dataclass(frozen=True)
class Laboratory(Declared):
    """A suite of redistributions over the whole mesh; the pairs follow from the mesh of the run.

    Other fields are as for Redistributions.

    Args:
        suite: a name from LABORATORY_SUITES.
        sizes_bytes: approximate sizes of the global tensor; suites on uneven shapes use the first size or fixed sizes.
        max_pairs: maximum number of pairs per size, 0 for all. Of more pairs, a sample is used; pairs that differ only
            by names are last.
        planners: names from PLANNERS. By default all planners that support the pair; calibrated only with a profile.
    """

    suite: str
    sizes_bytes: tuple[int, ...] = (262144, 8388608)
    max_pairs: int = 30
    dtype: str = "f32"
    planners: tuple[str, ...] = ()
    native_all_to_all: bool = False


@dataclass(frozen=True)
class Calibration(Declared):
    """Calibration: every kind of redistribution step of DTensor, over every mesh dim, and the direct exchange.

    Args:
        sizes_bytes: sizes of the global tensor for the fit of lines.
        held_out_bytes: sizes of the global tensor for the validation of lines.
    """

    sizes_bytes: tuple[int, ...]
    held_out_bytes: tuple[int, ...] = ()
    dtype: str = "f32"


@dataclass(frozen=True)
class DTensorOperator(Declared):
    """An operator on DTensors, forward and backward, under placements of its inputs, by each planner.

    Args:
        name: the operator's name in case ids and tables.
        call: `(*inputs) -> tensor`, the timed function of DTensors. A plain tensor must be the whole result on every
            rank.
        make_inputs: makes the whole inputs on the CPU, equal on all ranks; inputs of a floating dtype get gradients.
        placements: layouts of the inputs. A layout has one text per input, with one placement per mesh dim: `("S(0)R",
            "RS(1)")`.
        one_device: the same function of plain whole tensors; None if `call` accepts such tensors.
        planners: as for Redistributions, but not direct.
    """

    name: str
    call: Callable[..., Any]
    make_inputs: Callable[[], Sequence[Any]]
    placements: tuple[tuple[str, ...], ...]
    one_device: Callable[..., Any] | None = None
    planners: tuple[str, ...] = ()


@dataclass(frozen=True)
class Links(Declared):
    """Tests of every pair of ranks, the groups of each mesh dim, and each rank's computing, to find slow ranks and
    links.

    Args:
        size_bytes: size of a large message; 0 for a default that suits the device.
        matmul_size: rows and columns of each rank's matrix product; 0 for a default that suits the device.
        burst_s: seconds of a burst of computing. A burst covers some periods of CPU limits, which are 0.1 s each.
        max_rounds: number of rounds of pairs up to which every pair is measured; 0 for 64, which suffice for 64 ranks.
    """

    size_bytes: int = 0
    matmul_size: int = 0
    burst_s: float = 0.25
    max_rounds: int = 0


@dataclass(frozen=True)
class Checkpoints(Declared):
    """Saves of the sharded state of model and optimizer to a folder by torch.distributed.checkpoint, and loads of the
    files.

    Args:
        ways: names from CHECKPOINT_WAYS: `dcp.save`, `dcp.async_save` in a thread, `dcp.async_save` in a process.
        load_meshes: meshes of all ranks on which the files are loaded, in addition to the run's mesh, as in
            `"dp_shard4"` or `"dp_shard2xtp2"`; other mesh dims of the run's mesh have size 1.
        folder: a new or empty folder that all hosts share; "" for the folder of temporary files. Each case deletes its
            files.
    """

    ways: tuple[str, ...] = CHECKPOINT_WAYS
    load_meshes: tuple[str, ...] = ()
    folder: str = ""


@dataclass(frozen=True)
class Scenario(Declared):
    """The model, plan, step and cases of one variant of a scenario. Every part is optional.

    Args:
        build_model: makes the model. The function is called under the meta device, so it must not read parameter
            values. A model with buffers is built a second time with its buffers on the CPU, under the run's seed.
        make_batch: makes the global batch on the CPU, equal on all ranks: `(inputs, targets)`, or tensors in any dict,
            tuple or dataclass.
        batch_dims: the tensor dim over which data parallel ranks split the batch's tensors: a number for all tensors,
            or glob pattern over tensor names (keys, fields and positions joined by dots) to a number, or to None for no
            split. By default, tensors with the first tensor's size in tensor dim 0 are split on tensor dim 0.
        sequence_dims: the same for context parallel ranks; None for the plan's `seq_dim`.
        loss: `(output, targets) -> scalar`, a mean over the batch; None if the model's output is or contains the loss.
        call: `(model, batch) -> loss`, forward and loss of a rank's part of the batch, instead of `loss`. Without
            `call`, the model gets a dict as keyword arguments, or the inputs of `(inputs, targets)`.
        inference: run forward only, under `torch.inference_mode()`, without loss, backward or optimizer. The model, or
            `call`, returns logits: a tensor, an output with `logits`, or any structure, whose first tensor is used.
        make_cache: with `inference`, `(model, batch) -> cache`, called with the parallel model and the rank's part of
            the batch before timing. The cache is empty for prefill, or filled by a run of the model on a prompt for
            decode. `call` is then `(model, batch, cache) -> logits`; `call` runs many times, so it must not change the
            cache's length.
        parallelize: `(model, mesh) -> model or None`, which parallelizes the model (on the meta device) over the whole
            mesh, instead of the plan's `tp`. The function may make further meshes and process groups. The plan's
            other parts, including `ParallelPlan.loss_parallel`, are applied afterwards.
        gradient_divide_factor: the divisor, under `parallelize`, of gradients summed over data parallel ranks; None for
            the number of these ranks, by which FSDP and DDP divide by default.
        after_materialize: `(model, mesh) -> None`, called when the parameters have memory and initial values, for
            gradient hooks or other values.
        optimizer: `parameters -> optimizer`; without `optimizer` and `make_optimizers` there is no optimizer phase.
        make_optimizers: `model -> optimizer`, or a dict or list of optimizers, schedulers, scalers and averages of
            parameters, instead of `optimizer`. The model is the parallel model, with the parameter names of
            `build_model`. Without `step`, `step()` of each object runs after backward, in this order.
        step: `(model, batch, optimizers) -> loss`, or a dict of name to loss: the whole training step on a rank's part
            of the batch, with backward and optimizers, instead of `loss` and `call`. `optimizers` is the result of
            `make_optimizers` or `optimizer`. distbench does not clear gradients between two calls.
        period: number of calls of `step` per sample: the period of a step that alternates between kinds of calls.
        laboratories: suites of the planner study: redistributions whose values are checked, by several planners.
        calibrations: sweeps for the fit of a cost profile.
        operators: operators on DTensors, and the redistributions that each operator needs.
        links: measurements that find slow ranks and links.
        checkpoints: saves of the step's state to a folder, and loads on other meshes.
        calls: name to a function `DeviceMesh -> call`, `DeviceMesh -> (call, check)` or `DeviceMesh -> (call, check,
            numbers)`, which is called on every rank. `numbers` is a dict of this rank's numbers, such as its work.
            `call()` is timed until it returns. `check()` runs once afterwards. `check()` raises for a wrong result, or
            returns None or True for a correct result on this rank, and False or a sentence for a wrong result. Without
            `check`, the result is not checked.
        plugins: kind of case of an installed plug-in to its declaration, in the plug-in's documented form.
        compute: number of sizes, smallest first, of operators on all ranks at the same time and of collectives in
            groups of every size; 0 for none.
        num_tokens: number of tokens in a global batch, or `batch -> number`; None for rates in samples/s.
        needs: importable packages of the parallel step; the step is skipped where a package is not installed.
        omits: parts of the real step that this scenario replaces or leaves out, as phrases that `check` and `simulate`
            print.
        tolerance: allowed relative error of the loss and of each gradient, for plans with lower precision than the
            model by other means than dtypes; None for 1e-5 or the rounding error of the model on one device.
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
    checkpoints: tuple[Checkpoints, ...] = ()
    calls: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    plugins: Mapping[str, Any] = field(default_factory=dict)
    compute: int = 0
    num_tokens: int | Callable[[Any], int] | None = None
    needs: tuple[str, ...] = ()
    omits: tuple[str, ...] = ()
    tolerance: float | None = None

    def __post_init__(self) -> None:
        """Check the fields, also for contradictions between fields."""
        super().__post_init__()
        self._check_inference()
        if hasattr(self.build_model, "named_parameters") and not isinstance(self.build_model, type):
            problem = f"Scenario.build_model is a {type(self.build_model).__qualname__}"
            raise TypeError(f"{problem}; give a function that makes a model (it is called under the meta device)")
        if isinstance(self.loss, type):
            kind = self.loss.__qualname__
            raise TypeError(f"Scenario.loss is the class {kind}; give an instance, {kind}(), or a function")
        if self.parallelize is not None and self.plan.tp is not None:
            raise TypeError("Scenario has both parallelize and plan.tp; leave one of them out")
        if self.gradient_divide_factor is not None and not self.gradient_divide_factor > 0:
            raise TypeError(f"Scenario.gradient_divide_factor is {self.gradient_divide_factor}; give a number above 0")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise TypeError(f"Scenario.tolerance is {self.tolerance}; give a relative error, 0 or more")
        if self.call is not None and self.loss is not None:
            raise TypeError("Scenario has both call and loss; call also computes the loss, so leave one of them out")
        if self.plan.loss is not None and self.loss is None:
            raise TypeError(
                f"ParallelPlan.loss={self.plan.loss!r} needs Scenario.loss; give this function, or leave "
                "ParallelPlan.loss out"
            )
        if self.optimizer is not None and self.make_optimizers is not None:
            raise TypeError("Scenario has both optimizer and make_optimizers; leave one of them out")
        self._check_step()

    def _check_step(self) -> None:
        """Raise TypeError if another field overlaps with `step`."""
        if self.period < 1 or (self.step is None and self.period > 1):
            without = " without step" if self.step is None else ""
            problem = f"Scenario.period is {self.period}{without}"
            raise TypeError(f"{problem}; give the number of calls after which step repeats, 1 or more")
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
                f"Scenario has both step and {given[0]}; step runs the whole training step, so leave one of them out"
            )

    def _check_inference(self) -> None:
        """Raise UserError if a forward-only scenario has a part that needs gradients, or a training scenario has a
        cache."""
        if not self.inference:
            if self.make_cache is not None:
                problem = "make_cache is for forward-only scenarios"
                raise UserError(f"{problem}; use Scenario(inference=True) or leave out make_cache")
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
            problem = f"Scenario(inference=True) runs forward only, but this scenario has {', '.join(parts)}"
            raise UserError(f"{problem}; leave {'it' if len(parts) == 1 else 'them'} out")
        if self.plan.cp is not None and self.plan.cp.seq_dim < 1:
            problem = "a forward-only scenario has the batch in tensor dim 0"
            raise UserError(f"{problem}; give CpPlan another seq_dim than 0")
        if self.make_cache is not None and self.call is None:
            problem = "a scenario with make_cache needs a call; give call(model, batch, cache)"
            raise UserError(f"{problem}, which passes the cache to the model")

    def arguments_of(self, name: str) -> tuple[str, ...]:
        """Return the argument names of a field's function; `call` also gets the cache of `make_cache`."""
        return (*super().arguments_of(name), *(("cache",) if name == "call" and self.make_cache else ()))

    @property
    def step_plan(self) -> ParallelPlan:
        """The plan of a step, with `parallelize` as `tp`."""
        return self.plan if self.parallelize is None else replace(self.plan, tp=self.parallelize)


def wrap(train_step: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a `call` for a method such as Lightning's `training_step`: `Scenario(call=wrap(Model.training_step))`.

    The method runs inside the model's `forward`, where FSDP and DDP gather parameters and prepare reductions, even if
    the method calls only parts of the model. Further arguments, such as Lightning's `batch_idx`, are 0. If the method
    returns a dict, its `"loss"` is the loss.
    """
    parameters = inspect.signature(train_step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        parameter
        for parameter in parameters
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]
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

    call.__signature__ = inspect.signature(lambda model, batch: None)  # type: ignore[attr-defined]  # instead of the method's signature
    return call


def placement_pairs(
    mesh_ndim: int,
    sources: Sequence[str] = ("R", "S(0)", "S(1)", "P(sum)"),
    targets: Sequence[str] = ("R", "S(0)", "S(1)"),
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return all pairs (source, target) of different placements on a mesh of `mesh_ndim` mesh dims."""
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
    """Mark a function as a scenario. All arguments must be literals, because distbench parses the source without
    executing it.

    Args:
        mesh: mesh dim name to size, the default mesh.
        axes: parameter name to its values, unless the user sets others by --set; all combinations run.
        quick: parameter name to its value under --quick.
        quick_mesh: default mesh under --quick; None for `mesh`.
        tags: words by which `distbench list` groups scenarios. With the tag "profile", runs without --profile use
            profile.json of the current folder.
    """
    return lambda function: function
