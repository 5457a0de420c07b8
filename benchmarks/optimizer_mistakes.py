"""Optimizers that are right on one device and wrong on ranks, for bench_right_optimizers."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.right_optimizers import (
    ADAMW,
    LR,
    MOMENTUM,
    SGD,
    Averaged,
    Lamb,
    Make,
    OwnStep,
    Shampoo,
    Wrapped,
    parts_of_step,
)

NS = 5


def local(tensor: Any) -> Any:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rank_of(parameter: Any) -> int:
    """This rank, in a model that is laid over several; 0 on one device."""
    return dist.get_rank() if dist.get_world_size() > 1 else 0


class OwnNorm(Wrapped):
    """Clip by the norm of this rank's shards."""

    def before(self) -> None:
        """Do it."""
        norm = sum(local(parameter.grad).square().sum() for parameter in self.parameters) ** 0.5
        for parameter in self.parameters:
            parameter.grad.mul_((0.05 / norm).clamp(max=1.0))


class CountedTwice(Wrapped):
    """Clip by squares summed over ranks, those of what several ranks hold once per holder."""

    def before(self) -> None:
        """Do it."""
        square = torch.as_tensor(sum(local(parameter.grad).square().sum() for parameter in self.parameters))
        dist.all_reduce(square)
        for parameter in self.parameters:
            parameter.grad.mul_((0.05 / square.sqrt()).clamp(max=1.0))


class OnFirstRank(Averaged):
    """An average that only rank 0 updates."""

    def after(self) -> None:
        """Do it."""
        if dist.get_rank() == 0:
            super().after()


class OfOldShards(Averaged):
    """An average of copies of shards made before the first step."""

    def __init__(self, parameters: Iterable[Any], inner: Make) -> None:
        super().__init__(parameters, inner)
        self.seen = [local(parameter.detach()) + 0 for parameter in self.parameters]

    def after(self) -> None:
        """Do it."""
        for average, parameter, seen in zip(self.ema, self.parameters, self.seen, strict=True):
            is_sharded = isinstance(parameter, DTensor) and any(each.is_shard() for each in parameter.placements)
            local(average).lerp_(seen if is_sharded else local(parameter.detach()), 0.001)


