"""The private and experimental torch names that distbench uses, and whether this torch has them."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from distbench.spec import UserError
from distbench.spec.devices import NUMA_BINDING
from distbench.spec.versions import SUPPORTED, outside_of_support, release

REDISTRIBUTE = "torch.distributed.tensor._redistribute"
PLACEMENTS = "torch.distributed.tensor.placement_types"
SPEC = "torch.distributed.tensor._dtensor_spec"
COSTS = "torch.distributed.tensor._collective_utils"
DIST = "torch.distributed"
MESH = "torch.distributed.device_mesh"
FAKE = "torch._subclasses.fake_tensor"
FUNCTIONAL = "torch.distributed._functional_collectives"
FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
C10D = "torch.distributed.distributed_c10d"
PIPELINES = "torch.distributed.pipelining.schedules"
PROFILER = "torch._C._profiler"
AUTOGRAD = "torch._C._autograd"
CP = "torch.distributed.tensor.experimental._context_parallel._attention"


class Unsupported(Exception):
    """This torch or this machine cannot do what a case asks for; the message says what is missing."""

    status = "unsupported"


class Skipped(Unsupported):
    """There is nothing to measure here although the plan is right: not a failure; the message says why."""

    status = "skipped"


@dataclass(frozen=True)
class Internal:
    """A torch name that a feature uses although torch does not promise it, or the names that it has had in turn.

    Args:
        module: where torch has it.
        alternatives: dotted names in the module, each with the parameters that it must take; one is enough.
    """

    feature: str
    module: str
    alternatives: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def name(self) -> str:
        """The names as text."""
        return " or ".join(dict(self.alternatives))


@dataclass(frozen=True)
class Probe:
    """What came of looking for one Internal: `missing` is None when all is well."""

    internal: Internal
    missing: str | None


LOCAL = "redistribute_local_tensor(local_tensor, current_spec, target_spec"
PYTHON_DEVICE = "_setup_privateuseone_for_python_backend"
PLACED = "src_placements, dst_placements"
SPECS = "src_spec, dst_spec"
SHARDING = "torch.distributed.tensor._sharding_prop"
FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
PLANNER = "DTensorRedistributePlanner"
PLANNERS = "redistribution planners"
PATHS = "redistribution paths"
PENDING = "results of functional collectives"
KERNELS = "kernels around collectives"
BINDING = "ranks bound to NUMA nodes"
BIND = "_maybe_apply_numa_binding_to_current_process"
SPMD_MESH = "FSDP2 on one SPMD mesh"
REPLICAS = "torch.distributed._composable.replicate_with_fsdp"
REDUCER = "DDP's reducer on a simulated device"
STAGES_AGREE = "pipelines on a fake process group"
V_SCHEDULES = "schedules whose stages lie in a V, on gloo"
SHARDED_INDICES = "backward of indexing by a sharded tensor"
ZERO_FILLS = "redistribution from Shard to Partial by zero-fill"
# Features that older versions of torch lack, to the first version that has them.
LOWEST = {SPMD_MESH: (2, 12), V_SCHEDULES: (2, 12), SHARDED_INDICES: (2, 12), ZERO_FILLS: (2, 14)}
# Features that work around something that torch began to do in that version; older ones need no work-around.
NEEDLESS_BEFORE = {STAGES_AGREE: (2, 12)}
# Feature, module of torch, and dotted name in it with the parameters that it must take; " or " divides alternatives.
NEEDED = (
    (PLANNERS, REDISTRIBUTE, "_gen_transform_infos(src_spec, dst_spec)"),
    (PLANNERS, REDISTRIBUTE, "_gen_transform_infos_non_cached"),
    (PLANNERS, REDISTRIBUTE, "_gen_transform_infos.cache_clear"),
    (PLANNERS, REDISTRIBUTE, "clear_redistribute_planner_cache"),
    (PLANNERS, REDISTRIBUTE, "use_min_cost_redistribution_plan(enabled)"),
    (PLANNERS, REDISTRIBUTE, f"_optimize_transform_infos(transform_infos, device_mesh, {PLACED})"),
    (
        PATHS,
        REDISTRIBUTE,
        f"{PLANNER}.stringify_transform_infos(mesh, transform_infos, src_placement, src_shard_order)",
    ),
    (PATHS, REDISTRIBUTE, f"{LOCAL}, is_explicit)"),
    (PATHS, SPEC, "DTensorSpec(mesh, placements, tensor_meta, shard_order)"),
    (PATHS, SPEC, "ShardOrderEntry(tensor_dim, mesh_dims)"),
    (PLANNERS, SPEC, "TensorMeta"),
    ("calibrated planning", REDISTRIBUTE, f"{PLANNER}.find_min_cost_path(self, src_state, dst_state)"),
    ("calibrated planning", REDISTRIBUTE, f"{PLANNER}.get_next_state"),
    ("calibrated planning", REDISTRIBUTE, f"{PLANNER}.DistState"),
    (
        "calibrated planning",
        REDISTRIBUTE,
        f"{PLANNER}.generate_graph_based_transform_infos({SPECS}, full_tensor_shape)",
    ),
    ("calibrated planning", REDISTRIBUTE, f"_gen_transform_infos({SPECS}, use_graph_based_transform)"),
    ("calibrated planning", REDISTRIBUTE, f"_gen_transform_infos_non_cached({SPECS}, use_graph_based_transform)"),
    ("calibrated planning", REDISTRIBUTE, "_FORCE_MIN_COST_REDISTRIBUTION_PLAN"),
    ("calibrated planning", "torch.distributed.tensor._ops.utils", "redistribute_cost(current_spec, target_spec)"),
    (ZERO_FILLS, REDISTRIBUTE, f"{PLANNER}._get_shard_to_partial_target_states(self, current_state, dst_state)"),
    (ZERO_FILLS, PLACEMENTS, "Shard._to_partial_tensor"),
    ("ranks of a mesh in their order", "torch.utils._python_dispatch", "_disable_current_modes"),
    ("native all-to-all on CPU", PLACEMENTS, "shard_dim_alltoall(input, gather_dim, shard_dim, mesh, mesh_dim)"),
    ("native all-to-all on CPU", "torch", "ops._dtensor.shard_dim_alltoall"),
    ("collectives seen at dispatch", "torch.utils._python_dispatch", "TorchDispatchMode"),
    ("collectives seen at dispatch", C10D, "_resolve_process_group"),
    ("collectives seen at dispatch", DIST, "ProcessGroup.unbox"),
    (PENDING, FUNCTIONAL, "AsyncCollectiveTensor"),
    (PENDING, "torch.distributed.tensor", "DTensor._local_tensor"),
    (KERNELS, "torch", "_C._dispatch_keyset_full_after"),
    (KERNELS, "torch", "_C._distributed_c10d.PythonCallbackWork"),
    *((KERNELS, DIST, f"Work.{name}") for name in ("boxed", "unbox")),
    ("communication labels", FSDP, "FSDPParamGroup.unshard(self, async_op)"),
    ("communication labels", FSDP, "FSDPParamGroup.post_backward"),
    ("units of FSDP2", "torch.distributed.fsdp", "FSDPModule._get_fsdp_state"),
    ("units of FSDP2", "torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState.init(mp_policy)"),
    ("communication labels", FSDP_PARAM, "FSDPParam._get_grad_inner_tensor"),
    ("communication labels", "torch.distributed.tensor._api", f"{LOCAL})"),
    ("communication labels", "torch.distributed.tensor._dispatch", f"{LOCAL})"),
    ("communication labels", REDISTRIBUTE, f"{LOCAL})"),
    (
        BINDING,
        "torch.numa.binding",
        f"{BIND}(gpu_index, numa_options) or {BIND}(device_index, numa_options)",  # the second since 2.14
    ),
    *(("memory of a step", AUTOGRAD, f"_{what}_profiler") for what in ("prepare", "enable", "disable")),
    ("memory of a step", AUTOGRAD, "_ProfilerResult.experimental_event_tree"),
    ("memory of a step", PROFILER, "ProfilerConfig"),
    ("memory of a step", PROFILER, "_EventType.Allocation"),
    ("memory of a step", PROFILER, "_EventType.TorchOp"),
    ("memory of a step", PROFILER, "RecordScope.BACKWARD_FUNCTION"),
    ("memory of a step", PROFILER, "_ProfilerEvent.extra_fields"),
    ("autograd sequence numbers", "torch", "_C._current_autograd_node"),
    ("autograd sequence numbers", "torch.autograd", "_get_sequence_nr"),
    ("tensors without values", FAKE, "FakeTensorMode"),
    ("simulated device", "torch.utils.backend_registration", f"{PYTHON_DEVICE}(rename, backend_module)"),
    ("simulated device", "torch", "_C._dispatch_has_kernel_for_dispatch_key"),
    ("simulated device", "torch", "_C._dispatch_get_all_op_names"),
    ("simulated device", "torch", "ops.aten._scaled_dot_product_flash_attention"),
    ("simulated device", FAKE, "unset_fake_temporarily"),
    ("simulated device", "torch.distributed.fsdp._fully_shard._fully_shard", "_get_post_forward_mesh_info"),
    ("simulated device", FUNCTIONAL, "_are_we_tracing"),
    ("simulated device", FUNCTIONAL, "AsyncCollectiveTensor"),
    ("simulated device", SHARDING, "ShardingPropagator._propagate_tensor_meta"),
    ("simulated device", SHARDING, "ShardingPropagator._propagate_tensor_meta_non_cached"),
    ("chunks of parameters", FSDP_PARAM, "_chunk_with_empty(tensor, num_chunks, dim)"),
    *(("simulated device", DIST, f"Backend.{name}") for name in ("backend_capability", "default_device_backend_map")),
    ("fake process group", "torch.testing._internal.distributed.fake_pg", "FakeStore"),
    ("fake process group", "torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    ("fake process group", COSTS, "_mesh_resources.num_devices_per_host(device_type)"),
    ("fake process group", COSTS, "MeshTopoInfo.build_from_mesh.cache_clear"),
    ("partition to Partial", "torch.distributed.tensor", "Partial._partition_value(tensor, mesh, mesh_dim)"),
    ("process groups by name", C10D, "_world.pg_map"),
    (STAGES_AGREE, "torch.distributed.pipelining._utils", "InferenceMode.STATIC"),
    (
        STAGES_AGREE,
        PIPELINES,
        "_PipelineSchedule._warmup_p2p(stages) or "
        "_PipelineSchedule._initialize_pipeline_distributed_state(stages)",  # since 2.15
    ),
    ("simulated messages of pipelines", PIPELINES, "_batch_p2p(p2p_ops)"),
    ("2-D parameter shards", PLACEMENTS, "_StridedShard"),
    ("context parallel", CP, "context_parallel(mesh, buffers, buffer_seq_dims)"),
    ("context parallel", CP, "set_rotate_method(rotate_method)"),
    ("context parallel", CP, "_cp_options.enable_load_balance"),
    ("context parallel", CP, "_cp_options.rotate_method"),
    ("context parallel outputs", CP, "context_parallel_unshard(mesh, buffers, seq_dims, load_balancer)"),
    ("context parallel outputs", CP, "_context_parallel_buffers(mesh, buffers, load_balancer)"),
    ("context parallel outputs", CP, "_create_default_load_balancer(seq_length, world_size, device)"),
    ("context parallel on CPU", CP, "_templated_ring_attention(group, seq_dim, op, query, key, value, is_causal)"),
    (
        "context parallel on CPU",
        CP,
        "_templated_ring_attention_backward("
        "group, seq_dim, op, grad_out, grad_out_name, query, key, value, out, logsumexp)",
    ),
    ("context parallel on CPU", "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu"),
    ("context parallel on CPU", "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"),
    ("composable DDP", "torch.distributed._composable.replicate", "replicate(module, ignored_modules)"),
    ("composable DDP", "torch.distributed._composable.replicate", "DDP"),
    *((REDUCER, DIST, f"Reducer.{name}") for name in ("_rebuild_buckets", "_set_static_graph")),
    (REDUCER, DIST, "_verify_params_across_processes"),
    ("replicas by unit", REPLICAS, "replicate(module, mesh, ignored_params)"),
    ("async TP", "torch.distributed._symmetric_memory", "enable_symm_mem_for_group(group_name)"),
    ("async TP", "torch._inductor.config", "_micro_pipeline_tp"),
    ("mesh dims flattened for FSDP", MESH, "DeviceMesh._flatten"),
    (SPMD_MESH, "torch.distributed.fsdp", "fully_shard(module, mesh, dp_mesh_dims)"),
)


def _internal(feature: str, module: str, text: str) -> Internal:
    parts = [alternative.rstrip(")").partition("(") for alternative in text.split(" or ")]
    return Internal(
        feature, module, tuple((name, tuple(filter(None, names_text.split(", ")))) for name, _, names_text in parts)
    )


INTERNALS = tuple(_internal(*row) for row in NEEDED)


def probe() -> list[Probe]:
    """Look for every internal that this torch's version needs; nothing is changed."""
    version = release(torch.__version__)
    return [
        Probe(internal, needs_newer(internal.feature) or _missing(internal))
        for internal in INTERNALS
        if version >= NEEDLESS_BEFORE.get(internal.feature, version)
    ]


