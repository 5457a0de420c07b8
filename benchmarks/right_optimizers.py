"""Optimizers for bench_right_optimizers: those of torch, and others as people write them on parameters as DTensors."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.right_models import text_loss

LR = 1e-2
Make = Callable[[Iterable[Any]], Any]


class Wrapped:
    """An optimizer with something of its own around the step of another."""

    def __init__(self, parameters: Iterable[Any], inner: Make) -> None:
        self.parameters = list(parameters)
        self.inner = inner(self.parameters)

    @property
    def param_groups(self) -> Any:
        """Those of the wrapped optimizer."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """What comes before, the step, what comes after."""
        self.before()
        self.inner.step()
        self.after()

    def before(self) -> None:
        """Nothing."""

    def after(self) -> None:
        """Nothing."""


class ClipNorm(Wrapped):
    """Clip by the norm of all gradients, as torch does."""

    def before(self) -> None:
        """Do it."""
        clip_grad_norm_(self.parameters, 0.05)


class ClipNormByHand(Wrapped):
    """The same, the squares summed over ranks: of shards once, of what several ranks hold once per holder's share."""

    def before(self) -> None:
        """Do it."""
        square = torch.zeros(())
        for parameter in self.parameters:
            if isinstance(parameter, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # sums that are pending
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            copies = dist.get_world_size()
            if isinstance(gradient, DTensor):
                for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                    copies //= 1 if placement.is_replicate() else size
            square += local.square().sum() / copies
        dist.all_reduce(square)
        for parameter in self.parameters:
            parameter.grad.mul_((0.05 / square.sqrt()).clamp(max=1.0))


class ClipValue(Wrapped):
    """Clip each element."""

    def before(self) -> None:
        """Do it."""
        clip_grad_value_(self.parameters, 1e-3)


class Averaged(Wrapped):
    """An exponential moving average of the parameters, as DTensors like them."""

    def __init__(self, parameters: Iterable[Any], inner: Make) -> None:
        super().__init__(parameters, inner)
        self.ema = [parameter.detach().clone() for parameter in self.parameters]

    def after(self) -> None:
        """Do it."""
        for average, parameter in zip(self.ema, self.parameters, strict=True):
            average.lerp_(parameter.detach(), 0.001)


class AveragedShards(Wrapped):
    """The same of each rank's shards as plain tensors, made in the first step."""

    def __init__(self, parameters: Iterable[Any], inner: Make) -> None:
        super().__init__(parameters, inner)
        self.ema: dict[int, torch.Tensor] = {}

    def after(self) -> None:
        """Do it."""
        for index, parameter in enumerate(self.parameters):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            self.ema.setdefault(index, local.detach().clone()).lerp_(local, 0.001)


class Scaled(Wrapped):
    """A gradient scaler's logic: gradients times a scale, unscaled, skipped where one is infinite on any rank."""

    scale = 1024.0

    def step(self) -> None:
        """Skip the step if a gradient is infinite."""
        is_infinite = torch.zeros(())
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.grad.mul_(self.scale).mul_(1 / self.scale)
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                is_infinite += (~local.isfinite()).any()
        dist.all_reduce(is_infinite)
        if not is_infinite:
            self.inner.step()


class Scheduled(Wrapped):
    """A learning rate that falls with each step."""

    def __init__(self, parameters: Iterable[Any], inner: Make) -> None:
        super().__init__(parameters, inner)
        self.scheduler = LambdaLR(self.inner, lambda step: 1 / (1 + step))

    def after(self) -> None:
        """Do it."""
        self.scheduler.step()


def grouped(parameters: Iterable[Any], make: Any = torch.optim.AdamW) -> Any:
    """Weight decay of matrices only."""
    every = list(parameters)
    matrices = [parameter for parameter in every if parameter.ndim > 1]
    others = [parameter for parameter in every if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": LR / 2}]
    return make(groups, lr=LR)


class Lamb(torch.optim.Optimizer):
    """Adam's update times the ratio of the norms of the parameter and of the update, of DTensors."""

    def __init__(self, parameters: Iterable[Any], lr: float = LR) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.one(parameter, parameter.grad, self.state[parameter], group["lr"])

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        mean = state.setdefault("mean", torch.zeros_like(gradient)).lerp_(gradient, 0.1)
        square = state.setdefault("square", torch.zeros_like(gradient)).lerp_(gradient * gradient, 0.01)
        update = mean / (square.sqrt() + 1e-6)
        parameter.sub_(update * (parameter.norm() / update.norm()) * lr)


class Lion(Lamb):
    """The sign of a momentum."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        mean = state.setdefault("mean", torch.zeros_like(gradient))
        parameter.sub_(mean.lerp(gradient, 0.1).sign() * lr)
        mean.lerp_(gradient, 0.01)


class Factored(Lamb):
    """Adafactor's second moment of rows and columns, of DTensors."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        square = gradient * gradient + 1e-30
        if gradient.ndim == 2:
            rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
            state["rows"], state["columns"] = (state.get("rows", 0) + rows), (state.get("columns", 0) + columns)
            square = state["rows"] * state["columns"] / state["rows"].mean()
        update = gradient / square.sqrt()
        parameter.sub_(update / (update.square().mean().sqrt()).clamp(min=1.0) * lr)


def root(square: torch.Tensor) -> torch.Tensor:
    """Inverse fourth root of a positive matrix."""
    values, vectors = torch.linalg.eigh(square + 1e-4 * square.diagonal().mean() * torch.eye(len(square)))
    return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


class Shampoo(Lamb):
    """Preconditioned by the roots of both sides' second moments, of the whole gradient, gathered."""

    def one(self, parameter: Any, gradient: Any, state: Any, lr: float) -> None:
        """Step one parameter."""
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        update = self.update(whole, state)
        if isinstance(parameter, DTensor):
            update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.sub_(update * lr)

    def update(self, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        """The update of one whole gradient, or of what is taken for one."""
        if gradient.ndim != 2:
            return gradient
        left = state.setdefault("left", torch.zeros(2 * gradient.shape[:1])).add_(gradient @ gradient.T)
        right = state.setdefault("right", torch.zeros(2 * gradient.shape[1:])).add_(gradient.T @ gradient)
        return root(left) @ gradient @ root(right)


def muon(parameters: Iterable[Any], make: Any = torch.optim.AdamW) -> Any:
    """Muon of matrices, AdamW of the rest."""
    every = list(parameters)
    return Both(
        torch.optim.Muon([parameter for parameter in every if parameter.ndim == 2], lr=LR),
        make([parameter for parameter in every if parameter.ndim != 2], lr=LR),
    )


class Both:
    """Two optimizers."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[Any]:
        """Those of both."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Step both."""
        for optimizer in self.optimizers:
            optimizer.step()


ADAMW: Make = partial(torch.optim.AdamW, lr=LR, foreach=False)
SGD: Make = partial(torch.optim.SGD, lr=LR)
MOMENTUM: Make = partial(torch.optim.SGD, lr=LR, momentum=0.9)
RIGHT: dict[str, Make] = {
    "Adam": partial(torch.optim.Adam, lr=LR),
    "AdamW": ADAMW,
    "AdamW, fused": partial(torch.optim.AdamW, lr=LR, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=LR, foreach=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=LR, amsgrad=True),
    "SGD": SGD,
    "SGD, momentum": MOMENTUM,
    "SGD, Nesterov": partial(torch.optim.SGD, lr=LR, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=LR),
    "Adagrad": partial(torch.optim.Adagrad, lr=LR),
    "Adafactor": partial(torch.optim.Adafactor, lr=LR),
    "Adafactor of DTensors": Factored,
    "Muon": muon,
    "Shampoo": Shampoo,
    "LAMB": Lamb,
    "Lion": Lion,
    "clip_grad_norm_, AdamW": partial(ClipNorm, inner=ADAMW),
    "clip_grad_norm_, SGD": partial(ClipNorm, inner=SGD),
    "clip by a norm summed by hand": partial(ClipNormByHand, inner=MOMENTUM),
    "clip_grad_value_": partial(ClipValue, inner=SGD),
    "EMA of DTensors": partial(Averaged, inner=ADAMW),
    "EMA of shards": partial(AveragedShards, inner=ADAMW),
    "gradient scaler": partial(Scaled, inner=ADAMW),
    "parameter groups": grouped,
    "learning rate schedule": partial(Scheduled, inner=ADAMW),
}


def parts_of_step(model: Any) -> dict[str, Any]:
    """AdamW, a scaler, a schedule and an average by name, for a step of one's own."""
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [parameter for name, parameter in named.items() if "norm" not in name]},
            {"params": [parameter for name, parameter in named.items() if "norm" in name], "weight_decay": 0.0},
        ],
        lr=LR,
        foreach=False,
    )
    ema = {name: parameter.detach().clone() for name, parameter in named.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"adamw": adamw, "scaler": scaler, "schedule": LambdaLR(adamw, lambda step: 1 / (1 + step)), "ema": ema}


class OwnStep:
    """Scale, backward, unscale, clip, step, schedule, average: what people write; mistakes replace a part."""

    def __call__(self, model: Any, batch: Any, parts: Any) -> torch.Tensor:
        """Run it."""
        loss = text_loss(model(batch[0]), batch[1])
        scaler, adamw = parts["scaler"], parts["adamw"]
        scaler.scale(loss).backward()
        scaler.unscale_(adamw)
        self.clip([parameter for parameter in model.parameters() if parameter.grad is not None])
        scaler.step(adamw)
        scaler.update()
        parts["schedule"].step()
        self.average(model, parts["ema"])
        adamw.zero_grad()
        return loss.detach()

    def clip(self, parameters: list[Any]) -> None:
        """Clip by the norm of all gradients."""
        clip_grad_norm_(parameters, 0.05)

    @torch.no_grad()
    def average(self, model: Any, ema: dict[str, Any]) -> None:
        """Follow the parameters."""
        for name, parameter in model.named_parameters():
            ema[name].lerp_(parameter.detach(), 0.01)


# As fields of a scenario.
RIGHT_STEPS: dict[str, dict[str, Any]] = {
    "step with scaler, clip, schedule, EMA": {"step": OwnStep(), "make_optimizers": parts_of_step}
}
