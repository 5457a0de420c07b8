"""Which plans a sweep looks at next, predicted or measured, by a child that answers as it is told."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from sweep_plans import FACTS, measured, prediction, space

from distbench.search import measured as measured_module
from distbench.search import predicted as prediction_module
from distbench.search.measured import changes_of_best, combined, num_affordable, with_written
from distbench.search.predicted import Predictor, explore, no_plan_error
from distbench.search.space import Candidate, Space, set_up
from distbench.search.sweep_child import Question, SweepChild
from distbench.search.sweep_result import Limits, Prediction, SweepState
from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.recording import Head, Recording
from distbench.spec import UserError


def test_changes_of_the_best_are_tried_before_the_last_meshes() -> None:
    class Known:
        hardware = load_hardware("h100")

        def outcomes(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Prediction]]:
            """Slower from mesh to mesh; no change makes a difference."""
            return ((one, prediction(1.0 + sizes.index(one.sizes), candidate=one)) for one in candidates)

    names = {"dp_replicate": 1, "dp_shard": 64, "tp": 1}
    many = Space(names, [*names], 64, {**FACTS, "batch_size": 64}, {})
    sizes = [mesh.sizes for mesh in many.meshes]
    state = SweepState(many)
    explore(state, cast(Predictor, Known()), Limits(20, 600.0))
    tried = list(state.predictions)
    assert len(sizes) == 28 and tried[:10] == many.meshes[:10]
    assert len(tried) == 20 and all(one.sizes == sizes[0] and one.choices for one in tried[10:13])
    state = SweepState(many)
    explore(state, cast(Predictor, Known()), Limits(500, 600.0))
    assert {*many.meshes} <= {*state.predictions} and not state.stopped


class Refused:
    """A predictor of plans that work only with some choices."""

    hardware = load_hardware("h100")

    def __init__(self, *works: tuple[str, Any]) -> None:
        self.works = works

    def outcomes(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Prediction | str]]:
        for one in candidates:
            yield one, prediction(1.0, candidate=one) if {*self.works} & {*one.choices} else "it asks for values"


def refusal(space: Space, limits: Limits, predictor: Refused) -> str:
    state = SweepState(space)
    explore(state, cast(Predictor, predictor), limits)
    assert not state.predictions
    return str(no_plan_error(set_up("llama_2d", (), 4, None, True), state, load_hardware("h100")))


def test_where_no_plan_works_the_parameter_that_helps_is_named() -> None:
    axes = {"load": ("uniform", "zipf"), "capacity": (0.0, 1.25, 2.0)}
    message = refusal(replace(space(), axes=axes), Limits(80, 600.0), Refused(("capacity", 1.25), ("capacity", 2.0)))
    assert "no tried plan of llama_2d works (3 of 288): dp_shard=4: it asks for values" in message
    assert message.endswith("dp_shard=4 works with --set capacity=1.25")
    assert "works with" not in refusal(space(), Limits(80, 600.0), Refused())


def test_where_few_plans_were_tried_the_limit_is_named() -> None:
    message = refusal(space(), Limits(2, 600.0), Refused())
    assert "(2 of 48; the limit --plans 2 was reached)" in message and message.endswith("give a larger --plans")


class Recorder:
    """A child process that gives these answers, one after another."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers, self.forgotten = answers, 0

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        for place, _ in enumerate(questions):
            yield place, self.answers.pop(0)

    def forget(self, question: Question) -> None:
        self.forgotten += 1


@pytest.fixture
def kept_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # predictions are kept next to their recordings


