"""`distbench check --all`: a row per recipe as it is ready, a verdict, and failures that stop no other row."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner, Result

from distbench.cli.main import main
from distbench.search.sweep_child import Question, SweepChild

GIB = 2.0**30
ROW = {"num_parameters": 8_030_261_248, "usable_bytes": 75 * GIB, "mesh": {"dp_shard": 8, "tp": 1}, "set": {}}
FITS = {
    **ROW,
    "peak_bytes": 45.6 * GIB,
    "depth": "all",
    "why_not": "",
    "problems": [],
    "fits": True,
    "process_s": 9.0,
}
NEAR = {
    "mesh": {"dp_shard": 32, "tp": 1},
    "set": {"checkpoint": "full"},
    "peak_bytes": 47.4 * GIB,
    "depth": "4, 6 and 8 of 46",
}
ANSWERS = {
    "a_debugmodel": FITS,
    "b": {**FITS, "peak_bytes": 240.7 * GIB, "fits": False, "nearest": NEAR},
    "c": "no answer within 300 s",
    "d": {**FITS, "fits": False, "depth": "", "why_not": "its step raises"},
    "e": {**FITS, "fits": False, "why_not": "its plan is not valid", "problems": ["num_heads=3 over 2"]},
    "f": {**FITS, "fits": False, "depth": "", "why_not": "its step raises", "peak_bytes": 80 * GIB},
    "h": {**FITS, "fits": False, "process_s": 31.0},
    "i": {**FITS, "omits": ["attention sinks", "Muon (AdamW instead)"]},
    "g": {**FITS, "own_plan": "parallelize raises", "set": {"plan": "fsdp"}},
}

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Run:
    """The command on a torchtitan with the recipes given, and a child that answers as above."""
    folder = tmp_path / "torchtitan" / "models" / "all"
    folder.mkdir(parents=True)
    (folder.parents[1] / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def ask(_: SweepChild, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Answers in reverse order, as two processes at once may give them."""
        for place, question in reversed([*enumerate(questions)]):
            answer = ANSWERS[question.variants[0]["config"]]
            answered: dict[str, Any] = {"left_out": answer}
            if isinstance(answer, dict):
                answered = {"answers": [dict(answer, world=question.about["world"])]}
            yield place, {"seconds": 1.5, **answered}

    def invoke(names: str, *options: str) -> Result:
        (folder / "config_registry.py").write_text(
            "".join(f"def {name}() -> T.Config: ...\n" for name in names.split())
        )
        return CliRunner().invoke(main, ["check", "--all", "torchtitan", *options])

    monkeypatch.setattr(SweepChild, "ask", ask)
    return invoke


def test_each_recipe_has_a_row_and_the_last_line_counts_verdicts(run: Run, known_host: None) -> None:
    done = run(" ".join(ANSWERS), "--width", "100")
    lines = done.output.splitlines()
    assert lines[0] == "9 recipes of torchtitan on 8 x h100, 75.1 GiB usable each" and done.exit_code == 1
    assert lines[2].split() == ["a_debugmodel", "8.03", "G", "dp_shard=8,tp=1", "45.6", "fits"]
    assert "--mesh dp_shard=32,tp=1 --set checkpoint=full (~47.4 GiB)" in done.output
    assert "rejected" in lines[5] and "no answer within 300 s" in lines[6]
    assert ">= 45.6  rejected" in done.output and "num_heads=3 over 2" in done.output
    assert ">= 80.0  does not fit" in done.output  # that much is certain
    assert "checked with FSDP2 per block, because the recipe's plan fails: parallelize raises" in done.output
    assert "    without attention sinks, Muon (AdamW instead)\n" in done.output
    assert "no fitting plan was found\n" in done.output
    assert "no fitting plan was found in 30 s of CPU time" in done.output
    counts = "3 fits, 3 does not fit, 1 plan invalid, 2 rejected (1 with a plan that fits), of 9 recipes"
    assert f"FAIL: {counts}" in " ".join(done.output.split())


def test_the_exit_code_is_0_where_every_recipe_has_a_plan_that_fits(run: Run, known_host: None) -> None:
    done = run("a_debugmodel b")
    assert done.exit_code == 0 and done.output.splitlines()[-1].startswith(
        "PASS: 1 fits, 1 does not fit (1 with a plan"
    )


def test_json_has_a_line_per_recipe(run: Run, known_host: None) -> None:
    rows = [json.loads(line) for line in run("a_debugmodel c", "--json", "--world", "16").output.splitlines()]
    assert [(row["recipe"], row["verdict"]) for row in rows] == [("a_debugmodel", "fits"), ("c", "rejected")]
    assert rows[0]["world"] == 16 and rows[1]["reason"] == "no answer within 300 s" and rows[1]["seconds"] == 1.5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--all", "torchtitan", "llama_2d"], "cannot be combined with --all"),
        (["llama_2d", "--world", "8"], "--world has no effect without --all"),
        ([], "check needs a SCENARIO or --all SOURCE"),
    ],
)
def test_options_that_have_no_effect_are_refused(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(main, ["check", *words])
    assert done.exit_code and sentence in " ".join(done.output.split())
