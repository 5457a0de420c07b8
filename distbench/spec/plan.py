"""How a model is laid over a mesh: one plan, its parts in the order in which they are applied.

torch objects pass through untouched (hence `Any`): a scenario builds them, the worker uses them.
"""

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from distbench.spec.checked_dataclass import Declared


@dataclass(frozen=True)
class PipelineSchedule:
    """One of torch.distributed.pipelining's schedules.

    Args:
        torch_name: its name for `get_schedule_class`.
        stages_per_rank: the default number.
        is_fixed: whether it takes no other number.
        is_v: whether rank 0 has the first and the last stage (a V over the ranks); else stages go round the ranks.
        splits_backward: whether gradients of inputs and of weights are computed apart (zero bubble).
    """

    torch_name: str
    stages_per_rank: int = 1
    is_fixed: bool = True
    is_v: bool = False
    splits_backward: bool = False


SCHEDULES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule("GPipe"),
    "1f1b": PipelineSchedule("1F1B"),
    "looped_bfs": PipelineSchedule("LoopedBFS", 2, is_fixed=False),
    "interleaved_1f1b": PipelineSchedule("Interleaved1F1B", 2, is_fixed=False),
    "interleaved_zero_bubble": PipelineSchedule("InterleavedZeroBubble", 2, is_fixed=False, splits_backward=True),
    "zbv": PipelineSchedule("ZBVZeroBubble", 2, is_v=True, splits_backward=True),
    "dualpipev": PipelineSchedule("DualPipeV", 2, is_v=True, splits_backward=True),
}


@dataclass(frozen=True)
class PipelinePlan(Declared):
    """Pipeline parallel over one mesh dim: the model's layers in stages, by torch's own `PipelineStage` and schedules.

    A rank's batch goes through in `ParallelPlan.microbatches` parts. What else the plan has (TP, FSDP, activation
    checkpointing) is applied to each stage.

    Args:
        schedule: a name from SCHEDULES.
        mesh_dim: the mesh dim whose ranks have different stages and the same part of the batch.
        stages_per_rank: stages on each rank; None for as many as the schedule takes.
        first_layers: index of the layer that each stage after the first begins with; () for even shares, of which the
            first ones are larger by a layer where they do not divide.
        split: `(model, stage, num_stages) -> module`, a stage of a copy of the model (on the meta device) that it may
            change; parameters keep their names. None splits the model's `ModuleList` or `ModuleDict` of layers: modules
            before its layers are the first stage's, modules after them the last one's.
        activation_shards: mesh dim to the tensor dim that its ranks shard of activations between stages: {"tp": 1} for
            sequence parallel. Empty: every rank passes on whole activations.
    """

    schedule: str = "1f1b"
    mesh_dim: str = "pp"
    stages_per_rank: int | None = None
    first_layers: tuple[int, ...] = ()
    split: Callable[[Any, int, int], Any] | None = None
    activation_shards: Mapping[str, int] = field(default_factory=dict)

    @property
    def stages_of_a_rank(self) -> int:
        """`stages_per_rank`, or the schedule's own; 1 of a schedule that is unknown."""
        schedule = SCHEDULES.get(self.schedule, PipelineSchedule(""))
        return schedule.stages_per_rank if self.stages_per_rank is None else self.stages_per_rank

    def stages_on(self, position: int, size: int) -> tuple[int, ...]:
        """Return the stages of the rank at a position among `size`, in the model's order."""
        if SCHEDULES[self.schedule].is_v:
            return (position, 2 * size - 1 - position)
        return tuple(position + turn * size for turn in range(self.stages_of_a_rank))

    def least_bubble(self, size: int, microbatches: int) -> float | None:
        """Return the share of a step in which each of `size` ranks idles, with equal stages and free communication.

        It is (p-1)/(v m + p-1) with v stages per rank; None for zero-bubble schedules, whose share depends on the times
        of the parts of backward.

        Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", 2.2, as a share
        of the whole step and not of its ideal length.
        """
        if SCHEDULES[self.schedule].splits_backward:
            return None
        return (size - 1) / (self.stages_of_a_rank * microbatches + size - 1)


