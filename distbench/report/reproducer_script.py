"""The text of a reproducer: a stand-alone script that needs torch alone. `reproducer` fills in what stands after $."""

SCRIPT = '''"""$title

Found by distbench with torch $torch, backend $backend, $num_ranks ranks. This script needs torch alone:
    torchrun --nproc-per-node $num_ranks $file_name
Expected: every rank holds its shard of the full tensor, as the placements after the redistribution cut it.
Happened: $happened
"""

import contextlib
import datetime
import math
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

MESH_SHAPE, MESH_DIM_NAMES = $mesh_shape, $mesh_dim_names
FLATTENED = $flattened  # mesh dims that mesh[...]._flatten() was called on before the redistribution
SHAPE, DTYPE = $shape, torch.$dtype
SOURCE = [$source]
TARGET = [$target]
# The same as cuts, in the order in which they are made: (mesh dim, tensor dim, pieces that are cut one by one).
SOURCE_CUTS = $source_cuts
TARGET_CUTS = $target_cuts
# Shard orders: tensor dim to mesh dims; None where mesh dims cut from left to right, as they do by default.
SOURCE_ORDER, TARGET_ORDER = $source_order, $target_order
PLANNER, NATIVE_ALL_TO_ALL, BACKWARD = "$planner", $native, $backward


def chunk(tensor, dim, num_chunks, index):
    size = -(-tensor.shape[dim] // num_chunks)
    start = min(index * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))


def cut(full, cuts, coordinate):
    """What the rank at a mesh coordinate holds, worked out without DTensor."""
    local = full
    for mesh_dim, dim, num_pieces in cuts:
        pieces = [chunk(local, dim, num_pieces, index) for index in range(num_pieces)]
        local = torch.cat([chunk(piece, dim, MESH_SHAPE[mesh_dim], coordinate[mesh_dim]) for piece in pieces], dim)
    return local.contiguous()


def part(full, placements, coordinate):
    """What a rank adds to a Partial source; the full tensor where there is none."""
    dims = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
    if not dims:
        return full
    index, count = 0, math.prod(MESH_SHAPE[dim] for dim in dims)
    for dim in dims:
        index = index * MESH_SHAPE[dim] + coordinate[dim]
    operator, others = placements[dims[0]].reduce_op, sum(range(count))
    if operator == "max":
        return full - index
    if operator == "min":
        return full + index
    if operator == "avg":
        return full + index if index else full - others
    return torch.full_like(full, index) if index else full - others


def spec(mesh, full, placements, order):
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    if order is None:
        return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    entries = tuple(ShardOrderEntry(dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(order.items()))
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=entries)


def default_order(placements):
    order = {}
    for mesh_dim, placement in enumerate(placements):
        if placement.is_shard():
            order.setdefault(placement.dim, []).append(mesh_dim)
    return order


def redistribute(mesh, full, local):
    """The local tensor after the redistribution (or the local gradient after its backward)."""
    to_partial = any(after.is_partial() and after != before for before, after in zip(SOURCE, TARGET))
    if SOURCE_ORDER or TARGET_ORDER or to_partial:
        # What DTensor.redistribute calls; a shard order, and a Partial as the target, can only be given here.
        before = spec(mesh, full, SOURCE, SOURCE_ORDER or (default_order(SOURCE) if TARGET_ORDER else None))
        after = spec(mesh, full, TARGET, TARGET_ORDER or (default_order(TARGET) if SOURCE_ORDER else None))
        return _redistribute.redistribute_local_tensor(local, before, after)
    kwargs = dict(run_check=False, shape=full.shape, stride=full.stride())
    source = DTensor.from_local(local, mesh, SOURCE, **kwargs)
    if not BACKWARD:
        return source.redistribute(mesh, TARGET).to_local()
    source = source.detach().requires_grad_()
    moved = source.redistribute(mesh, TARGET)
    gradient = cut(full, TARGET_CUTS, mesh.get_coordinate())
    moved.backward(DTensor.from_local(gradient, mesh, TARGET, **kwargs))
    return source.grad.to_local()


def reduced(results, coordinate):
    """A Partial target as a value: the parts of all ranks along its mesh dims put together."""
    parts = []
    for rank, result in enumerate(results):
        other = [rank // math.prod(MESH_SHAPE[dim + 1:]) % MESH_SHAPE[dim] for dim in range(len(MESH_SHAPE))]
        if all(a == b for a, b, after in zip(other, coordinate, TARGET) if not after.is_partial()):
            parts.append(result)
    if len(parts) == 1 or len({tuple(other.shape) for other in parts}) > 1:
        return parts[0] if len(parts) == 1 else results[dist.get_rank()]
    operator = next(after.reduce_op for after in TARGET if after.is_partial())
    stacked = torch.stack(parts)
    reduce = {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax, "min": stacked.amin}[operator]
    return reduce(0)


@contextlib.contextmanager
def native_all_to_all():
    """DTensor replaces a CPU mesh's all-to-all by an all-gather; this takes the all-to-all itself."""
    from torch.distributed.tensor import placement_types

    def exchange(local, gather_dim, shard_dim, mesh, mesh_dim):
        group_name = mesh.get_group(mesh_dim).group_name
        return torch.ops._dtensor.shard_dim_alltoall(local, gather_dim, shard_dim, group_name)

    placement_types.shard_dim_alltoall = exchange
    yield


def main():
    dist.init_process_group("$backend", timeout=datetime.timedelta(seconds=60))
    device = "cpu"
    if "$backend" == "nccl":
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, MESH_SHAPE, mesh_dim_names=MESH_DIM_NAMES)
    if FLATTENED:
        mesh[FLATTENED]._flatten()
    coordinate = mesh.get_coordinate()
    full = (torch.arange(math.prod(SHAPE)) % 61).reshape(SHAPE).to(DTYPE).to(device)
    local = cut(part(full, SOURCE, coordinate), SOURCE_CUTS, coordinate)
    expected = cut(full, SOURCE_CUTS if BACKWARD else TARGET_CUTS, coordinate)
    with contextlib.ExitStack() as stack:
        if PLANNER == "min_cost":
            stack.enter_context(_redistribute.use_min_cost_redistribution_plan(True))
        if NATIVE_ALL_TO_ALL:
            stack.enter_context(native_all_to_all())
        try:
            got = redistribute(mesh, full, local)
            error = None
        except Exception as raised:
            got, error = None, f"{type(raised).__name__}: {raised}"
            print(f"rank {dist.get_rank()} RAISED {error}", flush=True)
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, None if got is None else got.cpu())
    if error is None and not BACKWARD and any(after.is_partial() for after in TARGET):
        got = reduced(results, coordinate)
    same = got is not None and got.shape == expected.shape and torch.equal(got.cpu(), expected.cpu())
    fine = [None] * dist.get_world_size()
    dist.all_gather_object(fine, same)
    if got is not None and not same and dist.get_rank() == fine.index(False):
        print(f"rank {dist.get_rank()} at mesh coordinate {tuple(coordinate)}", flush=True)
        print(f"expected {tuple(expected.shape)}:\\n{expected}\\ngot {tuple(got.shape)}:\\n{got}", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        bad = [rank for rank, is_fine in enumerate(fine) if not is_fine]
        verdict = "RAISED" if error else "WRONG VALUES" if bad else "RIGHT VALUES"
        print(f"torch {torch.__version__}: {verdict}" + (f" on ranks {bad}" if bad else " on every rank"), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not all(fine))


if __name__ == "__main__":
    main()
'''
