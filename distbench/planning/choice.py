"""Which redistribution planner to use, before anything of the pair is measured: one rule for all who recommend."""

from collections.abc import Mapping

from distbench.spec.planner_names import TORCH_PLANNERS

# Planners whose predictions are this close count as equal, and the simplest to use is taken.
EQUAL_SHARE = 0.02
# One of ours must be predicted faster by this share before torch's own path is left. With less, what measuring gave was
# noise either way, and now and then a loss: of 96 pairs at 1 MB and above (gloo, 2x4 and 2x2x2) the six that came out
# slower than the better of torch's two (by 1.5 to 11 %) were predicted 1 to 6 % faster.
LEAVING_SHARE = 0.10


def choose(predicted_s: Mapping[str, float]) -> str:
    """The planner to use by predicted seconds alone, given simplest to use first, one at least.

    The better of torch's planners (greedy where they are equal), or the fastest of the others where that is predicted
    faster by more than LEAVING_SHARE, or where torch's are not there.
    """
    torchs = _fastest({name: value for name, value in predicted_s.items() if name in TORCH_PLANNERS})
    ours = _fastest({name: value for name, value in predicted_s.items() if name not in TORCH_PLANNERS})
    if torchs is None or ours is None:
        return torchs or ours or next(iter(predicted_s))
    return ours if predicted_s[ours] < (1 - LEAVING_SHARE) * predicted_s[torchs] else torchs


def _fastest(predicted_s: Mapping[str, float]) -> str | None:
    """The first whose time is as good as the least; None for none."""
    limit = min(predicted_s.values(), default=0.0) * (1 + EQUAL_SHARE)
    return next((name for name, value in predicted_s.items() if value <= limit), None)
