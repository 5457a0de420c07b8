"""The picture of a sweep: what each mark stands for."""

from distbench.search.space import Candidate
from distbench.search.sweep_result import RankedPlan
from distbench.search.sweep_text import pareto_figures

GIB = float(1 << 30)


def test_a_plan_beyond_the_memory_that_fits_after_the_cache_is_freed_says_so() -> None:
    def plan(number: int, step_s: float, gib: float, fits: bool | None) -> RankedPlan:
        candidate = Candidate((("dp_shard", number),))
        return RankedPlan(candidate, step_s, 1.0, gib * GIB, fits=fits)

    best = plan(1, 1.0, 40, True)
    plans = [best, plan(2, 1.1, 82, None), plan(3, 1.2, 60, True), plan(4, 1.3, 90, False), plan(5, 1.5, 30, None)]
    ((_, figure),) = pareto_figures("plans", plans, best, 80 * GIB)
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert labels == [
        "does not fit (1)",
        "fits if the cache is freed (1)",
        "slower or larger (1)",
        "Pareto front (2)",
        "recommended (1)",
    ]
