"""torchtitan's llama3 under its own parallelize function, mesh and config, on CPU, with DTensor; how to install it says
docs/transformers.md. `distbench run docs/examples/torchtitan_llama3.py`"""

import torch
import torch.nn.functional as F
import torchtitan.tools.utils

torchtitan.tools.utils.device_type = "cpu"  # glue: without an accelerator it takes the device for CUDA

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from distbench.spec import ParallelPlan, Scenario, scenario

# What torchtitan's trainer reads from a job's configuration: two-way tensor parallel with sequence parallel, FSDP2 over
# the rest, everything in f32.
PAR = ParallelismConfig(tensor_parallel_degree=2, spmd_backend="partial_dtensor")
CONFIG = {
    "parallelism": PAR,
    "training": TrainingConfig(mixed_precision_param="float32", seq_len=64),
    "compile_config": CompileConfig(),
    "ac_config": None,
    "dump_folder": "",
}


def config():
    """Its debug model with two layers; its flex attention is compiled for GPUs, so here it is scaled_dot_product."""
    found = llama3_configs["debugmodel"](attn_backend="flex")
    found.layers = found.layers[:2]
    for layer in found.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(found, enable_sp=True)
    return found


def batch():
    torch.manual_seed(0)
    return torch.randint(2048, (4, 64)), torch.randint(2048, (4, 64))


@scenario(mesh={"dp_shard": 2, "tp": 2})
def torchtitan_llama3() -> Scenario:
    """torchtitan's llama3 (debug model) under its own tensor and sequence parallelism and FSDP2."""
    return Scenario(
        build_model=lambda: config().build(),
        make_batch=batch,
        loss=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        optimizer=torch.optim.AdamW,
        parallelize=lambda m, _: parallelize_llama(m, parallel_dims=ParallelDims.from_config(PAR, 4), **CONFIG),  # glue
        plan=ParallelPlan(loss_parallel=True),  # glue
        gradient_divide_factor=1,  # glue
        num_tokens=256,
    )
