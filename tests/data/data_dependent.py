"""Steps whose shapes depend on values: of the batch, and of what parameters decide."""

import torch
import torch.nn.functional as F
from torch import nn

from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario

VOCABULARY, DIM = 100, 64


class Gate(nn.Module):
    """Keeps tokens, or reads whether it keeps any."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.weight = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = self.weight(x).squeeze(-1) > 0
        if self.reads == "number":
            return x * keep.sum().item()
        counts = torch.zeros(1, dtype=torch.long)
        counts.copy_(keep.sum())
        if self.reads == "host":
            return x * counts.tolist()[0]
        return x.masked_select(keep[..., None].expand_as(x)).view(-1, DIM) if self.reads == "select" else x[keep]


class Experts(nn.Module):
    """Tokens go to one of four experts, all of them: none is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1)
        order = chosen.flatten().argsort()
        parts = x[order].split(torch.bincount(chosen.flatten(), minlength=4).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return x + weights * torch.zeros_like(x).index_copy(0, order, out)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.gate = Gate(kind.partition(" ")[2]) if kind.startswith("gate") else None
        self.mixture = Experts() if kind == "experts" else None
        self.teacher = nn.Linear(DIM, DIM).requires_grad_(False) if kind == "teacher" else None
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, keep = self.embedding(ids), ids != 0
        if self.kind == "padding":
            x, labels = x[keep], labels[keep]
        if self.kind == "ragged":
            lengths = keep.sum(1).tolist()
            x, labels = (
                torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]) for rows in (x, labels)
            )
        if self.teacher is not None:
            x = self.teacher(x) * torch.tensor([1.0, 2.0], device=x.device).sum() * torch.arange(3.0).numpy().max()
        if self.gate is not None:
            x = self.gate(x)
            return self.head(x).mean()
        if self.mixture is not None:
            x = self.mixture(x.flatten(0, 1))
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (16, 32))
    for row, length in enumerate(torch.randint(8, 32, (16,)).tolist()):
        ids[row, length:] = 0
    return {"ids": ids, "labels": torch.where(ids == 0, -100, ids)}


@scenario(
    mesh={"dp_shard": 4},
    axes={"kind": ("padding", "ragged", "teacher", "gate mask", "gate select", "gate number", "gate host", "experts")},
    tags=("tests",),
)
def data_dependent(*, kind: str = "padding") -> Scenario:
    """One way to depend on values a variant."""
    units = ("teacher",) if kind == "teacher" else ()
    return Scenario(
        build_model=lambda: Model(kind),
        make_batch=batch,
        optimizer=torch.optim.AdamW,
        plan=ParallelPlan(fsdp=FsdpPlan(wrap=units)),
    )
