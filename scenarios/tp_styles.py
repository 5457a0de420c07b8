"""Every style of torch's tensor parallelism on a small language model, one variant per style."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import next_token_loss, token_batch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from distbench.spec import ParallelPlan, Scenario, UserError, scenario

WHOLE, SEQUENCE = Replicate(), Shard(1)


class Mlp(nn.Module):
    """Two layers, with or without bias: (batch, sequence, dim) to the same shape."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Gate(nn.Module):
    """Two outputs from one input and a keyword; without parameters, only activations can be sharded."""

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * torch.sigmoid(gate), F.gelu(x)


class Model(nn.Module):
    """Token ids (batch, sequence) to logits, through every kind of module that a style supports."""

    def __init__(self, vocab_size: int, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden, bias)
        self.gate = Gate()
        self.output = nn.Linear(dim, vocab_size, bias=bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        hidden = self.mlp(self.norm(x))
        gated, passed = self.gate(x, gate=hidden)
        return self.output(gated + passed)


def chosen_by_hand(model: nn.Module, mesh: Any) -> nn.Module:
    """A plan as a function: the user's own code with the model and the mesh."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            style = (
                RowwiseParallel(input_layouts=WHOLE) if name.endswith("down") else ColwiseParallel(output_layouts=WHOLE)
            )
            parallelize_module(module, mesh, style)
    return model


def sequence_parallel(local: bool) -> dict[str, Any]:
    """Activations sharded on the sequence outside of the feed-forward, as local tensors or as DTensors."""
    return {
        "tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=SEQUENCE, use_local_output=local),
        "norm": SequenceParallel(use_local_output=local),
        "mlp": PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=WHOLE, use_local_output=local),
        "mlp.up": ColwiseParallel(use_local_output=local),
        "mlp.down": RowwiseParallel(output_layouts=SEQUENCE, use_local_output=local),
        "output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=WHOLE),
    }


STYLES: dict[str, Any] = {
    "embedding_rows": {"tokens": RowwiseParallel(input_layouts=WHOLE)},
    "embedding_columns": {"tokens": ColwiseParallel(output_layouts=WHOLE)},
    "linear": {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()},
    "linear_no_bias": {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()},
    "linear_dtensor": {"mlp.up": ColwiseParallel(use_local_output=False), "mlp.down": RowwiseParallel()},
    "rows_of_whole": {"mlp.down": RowwiseParallel(input_layouts=WHOLE)},
    "vocabulary": {
        "tokens": RowwiseParallel(input_layouts=WHOLE),
        "output": ColwiseParallel(output_layouts=WHOLE),
    },
    "sequence": sequence_parallel(local=True),
    "sequence_dtensor": sequence_parallel(local=False),
    "prepare_input": {
        "gate": PrepareModuleInput(
            input_layouts=(WHOLE,),
            desired_input_layouts=(SEQUENCE,),
            input_kwarg_layouts={"gate": WHOLE},
            desired_input_kwarg_layouts={"gate": SEQUENCE},
            use_local_output=False,
        ),
        "output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=WHOLE),
    },
    "prepare_output": {
        "gate": PrepareModuleOutput(
            output_layouts=(WHOLE, WHOLE), desired_output_layouts=(SEQUENCE, SEQUENCE), use_local_output=True
        ),
        "output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=WHOLE),
    },
    "prepare_both": {
        "gate": PrepareModuleInputOutput(
            input_layouts=(WHOLE,),
            desired_input_layouts=(SEQUENCE,),
            input_kwarg_layouts={"gate": WHOLE},
            desired_input_kwarg_layouts={"gate": SEQUENCE},
            use_local_input=True,
            output_layouts=(SEQUENCE, SEQUENCE),
            desired_output_layouts=(WHOLE, WHOLE),
            use_local_output=True,
        ),
    },
    "loss_parallel": {"output": ColwiseParallel(use_local_output=False)},
    "callable": chosen_by_hand,
}


@scenario(
    mesh={"tp": 4},
    axes={
        "style": (
            "embedding_rows",
            "embedding_columns",
            "linear",
            "linear_no_bias",
            "linear_dtensor",
            "rows_of_whole",
            "vocabulary",
            "sequence",
            "sequence_dtensor",
            "prepare_input",
            "prepare_output",
            "prepare_both",
            "loss_parallel",
            "callable",
        )
    },
    quick={"dim": 64, "hidden": 128, "sequence": 32},
    tags=("tp", "further"),
)
def tp_styles(
    *, dim: int = 512, hidden: int = 2048, batch: int = 4, sequence: int = 256, style: str = "linear"
) -> Scenario:
    """Each tensor parallel style on a small language model. Styles of embeddings, linears, sequence, prepared inputs
    and outputs, loss.
    """
    if style not in STYLES:
        raise UserError(f"--set style={style} is unknown; use {', '.join(STYLES)}")
    vocab_size = 1000
    return Scenario(
        build_model=partial(Model, vocab_size, dim, hidden, bias=style != "linear_no_bias"),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(tp=STYLES[style], loss_parallel=style == "loss_parallel"),
    )
