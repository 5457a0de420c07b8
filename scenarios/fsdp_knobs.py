"""Every option of FSDP2, one at a time, compared with the same plan without the option."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fsdp_communication import AllToAllScatter, BroadcastGather, averaged_over_replicas
from gather_extension import gathered_as
from models import Llama, next_token_loss, token_batch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from distbench.spec import FsdpPlan, LargestDim, ParallelPlan, Scenario, UserError, scenario

WRAP = ("layers.*",)
BASE = FsdpPlan(wrap=WRAP, mesh_dims=("dp_replicate", "dp_shard"))
HYBRID = replace(BASE, mesh_dims=("dp_shard",), replicate_dims=("dp_replicate",))
BF16 = torch.bfloat16


def columns(parameter: nn.Parameter) -> Shard | None:
    """Shard matrices on tensor dim 1, and other parameters as FSDP2's default."""
    return Shard(1) if parameter.ndim == 2 else None


def backward_needs(unit: str, _: Any) -> bool:
    """Skip the embedding's gather in backward, which does not read the weight."""
    return unit != "tok_embeddings"


def norms_in_f32(plan: FsdpPlan) -> FsdpPlan:
    """Compute in bf16, except for vectors, which are the weights of norms (torch 2.15)."""
    own: dict[str, Any] = {"param_dtype_override_fn": lambda weight: torch.float32 if weight.ndim == 1 else None}
    if not own.keys() <= inspect.signature(MixedPrecisionPolicy).parameters.keys():
        return replace(plan, configure=own)  # an option of a newer torch is reported as unsupported
    return replace(plan, mixed_precision=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, **own))


def unshard_two_ahead(model: Any, _: Any) -> None:
    """Gather the first two blocks together before each forward."""

    def gather(*_: Any) -> None:
        for handle in [layer.unshard(async_op=True) for layer in model.layers[:2]]:
            handle.wait()

    model.register_forward_pre_hook(gather)


KNOBS: dict[str, FsdpPlan] = {
    "plain": BASE,
    "keep": replace(BASE, reshard_after_forward=False),
    "reshard_to_2": replace(BASE, reshard_after_forward=2),
    "hybrid": HYBRID,
    "bf16_params": replace(BASE, mixed_precision=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)),
    "bf16_reduce": replace(BASE, mixed_precision=MixedPrecisionPolicy(reduce_dtype=BF16)),
    "f32_output": replace(
        BASE,
        mixed_precision={
            "": MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32),
            "layers.*": MixedPrecisionPolicy(param_dtype=BF16),
        },
    ),
    "cpu_offload": replace(BASE, offload=CPUOffloadPolicy()),
    "columns": replace(BASE, shard_placement=columns),
    "largest_dim": replace(BASE, shard_placement=LargestDim(min_numel=1000)),
    "uneven": BASE,
    "tied": BASE,
    "frozen": BASE,
    "ignored": replace(BASE, ignored=("tok_embeddings.weight", "norm.weight")),
    "prefetch_2": replace(BASE, prefetch_forward=2, prefetch_backward=2),
    "accumulate": replace(BASE, sync_each_microbatch=False),
    "accumulate_synced": BASE,
    "divide_by_1": replace(BASE, configure={"set_gradient_divide_factor": 1.0}),
    "all_reduce_once": replace(HYBRID, all_reduce_each_microbatch=False),
    "keep_over_microbatches": replace(BASE, reshard_each_microbatch=False),
    "not_in_backward": replace(
        BASE, wrap=(*WRAP, "tok_embeddings"), configure={"set_unshard_in_backward": backward_needs}
    ),
    "unshard_ahead": BASE,
    "all_reduce_hook": replace(HYBRID, configure={"set_all_reduce_hook": averaged_over_replicas}),
    "own_all_gather": replace(BASE, configure={"set_custom_all_gather": BroadcastGather()}),
    "own_reduce_scatter": replace(BASE, configure={"set_custom_reduce_scatter": AllToAllScatter()}),
    "own_group": replace(BASE, configure={"set_separate_reduce_scatter_group": True}),
    "two_buffers": replace(BASE, configure={"set_reduce_scatter_max_input_buffers": 2}),
    "unused_zeros": replace(BASE, configure={"set_reduce_scatter_unused_params": True}),
    "sum": replace(BASE, configure={"set_force_sum_reduction_for_comms": True}),
    "group_memory": replace(BASE, configure={"set_allocate_memory_from_process_group_for_comm": True}),
    "symm_mem": replace(BASE, configure={"set_symm_mem_for_comm": {"backend": "NCCL"}}),
    "kept_storage": replace(BASE, configure={"set_keep_unsharded_storage": True}),
    "f32_norms": BASE,
    "state_dict": BASE,
    "gather_bf16": replace(BASE, gather_extension=gathered_as("bf16")),
    "gather_int8": replace(BASE, gather_extension=gathered_as("int8")),
}
IN_TWO_PARTS = ("accumulate", "accumulate_synced", "all_reduce_once", "keep_over_microbatches")
# Relative to one device in fp32, for the loss and every gradient: about twice the measured error from rounding the
# weights. The largest errors are in the gradients of attention's projections; the losses agree to 1e-3.
TOLERANCES = {"gather_bf16": 5e-2, "gather_int8": 1e-1}
# Odd sizes: neither the vocabulary nor the hidden size is a multiple of the number of ranks.
ODD = {"vocab_size": 999, "hidden": 333}


