"""Mesh and placement facts that torch keeps to itself."""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from distbench.worker.torch_internals.probe import require

# gloo runs reduce-scatter as an all-reduce of the whole buffer; a test holds this against the profiler's spans.
BACKEND_OPS = {("gloo", "reduce_scatter"): "all_reduce"}


def is_strided_shard(placement: object) -> bool:
    """Whether a placement is the one FSDP2 gives a tensor dim that TP has already sharded (TP's cut comes first)."""
    return type(placement).__name__ == "_StridedShard"


def flatten_mesh(mesh: DeviceMesh, mesh_dims: Sequence[str]) -> DeviceMesh:
    """One mesh dim out of several, named by theirs joined; the sub-mesh itself when there is only one."""
    if len(mesh_dims) == 1:
        return mesh[mesh_dims[0]]
    require("mesh dims flattened for FSDP")
    return mesh[tuple(mesh_dims)]._flatten("_".join(mesh_dims))
