"""Every way of every collective, ways of one's own, right and wrong, and uneven all-to-alls."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distbench.cases.collective import WAYS
from distbench.spec import Collectives, Scenario, scenario

MATRIX = ((0, 3, 0), (5, 0, 2), (0, 0, 1))


def right(output, given, group):
    dist.all_reduce(output, group=group)


def returning(output, given, group):
    gathered = [torch.empty_like(given) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, given, group=group)
    return sum(gathered)


def wrong_shape(output, given, group):
    return output[:-1]


def wrong_values(output, given, group):
    dist.all_reduce(output, group=group)
    output[3] += 1


def wrong_dtype(output, given, group):
    dist.all_reduce(output, group=group)
    return output.double()


def wrong_type(output, given, group):
    return 3


OWN = {way.__name__: way for way in (right, returning, wrong_shape, wrong_values, wrong_dtype, wrong_type)}


@scenario(mesh={"tp": 3}, tags=("test",))
def ways() -> Scenario:
    """Ways and uneven all-to-alls."""
    sizes = {"sizes_bytes": (6000,)}
    sweeps = [Collectives((op,), ways=("plain", *WAYS[op]), dtypes=("f32", "bf16"), **sizes) for op in WAYS]
    sweeps.append(Collectives(("all_reduce",), sizes_bytes=(3000,), ways=("plain", *OWN, "nccl2"), own_ways=OWN))
    sweeps.append(Collectives(("scatter", "gather", "send_recv"), dtypes=("f32", "bf16"), **sizes))
    recorded = str(Path(__file__).with_name("routing.json"))
    for load in ("uniform", "zipf", *(f"W{number}" for number in range(8)), recorded):
        sweeps.append(Collectives(("all_to_all_v",), load=load, num_experts=6, num_tokens=20, **sizes))
    sweeps.append(Collectives(("all_to_all_v",), matrix=np.array(MATRIX), **sizes))
    sweeps.append(Collectives(("all_to_all_v",), sizes_bytes=(1200,), num_experts=6))
    return Scenario(collectives=tuple(sweeps))
