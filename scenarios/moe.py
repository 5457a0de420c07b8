"""Expert parallel: a token-choice mixture of experts that sends tokens to the ranks of their experts and back."""

from functools import partial

import torch
from llama_2d import TP_PLAN
from mixture import ExpertParallel, MoeLlama, TensorParallelMixture
from models import next_token_loss, token_batch

from distbench.spec import Collectives, FsdpPlan, ParallelPlan, Scenario, scenario
from distbench.spec.expert_loads import ROTATING, load_of_module, num_steps

MIXTURE = "layers.*.feed_forward"
EXPERTS = f"{MIXTURE}.experts"


@scenario(
    mesh={"dp_shard": 2, "ep": 2},
    axes={"load": ("uniform", "zipf"), "capacity": (0.0, 1.25)},
    quick={"dim": 64, "hidden": 128, "num_layers": 2, "sequence": 64},
    tags=("ep", "fsdp", "further"),
)
def moe(
    *,
    dim: int = 256,
    hidden: int = 512,
    num_layers: int = 4,
    num_heads: int = 4,
    num_experts: int = 8,
    top_k: int = 2,
    batch: int = 8,
    sequence: int = 256,
    load: str = "uniform",
    capacity: float = 0.0,
) -> Scenario:
    """Mixture of experts: experts over ep, and FSDP2. Loads by name or recorded; dropless (uneven all-to-alls), or with
    a capacity.
    """
    sizes = (dim, num_layers, num_heads, hidden, num_experts, top_k)
    fsdp = FsdpPlan(
        wrap=("layers.*",),
        mesh_dims=("dp_shard", "ep"),
        unit_mesh_dims={EXPERTS: ("dp_shard",)},  # ep already shards the experts
        whole=("layers.*.feed_forward.router.weight",),
    )
    return trained(sizes, batch, sequence, load, capacity, ParallelPlan(ep={EXPERTS: ExpertParallel()}, fsdp=fsdp))


@scenario(
    mesh={"dp_shard": 1, "ep": 2, "tp": 2},
    axes={"load": ("uniform", "zipf"), "capacity": (0.0, 1.25), "expert_tp": (True, False)},
    quick={"dim": 64, "hidden": 128, "num_layers": 2, "sequence": 64},
    tags=("ep", "tp", "fsdp", "further"),
)
def moe_tp(
    *,
    dim: int = 256,
    hidden: int = 512,
    num_layers: int = 4,
    num_heads: int = 4,
    num_experts: int = 8,
    top_k: int = 2,
    batch: int = 8,
    sequence: int = 256,
    load: str = "uniform",
    capacity: float = 0.0,
    expert_tp: bool = True,
) -> Scenario:
    """Mixture of experts: experts over ep and tp, and FSDP2. Each expert over tp, or whole ones over both (ETP 1); TP
    and SP around them.
    """
    sizes = (dim, num_layers, num_heads, hidden, num_experts, top_k)
    dense = {pattern: style for pattern, style in TP_PLAN.items() if not pattern.startswith(MIXTURE)}
    plan = ParallelPlan(
        tp={**dense, MIXTURE: TensorParallelMixture(whole_experts=not expert_tp)},
        ep={EXPERTS: ExpertParallel()},
        ep_dim="ep" if expert_tp else ("ep", "tp"),
        ep_tp_dim="tp" if expert_tp else None,
        fsdp=FsdpPlan(wrap=("layers.*",), mesh_dims=("dp_shard", "ep"), unit_mesh_dims={EXPERTS: ("dp_shard",)}),
    )
    return trained(sizes, batch, sequence, load, capacity, plan)


@scenario(
    mesh={"ep": 4},
    axes={"load": ("uniform", "zipf", "W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")},
    quick={"size": 65536},
    tags=("collective", "ep", "further"),
)
def expert_exchange(
    *,
    load: str = "uniform",
    matrix: str = "",
    num_experts: int = 16,
    top_k: int = 2,
    num_tokens: int = 512,
    size: int = 1048576,
    dtype: str = "f32",
) -> Scenario:
    """The all-to-all of tokens to their experts. No model. Loads by name, recorded, or as a traffic
    matrix.
    """
    exchange = Collectives(
        ops=("all_to_all_v",),
        sizes_bytes=(size,),
        dtypes=(dtype,),
        load=load,
        matrix=matrix or None,
        num_experts=num_experts,
        top_k=top_k,
        num_tokens=num_tokens,
        num_exchanges=num_steps(ROTATING, num_experts, top_k),
    )
    return Scenario(collectives=(exchange,))


def trained(
    sizes: tuple[int, ...], batch: int, sequence: int, load: str, capacity: float, plan: ParallelPlan
) -> Scenario:
    """A training step of a llama-like stack of experts under a plan."""
    vocab_size = 1000
    _, num_layers, _, _, num_experts, top_k = sizes
    names = [f"layers.{layer}.feed_forward" for layer in range(num_layers)]
    loads = [load_of_module(load, num_experts, top_k, name) for name in names]
    return Scenario(
        build_model=partial(MoeLlama, vocab_size, *sizes, loads, capacity),
        make_batch=partial(token_batch, batch, sequence, vocab_size),
        num_tokens=batch * sequence,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        plan=plan,
    )