class ScaledLlama(Llama):
    """A llama-like stack with one parameter of a single element, fewer than the ranks."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.logit_weight = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.logit_weight


def built(knob: str, sizes: dict[str, Any]) -> nn.Module:
    """The model for an option: tied, frozen, or of odd sizes where the option requires it."""
    if knob == "uneven":
        return ScaledLlama(*(sizes | ODD).values())
    model = Llama(**sizes)
    if knob == "tied":
        model.output.weight = model.tok_embeddings.weight
    if knob in ("frozen", "ignored"):
        for part in (model.tok_embeddings, model.layers[0].attention, model.norm):
            part.requires_grad_(False)
    return model


@scenario(
    mesh={"dp_replicate": 2, "dp_shard": 2},
    axes={
        "knob": (
            "plain",
            "keep",
            "reshard_to_2",
            "hybrid",
            "bf16_params",
            "bf16_reduce",
            "f32_output",
            "cpu_offload",
            "columns",
            "largest_dim",
            "uneven",
            "tied",
            "frozen",
            "ignored",
            "prefetch_2",
            "accumulate",
            "accumulate_synced",
            "divide_by_1",
            "all_reduce_once",
            "keep_over_microbatches",
            "not_in_backward",
            "unshard_ahead",
            "all_reduce_hook",
            "own_all_gather",
            "own_reduce_scatter",
            "state_dict",
            "gather_bf16",
            "gather_int8",
        )
    },
    quick={"dim": 64, "hidden": 128, "num_layers": 3, "sequence": 32},
    tags=("fsdp",),
)
def fsdp_knobs(
    *,
    dim: int = 512,
    hidden: int = 2048,
    num_layers: int = 4,
    num_heads: int = 8,
    batch: int = 8,
    sequence: int = 256,
    knob: str = "plain",
) -> Scenario:
    """FSDP2, one option at a time, on a llama-like stack. Options are resharding, precision, placement, accumulation
    and more.
    """
    if knob not in KNOBS:
        raise UserError(f"--set knob={knob} is unknown; use {', '.join(KNOBS)}")
    sizes = {
        "vocab_size": 1000,
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "hidden": hidden,
        "table_length": sequence,
    }
    return Scenario(
        build_model=partial(built, knob, sizes),
        make_batch=partial(token_batch, batch, sequence, ODD["vocab_size"]),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        after_materialize=unshard_two_ahead if knob == "unshard_ahead" else None,
        plan=ParallelPlan(
            fsdp=norms_in_f32(BASE) if knob == "f32_norms" else KNOBS[knob],
            microbatches=2 if knob in IN_TWO_PARTS else 1,
            state_dict=knob == "state_dict",
        ),
        tolerance=TOLERANCES.get(knob),
    )
