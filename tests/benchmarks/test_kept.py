"""Parts of a benchmark that are measured once for each state of the code, and the sentences that a family may have."""

from pathlib import Path

import pytest

from benchmarks import kept as parts
from benchmarks.bench_families import is_one_sentence, traced
from benchmarks.kept import kept


def test_a_part_is_measured_once_for_each_state_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, measured = ["first"], iter(range(3))
    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    monkeypatch.setattr(parts, "_state", lambda *_: states[-1])
    assert [kept("part", lambda: [next(measured)]) for _ in range(2)] == [[0], [0]]
    assert kept("other", lambda: [next(measured)]) == [1]
    states.append("second")
    assert kept("part", lambda: [next(measured)]) == [2]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("it cannot be simulated: its step reads a value (model.py:12); pass use_cache=False", True),
        ("the loss is 1e-2 off; the likely cause: drop (Dropout, 0.1) draws random numbers; drop with p=0", True),
        ("the gradient of head is 1e-2 off", False),
        ("Traceback (most recent call last):\n  model.py:12)", False),
        ("no answer", False),
    ],
)
def test_a_sentence_names_a_place_or_a_cause(text: str, is_good: bool) -> None:
    assert is_one_sentence(text) is is_good


def test_a_trace_is_right_where_both_methods_agree_and_every_owner_is_known() -> None:
    record = {"columns": ["kind", "owner_known"], "rows": [["sum", True]], "agreement": {"differences": []}}
    assert not traced(record)
    record |= {"rows": [["sum", False]], "agreement": {"differences": ["one sum more"]}}
    assert traced(record) == "one sum more; 1 owners are unknown"
