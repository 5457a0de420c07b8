"""Steps whose shapes depend on values: known from the batch and from constants, or given by `--assume`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, ROOT
from processes import Children

from distbench.launch import Request, jobs_of
from distbench.simulate.recording import MATMUL, HostWaited, Operator, RecordedSteps, Recording, record_steps
from distbench.spec import UserError
from distbench.spec.assumptions import assumptions_of

FILE = str(DATA / "data_dependent.py")
TOKENS, DIM, VOCABULARY = 128, 64, 100  # of a rank's part


def recorded(file: str, *choices: str, assume: dict[str, Any] | None = None) -> RecordedSteps:
    (job,) = jobs_of(Request((file,), choices, None, "cpu", full_mesh=True, shapes_only=True), None)
    return record_steps([job], assume=assume)[0]


@pytest.fixture(scope="module")
def unassumed(children: Children) -> RecordedSteps:
    with children.forked():
        return recorded(FILE)


def forward_flops(recording: Recording) -> int:
    matmuls = [event for event in recording.step if isinstance(event, Operator) and event.kind == MATMUL]
    return sum(matmul.flops for matmul in matmuls if matmul.phase == "forward")


def only(steps: RecordedSteps, kind: str) -> Recording:
    return next(one for one in steps.recordings if one.head.variant == f"kind={kind}")


@pytest.mark.parametrize("kind", ["padding", "ragged"])
def test_dropped_padding_is_that_of_the_batch(unassumed: RecordedSteps, kind: str) -> None:
    scope: dict[str, Any] = {}
    exec(compile(Path(FILE).read_text(), FILE, "exec"), scope)
    num_kept = int((scope["batch"]()["ids"][:4] != 0).sum())
    assert 0 < num_kept < TOKENS
    assert forward_flops(only(unassumed, kind)) == 2 * num_kept * DIM * VOCABULARY
    assert any(isinstance(event, HostWaited) for event in only(unassumed, kind).step)


def test_frozen_units_and_constants_of_forward_are_simulated(unassumed: RecordedSteps) -> None:
    kinds = [one.kind for one in only(unassumed, "teacher").collectives]
    assert kinds.count("all_gather") > kinds.count("reduce_scatter") > 0


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("gate mask", "in module 'gate'; give --assume 'gate=SHARE' (the kept share of its mask)"),
        ("gate number", "in module 'gate'; give --assume 'gate=NUMBER' (the value read)"),
        ("gate host", "in module 'gate'; give --assume 'gate=NUMBER' (the value read)"),
        ("experts", "from a choice by module 'mixture'; give --assume 'mixture=uniform'"),
    ],
)
def test_what_parameters_decide_is_refused_with_the_assumption_to_give(
    unassumed: RecordedSteps, kind: str, option: str
) -> None:
    sentence = unassumed.left_out[f"data_dependent/kind={kind}"]
    assert option in sentence and "data_dependent.py:" in sentence and "\n" not in sentence


def test_assumed_masks_and_numbers(children: Children) -> None:
    with children.forked():
        steps = recorded(FILE, "kind=gate mask,gate select,gate number,gate host", assume={"gate": 0.5})
    assert not steps.left_out
    gate = 2 * TOKENS * DIM
    for kind in ("gate mask", "gate select"):
        assert forward_flops(only(steps, kind)) == gate + 2 * (TOKENS // 2) * DIM * VOCABULARY
    assert forward_flops(only(steps, "gate number")) == gate + 2 * TOKENS * DIM * VOCABULARY
    assert only(steps, "gate mask").head.assumed == (
        "modules gate read the value 0.5, or their masks keep this share; all ranks make the same choices",
    )


@pytest.mark.parametrize(
    ("load", "rows"),
    [
        ("uniform", {32}),
        ("zipf", {61, 31, 21, 15}),  # ends of 128 choices: 61.44, 92.16, 112.64
        ([1.0, 0.0, 2.0, 1.0], {32, 64}),
        ([0.0, 0.0, 0.0, 9.0], {TOKENS}),
    ],
)
def test_experts_get_the_rows_of_the_load(children: Children, load: Any, rows: set[int]) -> None:
    with children.forked():
        (recording,) = recorded(FILE, "kind=experts", assume={"mix*": load}).recordings
    flops = {
        event.flops
        for event in recording.step
        if isinstance(event, Operator) and event.phase == "forward" and event.owner.startswith("mixture.experts.")
    } - {0}
    assert flops == {2 * count * DIM * DIM for count in rows}


def test_counts_of_another_model_are_refused_with_both_numbers(children: Children) -> None:
    with children.forked(), pytest.raises(UserError, match=r"has 6 counts, but the module chooses from 4; give"):
        recorded(FILE, "kind=experts", assume={"mix*": [1.0] * 6})


def test_an_assumption_that_nothing_needs_is_refused(children: Children) -> None:
    with (
        children.forked(),
        pytest.raises(UserError, match=r"--assume 'gates' matches no module that chooses, masks or"),
    ):
        recorded(FILE, "kind=padding", assume={"gates": 0.5})


def test_assumptions_are_read(tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text(json.dumps({"layers.0": [1, 3], "head": [1]}))
    given = ["a=uniform", "b=0.25", f"layers.*={tmp_path / 'loads.json'}"]
    assert assumptions_of(given) == {"a": "uniform", "b": 0.25, "layers.0": [1.0, 3.0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniform", "is not PATTERN=VALUE"),
        ("a=", "is not PATTERN=VALUE"),
        ("a=nan", "is not a finite number"),
        ("a=zip", "'zip' is neither a load nor a number; use uniform, zipf, W0, W1, W2, W3, W5, or a"),
        ("a=W6", "one step is simulated; use uniform, zipf, W0, W1, W2, W3, W5, or a JSON file with one count"),
        ("a=empty.json", "empty.json: this object has no module; give a list of counts per module name"),
        ("a=missing.json", "missing.json cannot be read"),
        ("a=negative.json", "is not a list of counts; give one number >= 0 per choice"),
        ("a=text.json", "give a JSON list"),
        ("a=names.json", "has no module that matches 'a'; use one of b"),
    ],
)
def test_unusable_assumptions_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {"negative": "[1, -1]", "text": "uniform", "empty": "{}", "names": '{"b": [1]}'}.items():
        (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(UserError) as refused:
        assumptions_of([text])
    assert message in str(refused.value)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.long
def test_families_of_transformers_are_simulated_as_they_come(children: Children) -> None:
    """With their caches; experts of Mixtral in groups; T5 has two stacks."""
    with children.forked():
        steps = recorded(f"{ROOT}/benchmarks/hf_families.py::family", "family=llama,mixtral,t5")
    assert not steps.left_out and all(one.collectives for one in steps.recordings)
