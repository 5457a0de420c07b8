"""Mistakes that a plan may hold, put into plans that were right: each must come out `wrong`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.right_plans import scenario_of, styles_of
from distbench.spec import CpPlan, FsdpPlan, Scenario

Forward = Callable[..., Any]


def is_last() -> bool:
    """Whether this is the one rank that a mistake is made on."""
    return dist.get_rank() == dist.get_world_size() - 1


def gradient_times(factor: float, forward: Forward, *given: torch.Tensor) -> torch.Tensor:
    """The same values; the gradients of the module's own parameters are `factor` times as large."""
    again = forward(*(one.detach() for one in given))
    result: torch.Tensor = forward(*given) + (factor - 1) * (again - again.detach())
    return result


def bias_lost(forward: Any, x: torch.Tensor) -> torch.Tensor:
    """The same values; the bias of a plain module gets no gradient."""
    bias = forward.__self__.bias
    result: torch.Tensor = forward(x) - (bias - bias.detach())
    return result


def backward_times(factor: float, forward: Forward, *given: torch.Tensor) -> torch.Tensor:
    """The same values; whatever lies before gets `factor` times its gradient."""
    out: torch.Tensor = forward(*given)
    return out + (factor - 1) * (out - out.detach())


def output_times(factor: float, forward: Forward, *given: torch.Tensor) -> torch.Tensor:
    """As if the weight were `factor` times what it is: left behind by an update, say."""
    result: torch.Tensor = forward(*given) * factor
    return result


def other_samples(forward: Forward, tokens: torch.Tensor) -> torch.Tensor:
    """A batch in another order than the rest of the tensor parallel group has."""
    result: torch.Tensor = forward(tokens.roll(1, 0))
    return result


def other_positions(forward: Forward, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Positions that count from another start."""
    result: torch.Tensor = forward(x, table.roll(1, 0))
    return result


def on_last(change: Forward, forward: Forward, *given: torch.Tensor) -> torch.Tensor:
    """A change on one rank only."""
    result: torch.Tensor = change(forward, *given) if is_last() else forward(*given)
    return result


def changed(model: nn.Module, mesh: DeviceMesh, styles: dict[str, Any], name: str, change: Forward) -> nn.Module:
    """A tensor parallel plan as a callable, which also changes how one module computes; "" is the root."""
    parallel = parallelize_module(model, mesh, styles)
    module = parallel.get_submodule(name)
    module.forward = partial(change, module.forward)
    return parallel


def bias_again(model: nn.Module, mesh: DeviceMesh, styles: dict[str, Any]) -> nn.Module:
    """Each rank adds the bias of a row parallel layer to its part of the sum, before the parts are added up."""
    parallel = parallelize_module(model, mesh, styles)
    dense: Any = parallel.get_submodule("layers.2.dense")
    dense.register_forward_hook(lambda module, given, out: out + module.bias.to_local())
    return parallel


# (model, module that computes otherwise, how)
CHANGES: dict[str, tuple[str, str, Forward]] = {
    "a gradient scaled by 2": ("llama", "layers.2.mlp.up_proj", partial(gradient_times, 2.0)),
    "a norm's gradient halved": ("llama", "layers.3.input_layernorm", partial(gradient_times, 0.5)),
    "a norm's gradient 5 % too large": ("llama", "layers.1.post_attention_layernorm", partial(gradient_times, 1.05)),
    "a head norm's gradient halved": ("qwen3", "layers.3.self_attn.q_norm", partial(gradient_times, 0.5)),
    "a head norm's gradient halved in a sharp model": (
        "sharp qwen3",
        "layers.2.self_attn.k_norm",
        partial(gradient_times, 0.5),
    ),
    "the last norm's gradient lost": ("vit", "layernorm", partial(gradient_times, 0.0)),
    "a bias's gradient lost": ("vit", "layers.0.layernorm_before", bias_lost),
    "a gradient of the wrong sign": ("llama", "layers.0.self_attn.o_proj", partial(gradient_times, -1.0)),
    "a gradient lost on one rank": ("llama", "layers.1.mlp.down_proj", partial(on_last, partial(gradient_times, 0.0))),
    "a shared weight without the head's gradient": ("tied", "lm_head", partial(gradient_times, 0.0)),
    "the loss summed, not averaged": ("llama", "", partial(backward_times, 2.0)),
    "the loss not averaged on one rank": ("llama", "", partial(on_last, partial(backward_times, 2.0))),
    "a gradient doubled between layers": ("qwen3", "layers.3", partial(backward_times, 2.0)),
    "one rank's backward cut": ("vit", "layers.2", partial(on_last, partial(backward_times, 0.0))),
    "one rank's shard stale by 1 %": (
        "llama",
        "layers.3.self_attn.v_proj",
        partial(on_last, partial(output_times, 0.99)),
    ),
    "one rank's norm stale by 0.1 %": (
        "llama",
        "layers.0.input_layernorm",
        partial(on_last, partial(output_times, 0.999)),
    ),
    "one rank's head norm stale by 1 %": (
        "qwen3",
        "layers.2.self_attn.k_norm",
        partial(on_last, partial(output_times, 0.99)),
    ),
    "one rank has the batch in another order": ("llama", "", partial(on_last, other_samples)),
    "one rank's positions shifted": ("llama", "layers.3.self_attn", partial(on_last, other_positions)),
}
# (model, patterns left out of its tensor parallel plan)
LEFT_OUT = {
    "layer norms' gradients not added up": ("llama", ("layers.*.*_layernorm",)),
    "the last norm's gradient not added up": ("llama", ("norm",)),
    "head norms' gradients not added up": ("qwen3", ("layers.*.self_attn.[qk]_norm",)),
}
# (model, mesh, parts of its plan that are something else)
REPLACED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a bias added on every rank": ("vit", "tp", {"tp": partial(bias_again, styles=styles_of("vit"))}),
    "gradients not averaged over the batch's parts": ("vit", "tp", {"fsdp": None}),
    "gradients not averaged over the sequence's parts": ("llama", "cp", {"fsdp": FsdpPlan(wrap=("layers.*",))}),
    "positions counted from each part's start": ("llama", "cp", {"cp": CpPlan(rotate="alltoall")}),
}
# Smaller than what computing in bf16 does to the same model.
BELOW_BF16 = (
    "a head norm's gradient halved in a sharp model",
    "a norm's gradient 5 % too large",
    "one rank's shard stale by 1 %",
    "one rank's head norm stale by 1 %",
    "one rank's norm stale by 0.1 %",
)
MISTAKES = (*CHANGES, *LEFT_OUT, *REPLACED)


def mistaken(mistake: str, precision: str, seed: int) -> tuple[Scenario, str]:
    """A scenario with the mistake, and the mesh that it is for."""
    if mistake in REPLACED:
        model, mesh, parts = REPLACED[mistake]
    elif mistake in LEFT_OUT:
        model, patterns = LEFT_OUT[mistake]
        mesh, parts = "tp", {"tp": {name: style for name, style in styles_of(model).items() if name not in patterns}}
    else:
        model, name, change = CHANGES[mistake]
        mesh, parts = "tp", {"tp": partial(changed, styles=styles_of(model), name=name, change=change)}
    scenario = scenario_of(model, precision, seed, mesh)
    return replace(scenario, plan=replace(scenario.plan, **parts)), mesh
