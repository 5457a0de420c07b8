"""Users' own calls: what they are named, what they may return, what their checks say, and their table."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT

from distbench.cases.user_call import call_cases, scenario_of_call
from distbench.ranks.case_protocol import OpenedCase
from distbench.records.dataframe import frame_of
from distbench.records.run_file import Run
from distbench.report.operators import USER_CALLS
from distbench.report.section_protocol import ReportedRun
from distbench.spec import Scenario, UserError
from distbench.spec.versions import release
from distbench.worker.rank_session import load_scenario

MESH = SimpleNamespace(size=lambda: 4)
PLACE: Any = SimpleNamespace(
    mesh=MESH, mesh_dims=("dp_shard", "tp"), mesh_shape=(2, 2), gather=lambda own: [own] * MESH.size()
)


def nothing() -> None:
    pass


def opened(make: Callable[..., Any], label: str = "mine", **variant: Any) -> OpenedCase:
    (case_spec,) = call_cases(scenario_of_call("mine", make, variant), label, PLACE)
    with case_spec.open() as opened_case:
        return opened_case


def verdict(check: Callable[[], object]) -> str | None:
    return opened(lambda mesh: (nothing, check)).check()


def test_a_call_is_named_by_itself_its_variant_and_its_mesh() -> None:
    scenario = Scenario(calls={"gather": lambda mesh: nothing, "ring": lambda mesh: nothing})
    assert [case_spec.case.id for case_spec in call_cases(scenario, "mine/numel=4", PLACE)] == [
        "call/gather/numel=4/dp_shard=2,tp=2",
        "call/ring/numel=4/dp_shard=2,tp=2",
    ]
    assert next(case_spec.case.id for case_spec in call_cases(scenario, "mine", PLACE)) == "call/gather/dp_shard=2,tp=2"


def test_the_function_gets_the_mesh_and_its_variant_and_its_call_is_what_is_timed() -> None:
    seen: list[Any] = []
    opened_case = opened(lambda mesh, numel: lambda: seen.append((mesh, numel)), "mine/numel=4", numel=4)
    assert seen == []
    opened_case.call(nothing)
    assert seen == [(PLACE.mesh, 4)]
    assert opened_case.fields == {"group_size": 4, "mesh_dim": "dp_shardxtp", "counters": {"checked": False}}
    assert opened_case.check() is None


@pytest.mark.parametrize("right", [None, True])
def test_a_check_that_has_nothing_to_say_is_a_right_result(right: bool | None) -> None:
    assert verdict(lambda: right) is None


def test_a_check_says_what_is_wrong_in_its_own_words_or_where_its_assert_stands() -> None:
    def asserts() -> None:
        got, wanted = 3, 4
        assert got == wanted

    def asserts_with_words() -> None:
        raise AssertionError("three are missing\nand more")

    assert verdict(lambda: "off by one") == "off by one"
    assert verdict(lambda: False) == "its check returned False"
    line = asserts.__code__.co_firstlineno + 2
    # pytest rewrites this file's asserts and so gives them a message; in a rank the source line stands there.
    assert str(verdict(asserts)).endswith(f"(assert at test_calls.py:{line})")
    assert str(verdict(asserts_with_words)).startswith("three are missing (assert at test_calls.py:")


@pytest.mark.parametrize(
    ("made", "named"),
    [(3.5, "returned float"), ((nothing, nothing, nothing), "a tuple of function, function"), ((nothing, 7), "int")],
)
def test_what_cannot_be_timed_is_told_in_one_sentence(made: object, named: str) -> None:
    with pytest.raises(
        UserError, match=r"^call 'mine': its function returned .*return the function to time"
    ) as message:
        opened(lambda mesh: made)
    assert named in str(message.value)


def test_a_check_that_answers_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(UserError, match="its check returned int"):
        verdict(lambda: 1)


def test_the_report_shows_calls_that_are_ok() -> None:
    cases = [
        {
            "type": "case",
            "case": {"id": f"call/{name}/tp=2", "kind": "call", "params": {"call": name}},
            "status": status,
            "samples_s": [0.001, 0.002, 0.003],
            "group_size": 2,
            "stop_reason": "precise",
        }
        for name, status in (("gather", "ok"), ("ring", "wrong"))
    ]
    header = {"type": "run", "schema_version": 1, "run_id": "x", "job": {}, "environment": {}}
    run = Run(Path("x.jsonl"), header, cases, None, [])
    (table,) = USER_CALLS.tables(ReportedRun(run, frame_of([run])), True)
    (row,) = table.rows
    assert (row[0], row[1], row[2].split(), row[5]) == ("gather/tp=2", "2", ["2.00", "ms"], "3")


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ([{"work": 1}, {}], "returned no number on rank 1 and work on rank 0; return the same names on every rank"),
        ([{"work": 1}, {"work": -1}], "number 'work' of rank 1 is -1; return a finite number, 0 or more"),
        ([{"work": float("nan")}], "number 'work' of rank 0 is nan; return a finite number, 0 or more"),
        ([{"work": "x"}], "number 'work' of rank 0 is 'x'; return a finite number, 0 or more"),
    ],
)
def test_numbers_that_differ_in_name_or_are_none_are_refused(of_ranks: list[dict[str, Any]], message: str) -> None:
    """A rank without numbers takes part in the exchange, so that no rank waits for it."""
    place: Any = SimpleNamespace(**{**vars(PLACE), "gather": lambda own: of_ranks})
    (case_spec,) = call_cases(Scenario(calls={"mine": lambda mesh: nothing}), "mine", place)
    with pytest.raises(UserError) as refused, case_spec.open():
        pass
    assert str(refused.value).endswith(message)


def test_a_calls_numbers_are_shown_as_the_largest_ranks_over_the_mean() -> None:
    numbers = [{"work": work} for work in (1.0, 1.0, 2.0, 4.0)]
    four: Any = SimpleNamespace(**{**vars(PLACE), "gather": lambda own: numbers})
    make = partial(lambda mesh: (nothing, None, {"work": 1}))
    (case_spec,) = call_cases(Scenario(calls={"mine": make}), "mine", four)
    with case_spec.open() as opened_case:
        counters = opened_case.fields["counters"]
    assert counters["per_rank"] == {"work": [1.0, 1.0, 2.0, 4.0]}
    case = {"id": "call/mine/tp=4", "kind": "call", "params": {"call": "mine"}}
    row = {"type": "case", "case": case, "status": "ok", "samples_s": [0.001], "counters": counters}
    header = {"type": "run", "schema_version": 1, "run_id": "x", "job": {}, "environment": {}}
    run = Run(Path("x.jsonl"), header, [row], None, [])
    (table,) = USER_CALLS.tables(ReportedRun(run, frame_of([run])), True)
    assert table.rows[0][1] == "2.000x" and "over the mean of all ranks" in table.notes[0]


@pytest.mark.parametrize(
    ("balancer", "documents", "pairs"),
    [
        # A rank's queries of one document see 512.5, 1536.5, 2560.5 and 3584.5 keys in the mean; all see 2048.5.
        ("none", [4096], 3584.5 / 2048.5),
        ("head_tail", [4096], 1.0),
        # torch 2.13 orders chunks document by document: ranks 0 and 1 share the first document, rank 2 has the second,
        # rank 3 the others.
        pytest.param(
            *("per_document", [2048, 1024, 512, 512], 2049 * 4 / (2049 + 2049 + 1025 + 513)),
            marks=pytest.mark.skipif(release(torch.__version__) > (2, 13), reason="torch 2.14 changed this balancer"),
        ),
        ("none", [1024] * 4, 1.0),
        # Chunks of 512 with 256.5, 768.5, 1280.5, 1792.5, 256.5, 768.5, 256.5, 256.5 keys: 0 and 7, 1 and 6, 2 and 5, 3
        # and 4.
        ("head_tail", [2048, 1024, 512, 512], 2049 * 4 / (513 + 1025 + 2049 + 2049)),
    ],
)
@pytest.mark.long
def test_work_per_rank_of_packed_documents_is_exact(balancer: str, documents: list[int], pairs: float) -> None:
    """Without ranks: torch's order of the sequence, and the pairs of each rank's part of it."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers

    module = load_scenario(ROOT / "scenarios" / "cp_documents.py", "work_of")
    order: Any = {
        "none": lambda: torch.arange(4096)[None],
        "head_tail": balancers._HeadTailLoadBalancer(4096, 4, "cpu")._generate_indices,
        "per_document": balancers._PerDocumentHeadTailLoadBalancer([documents], 4, "cpu")._generate_indices,
    }[balancer]()
    begins = torch.repeat_interleave(
        torch.tensor([sum(documents[:place]) for place in range(len(documents))]), torch.tensor(documents)
    )
    work = [module(part, begins) for part in order.view(4, -1)]  # type: ignore[call-arg,arg-type]
    of_ranks = [of_rank["pairs"] for of_rank in work]  # type: ignore[index]
    assert sum(of_ranks) == sum(length * (length + 1) / 2 for length in documents)
    assert max(of_ranks) / (sum(of_ranks) / 4) == pytest.approx(pairs, rel=1e-9)


def test_a_file_in_a_package_may_import_its_neighbours_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    inner = tmp_path / "calls_outer" / "calls_inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "sizes.py").write_text("SMALL = 64")
    (inner / "test_it.py").write_text(
        "from ..sizes import SMALL\nfrom calls_outer import sizes\ndef bench(mesh): return SMALL, sizes.SMALL"
    )
    function: Any = load_scenario(inner / "test_it.py", "bench")
    assert function(None) == (64, 64)


@pytest.mark.parametrize("part", ["0", "12", "x", "-8"])
def test_a_document_length_that_cannot_be_split_is_one_sentence(part: str) -> None:
    lengths_of: Any = load_scenario(ROOT / "scenarios" / "cp_documents.py", "lengths_of")
    with pytest.raises(UserError, match=f"'{part}' is not a valid length; use multiples of 8 that are above 0"):
        lengths_of(f"{part}+2048", 8)
