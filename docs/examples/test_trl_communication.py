"""A test of trl's SFTTrainer under DDP, in one process. `pip install trl`;
pytest docs/examples/test_trl_communication.py"""

import pytest
import torch.distributed as dist
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
WORDS = {**{f"w{number}": number for number in range(62)}, "[PAD]": 62, "[EOS]": 63}
# accelerate reads torchrun's variables.
RANK_0_OF_2 = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
}


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    for name, value in RANK_0_OF_2.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    config = SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    table = InMemoryTable.from_pydict({"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]] * 4})
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
    yield SFTTrainer(
        model=LlamaForCausalLM(CONFIG),
        args=config,
        train_dataset=Dataset(table, fingerprint="tiny"),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"),
    )
    dist.destroy_process_group()


def test_a_step_of_sft(trainer, distbench_communication, monkeypatch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    training_step, recorded = trainer.training_step, []

    def step(model, *args, **kwargs):  # the model as accelerate wrapped it
        with distbench_communication(model, mesh=mesh) as seen:
            loss = training_step(model, *args, **kwargs)
        recorded.append(seen)
        return loss

    monkeypatch.setattr(trainer, "training_step", step)
    trainer.train()

    [seen] = recorded
    num_gradient_bytes = 4 * sum(parameter.numel() for parameter in trainer.model.parameters())
    assert seen.bytes("all_reduce", on="dp", phase="backward") - num_gradient_bytes < 100
    assert seen.count("all_gather", on="dp", module="(loss)") <= 4  # trl's own metrics
