"""`distbench compare`: two sides of run files whose times were chosen; what one launch a side is allowed to say."""

import io
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from gate_runs import CASE, OTHER, case, records, steady, taking_turns, write

from distbench.cli.main import main
from distbench.judge.compare_runs import FRAME_COLUMNS, WORDS
from distbench.show.terminal import ask_width
from distbench.statistics.verdicts import JUDGED


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def flat(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def frame(*arguments: object) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(run(*arguments, "--format", "csv").output)).set_index("case")


def pair(tmp_path: Path, before: float = 1.0, after: float = 2.0, **changed: object) -> list[Path]:
    """One launch a side."""
    sides = (("a", 1000.0, before, {}), ("b", 2000.0, after, changed))
    return [
        write(tmp_path / f"{name}.jsonl", records(name, start, {CASE: case(steady(time_s, 0))}, **more))  # type: ignore[arg-type]
        for name, start, time_s, more in sides
    ]


def test_one_launch_a_side_is_shown_and_not_judged_however_far_apart(tmp_path: Path) -> None:
    result = run(*pair(tmp_path))
    text = flat(result)
    assert "compare: 1 case on both sides, B/A 2.00 to 2.00" in text and "note: -v shows" not in text
    assert "INCONCLUSIVE: one launch per side gives no verdict on 1 case. Largest difference: " in text
    assert text.endswith("Next: distbench ab REF_A REF_B -- collectives (alternates launches of both sides)")
    assert "One launch per side does not show which side is faster" in flat(run(*pair(tmp_path), "-v"))
    assert max(map(len, result.output.splitlines())) <= 120
    row = frame(*pair(tmp_path)).loc[CASE]
    assert row["verdict"] == "not told" and row["ratio"] == pytest.approx(2.0) and row["of"] == "median"
    assert math.isnan(row["ratio_low"]) and row["num_launches"] == 1


def test_its_tables_fit_the_width_that_is_asked_for(tmp_path: Path) -> None:
    for width in (60, 200):
        result = run(*pair(tmp_path), "--width", width)
        assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= width
    ask_width(None)


def test_a_launch_of_many_passes_has_an_interval_of_its_own(tmp_path: Path) -> None:
    def launch(name: str, start: float, scale: float) -> Path:
        lines = records(name, start, {CASE: case([scale])})
        lines[0]["schema_version"] = 2
        values = [scale * (1 + number / 100) for number in range(1, 10)]
        passes = [
            {"type": "pass", "case_id": CASE, "number": number, "samples_s": [value], "phases_s": {}}
            for number, value in enumerate(values, start=1)
        ]
        return write(tmp_path / f"{name}.jsonl", [*lines[:-1], *passes, lines[-1]])

    result = frame(launch("a", 1000.0, 1.0), launch("b", 2000.0, 1.0)).loc[CASE]
    # Ten pass medians 1.00 to 1.09: by the binomial, the 2nd and the 9th bound their median with 95 %.
    assert (result["a_low_s"], result["a_high_s"]) == (pytest.approx(1.01), pytest.approx(1.08))
    assert result["a_s"] == pytest.approx(1.045)


def test_on_a_narrow_screen_intervals_go_before_the_ratio(tmp_path: Path) -> None:
    sides = [write(tmp_path / f"{name}.jsonl", records(name, 1.0, {CASE: case([1.0] * 9)})) for name in "ab"]
    done = CliRunner().invoke(main, ["compare", *map(str, sides), "--width", "60"])
    table = done.output[done.output.index("one launch per side, median of each") :]
    assert table.split("\n")[1].split() == ["case", "A", "B", "B/A"] and "columns left out: quartiles" in table


def test_several_launches_that_took_turns_are_judged_as_the_gate_does(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1.0, 1.3)
    text = flat(run(base, new, "-v"))
    assert (
        f"FAIL: 1 slower. Worst: {CASE}: B 1.3x slower than A (95 % CI 1.2" in text
        and "10 pairs of alternating launches" in text
    )
    row = frame(base, new).loc[CASE]
    assert row["verdict"] == "slower" and row["ratio_low"] < 1.3 < row["ratio_high"] and row["num_launches"] == 10
    back = frame(new, base).loc[CASE]
    assert back["verdict"] == "faster" and back["ratio"] == pytest.approx(1 / 1.3)
    assert set(WORDS) == set(JUDGED)