def layers_of_stages(num_layers: int, num_stages: int, first_layers: tuple[int, ...] = ()) -> list[range]:
    """Return the layers of each stage, by index."""
    share, more = divmod(num_layers, num_stages)
    begins = [stage * share + min(stage, more) for stage in range(num_stages + 1)]
    if first_layers:
        begins = [0, *first_layers, num_layers]
    return [range(start, end) for start, end in itertools.pairwise(begins)]


# Kernels of scaled_dot_product_attention that torch's context parallel supports.
ATTENTION_KERNELS = ("flash", "efficient", "cudnn")
# How attention reaches keys and values of other ranks: two ring rotations of torch's, and no ring.
ULYSSES = "ulysses"
ROTATIONS = ("allgather", "alltoall", ULYSSES)


@dataclass(frozen=True)
class LargestDim(Declared):
    """Choose each parameter's shard placement for FSDP: the largest tensor dim that is divisible and not yet sharded.

    A parameter without such a tensor dim stays sharded on tensor dim 0, unevenly.

    Args:
        min_numel: a parameter of fewer elements is kept whole on every rank, and its gradient is averaged by an
            all-reduce of its own; 0 shards everything.
    """

    min_numel: int = 0


@dataclass(frozen=True)
class FsdpPlan(Declared):
    """FSDP2: which modules `fully_shard` wraps, each on its own, before the root.

    Args:
        wrap: glob patterns over module names; "auto" for the modules that a model of transformers names in
            `_no_split_modules`.
        mesh_dims: mesh dims whose ranks share the parameters' shards; several are flattened into one. () with
            `replicate_dims` for replicas alone: torch's composable `replicate` on FSDP2's units, which goes with TP.
        replicate_dims: mesh dims whose ranks hold the same shards (hybrid sharding); several are flattened into one.
        reshard_after_forward: as `fully_shard` takes it: None, a bool, or an int group size.
        mixed_precision: a `MixedPrecisionPolicy`; or glob patterns over the units' names ("" is the root) to one each,
            of which the first that matches holds; None for torch's default.
        offload: a `CPUOffloadPolicy`, or None to keep shards on the device.
        shard_placement: `parameter -> Shard or None` as `fully_shard` takes it, or `LargestDim`; None for dim 0.
        prefetch_forward: how many units ahead to gather in forward; None leaves it to torch.
        prefetch_backward: likewise in backward.
        sync_each_microbatch: reduce gradients after every micro-batch; False waits for the last one.
        all_reduce_each_microbatch: with replicas, reduce over them after every micro-batch; False scatters after every
            one and waits for the last to all-reduce.
        reshard_each_microbatch: free gathered parameters after every backward; False keeps them until the last one.
        configure: setter of torch's `FSDPModule` to its argument, or to a dict of its keyword arguments; each unit's
            setter is called after `fully_shard`: `{"set_gradient_divide_factor": 2.0}`. A function
            `(name, mesh) -> argument` returns the argument of the unit of that name ("" is the root):
            `{"set_unshard_in_backward": lambda name, mesh: name != "embeddings"}`. With `set_all_reduce_hook`, FSDP2
            does not reduce over `replicate_dims` itself: the hook must average over them.
        gather_extension: `tensor -> tensor subclass` with `fsdp_pre_all_gather` and `fsdp_post_all_gather`, applied to
            every parameter of two or more tensor dims, so that it travels in another form.
        whole: glob patterns over names of parameters that every rank keeps whole, each gradient averaged by an
            all-reduce of its own.
        ignored: glob patterns over names of parameters that FSDP leaves alone, gradients included.
        unit_mesh_dims: glob pattern over module names to the mesh dims that shard it in the place of `mesh_dims`, as a
            unit of its own: experts, which expert parallel has sharded over one of the others. Gradients are summed
            over these, and divided as all others are.
        spmd_mesh: make the model's parameters and inputs DTensors on the whole mesh, which `fully_shard` is given with
            `dp_mesh_dims` (torch 2.12 or newer). What TP has to communicate then follows from `shard_params` and the
            model's operators, or from what `Scenario.parallelize` does. Inputs are split on tensor dim 0.
    """

    removed_fields: ClassVar[Mapping[str, str]] = {
        "not_in_backward": 'write configure={"set_unshard_in_backward": lambda name, mesh: name != "embeddings"}',
        "unshard_ahead": "call unshard(async_op=True) of units in a hook from Scenario(after_materialize=...)",
        "all_reduce_hook": 'write configure={"set_all_reduce_hook": lambda name, mesh: hook(mesh["dp_replicate"])}',
        "all_gather": 'write configure={"set_custom_all_gather": AllGather()}',
        "reduce_scatter": 'write configure={"set_custom_reduce_scatter": ReduceScatter()}',
        "gradient_divide_factor": 'write configure={"set_gradient_divide_factor": 2.0}',
    }

    wrap: tuple[str, ...] | Literal["auto"] = ()
    mesh_dims: tuple[str, ...] = ("dp_shard",)
    replicate_dims: tuple[str, ...] = ()
    reshard_after_forward: bool | int | None = None
    mixed_precision: Any = None
    offload: Any = None
    shard_placement: Callable[[Any], Any] | LargestDim | None = None
    prefetch_forward: int | None = None
    prefetch_backward: int | None = None
    sync_each_microbatch: bool = True
    all_reduce_each_microbatch: bool = True
    reshard_each_microbatch: bool = True
    configure: Mapping[str, Any] = field(default_factory=dict)
    gather_extension: Callable[[Any], Any] | None = None
    whole: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unit_mesh_dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spmd_mesh: bool = False


