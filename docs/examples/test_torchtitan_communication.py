"""A test of torchtitan's llama3 under its own parallelize function, in one process; docs/transformers.md says how to
install torchtitan. pytest docs/examples/test_torchtitan_communication.py"""

import pytest
import torch
import torch.distributed as dist
import torchtitan_llama3 as example  # of docs/transformers.md; before torchtitan, which would use CUDA
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import parallelize_llama

FORMS = {"plain": {}, "checkpointed": {"ac_config": FullAC.Config()}}


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("form", FORMS)
def test_llama3_under_tp_and_fsdp(distbench_communication, form):
    model = example.config().build()
    parallelize_llama(
        model, parallel_dims=ParallelDims.from_config(example.PAR, 4), **{**example.CONFIG, **FORMS[form]}
    )

    with distbench_communication(model) as seen:
        model(torch.randint(2048, (4, 64))).mean().backward()

    for module in ("layers.*.attention", "layers.*.feed_forward"):
        assert seen.count("all_gather", on="tp", module=module, phase="forward") == 2
    for module in ("layers.*.attention.wo", "layers.*.feed_forward.w2"):
        assert seen.count("reduce_scatter", on="tp", module=module, phase="forward") == 2
    assert seen.count("all_gather", on="fsdp", phase="forward") == 4
    assert seen.count("reduce_scatter", on="fsdp", phase="backward") == 4
