"""One decode step of a model of transformers under the TP plan that it brings along, with transformers' own cache.
`pip install distbench[hf]`; distbench run docs/examples/hf_inference.py"""

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from distbench.spec import ParallelPlan, Scenario, scenario

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=256, num_key_value_heads=2, **SIZES)


def tokens():
    torch.manual_seed(0)
    ids = torch.randint(256, (4, 33))
    return {"prompt": ids[:, :-1], "token": ids[:, -1:]}


def filled(model, batch):
    cache = DynamicCache()
    model(batch["prompt"], past_key_values=cache)
    return cache


def decode(model, batch, cache):
    output = model(batch["token"], past_key_values=cache)
    cache.crop(-1)  # glue: as long as it was
    return output


@scenario(mesh={"tp": 2})
def hf_inference() -> Scenario:
    """One token of a Llama of transformers, after a prompt of 32."""
    return Scenario(
        build_model=lambda: AutoModelForCausalLM.from_config(CONFIG),
        make_batch=tokens,
        inference=True,  # glue
        make_cache=filled,
        call=decode,  # glue
        num_tokens=4,
        plan=ParallelPlan(tp="auto"),  # glue
    )
