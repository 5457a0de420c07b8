"""Plans: the layout of a model over a mesh, with the parts in the order of application.

torch objects have the type `Any`, because this module does not import torch: a scenario builds the objects, the worker
uses them.
"""

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from distbench.spec.checked_dataclass import Declared

LOSS = "(loss)"  # the loss as an owner of operators and collectives
LOSS_CHUNKS = 8


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of torch.distributed.pipelining.

    Args:
        torch_name: name for `get_schedule_class`.
        stages_per_rank: default number of stages per rank.
        is_fixed: whether the number of stages per rank cannot change.
        is_v: whether rank 0 has the first and the last stage (a V over the ranks); otherwise stages are assigned
            round-robin.
        splits_backward: whether gradients of inputs and of weights are computed separately (zero bubble).
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
    """Pipeline parallel over one mesh dim: the model's layers in stages, by torch's `PipelineStage` and schedules.

    A rank's batch passes the stages in `ParallelPlan.microbatches` parts. The plan's other parts (TP, FSDP, activation
    checkpointing) are applied to each stage.

    Args:
        schedule: a name from SCHEDULES.
        mesh_dim: the mesh dim whose ranks have different stages and the same part of the batch.
        stages_per_rank: stages on each rank; None for the schedule's default.
        first_layers: index of the first layer of each stage after the first stage; () for even shares (the remainder
            gives the first stages one more layer each).
        split: `(model, stage, num_stages) -> module`, which makes a stage from a copy of the model (on the meta device)
            and may change the copy; parameters keep their names. None splits the model's `ModuleList` or `ModuleDict`
            of layers: the first stage also has the modules before the layers, the last stage the modules after them.
        activation_shards: mesh dim to the tensor dim over which its ranks shard activations between stages: {"tp": 1}
            for sequence parallel. If empty, every rank sends whole activations.
        configure: further parameter of the schedule's class, or of `torch.distributed.config`, to its value:
            `{"defer_pp_recv": True}`.
    """

    schedule: str = "1f1b"
    mesh_dim: str = "pp"
    stages_per_rank: int | None = None
    first_layers: tuple[int, ...] = ()
    split: Callable[[Any, int, int], Any] | None = None
    activation_shards: Mapping[str, int] = field(default_factory=dict)
    configure: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stages_of_a_rank(self) -> int:
        """`stages_per_rank`, or the schedule's default; 1 for an unknown schedule."""
        schedule = SCHEDULES.get(self.schedule, PipelineSchedule(""))
        return schedule.stages_per_rank if self.stages_per_rank is None else self.stages_per_rank

    def stages_on(self, position: int, size: int) -> tuple[int, ...]:
        """Return the stages of the rank at a position among `size` ranks, in the model's order."""
        if SCHEDULES[self.schedule].is_v:
            return (position, 2 * size - 1 - position)
        return tuple(position + turn * size for turn in range(self.stages_of_a_rank))

    def least_bubble(self, size: int, microbatches: int) -> float | None:
        """Return the share of a step in which each of `size` ranks idles, with equal stages and free communication.

        The share is (p-1)/(v m + p-1) for p ranks, m micro-batches and v stages per rank. The result is None for
        zero-bubble schedules, because their share depends on the times of the parts of backward.

        Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", 2.2, converted
        from a share of the ideal step to a share of the whole step.
        """
        if SCHEDULES[self.schedule].splits_backward:
            return None
        return (size - 1) / (self.stages_of_a_rank * microbatches + size - 1)


def layers_of_stages(num_layers: int, num_stages: int, first_layers: tuple[int, ...] = ()) -> list[range]:
    """Return the range of layer indexes of each stage."""
    share, more = divmod(num_layers, num_stages)
    begins = [stage * share + min(stage, more) for stage in range(num_stages + 1)]
    if first_layers:
        begins = [0, *first_layers, num_layers]
    return [range(start, end) for start, end in itertools.pairwise(begins)]


