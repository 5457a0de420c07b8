"""A small model and batch, and what `check` says of a scenario of them, for tests of anyone's models."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from distbench.ranks.context import RankContext
from distbench.spec import FsdpPlan, ParallelPlan, Scenario, UserError
from distbench.torch_private import fake_ranks
from distbench.worker.plan_rehearsal import answer_of

HERE = __file__
CPU = torch.device("cpu")


class Alone(RankContext):
    """A rank that hears nothing of the others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def on(sizes: dict[str, int]) -> Iterator[RankContext]:
    with fake_ranks(sizes) as mesh:
        assert dist.group.WORLD is not None
        yield Alone(0, CPU, mesh, "gloo", dist.group.WORLD, 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def batch() -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, generator=generator), torch.randint(2, (4,), generator=generator)


GIVEN: dict[str, Any] = {"build_model": net, "make_batch": batch, "loss": F.cross_entropy}
SHARDED = ParallelPlan(fsdp=FsdpPlan())


def problems_of(context: RankContext, **given: Any) -> list[str]:
    answer = answer_of(Scenario(**{**GIVEN, "plan": SHARDED, **given}), context)
    return list(answer["problems"])


def problems_or_error(context: RankContext, **given: Any) -> str:
    try:
        return " ".join(problems_of(context, **given))
    except UserError as error:
        return str(error)


def shards(model: nn.Module, mesh: Any, factor: float | None = None, **options: Any) -> None:
    for one in (model[0], model):
        fully_shard(one, mesh=mesh, **options)
        if factor is not None:
            one.set_gradient_divide_factor(factor)
