"""A test of transformers' own tensor parallelism and FSDP2, in one process. `pip install distbench[hf]`;
pytest docs/examples/test_transformers_communication.py"""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("form", ["plain", "checkpointed", "compiled"])
def test_llama_under_tp_and_fsdp(distbench_communication, form):
    model = AutoModelForCausalLM.from_config(CONFIG)
    own, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_size=2, fsdp_size=2))
    model = model.maybe_distribute_model(model, own, meshes)
    if form == "checkpointed":
        model.gradient_checkpointing_enable()
    ids = torch.randint(256, (2, 16))

    with distbench_communication(torch.compile(model) if form == "compiled" else model) as seen:
        model(input_ids=ids, labels=ids).loss.backward()

    layer = "model.layers.*"
    assert seen.count("all_reduce", on="tp", module=f"{layer}.o_proj", phase="forward") == 2
    assert seen.count("all_reduce", on="tp", module=f"{layer}.down_proj", phase="forward") == 2
    # The inputs of q, k, v, gate and up are not sharded: each has a gradient of its own to sum.
    assert seen.count("all_reduce", on="tp", module=f"{layer}.[qkvgu]*_proj", phase="backward") == 2 * 5
    assert seen.count("all_gather", on="tp", module="lm_head") == 1
    assert seen.count("reduce_scatter", on="fsdp") == 4
