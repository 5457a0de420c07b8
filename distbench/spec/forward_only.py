"""What a forward-only scenario cannot have: parts that act on gradients, which a forward pass makes none of."""

from collections.abc import Iterator
from typing import Any

from distbench.spec.errors import UserError
from distbench.spec.parallel import FsdpPlan, ParallelPlan

# Fields of a plan and of its FsdpPlan that only backward, or what comes after it, reads.
OF_PLAN = ("loss_parallel", "checkpoint", "checkpoint_context", "ddp", "microbatches", "state_dict")
OF_FSDP = (
    *("prefetch_backward", "sync_each_microbatch", "all_reduce_each_microbatch", "reshard_each_microbatch"),
    *("not_in_backward", "all_reduce_hook", "reduce_scatter", "gradient_divide_factor"),
)


def require_forward_only(scenario: Any) -> None:
    """Raise UserError where a forward-only `Scenario` has a part that needs gradients, or another one a cache."""
    if not scenario.inference:
        if scenario.make_cache is not None:
            raise UserError("make_cache is for a forward-only scenario; say Scenario(inference=True) or leave it out")
        return
    if found := list(_parts_for_training(scenario)):
        raise UserError(
            f"Scenario(inference=True) runs forward alone, and this one has {', '.join(found)}; leave "
            f"{'it' if len(found) == 1 else 'them'} out"
        )
    if scenario.plan.cp is not None and scenario.plan.cp.seq_dim < 1:
        raise UserError("a forward-only scenario has the batch in tensor dim 0, so CpPlan(seq_dim=0) is no sequence")
    if scenario.make_cache is not None and scenario.call is None:
        raise UserError(
            "a scenario with make_cache needs call(model, batch, cache), which gives the cache to the model"
        )


def _parts_for_training(scenario: Any) -> Iterator[str]:
    for name in ("loss", "optimizer", "gradient_divide_factor"):
        if getattr(scenario, name) is not None:
            yield name if name != "loss" else "a loss"
    plan, fsdp = scenario.plan, scenario.plan.fsdp
    yield from (f"plan.{name}" for name in OF_PLAN if getattr(plan, name) != getattr(ParallelPlan(), name))
    if fsdp is not None:
        yield from (f"plan.fsdp.{name}" for name in OF_FSDP if getattr(fsdp, name) != getattr(FsdpPlan(), name))