def outcomes_of(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    def load(file: Path) -> list[Any]:
        if file.name == "damaged":
            raise UserError("recording damaged, line 1: it is not JSON")
        return ["a recording"]

    monkeypatch.setattr(prediction_module, "load_recordings", load)
    monkeypatch.setattr(prediction_module, "predicted", lambda _, recordings, *__: prediction(len(recordings)))
    predictor = Predictor(cast(SweepChild, recorder), {}, space(), load_hardware("h100"), lambda *_: None)
    return list(predictor.outcomes(space().meshes[:2]))


@pytest.mark.usefixtures("kept_in_tmp")
def test_a_damaged_recording_of_an_earlier_sweep_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder([{"answers": ["damaged"]}, {"left_out": "other"}, {"answers": ["new"]}])
    result = outcomes_of(recorder, monkeypatch)
    outcomes = [outcome for _, outcome in result]
    assert outcomes == ["other", prediction(1)] and recorder.forgotten == 1


@pytest.mark.usefixtures("kept_in_tmp")
def test_a_compiled_loss_is_predicted_from_the_recording_of_the_loss_as_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Asked(Recorder):
        def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
            variants.extend(question.variants[0] for question in questions)
            return super().ask(questions)

    variants: list[Any] = []
    mesh = space().meshes[0]
    recording = Recording(Head("llama", "", mesh.mesh, "2.13.0", 1, 1, None, 1, ("forward",)))
    monkeypatch.setattr(prediction_module, "load_recordings", lambda _: [recording])
    compiled_loss, other_loss = prediction(1.0), prediction(2.0)
    monkeypatch.setattr(
        prediction_module,
        "predicted",
        lambda _, recordings, *__: compiled_loss if recordings[0].head.compiled == ("(loss)",) else other_loss,
    )
    for written in ("none", "chunked"):
        own_space = replace(space(), facts={**FACTS, "loss": written})
        recorder = cast(SweepChild, Asked([{"answers": ["file"]}] * 2))
        predictor = Predictor(recorder, {}, own_space, load_hardware("h100"), lambda *_: None)
        plain = mesh if written == "none" else mesh.with_choice("plan.loss", "none")
        compiled = mesh.with_choice("plan.loss", "compiled")
        assert list(predictor.outcomes([plain, compiled])) == [(plain, other_loss), (compiled, compiled_loss)]
        assert variants == [plain.variant({})]
        variants.clear()


def test_a_kept_prediction_is_used_until_its_recording_or_the_hardware_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(candidate: Candidate, *_: Any) -> Prediction:
        computed.append(candidate)
        return prediction(1.0, candidate=candidate)

    computed: list[Candidate] = []
    monkeypatch.setattr(prediction_module, "load_recordings", lambda _: [])
    monkeypatch.setattr(prediction_module, "predicted", predict)
    mesh, file = space().meshes[0].with_choice("scale", 1j), tmp_path / "recording.jsonl"  # no type of JSON
    file.touch()

    def outcomes(hardware: str = "h100") -> list[Any]:
        recorder = cast(SweepChild, Recorder([{"answers": [str(file)]}]))
        predictor = Predictor(recorder, {}, space(), load_hardware(hardware), lambda *_: None)
        return list(predictor.outcomes([mesh]))

    expected = [(mesh, prediction(1.0, candidate=mesh))]
    assert outcomes() == outcomes() == expected and len(computed) == 1
    outcomes("a100")
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime + 60))
    outcomes()
    for kept in tmp_path.glob("*.prediction"):
        kept.write_bytes(b"damaged")
    outcomes()
    assert len(computed) == 4


@pytest.mark.parametrize("lasts", [True, False])
def test_what_may_go_well_another_time_is_not_remembered(tmp_path: Path, lasts: bool) -> None:
    entry = set_up("tp_mlp", (), 2, None, True).entry
    child = SweepChild(entry.file, entry.name, tmp_path, resume=True)
    question = Question("record", [{"dim": 8}], {"tp": 2})
    child._recorded(question, {"left_out": "it raises OSError: no space left", "lasts": lasts})
    assert (child._known(question) is not None) is lasts


