"""Calls of people's own that do more than forward and loss, and a right one between each two."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, scenario

KEPT: dict[str, Any] = {}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def make_batch() -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def right(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def own_optimizer(model: Any, batch: Any) -> torch.Tensor:
    """The optimizer of its first call, whose DTensors rank 0 would clip alone when it computes one device's step."""
    optimizer = KEPT.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.1))
    right(model, batch).backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return right(model, batch)


def own_backward(model: Any, batch: Any) -> torch.Tensor:
    right(model, batch).backward()
    return 2 * model(batch[0]).square().mean()


def own_collective(model: Any, batch: Any) -> torch.Tensor:
    loss = right(model, batch)
    dist.all_reduce(loss.detach().clone())
    return loss


def noise(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def contrastive(model: Any, batch: Any) -> torch.Tensor:
    result = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(result @ result.T / 0.1, torch.arange(len(result)))


def router(model: Any, batch: Any) -> torch.Tensor:
    """Load balance of a mixture of experts: the share of tokens times the mean probability."""
    shares = model(batch[0]).softmax(-1)
    chosen = F.one_hot(shares.argmax(-1), 4).float().mean(0)
    return right(model, batch) + 0.01 * 4 * (chosen * shares.mean(0)).sum()


def whitened(model: Any, batch: Any) -> torch.Tensor:
    result = model(batch[0])
    return F.cross_entropy((result - result.mean(0)) / result.std(0), batch[1])


def other_dtype(model: Any, batch: Any) -> torch.Tensor:
    loss = right(model, batch)
    torch.set_default_dtype(torch.float64)
    return loss


def not_forward(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model.encode(batch[0]), batch[1])


CALLS = (own_optimizer, own_collective, noise, contrastive, router, whitened, other_dtype)


def of(call: Any, plan: ParallelPlan) -> Scenario:
    return Scenario(build_model=Encoder, make_batch=make_batch, call=call, plan=plan)


@scenario(
    mesh={"dp_shard": 2},
    axes={
        "how": [
            "right",
            "own_optimizer",
            "own_collective",
            "noise",
            "contrastive",
            "router",
            "whitened",
            "other_dtype",
            "right again",
        ]
    },
)
def own_calls(*, how: str = "right") -> Scenario:
    """Under FSDP."""
    return of({one.__name__: one for one in CALLS}.get(how, right), ParallelPlan(fsdp=FsdpPlan()))


@scenario(mesh={"dp_replicate": 2}, axes={"how": ["not_forward", "own_backward"]})
def own_calls_ddp(*, how: str = "not_forward") -> Scenario:
    """Under DDP, whose reductions forward makes ready; of two micro-batches each loss counts half."""
    call = {"not_forward": not_forward, "own_backward": own_backward}[how]
    return of(call, ParallelPlan(ddp=DdpPlan(), microbatches=2))


@scenario(mesh={"dp_shard": 2, "tp": 2})
def own_collectives(*, late: bool = False) -> Scenario:
    """The first leaves a collective behind that rank 0 alone has begun; late: in its second pass."""

    def begins(mesh: Any) -> Any:
        def call() -> None:
            is_due = "begun" not in KEPT and ("summed" in KEPT or not late)
            if is_due and dist.get_rank() == 0:
                KEPT["begun"] = dist.all_reduce(torch.full((1,), 7.0), group=mesh["tp"].get_group(), async_op=True)

        return call

    def sums(mesh: Any) -> Any:
        def call() -> None:
            KEPT["summed"] = True
            dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())

        return call

    return Scenario(calls={"begins": begins, "sums": sums})
