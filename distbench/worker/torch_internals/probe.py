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
C10D = "torch.distributed.distributed_c10d"
MEMORY = "torch.distributed._tools.mem_tracker"
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


# Feature to modules of torch to dotted names in them, each with the parameters that it must take.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "redistribution planners": {
        REDISTRIBUTE: (
            "_gen_transform_infos(src_spec, dst_spec)",
            "_gen_transform_infos.cache_clear",
            "clear_redistribute_planner_cache",
            "use_min_cost_redistribution_plan(enabled)",
            "_optimize_transform_infos(transform_infos, device_mesh, src_placements, dst_placements)",
        ),
        SPEC: ("DTensorSpec(mesh, placements, tensor_meta)", "TensorMeta"),
    },
    "redistribution paths": {
        REDISTRIBUTE: (
            "DTensorRedistributePlanner.stringify_transform_infos"
            "(mesh, transform_infos, src_placement, src_shard_order)",
        ),
        SPEC: ("DTensorSpec.__init__(shard_order)", "ShardOrderEntry(tensor_dim, mesh_dims)"),
    },
    "calibrated planning": {
        REDISTRIBUTE: (
            "DTensorRedistributePlanner.find_min_cost_path(self, src_state, dst_state)",
            "DTensorRedistributePlanner.get_next_state",
            "DTensorRedistributePlanner.DistState",
            "disable_redistribute_transform_optimization",
        ),
        SPEC: ("ShardOrderEntry(tensor_dim, mesh_dims)",),
    },
    "native all-to-all on CPU": {
        PLACEMENTS: ("shard_dim_alltoall(input, gather_dim, shard_dim, mesh, mesh_dim)",),
        "torch": ("ops._dtensor.shard_dim_alltoall",),
    },
    "explicit shard orders": {
        REDISTRIBUTE: ("redistribute_local_tensor(local_tensor, current_spec, target_spec, is_explicit)",),
        SPEC: ("DTensorSpec.__init__(shard_order)", "ShardOrderEntry(tensor_dim, mesh_dims)"),
    },
    "collectives seen at dispatch": {
        "torch.utils._python_dispatch": ("TorchDispatchMode",),
        C10D: ("_resolve_process_group",),
        "torch.distributed": ("ProcessGroup.unbox",),
    },
    "process groups that forward": {
        "torch": (
            "_C._distributed_c10d._register_process_group",
            "_C._distributed_c10d._unregister_process_group",
            "_C._distributed_c10d.PythonCallbackWork",
        ),
        "torch.distributed": ("ProcessGroup._register_backend", "Backend.register_backend(name, func, devices)"),
        C10D: ("_resolve_process_group", "_update_default_pg", "_world.pg_map"),
        "torch.distributed.device_mesh": ("DeviceMesh._get_root_mesh",),
    },
    "communication labels": {
        "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
            "FSDPParamGroup.unshard(self, async_op)",
            "FSDPParamGroup.post_backward",
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_param": ("FSDPParam._get_grad_inner_tensor",),
        "torch.distributed.tensor._api": ("redistribute_local_tensor(local_tensor, current_spec, target_spec)",),
        "torch.distributed.tensor._dispatch": ("redistribute_local_tensor(local_tensor, current_spec, target_spec)",),
        REDISTRIBUTE: ("redistribute_local_tensor(local_tensor, current_spec, target_spec)",),
    },
    "predicted peak memory": {
        MEMORY: (
            "MemTracker.track_external",
            "MemTracker.get_tracker_snapshot",
            "MemTracker._track_module_params_and_buffers(module, install_grad_hooks)",
            "MemTracker._pre_fw_hook(module, inputs)",
        )
    },
    "autograd sequence numbers": {"torch": ("_C._current_autograd_node",), "torch.autograd": ("_get_sequence_nr",)},
    "tensors without values": {
        "torch._subclasses.fake_tensor": (
            "FakeTensorMode",
            "DataDependentOutputException",
            "DynamicOutputShapeException",
            "UnsupportedFakeTensorException",
            "UnsupportedOperatorException",
        )
    },
    "fake process group": {
        "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
        "torch.distributed.tensor.debug": ("_clear_sharding_prop_cache",),
        COSTS: ("_mesh_resources.num_devices_per_host(device_type)", "MeshTopoInfo.build_from_mesh.cache_clear"),
    },
    "partition to Partial": {"torch.distributed.tensor": ("Partial._partition_value(tensor, mesh, mesh_dim)",)},
    "process groups by name": {C10D: ("_world.pg_map",)},
    "2-D parameter shards": {PLACEMENTS: ("_StridedShard",)},
    "context parallel": {
        CP: (
            "context_parallel(mesh, buffers, buffer_seq_dims)",
            "set_rotate_method(rotate_method)",
            "_cp_options.enable_load_balance",
            "_cp_options.rotate_method",
        )
    },
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
            "_templated_ring_attention_backward(group, seq_dim, op, grad_out, grad_out_name, query, key, value, out, "
            "logsumexp)",
        ),
        "torch": (
            "ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        ),
    },
    "mesh dims flattened for FSDP": {"torch.distributed.device_mesh": ("DeviceMesh._flatten",)},
}


def _internal(feature: str, module: str, text: str) -> Internal:
    name, _, parameters = text.rstrip(")").partition("(")
    return Internal(feature, module, name, tuple(parameters.split(", ")) if parameters else ())


INTERNALS = tuple(
    _internal(feature, module, text)
    for feature, modules in NEEDED.items()
    for module, texts in modules.items()
    for text in texts
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
