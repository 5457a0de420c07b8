"""Scripts that show a failure with torch alone: what they hold, and one of them on real ranks."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from processes import Ranks
from test_lab_report import failing, four_pairs, study_in

from distbench.report.planner_study import Failure, Versions
from distbench.report.reproducer import Cut, NotWritten, layout_of, script_of, write_reproducers

GOLDEN = ROOT / "tests" / "golden" / "laboratory.jsonl"
VERSIONS = Versions("2.13.0", "gloo")
EXAMPLE: dict[Any, Any] = {
    "id": "x",
    "source": "S(0)S(0)",
    "target": "RR",
    "shape": "5x3",
    "dtype": "f32",
    "mesh": "dp_shard=2,tp=2",
    "mesh_shape": "2x2",
    "suite": "s",
    "direction": "forward",
    "flattened": "",
    "error": "it broke",
}


def failure(status: str = "wrong", planner: str = "greedy", **fields: str) -> Failure:
    return Failure(status, planner, "s", "pattern", 1, {**EXAMPLE, **fields}, {})


def script(planner: str = "greedy", **fields: str) -> str:
    return script_of(failure("wrong", planner, **fields), VERSIONS, "name.py")


@pytest.mark.parametrize(
    ("text", "placements", "cuts", "is_ordered"),
    [
        ("S(0)R", ["Shard(0)", "Replicate()"], [Cut(0, 0, 1)], False),
        ("S(0)S(0)", ["Shard(0)", "Shard(0)"], [Cut(0, 0, 1), Cut(1, 0, 1)], False),
        ("S(0)[1]S(0)[0]", ["Shard(0)", "Shard(0)"], [Cut(1, 0, 1), Cut(0, 0, 1)], True),
        ("P(max)S(1)", ['Partial("max")', "Shard(1)"], [Cut(1, 1, 1)], False),
        ("_S(0,2)S(0)", ["_StridedShard(0, split_factor=2)", "Shard(0)"], [Cut(0, 0, 2), Cut(1, 0, 1)], False),
        ("_S(1, 4)R", ["_StridedShard(1, split_factor=4)", "Replicate()"], [Cut(0, 1, 4)], False),
        ("_StridedShard(dim=1, sf=4)R", ["_StridedShard(1, split_factor=4)", "Replicate()"], [Cut(0, 1, 4)], False),
    ],
)
def test_layouts_are_written_as_torch_has_them(
    text: str, placements: list[str], cuts: list[Cut], is_ordered: bool
) -> None:
    result = layout_of(text, (2, 2))
    assert (result.placements, result.cuts, result.is_ordered) == (placements, cuts, is_ordered)


@pytest.mark.parametrize("text", ["S(0)", "S(0)X", "S(0)RR", ""])
def test_a_layout_that_does_not_fit_is_not_guessed(text: str) -> None:
    with pytest.raises(NotWritten, match="is not valid"):
        layout_of(text, (2, 2))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("planner", ["greedy", "min_cost", "greedy+native", "min_cost+native"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"flattened": "dp_shardxtp"},
        {"source": "S(0)[1]S(0)[0]", "target": "S(1)R"},
        {"source": "S(0)R", "target": "P(sum)R"},
        {"source": "P(avg)S(1)", "target": "RS(0)"},
        {"source": "P(max)P(max)"},
        {"source": "P(min)R"},
        {"source": "P(sum)S(0)", "direction": "backward"},
        {"source": "_S(0,2)R"},
        {"mesh_shape": "4", "source": "S(0)", "target": "R"},
    ],
)
@pytest.mark.long
def test_every_kind_of_script_is_whole_python_that_uses_all_it_has(
    fields: dict[str, str], planner: str, backend: str
) -> None:
    text = script_of(failure("wrong", planner, **fields), Versions("2.13.0", backend), "name.py")
    tree = ast.parse(text)
    names = [name for name in ast.walk(tree) if isinstance(name, ast.Name)]
    used = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    given = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)}
    builtin = set(dir(__builtins__)) if not isinstance(__builtins__, dict) else set(__builtins__)
    assert used <= defined | given | assigned | arguments | caught | builtin
    assert defined | given <= used
    assert "distbench" not in "".join(ast.unparse(node) for node in imports) and "{%" not in text and "{{" not in text
    assert len(text.splitlines()) <= 110


def test_the_header_says_what_is_expected_and_what_happens() -> None:
    text = script(error='rank 0: """ is\\N wrong\n' + "and more " * 60, flattened="dp_shardxtp")
    head = ast.get_docstring(ast.parse(text)) or ""
    assert head.startswith("DTensor redistribute S(0)S(0) -> RR of a 5x3 f32 tensor on a 2x2 mesh gives wrong values")
    assert "torch 2.13.0, backend gloo, 4 ranks" in head
    assert "torchrun --nproc-per-node 4 name.py" in head
    assert "Expected: " in head and "Happened: wrong: rank 0: " in head
    assert "mesh[('dp_shard', 'tp')]._flatten()" in text
    assert max(map(len, head.splitlines())) <= 120


