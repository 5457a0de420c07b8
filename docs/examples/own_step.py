"""Training steps as people write them. `distbench run docs/examples/own_step.py`"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim=64, num_out=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, num_out)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Stack(num_out=64)
        self.critic = Stack(num_out=1)


def samples():
    torch.manual_seed(0)
    return torch.randn(16, 64), torch.randint(8, (16,))


PLAN = ParallelPlan(fsdp=FsdpPlan(wrap=("blocks.*",)))


# clip, scaler, schedule, average
def warm_up(step):
    return min(1.0, (step + 1) / 100)


def parts_of_training(model):
    """A group of its own for norms and biases, a schedule, a scaler, and an average of the parameters."""
    decayed = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decayed[parameter.ndim > 1 and "norm" not in name].append(parameter)
    groups = [{"params": decayed[True]}, {"params": decayed[False], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3)
    ema = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler(ema[0].device.type)
    return {"adamw": adamw, "schedule": LambdaLR(adamw, warm_up), "scaler": scaler, "ema": ema}


def train_step(model, batch, parts):
    adamw, scaler = parts["adamw"], parts["scaler"]
    loss = F.cross_entropy(model(batch[0]), batch[1])
    scaler.scale(loss).backward()
    scaler.unscale_(adamw)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(adamw)
    scaler.update()
    adamw.zero_grad()
    parts["schedule"].step()
    with torch.no_grad():
        torch._foreach_lerp_(parts["ema"], list(model.parameters()), 0.01)
    return loss


@scenario(mesh={"dp_shard": 2})
def clip_ema() -> Scenario:
    """Gradient clipping, an AMP scaler, a learning-rate schedule, and an average of the parameters."""
    return Scenario(
        build_model=Stack,
        make_batch=samples,
        step=train_step,  # glue
        make_optimizers=parts_of_training,  # glue
        plan=PLAN,  # glue
    )


# GAN
def two_optimizers(model):
    return {
        "generator": torch.optim.Adam(model.generator.parameters()),
        "critic": torch.optim.Adam(model.critic.parameters()),
    }


def gan_step(model, batch, optimizers):
    """Hinge losses: the critic's step, then the generator's."""
    real = batch[0]
    fake = model.generator(real.flip(0))
    critic_loss = F.relu(1 - model.critic(real)).mean() + F.relu(1 + model.critic(fake.detach())).mean()
    critic_loss.backward()
    optimizers["critic"].step()
    model.critic.requires_grad_(False)
    generator_loss = -model.critic(fake).mean()
    generator_loss.backward()
    optimizers["generator"].step()
    model.critic.requires_grad_(True)
    model.zero_grad()
    return {"critic": critic_loss, "generator": generator_loss}


@scenario(mesh={"dp_shard": 2})
def gan() -> Scenario:
    """A generator and a critic, each with an optimizer of its own."""
    return Scenario(
        build_model=Gan,
        make_batch=samples,
        step=gan_step,  # glue
        make_optimizers=two_optimizers,  # glue
        plan=ParallelPlan(fsdp=FsdpPlan(wrap=("generator", "critic"))),  # glue
    )


# gradient accumulation
def counted(model):
    return {"adamw": torch.optim.AdamW(model.parameters()), "numbers": itertools.count(1)}


def accumulating_step(model, batch, parts):
    loss = F.cross_entropy(model(batch[0]), batch[1]) / 2
    loss.backward()
    if next(parts["numbers"]) % 2 == 0:
        parts["adamw"].step()
        parts["adamw"].zero_grad()
    return loss


@scenario(mesh={"dp_shard": 2})
def accumulation() -> Scenario:
    """The optimizer steps in every second call, so a sample is two calls."""
    return Scenario(
        build_model=Stack,
        make_batch=samples,
        step=accumulating_step,  # glue
        make_optimizers=counted,  # glue
        period=2,  # glue
        plan=PLAN,  # glue
    )