def test_no_change_is_within_noise_and_too_few_launches_are_not_told(tmp_path: Path) -> None:
    assert frame(*taking_turns(tmp_path / "same", 1.0, 1.0)).loc[CASE, "verdict"] == "within noise"
    base, new = taking_turns(tmp_path / "few", 1.0, 1.5, count=3)
    row = frame(base, new).loc[CASE]
    assert row["verdict"] == "not told" and "a verdict needs at least 5" in row["why"]


def test_launches_that_did_not_take_turns_are_no_verdict(tmp_path: Path) -> None:
    for side, start in (("a", 1000.0), ("b", 90000.0)):
        for number in range(8):
            lines = records(f"{side}{number}", start + 100 * number, {CASE: case(steady(1.0 + (side == "b"), number))})
            write(tmp_path / side / f"{number}.jsonl", lines)
    row = frame(tmp_path / "a", tmp_path / "b").loc[CASE]
    assert row["verdict"] == "not told" and "did not alternate" in row["why"]


def test_what_differs_is_listed_and_what_stands_on_one_side_says_so(tmp_path: Path) -> None:
    first = records("a", 1000.0, {CASE: case(steady(1.0, 0)), OTHER: case(steady(1.0, 0))})
    second = records("b", 2000.0, {CASE: case(steady(1.0, 0)), "new": case(steady(1.0, 0))}, torch="2.12.0")
    second[0]["environment"]["load_at_start"] = [4.0, 4.0, 4.0]
    sides = write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", second)
    text = flat(run(*sides, "-v"))
    assert "differs: collectives: torch: 2.13.0 in the baseline, 2.12.0 in the candidate" in text
    assert "differs: other processes used 10 % of the CPUs in the baseline, 100 % in the candidate" in text
    result = frame(*sides)["verdict"]
    assert result[OTHER] == "only in A" and result["new"] == "only in B" and result[CASE] == "not told"


def test_a_case_that_failed_is_invalid_and_the_others_are_compared(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", records("a", 1.0, {CASE: case([1.0]), OTHER: case([1.0])}))
    bad = {CASE: case([1.0]), OTHER: case(status="wrong", error="off by one")}
    result = frame(good, write(tmp_path / "b.jsonl", records("b", 2000.0, bad)))
    assert result.loc[OTHER, "verdict"] == "invalid" and "off by one" in result.loc[OTHER, "why"]
    assert result.loc[CASE, "ratio"] == 1.0


def test_steps_that_compute_differently_are_not_compared(tmp_path: Path) -> None:
    sides = []
    for name, text in (("a", "11111111"), ("b", "22222222")):
        lines = records(name, ord(name) * 1000.0, {CASE: case([1.0]), OTHER: case([1.0])})
        lines[1]["case"]["params"]["computes"] = text
        sides.append(write(tmp_path / f"{name}.jsonl", lines))
    result = frame(*sides)
    assert result.loc[CASE, "verdict"] == "incomparable" and "11111111 in the baseline" in result.loc[CASE, "why"]
    assert result.loc[OTHER, "verdict"] == "not told"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"machine": "box-2"},
            "machine: box-1 in the baseline, box-2 in the candidate; --allow-different FIELD permits",
        ),
        ({"mesh": {"tp": 2}}, "mesh: tp=4 in the baseline, tp=2 in the candidate"),
        ({"scenario": "other"}, "b.jsonl has other; give runs of one scenario"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    refused = run(*pair(tmp_path, **changed))
    assert refused.exit_code == 2 and message in refused.output and len(refused.output.splitlines()) == 1
    if "machine" in changed:
        assert "not told" in flat(run(*pair(tmp_path, **changed), "--allow-different", "machine", "--format", "csv"))


def test_usage_and_the_same_run_twice_are_sentences(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    assert "compare compares two sides: distbench compare A... vs B..." in run(a).output
    assert "write the word vs between the two sides: distbench compare" in run(a, b, b).output
    assert "give each run on one side only" in run(a, a).output
    assert flat(run(a, "vs", b)) == flat(run(a, b))


def test_json_and_markdown_hold_the_same(tmp_path: Path) -> None:
    [row] = json.loads(run(*pair(tmp_path), "--format", "json").output)
    assert set(row) == set(FRAME_COLUMNS) and row["ratio"] == pytest.approx(2.0) and row["ratio_low"] is None
    assert "| case | A |" in run(*pair(tmp_path), "--format", "markdown").output
