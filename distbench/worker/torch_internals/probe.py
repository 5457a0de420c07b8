"""Which private or experimental torch names we lean on, and whether this torch has them (2.11 to 2.13)."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch

REDISTRIBUTE = "torch.distributed.tensor._redistribute"
PLACEMENTS = "torch.distributed.tensor.placement_types"
SPEC = "torch.distributed.tensor._dtensor_spec"
COSTS = "torch.distributed.tensor._collective_utils"
FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
CP = "torch.distributed.tensor.experimental._context_parallel._attention"


class Unsupported(Exception):
    """This torch or this machine cannot do what a case asks for; the message says what is missing."""

    status = "unsupported"


class Skipped(Unsupported):
    """There is nothing to measure here although the plan is right: not a failure; the message says why."""

    status = "skipped"


@dataclass(frozen=True)
class Internal:
    """A torch name that we lean on although torch does not promise it.

    Args:
        feature: what needs it.
        module: where it lives.
        name: dotted name inside the module.
        parameters: parameters it must take, if it is called.
    """

    feature: str
    module: str
    name: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """What came of looking for one Internal: `missing` is None when all is well."""

    internal: Internal
    missing: str | None


INTERNALS = (
    Internal("redistribution planners", REDISTRIBUTE, "_gen_transform_infos", ("src_spec", "dst_spec")),
    Internal("redistribution planners", REDISTRIBUTE, "_gen_transform_infos.cache_clear"),
    Internal("redistribution planners", REDISTRIBUTE, "clear_redistribute_planner_cache"),
    Internal("redistribution planners", REDISTRIBUTE, "use_min_cost_redistribution_plan", ("enabled",)),
    Internal(
        "redistribution planners",
        REDISTRIBUTE,
        "_optimize_transform_infos",
        ("transform_infos", "device_mesh", "src_placements", "dst_placements"),
    ),
    Internal(
        "redistribution paths",
        REDISTRIBUTE,
        "DTensorRedistributePlanner.stringify_transform_infos",
        ("mesh", "transform_infos", "src_placement", "src_shard_order"),
    ),
    Internal(
        "calibrated planning",
        REDISTRIBUTE,
        "DTensorRedistributePlanner.find_min_cost_path",
        ("self", "src_state", "dst_state"),
    ),
    Internal("calibrated planning", REDISTRIBUTE, "DTensorRedistributePlanner.get_next_state"),
    Internal("calibrated planning", REDISTRIBUTE, "DTensorRedistributePlanner.DistState"),
    Internal("calibrated planning", REDISTRIBUTE, "disable_redistribute_transform_optimization"),
    Internal("calibrated planning", SPEC, "ShardOrderEntry", ("tensor_dim", "mesh_dims")),
    Internal(
        "native all-to-all on CPU",
        PLACEMENTS,
        "shard_dim_alltoall",
        ("input", "gather_dim", "shard_dim", "mesh", "mesh_dim"),
    ),
    Internal("native all-to-all on CPU", "torch", "ops._dtensor.shard_dim_alltoall"),
    Internal("redistribution planners", SPEC, "DTensorSpec", ("mesh", "placements", "tensor_meta")),
    Internal("redistribution paths", SPEC, "DTensorSpec.__init__", ("shard_order",)),
    Internal("redistribution paths", SPEC, "ShardOrderEntry", ("tensor_dim", "mesh_dims")),
    Internal(
        "explicit shard orders",
        REDISTRIBUTE,
        "redistribute_local_tensor",
        ("local_tensor", "current_spec", "target_spec", "is_explicit"),
    ),
    Internal("explicit shard orders", SPEC, "DTensorSpec.__init__", ("shard_order",)),
    Internal("explicit shard orders", SPEC, "ShardOrderEntry", ("tensor_dim", "mesh_dims")),
    Internal("collectives seen at dispatch", "torch.utils._python_dispatch", "TorchDispatchMode"),
    Internal("collectives seen at dispatch", "torch.distributed.distributed_c10d", "_resolve_process_group"),
    Internal("collectives seen at dispatch", "torch.distributed", "ProcessGroup.unbox"),
    Internal("process groups that forward", "torch", "_C._distributed_c10d._register_process_group"),
    Internal("process groups that forward", "torch", "_C._distributed_c10d._unregister_process_group"),
    Internal("process groups that forward", "torch", "_C._distributed_c10d.PythonCallbackWork"),
    Internal("process groups that forward", "torch.distributed", "ProcessGroup._register_backend"),
    Internal(
        "process groups that forward", "torch.distributed", "Backend.register_backend", ("name", "func", "devices")
    ),
    Internal("process groups that forward", "torch.distributed.distributed_c10d", "_resolve_process_group"),
    Internal("process groups that forward", "torch.distributed.distributed_c10d", "_update_default_pg"),
    Internal("process groups that forward", "torch.distributed.distributed_c10d", "_world.pg_map"),
    Internal("process groups that forward", "torch.distributed.device_mesh", "DeviceMesh._get_root_mesh"),
    Internal("communication labels", FSDP, "FSDPParamGroup.unshard", ("self", "async_op")),
    Internal("communication labels", FSDP, "FSDPParamGroup.post_backward"),
    Internal("communication labels", FSDP.removesuffix("_group"), "FSDPParam._get_grad_inner_tensor"),
    *(
        Internal(
            "communication labels",
            f"torch.distributed.tensor.{module}",
            "redistribute_local_tensor",
            ("local_tensor", "current_spec", "target_spec"),
        )
        for module in ("_api", "_dispatch", "_redistribute")
    ),
    Internal("predicted peak memory", "torch.distributed._tools.mem_tracker", "MemTracker.track_external"),
    Internal("predicted peak memory", "torch.distributed._tools.mem_tracker", "MemTracker.get_tracker_snapshot"),
    Internal(
        "predicted peak memory",
        "torch.distributed._tools.mem_tracker",
        "MemTracker._track_module_params_and_buffers",
        ("module", "install_grad_hooks"),
    ),
    Internal(
        "predicted peak memory",
        "torch.distributed._tools.mem_tracker",
        "MemTracker._pre_fw_hook",
        ("module", "inputs"),
    ),
    Internal("autograd sequence numbers", "torch", "_C._current_autograd_node"),
    Internal("autograd sequence numbers", "torch.autograd", "_get_sequence_nr"),
    *(
        Internal("tensors without values", "torch._subclasses.fake_tensor", name)
        for name in (
            "FakeTensorMode",
            "DataDependentOutputException",
            "DynamicOutputShapeException",
            "UnsupportedFakeTensorException",
            "UnsupportedOperatorException",
        )
    ),
    Internal("fake process group", "torch.testing._internal.distributed.fake_pg", "FakeStore"),
    Internal("fake process group", "torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    Internal("fake process group", COSTS, "_mesh_resources.num_devices_per_host", ("device_type",)),
    Internal("fake process group", COSTS, "MeshTopoInfo.build_from_mesh.cache_clear"),
    Internal("redistribution planners", SPEC, "TensorMeta"),
    Internal(
        "partition to Partial",
        "torch.distributed.tensor",
        "Partial._partition_value",
        ("tensor", "mesh", "mesh_dim"),
    ),
    Internal("process groups by name", "torch.distributed.distributed_c10d", "_world.pg_map"),
    Internal("2-D parameter shards", PLACEMENTS, "_StridedShard"),
    Internal("context parallel", CP, "context_parallel", ("mesh", "buffers", "buffer_seq_dims")),
    Internal("context parallel", CP, "set_rotate_method", ("rotate_method",)),
    Internal("context parallel", CP, "_cp_options.enable_load_balance"),
    Internal("context parallel", CP, "_cp_options.rotate_method"),
    Internal(
        "context parallel outputs", CP, "context_parallel_unshard", ("mesh", "buffers", "seq_dims", "load_balancer")
    ),
    Internal("context parallel outputs", CP, "_context_parallel_buffers", ("mesh", "buffers", "load_balancer")),
    Internal("context parallel outputs", CP, "_create_default_load_balancer", ("seq_length", "world_size", "device")),
    Internal(
        "context parallel on CPU",
        CP,
        "_templated_ring_attention",
        ("group", "seq_dim", "op", "query", "key", "value", "is_causal"),
    ),
    Internal(
        "context parallel on CPU",
        CP,
        "_templated_ring_attention_backward",
        ("group", "seq_dim", "op", "grad_out", "grad_out_name", "query", "key", "value", "out", "logsumexp"),
    ),
    Internal("context parallel on CPU", "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu"),
    Internal("context parallel on CPU", "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"),
    Internal("mesh dims flattened for FSDP", "torch.distributed.device_mesh", "DeviceMesh._flatten"),
)


def probe() -> list[Probe]:
    """Look for every internal; nothing is changed."""
    return [Probe(internal, _missing(internal)) for internal in INTERNALS]


def require(feature: str) -> None:
    """Raise unless every internal of the feature is there.

    Raises:
        Unsupported: with the first name that is missing.
    """
    for internal in INTERNALS:
        if internal.feature == feature and (missing := _missing(internal)):
            raise Unsupported(f"{feature}: torch {torch.__version__} {missing}; distbench knows torch 2.11 to 2.13")


def _missing(internal: Internal) -> str | None:
    try:
        found: Any = importlib.import_module(internal.module)
        for part in internal.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"has no {internal.module}.{internal.name}"
    if internal.parameters:
        known = inspect.signature(found).parameters
        if lacking := [name for name in internal.parameters if name not in known]:
            return f"has {internal.name} without its parameter {', '.join(lacking)}"
    return None
