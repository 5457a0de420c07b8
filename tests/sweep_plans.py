"""Facts of a small scenario, its space of plans, and plans whose times are said by the test."""

from typing import Any

from distbench.search.space import Candidate, Space
from distbench.search.sweep_result import Prediction, RankedPlan

FACTS: dict[str, Any] = {
    "mesh_dims": ["dp_shard", "tp"],
    "shard_dims": ["dp_shard", "tp"],
    "fsdp": {"reshard_after_forward": None, "mixed_precision": True, "prefetch": False},
    "cp": None,
    "checkpoint": [],
    "is_selective": False,
    "checkpointable": ["layers.*"],
    "compilable": True,
    "microbatches": 1,
    "parameter_bytes": 4_000,
    "trained_bytes": 4_000,
    "pipeline": False,
    "optimizer_share": 2.0,
    "batch_size": 4,
    "num_tokens": 64,
}


def space(world: int = 4, **facts: Any) -> Space:
    return Space({"dp_shard": 2, "tp": 2}, FACTS["mesh_dims"], world, {**FACTS, **facts}, {})


def prediction(step_s: float, reserved: float = 1e9, fits: bool = True, **fields: Any) -> Prediction:
    candidate = fields.pop("candidate", Candidate((("dp_shard", 4),)))
    given = {"parts_s": {}, "exposed_s": {}, "implicit_s": {}, **fields}
    return Prediction(
        candidate, step_s, reserved_bytes=reserved, num_parameters=10, batch_size=4, num_tokens=100,
        fits=fits, **given,
    )  # fmt: skip


def measured(step_s: float, *choices: tuple[str, Any]) -> RankedPlan:
    return RankedPlan(Candidate((("dp_shard", 4),), choices), step_s, 100 / step_s, None, "measured", True)
