"""torchtitan's llama3 with torchtitan's default backend: activations are local tensors with types of spmd_types. FSDP2
accepts such parameters since torch 2.14. `distbench run docs/examples/torchtitan_spmd_types.py`"""

import torch
import torch.nn.functional as F
import torchtitan_llama3 as example  # before torchtitan, which would use CUDA
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models.llama3 import parallelize_llama

from distbench.spec import ParallelPlan, Scenario, scenario

PAR = ParallelismConfig(tensor_parallel_degree=2)
IN_STEP = {}  # the context of torchtitan's trainer around forward and loss


def parallelize(model, _):
    dims = ParallelDims.from_config(PAR, 4)
    IN_STEP["context"] = get_spmd_context(parallel_dims=dims)
    model = parallelize_llama(model, parallel_dims=dims, **{**example.CONFIG, "parallelism": PAR})
    model.forward = IN_STEP["context"]()(model.forward)
    return model


def loss(logits, targets):
    if logits.shape[-1] == 2048:  # of the whole model on one device
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    with IN_STEP["context"]():
        return cross_entropy_loss(logits, targets, global_vocab_size=2048) / targets.numel()


@scenario(mesh={"dp_shard": 2, "tp": 2})
def torchtitan_spmd_types() -> Scenario:
    """torchtitan's llama3 (debug model) on its default backend, spmd_types, under its own parallelism."""
    return Scenario(
        build_model=lambda: example.config().build(),
        make_batch=example.batch,
        loss=loss,
        optimizer=torch.optim.AdamW,
        parallelize=parallelize,
        plan=ParallelPlan(loss_parallel=True),
        gradient_divide_factor=1,
        num_tokens=256,
    )