@dataclass(frozen=True)
class DdpPlan(Declared):
    """DistributedDataParallel by torch's composable `replicate`: every rank holds all parameters, and gradients are
    averaged in buckets while backward still runs.

    Args:
        mesh_dims: mesh dims whose ranks average; several are flattened into one.
        bucket_cap_mb: MiB of gradients in a bucket; None for torch's 25, of which the first has 1.
        gradient_as_bucket_view: let gradients live in the buckets.
        static_graph: the same parameters take part in every step.
        find_unused_parameters: look in each step for parameters that get no gradient; DDP waits for them otherwise.
        ignored: glob patterns over module names whose parameters' gradients are left as they are.
        sync_each_microbatch: average gradients after every micro-batch; False waits for the last one.
    """

    removed_fields: ClassVar[Mapping[str, str]] = {"fuse": "leave it out: DDP's reducer in C++ makes the buckets"}

    mesh_dims: tuple[str, ...] = ("dp_replicate",)
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    ignored: tuple[str, ...] = ()
    sync_each_microbatch: bool = True


@dataclass(frozen=True)
class CpPlan(Declared):
    """Context parallel over one mesh dim: ring attention, or Ulysses.

    Args:
        mesh_dim: the mesh dim that shards the sequence.
        rotate: how K and V travel round the ring: "allgather" or "alltoall"; or "ulysses", without a ring: all-to-alls
            of Q, K and V give each rank some heads of the whole sequence, and one of the output takes it back. The mesh
            dim must divide the heads, of K and V too. https://arxiv.org/abs/2309.14509
        load_balance: give each rank a head and a tail chunk of the sequence, so that causal work on a ring is even.
            None where there is a ring; Ulysses has nothing to balance.
        seq_dim: tensor dim of inputs, targets and (with `unshard_output`) the output that is the sequence.
        buffers: name of a model's buffer to the tensor dim that is the sequence; sharded for the step, then restored.
        unshard_output: gather the model's output along the sequence, in its original order, before the loss; every rank
            then computes the loss of the whole sequence. The output must be one plain tensor, batch first.
        kernel: the attention kernel, out of ATTENTION_KERNELS; None leaves the choice to torch. A CPU has "flash" only.
    """

    mesh_dim: str = "cp"
    rotate: str = "allgather"
    load_balance: bool | None = None
    seq_dim: int = 1
    buffers: Mapping[str, int] = field(default_factory=dict)
    unshard_output: bool = False
    kernel: str | None = None

    @property
    def balances(self) -> bool:
        """`load_balance`, or its default."""
        return self.rotate != ULYSSES if self.load_balance is None else self.load_balance


@dataclass(frozen=True)
class ShardParam(Declared):
    """Annotate a parameter as a DTensor sharded on one tensor dim; nothing is done to inputs or outputs.

    Args:
        tensor_dim: the tensor dim to shard; the product of the mesh dims must divide it.
        mesh_dims: which of the plan's `tp_dim` to shard it over, in the mesh's order; it is replicated over the
            others. A parameter that several patterns match is sharded by all of them, over different mesh dims.
    """

    tensor_dim: int = 0
    mesh_dims: tuple[str, ...] = ("tp",)


