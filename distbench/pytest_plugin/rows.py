"""Cases as rows of pytest-benchmark, where it is installed: its table, --benchmark-json, autosave and compare see them.

Two of its insides are used, as by other plugins: `config._benchmarksession.benchmarks`, and what that list holds,
`pytest_benchmark.stats.Metadata`. Should they move, a warning says so and the cases are printed instead.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from distbench.pytest_plugin.case import MeasuredCase
from distbench.spec import Job


def add_rows(item: pytest.Item, cases: Sequence[MeasuredCase], job: Job) -> bool:
    """Hand cases to pytest-benchmark, a round a sample; False where it is not installed, disabled, or another one."""
    session = getattr(item.config, "_benchmarksession", None)
    if session is None or session.disabled or session.skip:
        return False
    try:
        from pytest_benchmark.stats import Metadata

        rows = [Metadata(_row(item, case), iterations=1, options=_options(job)) for case in cases]
        for row, case in zip(rows, cases, strict=True):
            for seconds in case.samples_s:
                row.update(seconds)
        session.benchmarks.extend(rows)
    except (ImportError, AttributeError, TypeError) as error:
        item.warn(pytest.PytestWarning(f"this pytest-benchmark takes no rows of distbench's: {error}"))
        return False
    return True


def _row(item: pytest.Item, case: MeasuredCase) -> SimpleNamespace:
    """What pytest-benchmark takes from its own fixture: what its table shows, what `compare` joins by, and so on."""
    what = case.id.removeprefix("call/")
    group = item.get_closest_marker("benchmark")
    callspec = getattr(item, "callspec", None)
    given = callspec.params if callspec else {}
    return SimpleNamespace(
        name=f"{item.name}::{what}",
        fullname=f"{item.nodeid}::{what}",
        group=group.kwargs.get("group") if group else None,
        param=callspec.id if callspec else None,
        params={**given, "variant": case.params.get("variant"), "mesh": case.params["mesh"]},
        extra_info={
            "distbench": case.id,
            "round": "one iteration, on its slowest rank",
            "rank_median_s": list(case.rank_median_s),
            "stop_reason": case.stop_reason,
            "checked": case.counters.get("checked"),
        },
        cprofile_stats=None,
        has_error=False,
    )


def _options(job: Job) -> dict[str, Any]:
    """In pytest-benchmark's words."""
    return {
        "disable_gc": False,
        "timer": "each rank's monotonic clock",
        "min_rounds": job.settings.min_samples,
        "max_time": job.settings.max_case_s,
        "min_time": 0.0,
        "warmup": job.settings.warmup_iterations,
    }
