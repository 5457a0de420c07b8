"""Progress as plain lines: what a log shows of a long run."""

import io

from distbench.launch.display import Plain


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
    # 20 s for 2 of 4 cases: 20 s left.
    assert out.getvalue().splitlines() == [
        "demo: 4 cases",
        "demo: 2 of 4 cases, about 20 s left",
        "demo: c: wrong",
    ]
