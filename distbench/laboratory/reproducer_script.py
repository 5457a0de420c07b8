"""The text of a reproducer: a stand-alone script that needs torch alone. `reproducer` fills in what stands after $.

A line `#? words` says for which kinds of cases the lines after it are kept, up to the next such line: all of the words
must be true of the case (a word behind - must be false of it); `#?` alone keeps them always.
"""

SCRIPT = '''"""$title

Found by distbench with torch $torch, backend $backend, $num_ranks ranks. This script needs torch alone:
    torchrun --nproc-per-node $num_ranks $file_name
Expected: every rank holds its shard of the full tensor, as the placements after the redistribution cut it.
Happened: $happened
"""

import math
#? nccl
import os
#?
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
#? internals
from torch.distributed.tensor import $names
#? -internals
from torch.distributed.tensor import DTensor, $names
#? internals
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
#? min_cost
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan
#? strided
from torch.distributed.tensor.placement_types import _StridedShard
#?

MESH_SHAPE, MESH_DIM_NAMES = $mesh_shape, $mesh_dim_names
SHAPE, DTYPE = $shape, torch.$dtype
SOURCE = [$source]
TARGET = [$target]
#? internals
# Shard orders: tensor dim to the mesh dims that cut it, outermost cut first.
SOURCE_ORDER, TARGET_ORDER = $source_order, $target_order
#?
# What the placements cut, in the order of the cuts: (mesh dim, tensor dim, pieces that are cut one by one).
SOURCE_CUTS = $source_cuts
TARGET_CUTS = $target_cuts


def chunk(tensor, dim, num_chunks, index):
    size = -(-tensor.shape[dim] // num_chunks)
    start = min(index * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))


def cut(full, cuts, coordinate):
    """What the rank at a mesh coordinate holds, worked out without DTensor."""
    for mesh_dim, dim, num_pieces in cuts:
        pieces = [chunk(full, dim, num_pieces, index) for index in range(num_pieces)]
        full = torch.cat([chunk(piece, dim, MESH_SHAPE[mesh_dim], coordinate[mesh_dim]) for piece in pieces], dim)
    return full.contiguous()


#? from_partial
def part(full, coordinate):
    """What this rank adds to the Partial source; no two ranks add the same."""
    index, count = 0, 1
    for mesh_dim, placement in enumerate(SOURCE):
        if placement.is_partial():
            index, count = index * MESH_SHAPE[mesh_dim] + coordinate[mesh_dim], count * MESH_SHAPE[mesh_dim]
#? from_partial max
    return full - index


#? from_partial min
    return full + index


#? from_partial avg
    return full + index if index else full - sum(range(count))


#? from_partial sum
    return torch.full_like(full, index) if index else full - sum(range(count))


#? internals
def spec(mesh, full, placements, order):
    entries = tuple(ShardOrderEntry(dim, mesh_dims) for dim, mesh_dims in order.items())
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=entries)


#? native
def exchange(local, gather_dim, shard_dim, mesh, mesh_dim):
    """The all-to-all itself: on CPU, DTensor runs an all-gather and a cut in its place."""
    group_name = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(local, gather_dim, shard_dim, group_name)


#?
def redistribute(mesh, full, local):
#? internals
    # What DTensor.redistribute calls: a shard order, or Partial as the target, can only be asked for here.
    before, after = spec(mesh, full, SOURCE, SOURCE_ORDER), spec(mesh, full, TARGET, TARGET_ORDER)
    return redistribute_local_tensor(local, before, after)
#? -internals
    whole = {"run_check": False, "shape": full.shape, "stride": full.stride()}
    source = DTensor.from_local(local, mesh, SOURCE, **whole)
#? -internals -backward
    return source.redistribute(mesh, TARGET).to_local()
#? -internals backward
    source = source.detach().requires_grad_()
    gradient = DTensor.from_local(cut(full, TARGET_CUTS, mesh.get_coordinate()), mesh, TARGET, **whole)
    source.redistribute(mesh, TARGET).backward(gradient)
    return source.grad.to_local()
#?


def main():
    dist.init_process_group("$backend", timeout=timedelta(seconds=60))
#? -nccl
    device = "cpu"
#? nccl
    device = "cuda"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
#?
    mesh = init_device_mesh(device, MESH_SHAPE, mesh_dim_names=MESH_DIM_NAMES)
#? flattened
    mesh[$flattened]._flatten()
#? native
    torch.distributed.tensor.placement_types.shard_dim_alltoall = exchange
#?
    coordinate = mesh.get_coordinate()
    full = (torch.arange(math.prod(SHAPE), device=device) % 61).reshape(SHAPE).to(DTYPE)
#? from_partial
    local = cut(part(full, coordinate), SOURCE_CUTS, coordinate)
#? -from_partial
    local = cut(full, SOURCE_CUTS, coordinate)
#? backward
    expected = cut(full, SOURCE_CUTS, coordinate)
#? -backward
    expected = cut(full, TARGET_CUTS, coordinate)
#?
    try:
#? min_cost
        with use_min_cost_redistribution_plan(True):
            got = redistribute(mesh, full, local)
#? -min_cost
        got = redistribute(mesh, full, local)
#? to_partial
        got = got.clone()
        for mesh_dim, placement in enumerate(TARGET):
            if placement.is_partial():  # the parts, put together
                dist.all_reduce(got, dist.ReduceOp.$reduction, mesh.get_group(mesh_dim))
#?
        wrong = got.shape != expected.shape or not torch.allclose(got, expected)
        said = f"expected {tuple(expected.shape)}:\\n{expected}\\ngot {tuple(got.shape)}:\\n{got}" if wrong else ""
    except Exception as error:
        wrong, said = True, f"RAISED {type(error).__name__}: {error}"
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    if dist.get_rank() == 0:
        bad = [rank for rank, said in enumerate(found) if said]
        if bad:
            print(f"rank {bad[0]}: {found[bad[0]]}")
        verdict = f"WRONG on ranks {bad}" if bad else "right on every rank"
        print(f"torch {torch.__version__}: {verdict}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
'''


def kept(text: str, words: set[str]) -> str:
    """The lines of a script that a case needs, `words` being what is true of the case."""
    lines, keep = [], True
    for line in text.split("\n"):
        if line.startswith("#?"):
            conditions = line.removeprefix("#?").split()
            keep = all((word.removeprefix("-") in words) != word.startswith("-") for word in conditions)
        elif keep:
            lines.append(line)
    return "\n".join(lines)
