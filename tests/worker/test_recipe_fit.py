"""Whether a recipe fits: peaks by phase, the search of the nearest plan, and one recipe recorded whole."""

from pathlib import Path
from typing import Any

import pytest
from processes import Children

from distbench.launch import Request, jobs_of
from distbench.search.sweep_child import Question, SweepChild
from distbench.simulate.recording import Allocated, Freed, Head, Operator, Recording, StepBegun
from distbench.simulate.repeated_layers import NotRepeated
from distbench.worker.recipe_memory import (
    ALL,
    BYTES_PER_PARAMETER,
    Fit,
    Recipe,
    peaks_of,
)

PARAMETERS = 10**9


def test_peaks_are_of_each_phase_of_the_last_step() -> None:
    head = Head("s", "", {"dp_shard": 2}, "2.13", 1, 1, None, 1, ("forward", "backward"))

    def ran(phase: str) -> Operator:
        return Operator(0, "aten.mm.default", "matmul", 1, "f32", 1, (), (), phase, "")

    events = [
        *(Allocated(1, 10, 0, "parameters", ""), Allocated(2, 100, 0, "other", ""), ran("forward"), Freed(2)),
        StepBegun(2),
        *(ran("forward"), Allocated(3, 5, 0, "activations", ""), ran("backward")),
        *(Allocated(4, 7, 0, "gradients", ""), Freed(3), ran("backward")),
    ]
    assert peaks_of(Recording(head, events)) == {"forward": 15, "backward": 22}


def recipe(activations: float, has_tp: bool = False, why_not: str = "") -> Any:
    """One whose step takes so many bytes in addition to what is sharded, an eighth of it under TP."""
    made: Any = object.__new__(Recipe)
    made._num_trained, made._has_tp = PARAMETERS, has_tp
    made.tried = []

    def fit(mesh: dict[str, int], params: dict[str, Any]) -> Fit:
        made.tried.append(mesh)
        size = mesh["dp_shard"] * mesh["tp"]
        peak = BYTES_PER_PARAMETER * PARAMETERS / size + activations / mesh["tp"]
        return Fit(mesh, params, peak, why_not=why_not)

    made.fit = fit
    return made


FIRST = Fit({"dp_shard": 2, "tp": 1}, {}, 1e12)


def test_the_nearest_plan_recomputes_activations_on_as_few_devices_as_hold_it() -> None:
    made = recipe(activations=3e9)
    near = made.nearest(FIRST, 5e9, 1e9)
    assert near.mesh == {"dp_shard": 8, "tp": 1} and near.params == {"checkpoint": "full"} and near.peak_bytes == 5e9
    # Four devices would hold what is sharded, but for the activations; eight were tried at once after them.
    assert made.tried == [{"dp_shard": 4, "tp": 1}, {"dp_shard": 8, "tp": 1}]


def test_activations_that_no_number_of_devices_shrinks_need_tensor_parallel() -> None:
    assert recipe(activations=8e9).nearest(FIRST, 5e9, 1e9) is None
    assert recipe(activations=8e9, has_tp=True).nearest(FIRST, 5e9, 1e9).mesh == {"dp_shard": 1, "tp": 8}


def test_no_plan_is_tried_after_the_time_limit_or_a_failure() -> None:
    made = recipe(activations=3e9)
    assert made.nearest(FIRST, 5e9, 0.0) is None and not made.tried
    failing = recipe(activations=3e9, why_not="it raises")
    assert failing.nearest(FIRST, 5e9, 1e9) is None and len(failing.tried) == 1


def fit_of(layers: int, dense: int, gathered: int) -> tuple[Fit, list[int]]:
    """The fit of a model with `dense` smaller first layers, and the numbers of layers recorded for it.

    Each layer has its number of parameters and of activations; the largest two layers are gathered at once.
    """
    made: Any = object.__new__(Recipe)
    made.num_parameters, made.num_layers, requested = sum(sizes(layers, dense)), layers, []

    def recording(_: Any, __: Any, number: int, repeated: int | None = None) -> Recording:
        if repeated is not None:
            raise NotRepeated("layers differ")
        requested.append(number)
        of_layers = sizes(number or layers, dense)
        peak = sum(of_layers) + gathered * sum(sorted(of_layers)[-2:])
        head = Head("s", "", {"dp_shard": 2}, "2.13", sum(of_layers), 1, None, 1, ("forward",))
        return Recording(head, [StepBegun(2), Allocated(1, peak, 0, "other", "")])

    made._recording = recording
    return made._recorded({"dp_shard": 2}, {}), requested


def sizes(layers: int, dense: int) -> list[int]:
    return [1 if layer < dense else 50 for layer in range(layers)]


@pytest.mark.parametrize(
    ("layers", "dense", "recorded", "depth"),
    [
        (61, 0, [4, 6, 8], "4, 6 and 8 of 61"),
        (61, 3, [4, 6, 8, 10], "6, 8 and 10 of 61"),  # with four layers, one of the larger layers is gathered
        (61, 11, [4, 6, 8, 10, 12, 0], ALL),
        (6, 0, [4, 6], ALL),
        (5, 0, [4, 6, 0], ALL),
    ],
)
def test_peaks_on_a_line_are_extended_and_others_recorded(
    layers: int, dense: int, recorded: list[int], depth: str
) -> None:
    fit, requested = fit_of(layers, dense, gathered=7)
    whole = sum(sizes(layers, dense)) + 7 * sum(sorted(sizes(layers, dense))[-2:])
    assert (fit.depth, fit.peak_bytes, requested) == (depth, whole, recorded)


@pytest.mark.long
def test_a_tiny_model_of_transformers_is_recorded_whole(children: Children) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    job, encoder_decoder = jobs_of(Request(("hf:llama@tiny", "hf:t5@tiny"), device="cpu", shapes_only=True), None)
    about = {"world": 8, "hardware": "h100", "search_s": 1.0, "limit_s": 200}
    with SweepChild(Path(job.file), job.scenario) as child:
        questions = [Question("fit", job.variants, job.mesh, {**about, **change}) for change in ({}, {"limit_s": 0.01})]
        answers = dict(child.ask([*questions, Question("fit", encoder_decoder.variants, job.mesh, about)]))
    (row,) = answers[0]["answers"]
    assert row["fits"] and row["depth"] == "all" and row["num_parameters"] == 106_816
    assert row["mesh"] == {"dp_shard": 8, "tp": 1} and 1e5 < row["peak_bytes"] < 1e7
    assert answers[2]["answers"][0]["fits"], answers[2]
    assert answers[1]["left_out"] == "no answer within 0.01 s" and 0 < answers[0]["seconds"] < 200
