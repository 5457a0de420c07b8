"""Operators on DTensors: what is refused, that a wrong one comes out wrong, and the table of what each pays."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distbench.cases.dtensor_operator import operator_cases, try_once
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.records.dataframe import frame_of
from distbench.records.run_file import Run
from distbench.report.operators import SECTION
from distbench.report.section_protocol import ReportedRun
from distbench.spec import DTensorOperator, Scenario, UserError
from distbench.torch_private import Unsupported, fake_ranks


def square() -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 4),)


def twice(x: Any) -> Any:
    return x * 2


def operator(**given: Any) -> DTensorOperator:
    plain = {"name": "twice", "call": twice, "make_inputs": square, "placements": (("S(0)R",),)}
    return DTensorOperator(**{**plain, **given})


def found(one: DTensorOperator) -> list[str | None]:
    """What each case's check says, on rank 0 of four that send nothing."""
    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        group: Any = torch.distributed.group.WORLD
        context = RankContext(0, torch.device("cpu"), mesh, "gloo", group, seed=1)
        message = []
        for case_spec in operator_cases(Scenario(operators=(one,)), context):
            with case_spec.open() as opened_case:
                opened_case.call(no_stamp)
                message.append(opened_case.check())
    return message


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"placements": (("S(0)R", "RR"),)}, "there are 1 inputs; give placements for each input"),
        ({"placements": (("S(0)",),)}, "has 1 mesh dims, but the mesh has 2"),
        ({"placements": (("S(2)R",),)}, "does not fit shape"),
        ({"placements": (("sideways",),)}, "does not fit shape"),
        ({"make_inputs": lambda: ()}, "make_inputs returned nothing"),
        ({"make_inputs": lambda: (1,)}, "make_inputs returned int"),
        ({"planners": ("magic",)}, "planner 'magic' is unknown"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=r"^(operator|planner) ") as refused:
        found(operator(**given))
    assert sentence in str(refused.value)


@pytest.mark.long
def test_result_and_gradients_are_held_against_one_device() -> None:
    assert found(operator()) == [None, None]
    (wrong, _) = found(operator(one_device=lambda x: x * 2 + 0.001))
    assert wrong is not None and wrong.startswith("the result differs from one device's by 1.0e-03")
    detached = found(operator(one_device=lambda x: x + x.detach()))
    assert all(message is not None and "the gradient of input 0 differs" in message for message in detached)


def row(planner: str, pays: str, wire_bytes: int, median_s: float) -> dict[str, Any]:
    case = {"op": "add", "source": "S(0)R,RR", "planner": planner, "dtype": "f32"}
    return {
        "case": {"id": f"operator/f32/add/{planner}", "kind": "operator", "params": case},
        "status": "ok",
        "samples_s": [median_s] * 3,
        "wire_bytes": wire_bytes,
        "counters": {
            **{"result": "RR", "gradients": "RR, RR", "forward_pays": pays, "backward_pays": ""},
            "num_implicit": 1,
        },
    }


def told(*rows: dict[str, Any]) -> tuple[list[tuple[str, ...]], list[str]]:
    run = Run(Path("made_up.jsonl"), {}, list(rows), None, [])
    reported = ReportedRun(run, frame_of([run]))
    cells = [cells for table in SECTION.tables(reported, True) for cells in table.rows]
    return cells, list(SECTION.headline(reported))


def test_planners_that_pay_the_same_share_a_row_and_others_have_their_own() -> None:
    equal, lines = told(row("min_cost", "a", 1024, 2e-3), row("greedy", "a", 1024, 1e-3))
    assert equal == [("add", "S(0)R,RR", "RR", "RR, RR", "1", "1 KiB", "1.00 ms", "2.00 ms", "forward: a")]
    assert lines == [
        "1 of 1 operators and placements redistribute implicitly; add of S(0)R,RR sends the most, 1 KiB per rank"
    ]
    apart, lines = told(row("greedy", "a", 1024, 1e-3), row("min_cost", "b", 512, 2e-3))
    assert [cells[5:] for cells in apart] == [
        ("1 KiB", "1.00 ms", "", "forward: a"),
        ("512 B", "", "2.00 ms", "forward: b"),
    ]
    assert lines[1] == "planners communicate differently in 1 of these"
    assert told() == ([], [])


@pytest.mark.parametrize(("version", "outcome"), [((2, 11), Unsupported), ((2, 12), RuntimeError)])
def test_indexing_by_a_sharded_tensor_needs_a_newer_torch_than_2_11(
    version: tuple[int, int], outcome: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(stamp: object) -> None:
        raise RuntimeError("shape mismatch: value tensor of shape [16, 32] cannot be broadcast")

    monkeypatch.setattr(sys.modules["distbench.torch_private.probe"], "release", lambda _: version)
    with pytest.raises(outcome, match=r"needs torch 2\.12 or newer" if outcome is Unsupported else "shape mismatch"):
        try_once(run, "greedy")