def require(feature: str) -> None:
    """Raise `Unsupported` where this torch is too old for a feature, or lacks one of its internals."""
    if too_old := needs_newer(feature):
        raise Unsupported(f"{feature}: {too_old}")
    for internal in INTERNALS:
        if internal.feature == feature and (missing := _missing(internal)):
            advice = outside_of_support(torch.__version__) or f"distbench supports {SUPPORTED}"
            raise Unsupported(f"{feature}: torch {torch.__version__} {missing}; {advice}")


@functools.cache
def lacks(feature: str) -> str | None:
    """Return why `require` raises for a feature with this torch, else None."""
    try:
        require(feature)
    except Unsupported as reason:
        return str(reason)
    return None


def needs_newer(feature: str) -> str | None:
    """Return "needs torch X or newer, this is Y" where this torch is too old for a feature, else None."""
    lowest = LOWEST.get(feature, (0, 0))
    if release(torch.__version__) >= lowest:
        return None
    return f"needs torch {lowest[0]}.{lowest[1]} or newer, this is {torch.__version__}"


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Put something else in the place of `owner.name` for as long as the context is open."""
    plain = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _missing(internal: Internal) -> str | None:
    """What this torch lacks of an internal, as it lacks it of the last of its alternatives; None for nothing."""
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


# What the first compiled step of a process imports, which takes longer than the step; all else comes by way of these.
COMPILER = ("torch._functorch.aot_autograd", "torch._inductor.pattern_matcher")


def import_compiler() -> None:
    """Import torch's compiler, so that processes forked from this one need not; nothing is compiled.

    A torch that has moved it imports its own in time.
    """
    for name in COMPILER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises where it cannot compile; those of a module's own code come through as they are."""
    name = "torch._dynamo.exc"
    with contextlib.suppress(ImportError, AttributeError):
        return (importlib.import_module(name).TorchDynamoException,)
    return ()


def bind_to_numa_node(local_rank: int, mode: str) -> None:
    """Bind this process to the CPUs near its device, as torchrun's `--numa-binding` does.

    Raises:
        UserError: no mode of torch's.
        Unsupported: this torch binds in another way, or not at all.
    """
    require(BINDING)
    from torch.numa import binding

    modes = [affinity_mode.value for affinity_mode in binding.AffinityMode]
    if mode not in modes:
        raise UserError(f"{NUMA_BINDING}={mode} is no way to bind ranks; use {', '.join(modes)}, or unset it")
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    bind = getattr(binding, BIND)
    index = next(name for name in ("device_index", "gpu_index") if name in inspect.signature(bind).parameters)
    bind(**{index: local_rank}, numa_options=options)
