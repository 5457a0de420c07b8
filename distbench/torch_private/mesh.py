"""Properties of meshes and placements without public torch names."""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distbench.spec.mesh import dim_shape
from distbench.torch_private.probe import SPMD_MESH, Skipped, require

# gloo runs reduce-scatter as an all-reduce of the whole buffer; a test compares this with the profiler's events.
BACKEND_OPS = {("gloo", "reduce_scatter"): "all_reduce"}


def is_strided_shard(placement: object) -> bool:
    """Return whether a placement is FSDP2's strided shard of a tensor dim that TP sharded before."""
    return type(placement).__name__ == "_StridedShard"


def replicate_in_buckets(module: Any, ignored: Sequence[Any], **options: Any) -> None:
    """Apply torch's composable DDP, which starts with the first forward and so supports modules on the meta device."""
    require("composable DDP")
    from torch.distributed._composable.replicate import replicate

    replicate(module, list(ignored), **options)


def steps_until_buckets_stay(model: Any) -> int:
    """Return the number of steps after which DDP's buckets do not change; 0 without DDP.

    DDP rebuilds buckets in the second step, for a static graph in the third.
    """
    require("composable DDP")
    from torch.distributed._composable.replicate import DDP, replicate

    ddp_modules: list[Any] = [module for module in model.modules() if isinstance(module, DDP)]
    states: list[Any] = [replicate.state(module) for module in ddp_modules]
    for module, state in zip(ddp_modules, states, strict=True):
        mesh, process_group = (state._init_kwargs.get(name) for name in ("device_mesh", "process_group"))
        group: Any = process_group or (dist.group.WORLD if mesh is None else mesh.get_group())
        if not state._comm_hook_args:
            average_on_fake_group(module, group)
    return max((3 if state._init_kwargs.get("static_graph") else 2 for state in states), default=0)


def average_on_fake_group(ddp_module: Any, group: Any) -> None:
    """Give DDP on a fake process group of CPUs a hook, because its works lack the result that the reducer reads."""
    if next(ddp_module.parameters()).is_cpu and group._get_backend(torch.device("cpu")).name() == "fake":
        ddp_module.register_comm_hook(group, _averaged)


def hooked_parameters(model: Any) -> set[str]:
    """Return the names of the parameters with a hook on their gradient."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {name for name, parameter in model.named_parameters() if any(getattr(parameter, hook) for hook in hooks)}


def replicate_by_unit() -> Any:
    """Return torch's `replicate` on FSDP2's machinery, which supports DTensors: (module, mesh=..., ...) -> module."""
    require("replicas by unit")
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate


def async_tp_options(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the `options` of `torch.compile` for async TP over a 1-D mesh, whose group gets symmetric memory.

    Raises Skipped if the mesh's devices are not CUDA.
    """
    require_symmetric_memory(mesh.device_type, "async TP")
    require("async TP")
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)
    return {"_micro_pipeline_tp": True}


def require_symmetric_memory(device_type: str, what: str) -> None:
    """Raise Skipped, which names `what` needs the memory, if devices of a type have no symmetric memory."""
    if device_type != "cuda":
        raise Skipped(
            f"{what} needs symmetric memory, which {device_type} does not have; use --device cuda, with "
            "devices that can access the memory of each other"
        )


def _averaged(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group)
    done.set_result(bucket.buffer())
    return done


def strided_shard(tensor_dim: int, split_factor: int) -> Any:
    """Return torch's strided shard: `tensor_dim` in `split_factor` pieces, with a chunk of each piece per rank."""
    require("2-D parameter shards")
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(tensor_dim, split_factor=split_factor)


@functools.lru_cache(maxsize=256)
def unordered_groups(mesh: DeviceMesh) -> dict[int, list[int]]:
    """Map each mesh dim that has groups of non-ascending ranks to the first such group.

    torch sorts the ranks of a process group, so a collective over unordered groups silently gives wrong values.
    """
    unordered = {
        mesh_dim: [group for group in groups if group != sorted(group)]
        for mesh_dim, groups in enumerate(groups_along(mesh))
    }
    return {mesh_dim: groups[0] for mesh_dim, groups in unordered.items() if groups}


def groups_along(mesh: DeviceMesh) -> list[list[list[int]]]:
    """Return the groups of each mesh dim, each with its global ranks in the mesh's order."""
    require("ranks of a mesh in their order")
    # Plans are also made while torch traces, when torch rejects reads of a mesh.
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        ranks = mesh.mesh
        return [ranks.movedim(mesh_dim, -1).reshape(-1, size).tolist() for mesh_dim, size in enumerate(ranks.shape)]


