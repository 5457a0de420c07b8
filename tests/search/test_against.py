"""Rows of published steps: reading, invalid rows, and a comparison with two recordings of a small decoder."""

from pathlib import Path
from typing import Any

import pytest
from processes import Children

from distbench.search import published_comparison
from distbench.search.published_comparison import blocks_of, compared, record_of, residuals_of
from distbench.show.terminal import shown
from distbench.simulate.published import published_rows
from distbench.spec import find
from distbench.spec.errors import UserError

HEAD = """# url: https://example.org
# split: held-out
# hardware: h100
# left_open: the network
name,scenario,choices,mesh,dtype,mode,tokens_per_s,not_simulated
"""
SIZES = "vocab=512 dim=64 num_heads=4 hidden=128 sequence=64"


def rows_of(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_shipped_rows() -> None:
    """At least 80 rows with a source; a source is fitted or held out as a whole, and no row stands twice."""
    rows = published_rows("published")
    assert len(rows) >= 80
    assert all(row.url.startswith("https://") and row.left_open for row in rows)
    splits = {row.source: row.split for row in rows}
    assert all(row.split == splits[row.source] for row in rows)
    assert len({(row.source, row.name) for row in rows}) == len(rows)
    assert {*splits.values()} == {"fitted", "held-out"}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("a,decoder,,dp_shard=8,bf16,eager,fast,", "'fast' is not a number"),
        ("a,decoder,,dp_shard=8,int3,eager,1,", "int3"),
        ("a,decoder,,,bf16,eager,1,", "mesh is missing"),
        ("a,decoder,dim,dp_shard=8,bf16,eager,1,", "'dim' is not NAME=VALUE"),
        ("a,decoder,,dp_shard=8,bf16,eager,1,,more", "more cells"),
        ("a,decoder,,dp_shard=x,bf16,eager,1,", "dp_shard=x"),
        (",decoder,,dp_shard=8,bf16,eager,1,", "name is missing; give name in"),
    ],
)
def test_invalid_rows(tmp_path: Path, line: str, wrong: str) -> None:
    with pytest.raises(UserError) as raised:
        published_rows(rows_of(tmp_path, HEAD + line + "\n"))
    assert wrong in str(raised.value) and "row 1" in str(raised.value)
    assert "\n" not in str(raised.value)
    # The other rows remain, and the invalid row is named.
    problems: list[str] = []
    good = "good,decoder,,dp_shard=8,bf16,eager,1,\n"
    rows = published_rows(rows_of(tmp_path, HEAD + good + line + "\n" + good), problems.append)
    assert [row.name for row in rows] == ["good", "good"]
    assert len(problems) == 1 and wrong in problems[0] and "row 2" in problems[0]


def test_invalid_files(tmp_path: Path) -> None:
    for text, wrong in (
        ("name,speed\na,1\n", "'speed' is unknown"),
        ("# colour: red\nname\na\n", "'colour' is unknown"),
    ):
        with pytest.raises(UserError, match=wrong):
            published_rows(rows_of(tmp_path, text))
    with pytest.raises(UserError, match="has no rows"):
        published_rows(rows_of(tmp_path, HEAD))
    with pytest.raises(UserError, match="cannot be read"):
        published_rows(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("variant", "recorded"),
    [
        ({"batch": 32, "microbatches": 4}, (1, 2)),
        ({"batch": 32, "microbatches": 2}, (2,)),
        ({"samples": 32, "microbatches": 4}, (4,)),
        ({"batch": 32, "microbatches": "auto"}, (1,)),
        ({}, (1,)),
    ],
)
def test_micro_batches_of_other_scenarios_are_recorded_whole(
    variant: dict[str, Any], recorded: tuple[int, ...], tmp_path: Path
) -> None:
    (row,) = published_rows(rows_of(tmp_path, HEAD + "good,decoder,,dp_shard=8,bf16,eager,1,\n"))
    step = published_comparison._Step(row, find("decoder")[0], variant, {"dp_shard": 8})
    assert step.recorded == recorded and [step.question(count).variants[0] for count in recorded]


@pytest.mark.long
def test_comparison(tmp_path: Path, children: Children) -> None:
    """Rows that no scenario expresses have their reason and the others are simulated; equal steps are recorded once.

    From 1 and 2 micro-batches, the step has the same time as recorded whole.
    """
    lines = [
        f"eager,decoder,{SIZES} num_layers=6 batch=32 microbatches=4,dp_shard=8,bf16,eager,1000,",
        f"compiled,decoder,{SIZES} num_layers=6 batch=32 microbatches=4,dp_shard=8,bf16,compile,1000,",
        "other,,,,bf16,eager,1000,no scenario has it",
        "unknown,decoder,depth=3,dp_shard=8,bf16,eager,1000,",
        "nowhere,absent_scenario,,dp_shard=8,bf16,eager,1000,",
    ]
    rows = published_rows(rows_of(tmp_path, HEAD + "\n".join(lines) + "\n"))
    counts = [0, 0]

    def on_progress(more: int, done: int) -> None:
        counts[0], counts[1] = counts[0] + more, counts[1] + done

    results = compared(rows, tmp_path / "recordings", on_progress)
    assert counts == [2, 2]  # two numbers of micro-batches
    eager, compiled, other, unknown, nowhere = results
    assert eager.step_s is not None and compiled.step_s is not None and compiled.step_s < eager.step_s
    # 32 sequences of 64 tokens on 8 devices, at 1,000 tokens/s per device
    assert eager.published_s == pytest.approx(32 * 64 / 8 / 1000)
    assert (other.step_s, other.why) == (None, "no scenario has it")
    assert "depth" in unknown.why and "absent_scenario" in nowhere.why
    text = shown(blocks_of(results), "table")
    assert "Held-out: 2 rows of 1 source" in text and "Not simulated: 3 rows" in text
    assert [row["why_not"] for row in record_of(results)["rows"]][2] == "no scenario has it"
    assert [row.name for row in residuals_of(results, "").rows] == ["eager", "compiled"]
    line = lines[0] + "\n"
    few = rows_of(tmp_path, HEAD + line, "few.csv")
    head = HEAD.replace("tokens_per_s,", "tokens_per_s,reserved_gib,")
    whole = rows_of(tmp_path, head + line.replace("1000,", "1000,1,"), "whole.csv")
    recorded, extended = (
        compared(published_rows(file), tmp_path / "recordings", on_progress)[0] for file in (whole, few)
    )
    assert recorded.step_s is not None and extended.step_s == pytest.approx(recorded.step_s, rel=0.02)
    assert recorded.reserved_bytes is not None and extended.reserved_bytes is None
