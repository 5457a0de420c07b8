"""FlexAttention of packed documents under context parallel, by torch's balancers of work."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from distbench.spec import Scenario, UserError, scenario
from distbench.torch_private import flex_attention_over

BALANCERS = ("none", "head_tail", "per_document", "ptrr")
BLOCK = 128  # FlexAttention skips blocks of this many queries and keys without an attended pair
TOLERANCE = 1e-5


def lengths_of(documents: str, multiple: int) -> list[int]:
    """Lengths of documents as text, such as 512+256+256."""
    parts = documents.split("+")
    lengths = [int(part) if part.isdigit() else 0 for part in parts]
    if wrong := [part for part, length in zip(parts, lengths, strict=True) if not length or length % multiple]:
        allowed = f"use multiples of {multiple} that are above 0, such as 512+256+256"
        raise UserError(f"--set documents={documents}: {wrong[0]!r} is not a valid length; {allowed}")
    return lengths


def work_of(positions: torch.Tensor, begins: torch.Tensor) -> dict[str, float]:
    """Work of one rank: attended pairs of a query and a key, and blocks of FlexAttention with such a pair."""
    blocks = positions.view(-1, BLOCK)
    keys = [torch.cat([torch.arange(int(begins[at]), int(at) + 1) for at in block]) for block in blocks]
    return {
        "pairs": float((positions - begins[positions] + 1).sum()),
        "blocks": float(sum((of_block // BLOCK).unique().numel() for of_block in keys)),
    }


@scenario(
    mesh={"cp": 4},
    axes={
        "balancer": ("none", "head_tail", "per_document", "ptrr"),
        "documents": ("2048", "1024+512+256+256", "512+512+512+512"),
    },
    quick={"num_heads": 2, "head": 16},
    tags=("cp", "attention", "further"),
)
def cp_documents(
    *,
    balancer: str = "per_document",
    documents: str = "1024+512+256+256",
    num_heads: int = 8,
    head: int = 64,
) -> Scenario:
    """FlexAttention of packed documents over cp, by balancer. Forward only. Shows each rank's exact work."""
    if balancer not in BALANCERS:
        raise UserError(f"--set balancer={balancer} is unknown; use {', '.join(BALANCERS)}")

    def attention(mesh: DeviceMesh) -> tuple[Callable[[], Any], Callable[[], Any], dict[str, float]]:
        cp = mesh["cp"]
        lengths = lengths_of(documents, 2 * cp.size())
        sequence = sum(lengths)
        if sequence % (cp.size() * BLOCK):
            multiple = cp.size() * BLOCK
            raise UserError(f"--set documents={documents} has {sequence} tokens; use a multiple of {multiple}")
        device = torch.device(mesh.device_type)
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        begins = torch.tensor([sum(lengths[:number]) for number in range(len(lengths))])[numbers]
        document = numbers.to(device)
        generator = torch.Generator().manual_seed(0)
        shape = (1, num_heads, sequence, head)
        tensors = [torch.randn(shape, generator=generator).to(device) for _ in range(3)]

        def attends(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (document[query] == document[key])

        flex = flex_attention_over(cp, tensors, attends, balancer, lengths)

        def check() -> str | None:
            mask = create_block_mask(attends, 1, 1, sequence, sequence, device=str(device))
            expected = flex_attention(*tensors, block_mask=mask)
            error = float((flex.whole(flex.call()) - expected).abs().max())
            return None if error <= TOLERANCE else f"the output differs by {error:.1e} from one device's"

        return flex.call, check, work_of(flex.positions[cp.get_local_rank()], begins)

    return Scenario(calls={"attention": attention})
