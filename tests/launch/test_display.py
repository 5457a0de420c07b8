"""Progress as plain lines: what a log shows of a long run."""

import io

import pytest
from rich.console import Console

from distbench.launch.display import Live, Plain, progress_on


def test_plain_lines_come_now_and_then_and_tell_every_case_that_is_not_ok() -> None:
    now = [0.0]
    out = io.StringIO()
    shown = Plain("demo", out, lambda: now[0])
    shown.event({"event": "plan", "num_cases": 4})
    shown.event({"event": "case", "index": 0, "id": "a"})
    shown.event({"event": "done", "id": "a", "status": "ok"})
    now[0] = 20.0
    shown.event({"event": "done", "id": "b", "status": "ok"})
    shown.event({"event": "done", "id": "c", "status": "wrong"})
    # A sweep adds cases; ranks that are started again send the same plan.
    shown.event({"event": "plan", "num_cases": 8})
    shown.event({"event": "plan", "num_cases": 4})
    now[0] = 40.0
    shown.event({"event": "done", "id": "d", "status": "ok"})
    # 20 s for 2 of 4 cases: 20 s left; 40 s for 4 of 8.
    assert out.getvalue().splitlines() == [
        "demo: 4 cases",
        "demo: 2 of 4 cases, about 20 s left",
        "demo: c: wrong",
        "demo: 4 of 8 cases, about 40 s left",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_line_keeps_bar_count_and_time_left_at_any_width(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    progress = progress_on(console)
    shown = Live("a_scenario_with_a_long_name", progress)
    shown.event({"event": "plan", "num_cases": 540})
    shown.event({"event": "pass", "number": 4, "num_passes": 8, "num_cases": 540})
    shown.event({"event": "case", "index": 0, "id": f"redistribute/{'f32[512,512]/S(0)S(1)->S(1)S(0)/' * 5}"})
    shown.event({"event": "samples", "count": 1234})
    console.print(progress.get_renderable())
    (line,) = out.getvalue().splitlines()
    assert len(line) <= width
    assert "2160/4320" in line and "━" in line and ":" in line[: line.index("a_scenario")]
    assert "a_scenario" in line
    # What was not needed, or measured before a run was resumed, is no longer counted once the ranks are done.
    shown.event({"event": "end", "spent_s": {}})
    console.print(progress.get_renderable())
    assert "2160/2160" in out.getvalue().splitlines()[-1]
