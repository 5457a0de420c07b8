"""Plots of steps: no phase is drawn beyond its step, and one slow variant does not squeeze the others."""

import json
from pathlib import Path

import pytest
from step_runs import steps
from test_headline import contents_of

from distbench.report.sections import figures_in
from distbench.show.plots import styled


def bars_and_medians(path: Path) -> tuple[list[float], list[str], float]:
    """(where the bars of each variant end, ms; texts within the axes; the axis's end)."""
    with styled():
        (figure,) = [figure for name, figure in figures_in(contents_of(path)) if name.startswith("step")]
        axes = figure.axes[0]
        ends: dict[int, float] = {}
        for bar in axes.patches:
            at = round(bar.get_y() + bar.get_height() / 2)
            ends[at] = max(ends.get(at, 0.0), bar.get_x() + bar.get_width())
        return [ends[at] for at in sorted(ends)], [text.get_text() for text in axes.texts], axes.get_xlim()[1]


def test_phases_that_add_up_to_more_than_the_step_end_with_it(tmp_path: Path) -> None:
    path = steps(tmp_path, {"slow": 1.7})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["type"] in ("case", "pass"):
            line["phases_s"] = {phase: [0.08] for phase in ("forward", "backward")}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ends, texts, _ = bars_and_medians(path)
    assert texts == ["100 ms", "171 ms"]
    assert ends[0] == pytest.approx(100.45, abs=0.1)
    assert ends[1] == pytest.approx(160.0, abs=0.1)  # phases that take less are drawn as they are


def test_one_slow_variant_is_an_arrow_at_the_edge_with_its_value(tmp_path: Path) -> None:
    path = steps(tmp_path, {"a": 1.1, "b": 1.2, "c": 1.3, "slow": 40.0})
    _, texts, end = bars_and_medians(path)
    assert texts[-1] == "4.02 s" and 130 < end < 400
