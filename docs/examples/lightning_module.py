"""A LightningModule as it is. `distbench run docs/examples/lightning_module.py`"""

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import distbench
from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


class Classifier(lightning.LightningModule):
    def __init__(self, dim=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, 8))

    def training_step(self, batch, batch_idx):
        x, labels = batch
        loss = F.cross_entropy(self.layers(x), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)}


def samples():
    torch.manual_seed(0)
    return torch.randn(16, 64), torch.randint(8, (16,))


@scenario(mesh={"dp_shard": 2})
def lightning_module() -> Scenario:
    """Automatic optimization: its training step, and the optimizer and scheduler that it configures."""
    return Scenario(
        build_model=Classifier,
        make_batch=samples,
        call=distbench.wrap(Classifier.training_step),  # glue
        make_optimizers=Classifier.configure_optimizers,  # glue
        plan=ParallelPlan(fsdp=FsdpPlan()),  # glue
    )