@pytest.mark.parametrize(
    ("planner", "fields", "reason"),
    [
        ("calibrated", {}, "a planner of distbench"),
        ("direct", {}, "a planner of distbench"),
        ("greedy", {"dtype": "i8"}, "dtype"),
        ("greedy", {"shape": "4096x4096"}, "16777216 elements"),
        ("greedy", {"source": "P(product)R"}, "reduce op"),
        ("greedy", {"mesh_shape": "4", "source": "S(0)", "target": "R", "flattened": "dp_shardxtp"}, "flattens"),
    ],
)
def test_what_torch_alone_cannot_show_is_said(planner: str, fields: dict[str, str], reason: str) -> None:
    with pytest.raises(NotWritten, match=reason):
        script(planner, **fields)


def test_one_script_for_each_cause(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    result = study_in(tmp_path / "runs", [*four_pairs(), *failing()])
    ours = failure("wrong", "calibrated")
    *written, left_out = write_reproducers([*result.failures, ours], VERSIONS, tmp_path / "up")
    names = [
        "01-wrong-greedy-flattened-nested-shards-uneven-a-flattened-mesh-exists.py",
        "02-raised-greedy-partials-Shard-to-Partial.py",
        "03-aborted-min_cost-strided-strided-shards.py",
    ]
    assert written == [f"reproducer written: {tmp_path / 'up' / name}" for name in names]
    assert sorted(path.name for path in (tmp_path / "up").iterdir()) == names
    assert (
        left_out
        == "no reproducer for x (wrong): calibrated is a planner of distbench; run the case again with distbench"
    )


def test_a_real_runs_failures_come_out_by_cause(tmp_path: Path) -> None:
    """The file is a real run's; what it holds is counted here from its lines alone."""
    records = [json.loads(line) for line in GOLDEN.read_text().splitlines()[1:-1]]
    bad = [record for record in records if record["status"] in ("wrong", "raised", "aborted", "timeout")]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run0.jsonl").write_text("")
    result = study_in_file(GOLDEN)
    assert sum(group.num_cases for group in result) == len(bad) > 0
    causes = {(group.status, group.planner.partition("+")[0], group.suite) for group in result}
    params = [(record["status"], record["case"]["params"]) for record in bad]
    assert causes == {(status, param["planner"], param["suite"]) for status, param in params}
    assert all(set(outcomes) == {"ok"} for group in result for outcomes in group.ours.values())


def study_in_file(path: Path) -> list[Failure]:
    from distbench.records.dataframe import frame_of
    from distbench.records.results_folder import collect
    from distbench.report.planner_study import studies_of

    runs, _ = collect((path,), Path("nowhere"))
    (study,) = studies_of(runs, [frame_of(runs)])
    return study.failures


def test_a_script_shows_the_wrong_values_on_real_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """F1 of torch 2.13: a flattened mesh exists, and nested shards do not divide the tensor evenly."""
    path = tmp_path / "f1.py"
    path.write_text(script(flattened="dp_shardxtp"))
    done = ranks.torchrun(4, path, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "WRONG on ranks [0, 1, 2, 3]" in done.stdout
    # 5 rows over 2 x 2 ranks are 2, 1, 1 and 1: rank 1's share is padded to two, and row 3 comes out as the padding.
    expected, got = done.stdout.split("got (5, 3):")
    assert numbers(expected[expected.index("tensor") :]) == list(range(15))
    assert numbers(got[got.index("tensor") : got.index("torch")]) == [*range(9), 0, 0, 0, 9, 10, 11]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.", text)]
