"""`distbench gate` at its edge: the two sides, exit codes, what CI reads. Text is checked for what it must say."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner, Result
from conftest import Cli
from gate_runs import CASE, OTHER, case, records, steady, taking_turns, write, write_side

from distbench.cli.gate import sides_of
from distbench.cli.main import main
from distbench.cli.options import FORMS
from distbench.judge import communication_signature, gate_text
from distbench.judge import gate_text as machine_forms
from distbench.judge.gate import CaseVerdict, Gated, MetricVerdict
from distbench.judge.gate_text import annotations
from distbench.show.ci_formats import MAX_ANNOTATIONS
from distbench.spec.errors import UserError
from distbench.statistics.verdicts import Options


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(main, ["gate", *map(str, arguments)], env=environment)


def answer(done: Result) -> str:
    """The last paragraph."""
    return done.output.strip().rpartition("\n\n")[2].replace("\n  ", " ")


def test_exit_codes_as_a_user_meets_them(cli: Cli, tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1.2e-3)
    done = cli("gate", str(base), str(new))
    assert done.returncode == 1
    finding, command = done.stdout.splitlines()[-2:]
    assert finding.startswith(f"FAIL: 1 regression. Worst: {CASE}: p10 1.2x slower than the baseline (95 % CI 1.17-1.")
    assert command.startswith("Next: distbench ab REF_A REF_B -- collectives ")
    assert CASE.replace("/tp", "") in done.stdout.replace("\n", "") and "+20.0 %" in done.stdout
    assert cli("gate", str(base), str(new), "--tolerance", "50%").returncode == 0
    refused = cli("gate", str(base))
    assert refused.returncode == 2 and refused.stderr.startswith("distbench: gate compares two sides")
    assert "Traceback" not in refused.stderr


def test_strict_turns_what_could_not_be_told_into_exit_code_3(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1.05e-3)
    assert run(base, new, "--strict").exit_code == 3


def test_what_told_nothing_is_not_headed_pass_in_any_form(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1.045e-3)
    done = run(base, new)
    assert done.exit_code == 0 and answer(done).startswith("INCONCLUSIVE: 1 inconclusive. Undecided: ")
    assert "Next: distbench ab REF_A REF_B --" in done.output
    assert run(base, new, "--format", "markdown").output.startswith("# gate: INCONCLUSIVE: 1 inconclusive. Undecided")
    root = ElementTree.fromstring(run(base, new, "--format", "junit").output)
    tags = {one.get("name"): [child.tag for child in one] for one in root.iter("testcase")}
    assert tags == {CASE: ["skipped"], "the comparison is decided": ["skipped"]}
    first = run(base, new, "--format", "github").output.splitlines()[0]
    assert first == "::warning title=distbench gate::INCONCLUSIVE (0 of 1 case decided): 1 inconclusive"


def test_a_pass_says_how_many_cases_were_told(tmp_path: Path) -> None:
    def cases(index: int, factor: float = 1.049) -> dict[str, dict[str, object]]:
        return {CASE: case(steady(1e-3, index)), OTHER: case(steady(1e-3 * factor, index))}

    base = write_side(tmp_path / "base", lambda index: cases(index + 3, 1.0))
    done = run(base, write_side(tmp_path / "new", cases, start=1050.0))
    assert done.exit_code == 0
    assert answer(done).startswith("PASS: 1 inconclusive, 1 pass. No case is slower than the baseline by more than ")
    assert "Detectable: slowdowns of " in answer(done)


def test_an_undecided_case_that_was_measured_slower_is_no_pass_in_any_form(tmp_path: Path) -> None:
    """One launch of six takes three times as long: its case is measured 20 % slower and cannot be decided."""

    def cases(index: int, slowest: float = 3.0) -> dict[str, dict[str, object]]:
        return {CASE: case(steady(1e-3, index)), OTHER: case(steady(1e-3 * (slowest if index == 2 else 1), index))}

    base = write_side(tmp_path / "base", lambda index: cases(index + 3, 1.0), count=6)
    new = write_side(tmp_path / "new", cases, count=6, start=1050.0)
    done = run(base, new)
    first = json.loads(run(base, new, "--format", "json").output)["headline"]
    assert done.exit_code == 0 and answer(done).startswith("INCONCLUSIVE: 1 inconclusive, 1 pass. 1 measured slower ")
    assert first.startswith("INCONCLUSIVE")
    worst = [one for one in gate_cases(run(base, new, "--format", "json")) if one["verdict"] == "inconclusive"]
    [change] = {max(metric["change"] for metric in one["metrics"]) for one in worst}
    assert change == pytest.approx(3 ** (1 / 6) - 1, abs=0.01) and f"{100 * change:+.1f} %" in first and OTHER in first
    assert run(base, new, "--format", "github").output.startswith("::warning title=distbench gate::INCONCLUSIVE")
    assert run(base, new, "--strict").exit_code == 3


def gate_cases(done: Result) -> list[dict[str, Any]]:
    return list(json.loads(done.output)["cases"])


def test_too_few_launches_are_the_reason_that_is_printed_over_cases_that_were_compared(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1e-3, count=2)
    junit = tmp_path / "gate.xml"
    done = run(base, new, "--write", f"junit={junit}")
    assert done.exit_code == 4 and answer(done).startswith("UNKNOWN: 1 inconclusive. 2 pairs; a verdict needs at least")
    assert "1 of 1 compared cases" in done.output
    assert "nothing was measured" not in done.output + junit.read_text()


def test_an_empty_folder_is_no_pass(tmp_path: Path) -> None:
    base, _ = taking_turns(tmp_path, 1e-3, 1e-3)
    (tmp_path / "empty").mkdir()
    for sides in ((base, tmp_path / "empty"), (tmp_path / "empty", base), (tmp_path / "empty",) * 2):
        done = run(*sides)
        assert done.exit_code == 4
        assert answer(done).startswith("UNKNOWN: ")
        assert "no measured case is comparable" in run(*sides, "--format", "json").output


def test_the_sides_are_two_paths_or_told_apart_by_vs(tmp_path: Path) -> None:
    for name in ("a1.jsonl", "a2.jsonl", "b1.jsonl", "b2.jsonl"):
        (tmp_path / name).touch()
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("a1", "a2", "b1", "b2")}
    texts = {name: str(path) for name, path in paths.items()}
    assert sides_of([texts["a1"], texts["b1"]]) == ([paths["a1"]], [paths["b1"]])
    both = ([paths["a1"], paths["a2"]], [paths["b1"], paths["b2"]])
    assert sides_of([texts["a1"], texts["a2"], "vs", texts["b1"], texts["b2"]]) == both
    assert sides_of([str(tmp_path / "a*.jsonl"), str(tmp_path / "b*.jsonl")]) == both
    with pytest.raises(UserError, match="write the word vs between"):
        sides_of([texts["a1"], texts["a2"], texts["b1"]])
    for wrong in (["vs", "a"], ["a", "vs"], ["a"], ["a", "vs", "b", "vs", "c"]):
        with pytest.raises(UserError, match="two sides"):
            sides_of(wrong)
    with pytest.raises(UserError, match="matches no file"):
        sides_of([str(tmp_path / "c*.jsonl"), "b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tolerance", "5"], "write 5% or 0.05"),
        (["--allow-different", "machin"], "nearest: machine"),
        (["--write", "html=x"], "is not FORMAT=FILE"),
        (["--write", "junit=/nowhere/x.xml"], "cannot be written"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(tmp_path: Path, options: list[str], message: str) -> None:
    done = run(*taking_turns(tmp_path, 1e-3, 1e-3), *options)
    assert done.exit_code == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_header_of_other_types_is_refused_by_name_and_left_out_of_a_folder(tmp_path: Path) -> None:
    odd = write(tmp_path / "odd.jsonl", records("odd", 1.0, {CASE: case([1.0])}, mesh="x"))
    steady_one = write(tmp_path / "one.jsonl", records("one", 2.0, {CASE: case([1.0])}))
    for command in (["gate", odd, steady_one], ["export", "pytest-benchmark", odd], ["history", "--results", odd]):
        done = CliRunner().invoke(main, [str(part) for part in command])
        assert done.exit_code == 2 and "odd.jsonl, line 1: job.mesh is 'x'" in done.stderr
    assert CliRunner().invoke(main, ["history", "--results", str(tmp_path)]).exit_code == 0


def every_option(command: click.Command) -> Iterable[str]:
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("-"))
    for child in getattr(command, "commands", {}).values():
        yield from every_option(child)


def test_options_of_the_new_commands_abbreviate_none_of_torchruns(torchrun_options: set[str]) -> None:
    ours = {option for name in ("gate", "baseline", "export") for option in every_option(main.commands[name])}
    assert {"--tolerance", "--results", "-o"} <= ours
    assert not {(our, their) for our in ours for their in torchrun_options if their.startswith(our)}


@pytest.mark.parametrize(
    "command",
    [
        ["gate"],
        ["baseline"],
        ["baseline", "save"],
        ["baseline", "list"],
        ["baseline", "show"],
        ["export"],
        ["signature", "check"],
    ],
)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    done = CliRunner().invoke(main, [*command, "--help"])
    assert done.exit_code == 0
    assert re.search(r"Examples?:", done.output) and f"distbench {' '.join(command)}" in done.output


def mixed(tmp_path: Path) -> tuple[Path, Path]:
    """One case of each verdict that a single comparison can give."""
    gone, fresh, broken = (f"collective/f32[{number}]/x/tp" for number in (1, 2, 3))
    wild = [4.0, 0.2, 3.0, 0.3, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0]

    def before(index: int) -> dict[str, dict[str, object]]:
        fine = case(steady(1e-3, index))
        return {CASE: fine, OTHER: fine, gone: fine, broken: fine, "step/wild%, a:b": fine}

    def after(index: int) -> dict[str, dict[str, object]]:
        return {
            CASE: case(steady(1.5e-3, index + 3)),
            OTHER: case(steady(1e-3, index)),
            fresh: case(steady(1e-3, index)),
            broken: case(status="wrong", error="rank 1: 3 elements differ\x07"),
            "step/wild%, a:b": case([1e-3 * wild[index]] * 3),
        }

    return write_side(tmp_path / "base", before), write_side(tmp_path / "new", after, start=1050.0)


def test_text_fits_a_terminal_and_shows_the_worst_first(tmp_path: Path) -> None:
    done = run(*mixed(tmp_path))
    assert done.exit_code == 1
    assert max(map(len, done.output.splitlines())) <= 120
    assert answer(done).startswith("FAIL: 1 regression, 1 invalid, 1 missing, 1 inconclusive, 1 new, 1 pass. Worst: ")
    for message in ("rank 1: 3 elements differ", "not measured in 10 of 10 launches", "not in the baseline"):
        assert message in re.sub(r"\s+", " ", done.output) or message.split()[0] in done.output
    assert done.output.index("regression    ") < done.output.index("inconclusive  ")


def test_json_holds_every_number_and_the_exit_code(tmp_path: Path) -> None:
    result = json.loads(run(*mixed(tmp_path), "--format", "json").output)
    assert result["exit_code"] == 1 and result["num_baseline"] == 10
    verdicts = [one["verdict"] for one in result["cases"]]
    assert verdicts == ["regression", "invalid", "missing", "inconclusive", "new", "pass"]
    mean = next(metric for metric in result["cases"][0]["metrics"] if metric["metric"] == "mean")
    assert mean["change"] == pytest.approx(0.5) and mean["num_launches"] == 10
    assert mean["low"] < 0.5 < mean["high"] and mean["p"] < 0.05


def test_both_gates_have_every_form_that_can_be_asked_for() -> None:
    assert tuple(machine_forms.FORMS) == tuple(communication_signature.FORMS) == FORMS


def test_junit_maps_verdicts_to_what_test_reporters_know(tmp_path: Path) -> None:
    root = ElementTree.fromstring(run(*mixed(tmp_path), "--format", "junit").output)
    tags = {one.get("name"): [child.tag for child in one] for one in root.iter("testcase")}
    assert tags[CASE] == ["failure"] and tags[OTHER] == ["system-out"]
    assert tags["collective/f32[1]/x/tp"] == ["error"] and tags["collective/f32[3]/x/tp"] == ["error"]
    assert tags["collective/f32[2]/x/tp"] == ["skipped"] and tags["step/wild%, a:b"] == ["skipped"]
    suite = root.find("testsuite")
    assert suite is not None
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["6", "1", "2", "2"]
    failure = root.find(".//failure")
    assert failure is not None and failure.text == failure.get("message") and "+50.0 %" in (failure.text or "")


def test_junit_of_nothing_is_an_error_and_not_an_empty_green(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    root = ElementTree.fromstring(run(tmp_path / "empty", tmp_path / "empty", "--format", "junit").output)
    assert len(root.findall(".//error")) == 1


def test_annotations_are_escaped_as_github_wants_them(tmp_path: Path) -> None:
    lines = run(*mixed(tmp_path), "--format", "github").output.strip().splitlines()
    levels = [re.match(r"::(error|warning) title=([^:,]*)::", line) for line in lines]
    assert [match and match.group(1) for match in levels] == ["error", "error", "error", "warning"]
    assert "+50.0 %25" in lines[0] and not re.search(r"%(?!25|0A|0D|3A|2C)", "".join(lines))


def verdicts(count: int, verdict: str) -> Gated:
    metric = MetricVerdict("mean", verdict, 1.0, 2.0, 1.0, 0.9, 1.1, 0.01, 0.05, 0.1, 10)
    cases = [CaseVerdict("s", f"case-{number:06}", verdict, "why " * 20, True, (metric,)) for number in range(count)]
    return Gated(cases, Options(), 10, 10)


def test_annotations_beyond_what_github_shows_are_counted() -> None:
    lines = annotations(verdicts(25, "regression")).splitlines()
    assert len(lines) == MAX_ANNOTATIONS and "16 more" in lines[-1]
    assert len(annotations(verdicts(10, "regression")).splitlines()) == 10
    assert annotations(verdicts(3, "pass")) == ""


def test_markdown_fits_a_step_summary_and_says_what_it_left_out() -> None:
    text = gate_text.markdown(verdicts(10_000, "regression"))
    assert len(text.encode()) <= 1 << 20
    assert text.startswith("# gate: FAIL: 10000 regression") and text.endswith("</details>\n")
    left_out = re.search(r"\.\.\. (\d+) more cases: distbench gate --format json", text)
    assert left_out and int(left_out.group(1)) == 10_000 - len(re.findall(r"^regression: s: case", text, re.MULTILINE))


def test_github_appends_to_the_step_summary_and_prints_annotations(tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("earlier step\n")
    junit = tmp_path / "gate.xml"
    done = run(*mixed(tmp_path), "--github", "--write", f"junit={junit}", GITHUB_STEP_SUMMARY=str(summary))
    assert done.exit_code == 1
    assert "\nFAIL: 1 regression" in done.output and "\n::error title=regression" in done.output
    assert summary.read_text().startswith("earlier step\n# gate: FAIL") and "<details>" in summary.read_text()
    assert ElementTree.parse(junit).getroot().tag == "testsuites"


def test_what_may_differ_is_stamped_on_the_report(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1e-3, machine="box-2", torch="2.12.0")
    assert "machine: box-1 in the baseline, box-2 in the" in run(base, new).output
    assert "notes: -v shows them\n" in run(base, new, "--allow-different", "machine").output
    done = run(base, new, "--allow-different", "machine", "-v")
    assert done.exit_code == 0
    assert "allowed to differ: collectives: machine: box-1 in the baseline, box-2 in the candidate" in done.output
    assert "differs: collectives: torch: 2.13.0 in the baseline, 2.12.0 in the candidate" in done.output


@pytest.mark.parametrize(("verdict", "shown"), [("pass", 10), ("inconclusive", 40)])
def test_a_long_table_says_how_many_rows_it_left_out(verdict: str, shown: int) -> None:
    text = gate_text.text(verdicts(100, verdict))
    assert len(re.findall(rf"^{verdict} +case-", text, re.MULTILINE)) == shown
    assert f"... {100 - shown} more: --format json" in text


@pytest.mark.parametrize(("after_s", "advice"), [(1.02e-3, "REF_B --pairs "), (1.045e-3, "--passes 24 --budget 12")])
def test_longer_launches_are_the_advice_where_many_pairs_would_be_needed(
    tmp_path: Path, after_s: float, advice: str
) -> None:
    output = " ".join(run(*taking_turns(tmp_path, 1e-3, after_s, count=5)).output.split())
    assert advice in output.rpartition("Next: ")[2]
