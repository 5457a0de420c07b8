"""Declarations: a wrong name, type or function is said where it was declared; plain data."""

from collections.abc import Callable
from typing import Any

import pytest

from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, UserError, find
from distbench.spec.checked_dataclass import fits, in_words
from distbench.spec.discovery import argument_of


class Model:
    def named_parameters(self) -> list[Any]:
        return []

    def __call__(self) -> None:
        return None


def two(output: Any, targets: Any) -> Any:
    return output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scenario(make_bach=two), "Scenario has no field 'make_bach' (nearest: make_batch, make_cache)"),
        (lambda: ParallelPlan(tpp={}), "ParallelPlan has no field 'tpp' (nearest: tp"),
        (lambda: Scenario(make_batch=(1, 2)), "Scenario.make_batch is (1, 2); give a function or None"),
        (lambda: Scenario(make_batch=[0] * 99), "Scenario.make_batch is a list; give a function or None"),
        (lambda: Scenario(plan={"tp": {}}), "Scenario.plan is {'tp': {}}; give a ParallelPlan"),
        (lambda: ParallelPlan(fsdp="auto"), "ParallelPlan.fsdp is 'auto'; give a FsdpPlan or None"),
        (
            lambda: FsdpPlan(wrap="blocks.*"),
            "FsdpPlan.wrap is 'blocks.*'; give a tuple of text or 'auto': ('blo",
        ),
        (lambda: FsdpPlan(mesh_dims="dp"), "FsdpPlan.mesh_dims is 'dp'; give a tuple of text: ('dp',)"),
        (lambda: ParallelPlan(microbatches="2"), "ParallelPlan.microbatches is '2'; give a whole number"),
        (lambda: ParallelPlan(microbatches=True), "ParallelPlan.microbatches is True; give a whole number"),
        (lambda: DdpPlan(bucket_cap_mb="1"), "DdpPlan.bucket_cap_mb is '1'; give a number or None"),
        (
            lambda: Scenario(batch_dims={"x": "0"}),
            "Scenario.batch_dims is {'x': '0'}; give a whole number or a",
        ),
        (lambda: Scenario(loss=lambda a: a), "Scenario.loss is called as loss(output, targets), but accepts (a)"),
        (
            lambda: Scenario(call=lambda m, b, c: m),
            "Scenario.call is called as call(model, batch), but accepts (m, b",
        ),
        (
            lambda: Scenario(parallelize=lambda m: m),
            "parallelize is called as parallelize(model, mesh), but accepts (m)",
        ),
        (lambda: Scenario(build_model=Model()), "Scenario.build_model is a Model; give a function that makes a model"),
        (lambda: Scenario(call=two, loss=two), "Scenario has both call and loss"),
    ],
)
def test_what_is_declared_wrongly_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert message in str(caught.value)


def test_what_fits_is_taken() -> None:
    plan = FsdpPlan(wrap=["blocks.*"], reshard_after_forward=2, shard_placement=lambda parameter: None)  # type: ignore[arg-type]
    assert plan.wrap == ("blocks.*",), "a list is the tuple that is meant"
    assert ParallelPlan(tp="auto", fsdp=FsdpPlan(wrap="auto"), tp_dim=("dp_shard", "tp")).tp_dims == ("dp_shard", "tp")
    assert DdpPlan(bucket_cap_mb=1).bucket_cap_mb == 1
    Scenario(build_model=Model, loss=two, optimizer=dict, num_tokens=3)
    assert fits((1, "a"), tuple[int, str]) and not fits((1,), tuple[int, str])
    assert in_words(tuple[int, str]) == "(a whole number, text)"


def test_a_header_s_mesh_and_a_file_without_scenarios_are_said_with_their_file(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from distbench.spec import scenario\n\n@scenario(mesh={'data': 2})\ndef mine():\n    pass\n")
    with pytest.raises(UserError, match=r"mine.py:3, scenario 'mine': mesh dim 'data' is unknown; use pp, "):
        find(str(file))
    file.write_text("")
    with pytest.raises(UserError, match=r"mine.py declares no scenario; decorate a function"):
        find(str(file))


def test_a_next_command_names_the_file_of_a_scenario_that_is_not_shipped() -> None:
    assert argument_of("llama_2d (tp=8)") == "llama_2d" and argument_of("mine") == "FILE.py::mine"
