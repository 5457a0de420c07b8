"""Models of transformers under its own tensor parallelism and FSDP2, in the place of distbench's.
`pip install distbench[hf]`; distbench run docs/examples/hf_itself.py"""

import torch
from hf import MODELS, text
from transformers.distributed import DistributedConfig

from distbench.spec import Scenario, scenario


@scenario(mesh={"dp_shard": 2, "tp": 2}, axes={"model": ("llama", "qwen3", "mixtral")})
def hf_itself(*, model: str = "llama") -> Scenario:
    """transformers' own tensor parallelism and FSDP2, by the plans that its models bring along."""
    kind, config = MODELS[model]

    def parallelize(model, _):  # glue: what from_pretrained(distributed_config=...) does, on meshes of its own
        own, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_size=2, fsdp_size=2))  # glue
        return model.maybe_distribute_model(model, own, meshes)  # glue

    return Scenario(
        build_model=lambda: kind.from_config(config),
        make_batch=text,
        optimizer=torch.optim.AdamW,
        parallelize=parallelize,  # glue
    )
