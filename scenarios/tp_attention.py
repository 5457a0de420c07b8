"""Tensor parallel attention: heads are split over the tp mesh dim, and the output projection sums the parts."""

from functools import partial

import torch
import torch.nn.functional as F
from models import Attention, vector_batch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from distbench.spec import ParallelPlan, Scenario, scenario


@scenario(mesh={"tp": 4}, quick={"dim": 256, "sequence": 128}, tags=("tp", "attention", "further"))
def tp_attention(*, dim: int = 1024, num_heads: int = 16, batch: int = 2, sequence: int = 512) -> Scenario:
    """Causal attention with heads split over tp. Colwise projections split them, a Rowwise projection joins them."""
    plan = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()}
    return Scenario(
        build_model=partial(Attention, dim, num_heads),
        make_batch=partial(vector_batch, batch, sequence, dim),
        num_tokens=batch * sequence,
        loss=F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=ParallelPlan(tp=plan),
    )