def group_shapes(mesh: DeviceMesh, names: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """Return the placement of each mesh dim's groups on `hosts`, one per global rank; {} if a rank has no host."""
    along = groups_along(mesh)
    if any(rank >= len(hosts) for group in along[0] for rank in group):
        return {}
    return {name: dim_shape(groups, hosts) for name, groups in zip(names, along, strict=True)}


def ranks_by_group_name() -> dict[str, str]:
    """Map every process group's name to its global ranks, sorted and joined by commas."""
    require("process groups by name")
    groups = dist.distributed_c10d._world.pg_map
    return {group.group_name: ",".join(map(str, sorted(dist.get_process_group_ranks(group)))) for group in groups}


def flatten_mesh(mesh: DeviceMesh, mesh_dims: Sequence[str]) -> DeviceMesh:
    """Flatten several mesh dims into one, whose name joins the names; return the sub-mesh of a single mesh dim."""
    if len(mesh_dims) == 1:
        return mesh[mesh_dims[0]]
    require("mesh dims flattened for FSDP")
    return mesh[tuple(mesh_dims)]._flatten("_".join(mesh_dims))


def hybrid_mesh(mesh: DeviceMesh, replicate_dims: Sequence[str], shard_dims: Sequence[str]) -> DeviceMesh:
    """Return a mesh of two mesh dims, (replicate, shard), each flattened from one or several mesh dims."""
    if len(replicate_dims) == 1 and len(shard_dims) == 1:
        return mesh[(replicate_dims[0], shard_dims[0])]
    for mesh_dims in (replicate_dims, shard_dims):
        flatten_mesh(mesh, mesh_dims)
    return mesh[("_".join(replicate_dims), "_".join(shard_dims))]


def on_spmd_mesh(mesh: DeviceMesh, shard_dims: Sequence[str], replicate_dims: Sequence[str]) -> dict[str, Any]:
    """Return arguments of `fully_shard` for parameters that are DTensors on a mesh with these data parallel dims."""
    require(SPMD_MESH)
    from torch.distributed.fsdp import DataParallelMeshDims

    return {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(tuple(shard_dims), tuple(replicate_dims) or None)}


@contextlib.contextmanager
def _fake_group(world_size: int, backend: str = "fake", rank: int = 0) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_ranks(mesh: Mapping[str, int], device: str = "cpu", rank: int = 0) -> Iterator[DeviceMesh]:
    """Make a device mesh over torch's fake process group as the given rank, without communication.

    Repeated use in a process is possible, because DTensor's data on the last mesh, whose groups no longer exist, is
    cleared.
    """
    require("fake process group")
    try:
        with _fake_group(math.prod(mesh.values()), "fake" if device == "cpu" else f"cpu:fake,{device}:fake", rank):
            yield init_device_mesh(device, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    finally:
        # DTensor would reuse layouts with these groups' names for an equal mesh, or for a part of an equal mesh.
        forget_layouts()


def forget_layouts() -> None:
    """Empty this thread's cache of DTensor's sharding decisions."""
    require("fake process group")
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def backend_class(device: torch.device) -> str:
    """Return the class of the default group's backend for a device; "nccl" has another class since torch 2.15."""
    assert dist.group.WORLD is not None
    return type(dist.group.WORLD._get_backend(device)).__name__


class _ForgetInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        forget_layouts()
        return gradient


def forget_layouts_of_backward(device: torch.device) -> None:
    """Run `forget_layouts` on the thread of a device's backward, which has its own layouts."""
    _ForgetInBackward.apply(torch.ones((), device=device, requires_grad=True)).backward()


@contextlib.contextmanager
def fake_mesh(mesh_shape: Sequence[int], devices_per_host: int) -> Iterator[DeviceMesh]:
    """Make a mesh without names and with `devices_per_host` on a fake process group, for torch's planners."""
    require("fake process group")
    from torch.distributed.tensor import _collective_utils

    costs: Any = _collective_utils
    costs._mesh_resources.num_devices_per_host = lambda device_type: devices_per_host
    costs.MeshTopoInfo.build_from_mesh.cache_clear()
    try:
        with _fake_group(math.prod(mesh_shape)):
            yield init_device_mesh("cpu", tuple(mesh_shape))
    finally:
        del costs._mesh_resources.num_devices_per_host
        costs.MeshTopoInfo.build_from_mesh.cache_clear()