def test_a_damaged_file_of_answers_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = set_up("tp_mlp", (), 2, None, True).entry
    child = SweepChild(entry.file, entry.name, tmp_path, resume=True)
    question = Question("facts", [{"dim": 8}], {"tp": 2})
    child._answers_file(question).write_text('{"answers": [{"fsdp": null}]}')
    assert child.answers(question) == [{"fsdp": None}] and child.num_reused == 0
    child._answers_file(question).write_text('{"answers": [')
    monkeypatch.setattr(SweepChild, "_started", lambda _: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        child.answers(question)


def rounds_of(out: Path) -> tuple[measured_module.Rounds, SweepState]:
    state, setup = SweepState(space()), set_up("tp_mlp", (), 2, None, True)
    return measured_module.Rounds(setup, Limits(5, 60.0), state, out=out, resume=False, quiet=True), state


def test_an_interrupt_between_rounds_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_module, "RankProcesses", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(measured_module.Rounds, "_job", lambda self: None)
    rounds, state = rounds_of(tmp_path)

    def measure(self: Any, _: Any, number: int, candidates: Sequence[Candidate], __: Any) -> None:
        assert number == 0
        state.measured |= {one: measured(1.0) for one in candidates}

    def interrupted(*_: Any) -> list[Candidate]:
        raise KeyboardInterrupt

    monkeypatch.setattr(measured_module.Rounds, "_round", measure)
    rounds.run(space().meshes[:1], interrupted)
    assert state.interrupted and [*state.measured] == space().meshes[:1]


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_an_interrupt_cut_short_keeps_its_earlier_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    monkeypatch.setattr(measured_module.Rounds, "_job", lambda self: None)
    rounds, state = rounds_of(tmp_path)
    plan = measured(1.0)
    state.measured[plan.candidate] = plan
    state.interrupted = interrupted
    case = {"case": {"params": {"variant": "it"}}, "status": "aborted", "error": "interrupted"}
    monkeypatch.setattr(measured_module, "read_run", lambda _: SimpleNamespace(footer=None, cases=[case]))
    monkeypatch.setattr(measured_module, "frame_of", lambda _: None)
    monkeypatch.setattr(measured_module, "measured_of", lambda *_: pd.DataFrame({"variant": []}))
    rounds._take_in(tmp_path, {"it": plan.candidate}, False)
    assert (plan.candidate in state.measured) is interrupted
    assert (plan.candidate in state.left_out) is not interrupted


def test_the_plan_as_written_has_a_turn_in_the_last_round() -> None:
    written, *others = (measured(1.0, *choices).candidate for choices in ((), [("a", 1)], [("b", 1)], [("c", 1)]))
    known = dict.fromkeys([written, *others])
    assert with_written(others, written, known) == [*others[:2], written]
    assert with_written(others[:2], written, known) == [*others[:2], written]
    assert with_written(others, written, dict.fromkeys(others)) == others  # it did not work
    assert with_written(others, None, known) == others and with_written([written], written, known) == [written]


def test_changes_of_the_fastest_mesh_are_screened_first_and_as_many_as_there_is_time_for() -> None:
    one = space()
    slow, fast = one.meshes[0], one.meshes[1]
    result = changes_of_best(one, [fast, slow, slow.with_choice("plan.prefetch", 2)])
    num_of_fast = len([*one.neighbours(fast)])
    for changed, mesh in ((result[:num_of_fast], fast), (result[num_of_fast:], slow)):
        assert set(changed) == {*one.neighbours(mesh)} and len(changed) == len({*changed})
        names = [name for candidate in changed for name, _ in candidate.choices]
        soonest = [name in ("plan.mixed_precision", "plan.reshard_after_forward") for name in names]
        assert any(soonest) and soonest == sorted(soonest, reverse=True), names
    # 20 s, half of them for the second look, and 2 s a plan.
    assert num_affordable(2.0, 20.0, 80) == 5 and num_affordable(2.0, 20.0, 3) == 3
    assert (
        num_affordable(2.0, -1.0, 80) == 2 and num_affordable(0.0, 20.0, 7) == 7 and num_affordable(2.0, 20.0, -1) == 0
    )


def test_the_two_best_changes_are_tried_together() -> None:
    plans = [measured(0.8, ("plan.prefetch", 2)), measured(0.9, ("plan.checkpoint", "full")), measured(1.0)]
    known = {plan.candidate: plan for plan in plans}
    both = (("plan.checkpoint", "full"), ("plan.prefetch", 2))
    assert [one.choices for one in combined(plans, known)] == [both]
    assert combined([measured(0.8, ("plan.prefetch", 2)), measured(0.7)], known) == []


def test_options_outside_of_the_search_that_make_the_best_plan_faster_are_named() -> None:
    class Known:
        """Compilation takes 10 % less time, float8 with it 30 %."""

        hardware = load_hardware("h100")
        float8: tuple[str, ...] = ()

        def outcomes(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Prediction]]:
            for one in candidates:
                yield one, prediction(1.0 - 0.1 * len(one.choices) - 0.2 * len(self.float8), candidate=one)

    state, known = SweepState(space()), Known()
    state.predictions = {space().meshes[0]: prediction(1.0)}
    prediction_module._try_outside(state, cast(Predictor, known), Limits(80, 600.0))
    compiled = "--set plan.compile=inductor"
    times = {option: round(one.step_s, 3) for option, one in state.faster_outside.items()}
    assert times == {compiled: 0.9, f"{compiled} --float8 'layers.*'": 0.7} and known.float8 == ()
    pinned = SweepState(replace(space(), pinned=frozenset(["plan.compile"])), predictions=state.predictions)
    prediction_module._try_outside(pinned, cast(Predictor, known), Limits(80, 600.0))
    assert [*pinned.faster_outside] == ["--float8 'layers.*'"]
    late = SweepState(space(), predictions=state.predictions)
    prediction_module._try_outside(late, cast(Predictor, known), Limits(80, -1.0))
    assert not late.faster_outside
