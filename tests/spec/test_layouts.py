"""The notation of placements: everything that run files and people write is read, and written again, in one way."""

import pytest

from distbench.report.planner_study import pattern_of
from distbench.report.reproducer import layout_of
from distbench.spec.placements import Placement, format_placements, parse_placements, shard_orders

STRIDED = Placement(1, split_factor=4)


@pytest.mark.parametrize(
    ("text", "placements", "written"),
    [
        ("R", [Placement()], "R"),
        ("S(0)S(12)", [Placement(0), Placement(12)], "S(0)S(12)"),
        ("S(0)[1]S(0)[0]", [Placement(0, 1), Placement(0, 0)], "S(0)[1]S(0)[0]"),
        ("P(sum)RP(avg)", [Placement(reduce_op="sum"), Placement(), Placement(reduce_op="avg")], "P(sum)RP(avg)"),
        ("_S(1,4)R", [STRIDED, Placement()], "_S(1,4)R"),
        ("_S(1, 4)", [STRIDED], "_S(1,4)"),
        ("SS(1, 4)S(0)", [STRIDED, Placement(0)], "_S(1,4)S(0)"),
        ("_StridedShard(dim=1, sf=4)", [STRIDED], "_S(1,4)"),
        ("_StridedShard(dim=1, split_factor=4)", [STRIDED], "_S(1,4)"),
        ("StridedShard(1,4)[1]S(1)[0]", [Placement(1, 1, 4), Placement(1, 0)], "_S(1,4)[1]S(1)[0]"),
    ],
)
def test_every_notation_is_read_and_written_in_one(text: str, placements: list[Placement], written: str) -> None:
    assert list(parse_placements(text)) == placements
    assert format_placements(placements) == written
    assert list(parse_placements(written)) == placements


@pytest.mark.parametrize(
    "text", ["", " R", "Q", "S", "S(0", "S(-1)", "S(x)", "_S(0)", "_S(0,x)", "P()", "S(0)->R", "nan"]
)
def test_what_is_no_list_of_placements_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"placements .* are unknown; write R, S\(tensor dim\)"):
        parse_placements(text)


def test_shard_orders_follow_the_turns_and_else_the_mesh() -> None:
    assert shard_orders(parse_placements("S(0)S(1)S(0)"), 2) == ((0, 2), (1,))
    assert shard_orders(parse_placements("S(0)[1]P(sum)S(0)[0]"), 2) == ((2, 0), ())
    with pytest.raises(ValueError, match=r"placement S\(2\) shards a tensor dim that a 2-D tensor lacks"):
        shard_orders(parse_placements("S(2)"), 2)
    with pytest.raises(ValueError, match="do not number the shards"):
        shard_orders(parse_placements("S(0)[1]S(0)[1]"), 2)


@pytest.mark.parametrize("text", ["_S(0, 2)S(0)", "SS(0, 2)S(0)", "_StridedShard(dim=0, sf=2)S(0)"])
def test_old_run_files_strided_shards_mean_the_same_everywhere(text: str) -> None:
    row = {"source": text, "target": "RR", "shape": "8x8", "mesh_shape": "2x2", "flattened": "", "direction": "forward"}
    assert pattern_of(row) == "strided shards, nested shards"
    assert layout_of(text, (2, 2)).placements == ["_StridedShard(0, split_factor=2)", "Shard(0)"]