@dataclass(frozen=True)
class CompilePlan(Declared):
    """torch.compile, module by module, before FSDP sees them.

    Args:
        modules: glob patterns over module names; "" is the whole model.
        backend: a name from `torch.compiler.list_backends()`, "aot_eager" or "eager".
        async_tp: have inductor split the all-gathers and reduce-scatters of `tp`, and the matmuls next to them, into
            pieces that overlap, through symmetric memory: on CUDA only.
    """

    modules: tuple[str, ...]
    backend: str = "inductor"
    async_tp: bool = False


@dataclass(frozen=True)
class ParallelPlan(Declared):
    """How the model is laid over the mesh: pipeline stages, and in each TP, EP, then CP, activation checkpointing,
    compile, and FSDP or DDP last.

    Args:
        shard_params: glob pattern over parameter names to `ShardParam`; applied before `tp`.
        tp: glob pattern over module names to torch `ParallelStyle`, or to the name of a style as models of transformers
            have it ("colwise", "rowwise", ...); "auto" for the plan that such a model brings along. A callable
            `(model, mesh) -> model` is what `Scenario.parallelize` is, on the mesh of `tp_dim` alone.
        tp_dim: the mesh dim that `tp` and `shard_params` work on, or several. Styles get them flattened into one mesh
            dim; a callable and annotations get a mesh of as many mesh dims.
        ep: glob pattern over module names to the torch `ParallelStyle` that shards its experts and exchanges tokens.
        ep_dim: the mesh dim that `ep` works on, whose ranks have different parts of the batch; or several, flattened
            into one: ("ep", "tp") has whole experts on the ranks of tensor parallel too, which torchtitan calls an
            expert_tensor_parallel_degree of 1.
        ep_tp_dim: a mesh dim that shards each expert's weights besides (EP x TP); its ranks have the same tokens. The
            styles of `ep` get a mesh of both mesh dims, where the mesh has this one.
        loss_parallel: compute the loss on logits that stay sharded over the vocabulary.
        cp: context parallel, or None.
        checkpoint: glob patterns over modules whose activations are computed again in backward.
        checkpoint_context: what `torch.utils.checkpoint` takes as `context_fn`, to keep the outputs of some operators:
            `() -> create_selective_checkpoint_contexts(policy)`; None keeps none.
        compile: torch.compile, or None.
        fsdp: FSDP2, or None.
        ddp: DistributedDataParallel, or None; in the place of FSDP2.
        microbatches: parts that a rank's batch is split into; gradients accumulate over them before the optimizer.
        pipeline: pipeline parallel, or None.
        state_dict: end each step with a round trip of the sharded state of model and optimizer, in phases of its own:
            `save` copies it out, `load` puts it back.
    """

    shard_params: Mapping[str, ShardParam] = field(default_factory=dict)
    tp: Mapping[str, Any] | Callable[[Any, Any], Any] | Literal["auto"] | None = None
    tp_dim: str | tuple[str, ...] = "tp"
    ep: Mapping[str, Any] = field(default_factory=dict)
    ep_dim: str | tuple[str, ...] = "ep"
    ep_tp_dim: str | None = None
    loss_parallel: bool = False
    cp: CpPlan | None = None
    checkpoint: tuple[str, ...] = ()
    checkpoint_context: Callable[[], Any] | None = None
    compile: CompilePlan | None = None
    fsdp: FsdpPlan | None = None
    ddp: DdpPlan | None = None
    microbatches: int = 1
    pipeline: PipelinePlan | None = None
    state_dict: bool = False

    @property
    def tp_dims(self) -> tuple[str, ...]:
        """`tp_dim` as a tuple."""
        return (self.tp_dim,) if isinstance(self.tp_dim, str) else self.tp_dim

    @property
    def ep_dims(self) -> tuple[str, ...]:
        """`ep_dim` as a tuple."""
        return (self.ep_dim,) if isinstance(self.ep_dim, str) else self.ep_dim


def folded(name: str) -> str:
    """A module's name with the numbers of layers left out: `layers.3.wq` is `layers.*.wq`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that a glob pattern matches, part by part: `*` never crosses a dot."""
    parts = pattern.split(".")
    split = {name: name.split(".") for name in names}
    return [
        name
        for name, name_parts in split.items()
        if len(name_parts) == len(parts) and all(map(fnmatch.fnmatchcase, name_parts, parts))
    ]
