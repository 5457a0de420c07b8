"""The private and experimental torch names that distbench uses, and whether this version of torch has them."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distbench.spec import UserError
from distbench.spec.devices import NUMA_BINDING
from distbench.spec.versions import SUPPORTED, outside_of_support, release


class Unsupported(Exception):
    """This version of torch or this machine lacks a requirement of a case; the message has the reason."""

    status = "unsupported"


class Skipped(Unsupported):
    """This machine or mesh has nothing to measure, which is not a failure; the message has the reason."""

    status = "skipped"


@dataclass(frozen=True)
class Internal:
    """A torch name that a feature uses without a guarantee by torch, or its alternative names in different versions.

    The alternatives are dotted names in a module, each with its required parameters.
    """

    feature: str
    module: str
    alternatives: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def name(self) -> str:
        """Alternative names as text."""
        return " or ".join(dict(self.alternatives))


class Probe(NamedTuple):
    """An Internal, and its missing part in this version of torch, or None."""

    internal: Internal
    missing: str | None


PLANNERS = "redistribution planners"
PATHS = "redistribution paths"
PENDING = "results of functional collectives"
KERNELS = "kernels around collectives"
STORE = "store of the default process group"
COALESCED = "coalesced all-reduces"
BINDING = "ranks bound to NUMA nodes"
SPMD_MESH = "FSDP2 on one SPMD mesh"
STRATEGIES = "placements of DTensor's operators on lists"
REDUCER = "DDP's reducer on a simulated device"
STAGES_AGREE = "pipelines on a fake process group"
V_SCHEDULES = "schedules with stages in a V, on gloo"
SHARDED_INDICES = "backward of indexing by a sharded tensor"
ZERO_FILLS = "redistribution from Shard to Partial by zero-fill"
# Features that older versions of torch lack, to the first version with them.
LOWEST = {
    **{SPMD_MESH: (2, 12), V_SCHEDULES: (2, 12), SHARDED_INDICES: (2, 12), ZERO_FILLS: (2, 14)},
    # Options that the `configure` fields of plans pass to torch.
    **dict.fromkeys(("set_symm_mem_for_comm", "batched_grad_copy"), (2, 12)),
    **dict.fromkeys(("set_separate_reduce_scatter_group", "set_reduce_scatter_max_input_buffers"), (2, 13)),
    **dict.fromkeys(("set_reduce_scatter_unused_params", "defer_pp_recv"), (2, 13)),
    **dict.fromkeys(("set_keep_unsharded_storage", "lazy_bucket_allocation", "pipeline_per_edge_p2p"), (2, 15)),
    **{"pipeline_per_direction_p2p": (2, 14)},  # torch 2.15 calls it pipeline_per_edge_p2p
    **dict.fromkeys(("max_active_stages", "unshard_lookahead", "defer_reduce_grad_wait"), (2, 15)),
    **dict.fromkeys(("max_outstanding_sends", "param_dtype_override_fn"), (2, 15)),
}
# Features that work around a change of torch in that version; older versions need no workaround.
NEEDLESS_BEFORE = {STAGES_AGREE: (2, 12)}

BIND = "_maybe_apply_numa_binding_to_current_process"
CP = "torch.distributed.tensor.experimental._context_parallel._attention"
FAKE = "torch._subclasses.fake_tensor"
FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
LOCAL = "redistribute_local_tensor(local_tensor, current_spec, target_spec"
PIPELINES = "torch.distributed.pipelining.schedules"
PLACEMENTS = "torch.distributed.tensor.placement_types"
PLANNER = "DTensorRedistributePlanner"
REDISTRIBUTE = "torch.distributed.tensor._redistribute"
REPLICATE = "torch.distributed._composable.replicate"
SPECS = "src_spec, dst_spec"
# Feature, to modules of torch, to dotted names in each with their required parameters; " or " separates alternatives.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    PLANNERS: {
        REDISTRIBUTE: (
            f"_gen_transform_infos({SPECS}, use_graph_based_transform)",
            "_gen_transform_infos_non_cached",
            "_gen_transform_infos.cache_clear",
            "clear_redistribute_planner_cache",
            "use_min_cost_redistribution_plan(enabled)",
            "_optimize_transform_infos(transform_infos, device_mesh, src_placements, dst_placements)",
        ),
        "torch.distributed.tensor._dtensor_spec": ("TensorMeta",),
    },
    PATHS: {
        REDISTRIBUTE: (
            f"{PLANNER}.stringify_transform_infos(mesh, transform_infos, src_placement, src_shard_order)",
            f"{LOCAL}, is_explicit)",
        ),
        "torch.distributed.tensor._dtensor_spec": (
            "DTensorSpec(mesh, placements, tensor_meta, shard_order)",
            "ShardOrderEntry(tensor_dim, mesh_dims)",
        ),
    },
    "calibrated planning": {
        REDISTRIBUTE: (
            f"{PLANNER}.find_min_cost_path(self, src_state, dst_state)",
            f"{PLANNER}.get_next_state",
            f"{PLANNER}.DistState",
            f"{PLANNER}.generate_graph_based_transform_infos({SPECS}, full_tensor_shape)",
            "_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
        ),
        "torch.distributed.tensor._ops.utils": ("redistribute_cost(current_spec, target_spec)",),
    },
    "ranks of a mesh in their order": {"torch.utils._python_dispatch": ("_disable_current_modes",)},
    "native all-to-all on CPU": {
        PLACEMENTS: ("shard_dim_alltoall(input, gather_dim, shard_dim, mesh, mesh_dim)",),
        "torch": ("ops._dtensor.shard_dim_alltoall",),
    },
    "collectives seen at dispatch": {
        "torch.utils._python_dispatch": ("TorchDispatchMode",),
        "torch.distributed.distributed_c10d": ("_resolve_process_group",),
        "torch.distributed": ("ProcessGroup.unbox",),
    },
    PENDING: {"torch.distributed._functional_collectives": ("AsyncCollectiveTensor",)},
    KERNELS: {
        "torch": ("_C._dispatch_keyset_full_after", "_C._distributed_c10d.PythonCallbackWork"),
        "torch.distributed": ("Work.boxed", "Work.unbox"),
    },
    STORE: {"torch.distributed.distributed_c10d": ("_get_default_store",)},
    COALESCED: {"torch.distributed.distributed_c10d": ("_coalescing_manager(group)",)},
    "communication labels": {
        "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
            "FSDPParamGroup.unshard(self, async_op)",
            "FSDPParamGroup.post_backward",
        ),
        FSDP_PARAM: ("FSDPParam._get_grad_inner_tensor",),
        "torch.distributed.tensor._api": (f"{LOCAL})",),
        "torch.distributed.tensor._dispatch": (f"{LOCAL})",),
        REDISTRIBUTE: (f"{LOCAL})",),
    },
    "units of FSDP2": {
        "torch.distributed.fsdp": ("FSDPModule._get_fsdp_state",),
        "torch.distributed.fsdp._fully_shard._fsdp_state": ("FSDPState.init(mp_policy)",),
    },
    # torch has the second name since 2.14.
    BINDING: {"torch.numa.binding": (f"{BIND}(gpu_index, numa_options) or {BIND}(device_index, numa_options)",)},
    "memory of a step": {
        "torch.autograd.profiler": ("_enable_profiler",),
        "torch._C._autograd": ("_ProfilerResult.experimental_event_tree",),
        "torch._C._profiler": ("RecordScope.BACKWARD_FUNCTION", "_ProfilerEvent.extra_fields"),
    },
    "autograd sequence numbers": {
        "torch": ("_C._current_autograd_node",),
        "torch.autograd": ("_get_sequence_nr",),
    },
    "runs of autograd": {"torch.autograd": ("_engine_run_backward",)},
    "tensors without values": {
        FAKE: ("FakeTensorMode", "FakeTensor"),
        "torch.amp.grad_scaler": ("GradScaler._maybe_opt_step(self, optimizer, optimizer_state)",),
    },
    "simulated device": {
        "torch.utils.backend_registration": ("_setup_privateuseone_for_python_backend(rename, backend_module)",),
        "torch": (
            "_C._dispatch_get_registrations_for_dispatch_key",
            "_C._get_dispatch_mode",
            "ops.aten._scaled_dot_product_flash_attention",
        ),
        FAKE: ("unset_fake_temporarily",),
        "torch.distributed.fsdp._fully_shard._fully_shard": ("_get_post_forward_mesh_info",),
        "torch.distributed._functional_collectives": ("_are_we_tracing",),
        "torch.distributed.tensor._sharding_prop": ("ShardingPropagator._propagate_tensor_meta_non_cached",),
        "torch.distributed": ("Backend.backend_capability", "Backend.default_device_backend_map"),
    },
    STRATEGIES: {
        "torch.distributed.tensor._sharding_prop": ("ShardingPropagator.propagate_op_sharding_non_cached(op_schema)",)
    },
    "chunks of parameters": {FSDP_PARAM: ("_chunk_with_empty(tensor, num_chunks, dim)",)},
    "fake process group": {
        "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
        "torch.distributed.tensor.debug": ("_clear_sharding_prop_cache",),
        "torch.distributed.tensor._collective_utils": (
            "_mesh_resources.num_devices_per_host(device_type)",
            "MeshTopoInfo.build_from_mesh.cache_clear",
        ),
    },
    "partition to Partial": {"torch.distributed.tensor": ("Partial._partition_value(tensor, mesh, mesh_dim)",)},
    "process groups by name": {"torch.distributed.distributed_c10d": ("_world.pg_map",)},
    STAGES_AGREE: {
        "torch.distributed.pipelining._utils": ("InferenceMode.STATIC",),
        # torch has the second name since 2.15.
        PIPELINES: (
            "_PipelineSchedule._warmup_p2p(stages) or _PipelineSchedule._initialize_pipeline_distributed_state(stages)",
        ),
    },
    "simulated messages of pipelines": {PIPELINES: ("_batch_p2p(p2p_ops)",)},
    "2-D parameter shards": {PLACEMENTS: ("_StridedShard",)},
    "context parallel": {CP: ("set_rotate_method(rotate_method)", "_cp_options.enable_load_balance")},
    "context parallel outputs": {
        CP: (
            "context_parallel_unshard(mesh, buffers, seq_dims, load_balancer)",
            "_context_parallel_buffers(mesh, buffers, load_balancer)",
            "_create_default_load_balancer(seq_length, world_size, device)",
        )
    },
    "context parallel on CPU": {
        CP: (
            "_templated_ring_attention(group, seq_dim, op, query, key, value, is_causal)",
            "_templated_ring_attention_backward("
            "group, seq_dim, op, grad_out, grad_out_name, query, key, value, out, logsumexp)",
        ),
        "torch": (
            "ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        ),
    },
    "FlexAttention under context parallel": {
        CP: (
            "_context_parallel_shard(mesh, buffers, seq_dims, load_balancer)",
            "_ContextParallel(seq_dim, attention_type)",
            "context_parallel_unshard(mesh, buffers, seq_dims, load_balancer)",
            "_compiled_create_block_mask",
        ),
        CP.replace("._attention", "._load_balancer"): (
            "_HeadTailLoadBalancer(seq_length, world_size, device)",
            "_PerDocumentHeadTailLoadBalancer(seq_length_per_doc, world_size, device)",
            "_PTRRLoadBalancer(block_mask, world_size)",
        ),
    },
    "composable DDP": {REPLICATE: ("replicate(module, ignored_modules)", "DDP")},
    REDUCER: {
        "torch.distributed": (
            "Reducer._rebuild_buckets",
            "Reducer._set_static_graph",
            "_verify_params_across_processes",
        )
    },
    "replicas by unit": {f"{REPLICATE}_with_fsdp": ("replicate(module, mesh, ignored_params)",)},
    "async TP": {
        "torch.distributed._symmetric_memory": ("enable_symm_mem_for_group(group_name)",),
        "torch._inductor.config": ("_micro_pipeline_tp",),
    },
    "mesh dims flattened for FSDP": {"torch.distributed.device_mesh": ("DeviceMesh._flatten",)},
    SPMD_MESH: {"torch.distributed.fsdp": ("fully_shard(module, mesh, dp_mesh_dims)",)},
}


def _internal(feature: str, module: str, text: str) -> Internal:
    parts = [alternative.rstrip(")").partition("(") for alternative in text.split(" or ")]
    return Internal(feature, module, tuple((name, tuple(filter(None, names.split(", ")))) for name, _, names in parts))


INTERNALS = tuple(
    _internal(feature, module, text)
    for feature, names_in in NEEDED.items()
    for module, texts in names_in.items()
    for text in texts
)


def probe() -> list[Probe]:
    """Look up every internal for this version of torch, without changes to torch."""
    version = release(torch.__version__)
    return [
        Probe(internal, needs_newer(internal.feature) or _missing(internal))
        for internal in INTERNALS
        if version >= NEEDLESS_BEFORE.get(internal.feature, version)
    ]


def require(feature: str) -> None:
    """Raise `Unsupported` if this version of torch is too old for a feature, or lacks one of its internals."""
    if too_old := needs_newer(feature):
        raise Unsupported(f"{feature}: {too_old}")
    for internal in INTERNALS:
        if internal.feature == feature and (missing := _missing(internal)):
            advice = outside_of_support(torch.__version__) or f"distbench supports {SUPPORTED}"
            raise Unsupported(f"{feature}: torch {torch.__version__} {missing}; {advice}")


@functools.cache
def lacks(feature: str) -> str | None:
    """Return the error of `require` for a feature with this version of torch, else None."""
    try:
        require(feature)
    except Unsupported as reason:
        return str(reason)
    return None


def needs_newer(feature: str) -> str | None:
    """Return "needs torch X or newer, but this is Y" if this torch is too old for a feature, else None."""
    lowest = LOWEST.get(feature, (0, 0))
    if release(torch.__version__) >= lowest:
        return None
    return f"needs torch {lowest[0]}.{lowest[1]} or newer, but this is {torch.__version__}"


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace `owner.name` while the context is open."""
    plain = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _missing(internal: Internal) -> str | None:
    """Return the missing part of an internal's last alternative; None if this torch has an alternative."""
    missing: str | None = None
    for name, parameters in internal.alternatives:
        try:
            value: Any = importlib.import_module(internal.module)
            for part in name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            missing = f"has no {internal.module}.{internal.name}"
            continue
        accepted = inspect.signature(value).parameters if parameters else ()
        lacking = [parameter for parameter in parameters if parameter not in accepted]
        if not lacking:
            return None
        missing = f"has {name} without its parameter {', '.join(lacking)}"
    return missing


# Modules whose import takes longer than the first compiled step of a process; they import all others.
COMPILER = ("torch._functorch.aot_autograd", "torch._inductor.pattern_matcher")


def import_compiler() -> None:
    """Import torch's compiler for processes forked from this process, without compiling."""
    for name in COMPILER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return torch.compile's error types for code that it cannot compile; a module's own errors have other types."""
    with contextlib.suppress(ImportError, AttributeError):
        return (importlib.import_module("torch._dynamo.exc").TorchDynamoException,)
    return ()


def bind_to_numa_node(local_rank: int, mode: str) -> None:
    """Bind this process to the CPUs near its device, as torchrun's `--numa-binding` does.

    Raises UserError for a mode that torch lacks, and Unsupported if this version of torch binds in another way.
    """
    require(BINDING)
    from torch.numa import binding

    modes = [affinity_mode.value for affinity_mode in binding.AffinityMode]
    if mode not in modes:
        raise UserError(
            f"{NUMA_BINDING}={mode} is not a valid binding of ranks; use {', '.join(modes)}, or unset the variable"
        )
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    bind = getattr(binding, BIND)
    index = next(name for name in ("device_index", "gpu_index") if name in inspect.signature(bind).parameters)
    bind(**{index: local_rank}, numa_options=options)
