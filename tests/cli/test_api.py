"""`distbench.run`, `load` and `compare` against the commands, by way of the notebook in docs/, executed once."""

import ast
import contextlib
import inspect
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import nbformat
import pandas as pd
import pytest
from conftest import ROOT
from gate_runs import CASE, case, records, steady, write
from processes import Ranks

import distbench
from distbench.cli.main import main
from distbench.records.run_file import run_file_schema

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def notebook(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Names that the notebook's cells leave, with `shown`: what each code cell's last line gave."""
    result: dict[str, Any] = {"shown": [], "printed": ""}
    with pytest.MonkeyPatch.context() as patched, ranks.forked(), contextlib.redirect_stdout(io.StringIO()) as printed:
        patched.chdir(tmp_path_factory.mktemp("notebook"))
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
            if cell.cell_type == "code":
                result["shown"].append(executed(cell.source, result))
        result["printed"] = printed.getvalue()
        yield result


def executed(source: str, names: dict[str, Any]) -> Any:
    """As a notebook does: the value of a last line that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_the_notebook_is_one_and_holds_no_output() -> None:
    result = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(result)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in result.cells)


def test_every_cell_shows_what_its_text_says(notebook: dict[str, Any]) -> None:
    (code, paths), frame, report, compared, cases = notebook["shown"][:5]
    assert code == 0 and [path.suffix for path in paths] == [".jsonl"]
    assert set(frame["status"]) == {"ok"} and (frame["median_s"] > 0).all()
    assert "<table>" in report._repr_html_() and "tp_mlp" in str(report)
    assert "INCONCLUSIVE: one launch per side gives no verdict" in str(compared)
    assert set(cases["verdict"]) == {"not told"} and cases["ratio"].notna().all()
    assert "no scenario 'tp_mlpp'" in notebook["printed"]


def test_what_the_api_measures_and_says_is_what_the_commands_do(notebook: dict[str, Any], ranks: Ranks) -> None:
    runs = notebook["runs"]
    header = json.loads(runs.paths[0].read_text().splitlines()[0])
    assert header["job"]["mesh"] == {"tp": 2} and header["job"]["settings"]["budget_s"] == 0.5
    assert {variant["hidden"] for variant in header["job"]["variants"]} == {128}
    path = str(runs.paths[0])
    assert str(runs.report()) == ranks.run_here("report", path, cwd=Path.cwd()).stdout.rstrip("\n")
    printed = ranks.run_here("report", path, "--format", "csv", cwd=Path.cwd()).stdout
    message = pd.read_csv(io.StringIO(printed))
    frame = runs.frame.drop(columns="pass_medians_s")
    assert list(message.columns) == list(frame.columns)
    assert message["median_s"].tolist() == frame["median_s"].tolist() and message["id"].tolist() == frame["id"].tolist()
    both = [path, str(notebook["again"].paths[0])]
    assert str(notebook["comparison"]) == ranks.run_here("compare", *both, cwd=Path.cwd()).stdout.rstrip("\n")


def test_a_run_file_of_today_is_one_by_the_schema(notebook: dict[str, Any]) -> None:
    check = jsonschema.Draft202012Validator(run_file_schema())
    lines = notebook["runs"].paths[0].read_text().splitlines()
    assert len(lines) > 3
    for line in lines:
        check.validate(json.loads(line))


@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_function_takes_what_its_command_takes(name: str) -> None:
    taken = set(inspect.signature(getattr(distbench, name)).parameters) - {"scenarios", "a", "b"}
    options = {
        max(option.opts, key=len).lstrip("-").replace("-", "_")
        for option in main.commands[name].params
        if isinstance(option, click.Option) and not option.hidden
    }
    assert taken == options and len(taken) > 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: distbench.run("tp_mlp", colour=1),
            "'colour' is not an option of run; use one of against, budget, check",
        ),
        (lambda: distbench.run("tp_mlp", budget="much"), "'much' is not a duration"),
        (lambda: distbench.run("tp_mlp", mesh={"dp": 2}), "'dp' is unknown"),
        (lambda: distbench.run(), "run needs a SCENARIO"),
        (lambda: distbench.load("nowhere"), "run nowhere does not exist"),
        (lambda: distbench.load(), "load needs a run file"),
        (lambda: distbench.compare("nowhere", "there"), "run nowhere does not exist"),
    ],
)
def test_what_the_caller_can_mend_is_raised(call: Any, message: str, known_host: None) -> None:
    with pytest.raises(distbench.UserError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.long
def test_runs_are_a_sequence_and_go_by_their_scenario(tmp_path: Path) -> None:
    for number, name in enumerate(("one", "two")):
        lines = records(name, 1000.0 + number, {CASE: case(steady(1.0, number))}, scenario=name)
        write(tmp_path / f"{name}.jsonl", lines)
    runs = distbench.load(tmp_path)
    assert len(runs) == 2 and runs.scenarios == ["one", "two"] and len(runs.frame) == 2
    assert runs["two"].paths == runs[1].paths == [tmp_path / "two.jsonl"] and runs[:1].scenarios == ["one"]
    assert [one.scenarios for one in runs] == [["one"], ["two"]]
    with pytest.raises(KeyError, match="use one of one, two"):
        runs["three"]
    page = tmp_path / "report.html"
    assert "two" in str(runs.report(page=page)) and page.exists()


def test_importing_the_room_of_that_name_leaves_the_function() -> None:
    import distbench.statistics.verdicts

    assert inspect.isfunction(distbench.compare)
    assert distbench.compare.__module__ == "distbench.cli.python_api"