class OwnScale(Wrapped):
    """A loss scale of each rank's own: one of them has halved it, and all unscale by the first one's."""

    def before(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            parameter.grad.mul_(512 if rank_of(parameter) == 1 else 1024).div_(1024)


class Skips(Wrapped):
    """Leave out what is a DTensor in one dim."""

    def before(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            if isinstance(parameter, DTensor) and parameter.ndim == 1:
                parameter.grad = None


class SkipsOnOneRank(Wrapped):
    """Leave out the last parameter on the last rank."""

    def step(self) -> None:
        """Step with what it was."""
        last = self.parameters[-1]
        before = local(last).detach().clone()
        super().step()
        if rank_of(last) == dist.get_world_size() - 1 > 0:
            local(last.data).copy_(before)


class Twice(Wrapped):
    """Step twice on ranks."""

    def after(self) -> None:
        """Do it."""
        if isinstance(self.parameters[0], DTensor):
            self.inner.step()


class OwnRate(Wrapped):
    """A learning rate of its own on rank 1."""

    def before(self) -> None:
        """Do it."""
        for group in self.inner.param_groups:
            group["lr"] = LR * (1.5 if rank_of(self.parameters[0]) == 1 else 1.0)


class HiddenRate(Lamb):
    """The same, where no parameter group shows it."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        parameter.sub_(gradient * lr * (1.5 if rank_of(parameter) == 1 else 1.0))


class DecaysShards(Wrapped):
    """Weight decay of whatever has more than one row here; the norms of one device have none."""

    def after(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            if parameter.ndim > 1 or isinstance(parameter, DTensor):
                parameter.mul_(1 - 0.1 * LR)


class Noisy(Wrapped):
    """Noise from each rank's own generator."""

    def after(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            part = local(parameter.data)
            generator = torch.Generator().manual_seed(rank_of(parameter))
            if dist.get_world_size() > 1:
                part.add_(torch.randn(part.shape, generator=generator), alpha=1e-5)


class Drawn(Wrapped):
    """Noise from torch's own generator, which the plan of one device does not have."""

    def after(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            if isinstance(parameter, DTensor):
                part = local(parameter.data)
                part.add_(torch.randn_like(part), alpha=1e-5)


class ForgetsMomentum(Wrapped):
    """Momentum made anew for DTensors in each step."""

    def before(self) -> None:
        """Do it."""
        if isinstance(self.parameters[0], DTensor):
            self.inner.state.clear()


class LocalFactors(Lamb):
    """Adafactor's factored second moment, of this rank's shard."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        gradient, part = local(gradient), local(parameter.data)
        square = gradient.square() + 1e-30
        if gradient.ndim == 2:
            square = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
        part.sub_(gradient / square.sqrt() * lr)


class LocalShampoo(Shampoo):
    """Preconditioners of this rank's shard."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        local(parameter.data).sub_(self.update(local(gradient), state) * lr)


class LocalMuon(Lamb):
    """Newton-Schulz of this rank's shard."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        update = local(gradient)
        if update.ndim == 2:
            update = update / (update.norm() + 1e-7)
            for _ in range(NS):
                square = update @ update.T
                update = 3.4445 * update + (-4.775 * square + 2.0315 * square @ square) @ update
        local(parameter.data).sub_(update * lr)


class LocalRatio(Lamb):
    """LAMB's ratio of norms, of this rank's shard."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        part, update = local(parameter.data), local(gradient)
        part.sub_(update * (part.norm() / update.norm()) * lr)


class OtherShard(Wrapped):
    """Each rank writes its neighbour's shard of what it has gathered."""

    def after(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            for mesh_dim, placement in enumerate(getattr(parameter, "placements", ())):
                if placement.is_shard():
                    size, index = (
                        parameter.device_mesh.shape[mesh_dim],
                        parameter.device_mesh.get_coordinate()[mesh_dim],
                    )
                    parts = [torch.empty_like(local(parameter.data)) for _ in range(size)]
                    dist.all_gather(parts, local(parameter.data), group=parameter.device_mesh.get_group(mesh_dim))
                    local(parameter.data).copy_(parts[(index + 1) % size])
                    break


class Reversed(Wrapped):
    """Moments written back in the wrong order of rows."""

    def after(self) -> None:
        """Do it."""
        for parameter, state in self.inner.state.items():
            if isinstance(parameter, DTensor):
                part = local(state["exp_avg"])
                part.copy_(part.flip(0).clone())


class Unreduced(Wrapped):
    """Replicated gradients times what this rank adds: a correction that is not summed over ranks."""

    def before(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            if any(each.is_replicate() for each in getattr(parameter, "placements", ())):
                local(parameter.grad).mul_(1 + 0.01 * rank_of(parameter))


def groups_by_shard(parameters: Iterable[Any]) -> Any:
    """Weight decay for whatever is a DTensor, as the shards of norms are."""
    every = list(parameters)
    decayed = [parameter for parameter in every if isinstance(parameter, DTensor) or parameter.ndim > 1]
    ids = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in every if id(parameter) not in ids]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LR)


class Corrupts(Wrapped):
    """Every rank's parameters times a number, which no rank of one has."""

    def after(self) -> None:
        """Do it."""
        for parameter in self.parameters:
            if dist.get_world_size() > 1:
                parameter.mul_(1.001)


# Mistakes of copies, which plans that shard everything do not have.
OF_COPIES = ("clip counts copies twice", "no reduction of replicas")
# What is made, words of the cause ("" where none can be established).
MISTAKES: dict[str, tuple[Make, str]] = {
    "clip by the rank's own norm, SGD": (partial(OwnNorm, inner=SGD), "norm of its own shards"),
    "clip by the rank's own norm, AdamW": (partial(OwnNorm, inner=ADAMW), "norm of its own shards"),
    "clip counts copies twice": (partial(CountedTwice, inner=ADAMW), "one factor"),
    "EMA on rank 0 only": (partial(OnFirstRank, inner=ADAMW), "never changes"),
    "EMA of old shards": (partial(OfOldShards, inner=ADAMW), "never changes"),
    "loss scale of its own": (partial(OwnScale, inner=ADAMW), "one factor"),
    "skips shards of norms": (partial(Skips, inner=ADAMW), "never changes"),
    "skips one on one rank": (partial(SkipsOnOneRank, inner=ADAMW), "never changes"),
    "steps twice": (partial(Twice, inner=ADAMW), "2 times one device's"),
    "steps twice, SGD": (partial(Twice, inner=SGD), "one factor"),
    "learning rate of its own": (partial(OwnRate, inner=ADAMW), "lr of"),
    "hidden learning rate of its own": (HiddenRate, "one factor"),
    "weight decay of shards of norms": (partial(DecaysShards, inner=ADAMW), "times its own value"),
    "wrong parameter group": (groups_by_shard, "weight_decay of"),
    "noise of its own generator": (partial(Noisy, inner=ADAMW), ""),
    "noise of torch's generator": (partial(Drawn, inner=ADAMW), "random numbers"),
    "momentum is forgotten": (partial(ForgetsMomentum, inner=MOMENTUM), ""),
    "Adafactor of a shard": (LocalFactors, "its shards as whole tensors"),
    "Muon of a shard": (LocalMuon, "its shards as whole tensors"),
    "Shampoo of a shard": (LocalShampoo, "its shards as whole tensors"),
    "LAMB of a shard": (LocalRatio, "its shards as whole tensors"),
    "writes another shard": (partial(OtherShard, inner=ADAMW), "belongs to the rank"),
    "moments in the wrong order": (partial(Reversed, inner=ADAMW), ""),
    "no reduction of replicas": (partial(Unreduced, inner=SGD), "one factor"),
    "corrupts every rank": (partial(Corrupts, inner=ADAMW), "times its own value"),
}


class OwnNormStep(OwnStep):
    """Clip by the norm of this rank's shards."""

    def clip(self, parameters: list[Any]) -> None:
        """Do it."""
        norm = sum(local(parameter.grad).square().sum() for parameter in parameters) ** 0.5
        for parameter in parameters:
            local(parameter.grad).mul_((0.05 / norm).clamp(max=1.0))


class OwnScaleStep(OwnStep):
    """A scale of each rank's own, left in the gradients."""

    def clip(self, parameters: list[Any]) -> None:
        """Do it."""
        for parameter in parameters:
            local(parameter.grad).mul_(0.5 if rank_of(parameter) == 1 else 1.0)


class StaleAverageStep(OwnStep):
    """An average that only rank 0 updates."""

    def average(self, model: Any, ema: dict[str, Any]) -> None:
        """Do it."""
        if dist.get_rank() == 0:
            super().average(model, ema)


class AddsStep(OwnStep):
    """Rank 1 adds something to its own shards."""

    def average(self, model: Any, ema: dict[str, Any]) -> None:
        """Do it."""
        super().average(model, ema)
        if rank_of(None) == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    local(parameter.data).add_(local(ema[next(iter(ema))]).mean() * 1e-1)


MISTAKEN_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "step that clips by the rank's own norm": (
        {"step": OwnNormStep(), "make_optimizers": parts_of_step},
        "norm of its own shards",
    ),
    "step with a scale of its own": ({"step": OwnScaleStep(), "make_optimizers": parts_of_step}, "one factor"),
    "step with a stale EMA": ({"step": StaleAverageStep(), "make_optimizers": parts_of_step}, "never changes"),
    "step that moves one rank's shards": ({"step": AddsStep(), "make_optimizers": parts_of_step}, ""),
}