# Kernels of scaled_dot_product_attention that torch's context parallel supports.
ATTENTION_KERNELS = ("flash", "efficient", "cudnn")
# Methods by which attention gets the keys and values of other ranks: two ring rotations of torch, and "ulysses" without
# a ring.
ULYSSES = "ulysses"
ROTATIONS = ("allgather", "alltoall", ULYSSES)


@dataclass(frozen=True)
class LargestDim(Declared):
    """Choose each parameter's shard placement for FSDP: the largest tensor dim that is divisible and not yet sharded.

    A parameter without such a tensor dim is sharded unevenly on tensor dim 0.

    Args:
        min_numel: every rank has the whole of each parameter with fewer elements, and a separate all-reduce averages
            its gradient; 0 shards all parameters.
    """

    min_numel: int = 0


@dataclass(frozen=True)
class FsdpPlan(Declared):
    """FSDP2: `fully_shard` wraps each matching module as a separate unit, then the root.

    Args:
        wrap: glob patterns over module names; "auto" for the modules in `_no_split_modules` of a transformers model.
        mesh_dims: mesh dims whose ranks share the parameters' shards; several are flattened into one. () with
            `replicate_dims` gives replicas without shards: torch's composable `replicate` on FSDP2's units, which works
            with TP.
        replicate_dims: mesh dims whose ranks have the same shards (hybrid sharding); several are flattened into one.
        reshard_after_forward: argument of `fully_shard`: None, a bool, or an int group size.
        mixed_precision: a `MixedPrecisionPolicy`, or a mapping from glob patterns over unit names ("" is the root) to
            policies, with the first match used; None for torch's default.
        offload: a `CPUOffloadPolicy`, or None to keep shards on the device.
        shard_placement: `parameter -> Shard or None`, as for `fully_shard`, or `LargestDim`; None for tensor dim 0.
        prefetch_forward: number of units to gather ahead in forward; None for torch's default.
        prefetch_backward: number of units to gather ahead in backward.
        sync_each_microbatch: reduce gradients after every micro-batch; False reduces after the last micro-batch.
        all_reduce_each_microbatch: with replicas, all-reduce gradients after every micro-batch; False reduce-scatters
            after every micro-batch and all-reduces after the last.
        reshard_each_microbatch: free gathered parameters after every backward; False frees them after the last
            backward.
        configure: setter of torch's `FSDPModule` to its argument, or to a dict of keyword arguments, as in
            `{"set_gradient_divide_factor": 2.0}`. Each unit's setter is called after `fully_shard`. A function `(name,
            mesh) -> argument` returns a unit's argument from the unit's name ("" is the root):
            `{"set_unshard_in_backward": lambda name, mesh: name != "embeddings"}`. With `set_all_reduce_hook`, FSDP2
            does not reduce over `replicate_dims`; the hook must average over these mesh dims.
        gather_extension: `tensor -> tensor subclass` with `fsdp_pre_all_gather` and `fsdp_post_all_gather`, applied to
            every parameter of two or more tensor dims, so that the all-gather sends another format.
        whole: glob patterns over names of parameters that are not sharded; a separate all-reduce averages each
            gradient.
        ignored: glob patterns over names of parameters that FSDP does not change, including gradients.
        unit_mesh_dims: glob pattern over module names to the mesh dims that shard the module, instead of `mesh_dims`,
            as a separate unit: for experts, which expert parallel shards over another of the mesh dims. Gradients are
            summed over the unit's mesh dims, and divided by the same number as all other gradients.
        spmd_mesh: make the model's parameters and inputs DTensors on the whole mesh, and pass this mesh to
            `fully_shard` with `dp_mesh_dims` (torch 2.12 or newer). TP's communication then follows from `shard_params`
            and the model's operators, or from `Scenario.parallelize`. Inputs are split on tensor dim 0.
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
    """DistributedDataParallel by torch's composable `replicate`: every rank has all parameters, and gradients are
    averaged in buckets during backward.

    Args:
        mesh_dims: mesh dims whose ranks average gradients; several are flattened into one.
        bucket_cap_mb: MiB of gradients per bucket; None for torch's default of 25 (1 for the first bucket).
        gradient_as_bucket_view: store gradients in the buckets.
        static_graph: whether every step uses the same parameters.
        find_unused_parameters: search in each step for parameters without a gradient; otherwise DDP waits for their
            gradients.
        ignored: glob patterns over module names; gradients of these modules' parameters are not averaged.
        sync_each_microbatch: average gradients after every micro-batch; False averages after the last micro-batch.
        configure: further parameter of torch's `DistributedDataParallel` to its value: `{"bucket_cap_mb_list": [1,
            25]}`.
        comm_hook: `process group -> (state, hook)`, whose hook reduces each bucket instead of an all-reduce: `lambda
            group: (group, default_hooks.fp16_compress_hook)`. The result must be the mean over the ranks.
    """

    called_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"comm_hook": ("group",)}
    removed_fields: ClassVar[Mapping[str, str]] = {"fuse": "leave out this field; DDP's C++ reducer makes the buckets"}

    mesh_dims: tuple[str, ...] = ("dp_replicate",)
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    ignored: tuple[str, ...] = ()
    sync_each_microbatch: bool = True
    configure: Mapping[str, Any] = field(default_factory=dict)
    comm_hook: Callable[[Any], tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class CpPlan(Declared):
    """Context parallel over one mesh dim: ring attention, or Ulysses.

    Args:
        mesh_dim: the mesh dim that shards the sequence.
        rotate: the collective that rotates K and V in the ring, "allgather" or "alltoall"; or "ulysses", without a
            ring. With Ulysses, all-to-alls of Q, K and V give each rank some heads of the whole sequence, and an
            all-to-all of the output restores the sharded sequence. The size of the mesh dim must divide the numbers of
            heads of Q, K and V. https://arxiv.org/abs/2309.14509
        load_balance: give each rank a head and a tail chunk of the sequence, so that causal attention on a ring has
            equal work on all ranks. None means True for a ring, False for Ulysses.
        seq_dim: the tensor dim for the sequence in inputs, targets and (with `unshard_output`) the output.
        buffers: name of a model's buffer to its tensor dim for the sequence; buffers are sharded for the step, then
            restored.
        unshard_output: gather the model's output along the sequence, in its original order, before the loss; every rank
            then computes the loss of the whole sequence. The output must be one plain tensor, batch first.
        kernel: the attention kernel, out of ATTENTION_KERNELS (on CPUs only "flash"); None for torch's choice.
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
        """`load_balance`, or by default whether there is a ring."""
        return self.rotate != ULYSSES if self.load_balance is None else self.load_balance


@dataclass(frozen=True)
class ShardParam(Declared):
    """Annotation of a parameter as a DTensor that is sharded on one tensor dim. Inputs and outputs do not change.

    Args:
        tensor_dim: the tensor dim to shard; the product of the mesh dims' sizes must divide its size.
        mesh_dims: the mesh dims of the plan's `tp_dim` over which to shard the parameter, in the mesh's order; over
            other mesh dims, the parameter is replicated. Several matching patterns shard a parameter over different
            mesh dims.
    """

    tensor_dim: int = 0
    mesh_dims: tuple[str, ...] = ("tp",)


@dataclass(frozen=True)
class CompilePlan(Declared):
    """torch.compile for each matching module, before FSDP wraps the module.

    Args:
        modules: glob patterns over module names; "" is the whole model.
        backend: a name from `torch.compiler.list_backends()`, "aot_eager" or "eager".
        async_tp: let inductor split the all-gathers and reduce-scatters of `tp`, and the adjacent matmuls, into pieces
            that overlap, with symmetric memory (CUDA only).
    """

    modules: tuple[str, ...]
    backend: str = "inductor"
    async_tp: bool = False


@dataclass(frozen=True)
class ParallelPlan(Declared):
    """The layout of a model over a mesh: pipeline stages, and in each stage in this order TP, EP, CP, activation
    checkpointing, compile, and FSDP or DDP.

    Args:
        shard_params: glob pattern over parameter names to `ShardParam`; applied before `tp`.
        tp: glob pattern over module names to a torch `ParallelStyle`, or to a style's name in transformers ("colwise",
            "rowwise", ...); "auto" for the plan of a transformers model. A callable `(model, mesh) -> model` works as
            `Scenario.parallelize`, but on the mesh of `tp_dim` only.
        tp_dim: the mesh dim or mesh dims of `tp` and `shard_params`. Several mesh dims are flattened into one mesh
            dim for styles; a callable and annotations get a mesh with all these mesh dims.
        ep: glob pattern over module names to the torch `ParallelStyle` that shards the module's experts and exchanges
            tokens.
        ep_dim: the mesh dim of `ep`, whose ranks have different parts of the batch; or several mesh dims, flattened
            into one: with ("ep", "tp"), the ranks of tensor parallel have different whole experts (in torchtitan, an
            expert_tensor_parallel_degree of 1).
        ep_tp_dim: a further mesh dim, over which each expert's weights are sharded (EP x TP); its ranks have the same
            tokens. If the mesh has this mesh dim, the styles of `ep` get a mesh of both mesh dims.
        loss_parallel: compute the loss on logits that remain sharded over the vocabulary.
        loss: compute `Scenario.loss` "compiled" by torch.compile, with the backend of `compile`, or "chunked": on
            LOSS_CHUNKS parts of the sequence, each computed again in backward. Both keep logits in their own dtype
            instead of a copy in fp32. None computes the loss as written.
        cp: context parallel, or None.
        checkpoint: glob patterns over names of modules whose activations are recomputed in backward.
        checkpoint_context: `context_fn` of `torch.utils.checkpoint`, to store the outputs of some operators: `() ->
            create_selective_checkpoint_contexts(policy)`; None stores no outputs.
        compile: torch.compile, or None.
        fsdp: FSDP2, or None.
        ddp: DistributedDataParallel instead of FSDP2, or None.
        microbatches: number of parts of a rank's batch; gradients accumulate over the parts before the optimizer.
        pipeline: pipeline parallel, or None.
        state_dict: end each step with a round trip of the sharded state of model and optimizer, in two phases: `save`
            copies the state, `load` restores it.
    """

    shard_params: Mapping[str, ShardParam] = field(default_factory=dict)
    tp: Mapping[str, Any] | Callable[[Any, Any], Any] | Literal["auto"] | None = None
    tp_dim: str | tuple[str, ...] = "tp"
    ep: Mapping[str, Any] = field(default_factory=dict)
    ep_dim: str | tuple[str, ...] = "ep"
    ep_tp_dim: str | None = None
    loss_parallel: bool = False
    loss: Literal["compiled", "chunked"] | None = None
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
    def compiles(self) -> bool:
        """Whether torch.compile compiles any part of the step."""
        return self.compile is not None or self.loss == "compiled"

    @property
    def tp_dims(self) -> tuple[str, ...]:
        """`tp_dim` as a tuple."""
        return (self.tp_dim,) if isinstance(self.tp_dim, str) else self.tp_dim

    @property
    def ep_dims(self) -> tuple[str, ...]:
        """`ep_dim` as a tuple."""
        return (self.ep_dim,) if isinstance(self.ep_dim, str) else self.ep_dim


def folded(name: str) -> str:
    """Return a module's name with `*` for the numbers of layers: `layers.*.wq` for `layers.3.wq`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a glob pattern matches part by part: `*` does not match a dot."""
    parts = pattern.split(".")
    split = {name: name.split(".") for name in names}
    return [
        name
        for name, name_parts in split.items()
        if len(name_parts) == len(parts) and all(map(fnmatch.fnmatchcase, name_parts, parts))
    ]
