"""All commands at once: one name for one thing, help for every option, sections that are never cut, completion."""

import re
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from conftest import DATA, Cli

from distbench.cli.main import OLD_NAMES, SECTIONS, main, under_new_names
from distbench.cli.options import Duration


def leaves(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{before}{name}", command
        if isinstance(command, click.Group):
            yield from leaves(command, f"{before}{name} ")


COMMANDS = dict(leaves(main))
OPTIONS = [
    (name, option)
    for name, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option)
]
DURATIONS = ("--budget", "--max-step", "--max-time", "--older-than", "--timeout")
WIDTHS = (60, 80, 120)


def long_name(option: click.Option) -> str:
    return max(option.opts, key=len)


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{name} {long_name(one)}" for name, one in OPTIONS])
def test_every_option_has_help_a_long_name_and_small_letters(command: str, option: click.Option) -> None:
    assert option.help and option.help.rstrip().endswith((".", "]", "below.")), option.help
    # pytest's -k, which everybody knows by that name alone.
    assert long_name(option) == "-k" or re.fullmatch(r"--[a-z][a-z0-9-]+", long_name(option))


def of_name(name: str) -> dict[str, click.Option]:
    return {command: option for command, option in OPTIONS if name in option.opts}


def test_what_is_printed_is_chosen_by_format_alone() -> None:
    assert not {long_name(option) for _, option in OPTIONS} & {"--json", "--markdown", "--csv", "--table", "--html"}
    printing = {
        "baseline list",
        "check",
        "compare",
        "doctor",
        "history",
        "list",
        "report",
        "run",
        "simulate",
        "site",
        "tune",
    }
    printing |= {
        "ab",
        "gate",
        "preflight",
        "redistribute",
        "self-test",
        "signature check",
        "trace",
        "calibrate",
        "clean",
    }
    printing |= {"baseline show", "baseline save", "signature update", "watch"}
    assert printing == set(of_name("--format"))
    for command, option in of_name("--format").items():
        assert isinstance(option.type, click.Choice) and option.default == option.type.choices[0] == "table", command


@pytest.mark.parametrize("command", [name for name, option in OPTIONS if option.name == "form"])
def test_json_is_short_for_format_json(command: str) -> None:
    result = COMMANDS[command]
    [option] = [option for option in result.params if option.name == "form"]
    for words, form in ((["--json"], "json"), (["--json", "--format", "table"], "table")):
        assert result.make_context(command, words, resilient_parsing=True).params["form"] == form
    assert "--json" in CliRunner().invoke(main, [*command.split(), "--help"]).output and "--json" not in option.opts


def test_results_is_the_folder_and_output_a_file() -> None:
    for name in ("--results", "--output"):
        assert all(isinstance(option.type, click.Path) for option in of_name(name).values())
    assert {"run", "ab", "report", "history", "clean", "baseline save", "baseline list"} <= set(of_name("--results"))
    assert {option.metavar for option in of_name("--results").values()} == {"DIR"}
    assert {option.metavar for option in of_name("--output").values()} == {"FILE"}
    assert not of_name("--out") and not of_name("--runs")


# Options that had another name, or another meaning in one command.
SYNONYMS = {
    *("--out", "--out-dir", "--outdir", "--folder", "--runs", "--file", "--json", "--csv", "--html", "--markdown"),
    *("--print", "--no-run", "--silent", "--debug", "--seconds", "--time", "--time-limit", "--deadline", "--filter"),
    *("--cases", "--select", "--force", "--cpu", "--gpu", "--gpus", "--ranks", "--world-size", "--signature"),
}


def test_an_option_has_one_type_and_one_meaning_in_all_commands() -> None:
    """The first sentence of its help is its meaning; details of a command follow."""
    meanings: dict[str, set[object]] = {}
    for _, option in OPTIONS:
        if option.name not in ("help", "color"):
            meaning = re.split(r"(?<=[.;]) | \[|\.$", str(option.help))[0].rstrip(".")
            kind = (option.type.name, option.metavar, option.is_flag, option.multiple, option.nargs)
            meanings.setdefault(long_name(option), set()).add((*kind, meaning))
    assert {name: result for name, result in meanings.items() if len(result) > 1} == {}


def test_no_option_is_another_name_of_one_that_exists() -> None:
    names = {name for _, option in OPTIONS for name in (*option.opts, *option.secondary_opts)}
    assert not names & SYNONYMS
    # Two options with the same meaning would have the same help.
    by_help: dict[str, set[str]] = {}
    for _, option in OPTIONS:
        by_help.setdefault(str(option.help), set()).add(long_name(option))
    assert [sorted(same) for same in by_help.values() if len(same) > 1] == []


def test_every_duration_takes_the_same_units() -> None:
    durations = {(command, long_name(option)) for command, option in OPTIONS if isinstance(option.type, Duration)}
    assert durations == {(command, name) for name in DURATIONS for command in of_name(name)}
    assert not {name for _, option in OPTIONS for name in option.opts if option.metavar == "S"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("2h", 7200), ("10min", 600), ("1.5h", 5400), ("90", 90), ("30 S", 30), (".5m", 30)],
)
def test_a_duration_has_a_unit_or_is_seconds(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "s", "٣s", "nan", "inf", "1e3", "5 m s", "-3", "3y", "0", "31d"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="give "):
        Duration().convert(text, None, None)


def test_short_options_are_few() -> None:
    short = {name for _, option in OPTIONS for name in option.opts if not name.startswith("--")}
    assert short <= {"-o", "-h", "-k", "-q", "-v"}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.long
def test_help_is_never_cut_and_fits(command: str, width: int) -> None:
    text = CliRunner().invoke(main, [*command.split(), "--help"], terminal_width=width).output
    # Words of usage, such as RUN..., end with dots too.
    cut = [line for line in text.splitlines() if re.search(r"[a-z,;:]\.\.\.$", line)]
    # Examples are for pasting, and so stand on one line.
    prose = [line for line in text.splitlines() if not line.startswith("    ") or " [" in line]
    assert cut == [] and max(map(len, prose)) <= width


def test_commands_stand_in_one_section_each() -> None:
    named = [name for commands in SECTIONS.values() for name in commands]
    assert len(named) == len(set(named)) and set(named) <= set(main.commands)
    text = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert headings[headings.index("Measure") :][:5] == ["Measure", "Read", "Compare", "Plan", "Machine"]
    for name in main.commands:
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("words", "means"),
    [
        (["report", "--out", "x", "y"], ["report", "--results", "x", "y"]),
        (["report", "--runs=x"], ["report", "--results=x"]),
        (["baseline", "save", "--out", "x"], ["baseline", "save", "--results", "x"]),
        (["run", "--results", "x"], ["run", "--results", "x"]),
        (["sweep", "tp_mlp", "--quick"], ["tune", "tp_mlp", "--quick"]),
        (["plan", "RS(0)", "S(0)R"], ["redistribute", "RS(0)", "S(0)R"]),
        (["gate", "--signature", "a", "b", "--json"], ["signature", "check", "a", "b", "--json"]),
        (["gate", "a", "--signature", "b", "--update"], ["signature", "update", "a", "b"]),
        (["gate", "--self-test", "--", "tp_mlp", "--quick"], ["self-test", "--", "tp_mlp", "--quick"]),
        (["gate", "a", "b"], ["gate", "a", "b"]),
        (["tune", "a", "--resume", "--budget=9"], ["tune", "a", "--reuse", "--max-time=9"]),
        (["ab", "a", "--budget", "9", "--", "--budget", "3"], ["ab", "a", "--max-time", "9", "--", "--budget", "3"]),
    ],
)
def test_an_old_name_means_the_new_one_and_says_so_in_a_line(
    words: list[str], means: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert under_new_names(words) == means
    message = capsys.readouterr().err
    assert bool(message) == (words != means) and message.count("is an old name. Use ") == message.count("\n")


def test_the_short_form_of_signature_writes() -> None:
    assert under_new_names(["signature", "a.py", "--quick"]) == ["signature", "write", "a.py", "--quick"]
    for word in main.commands["signature"].commands:  # type: ignore[attr-defined]
        assert under_new_names(["signature", word, "check"]) == ["signature", word, "check"]


def test_preflight_and_trace_are_runs() -> None:
    assert under_new_names(["preflight", "--nodes", "2"]) == ["run", "links", "--fail-on-outlier", "--nodes", "2"]
    assert under_new_names(["preflight", "--out", "x"])[3:] == ["--results", "x"]
    assert under_new_names(["trace", "tp_mlp"]) == ["run", "--trace-paths", "--show-paths", "tp_mlp"]


@pytest.mark.parametrize("name", ["llama3_8b", "bench.py::mine"])
def test_a_plan_of_a_scenario_is_answered_with_tune_and_check(name: str) -> None:
    done = CliRunner().invoke(main, ["plan", name])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert f"{name} is a scenario. Use distbench tune {name}" in done.stderr and "check" in done.stderr


def test_every_new_name_is_an_option_and_no_old_one_is() -> None:
    for words, names in OLD_NAMES.items():
        of_command = [COMMANDS[" ".join(words)]] if words else COMMANDS.values()
        known = {name for command in of_command for option in command.params for name in option.opts}
        assert {new[0] for new in names.values()} <= known and not set(names) & known


def completed(*words: str) -> list[str]:
    shell = ShellComplete(main, {}, "distbench", "_DISTBENCH_COMPLETE")
    return [item.value for item in shell.get_completions([*words[:-1]], words[-1])]


def test_a_shell_completes_commands_options_values_and_scenarios() -> None:
    assert completed("ru") == ["run"]
    assert (
        completed("run", "llama")
        == completed("check", "llama")
        == [*("llama3_405b", "llama3_70b", "llama3_8b", "llama_2d", "llama_3d", "llama_inference", "llama_spmd_types")]
    )
    assert completed("run", "--mes") == ["--mesh"]
    assert completed("report", "--format", "ma") == ["markdown"]


def test_the_command_gives_a_shell_its_function(cli: Cli) -> None:
    source = cli(_DISTBENCH_COMPLETE="bash_source").stdout
    assert "_distbench_completion" in source and "_DISTBENCH_COMPLETE=bash_complete" in source


def test_scenarios_of_ones_own_complete_as_files() -> None:
    from distbench.cli.options import scenario_names

    run = main.commands["run"]
    [item] = scenario_names(click.Context(run), run.params[0], str(DATA / "ti"))
    assert item.type == "file"


def test_the_command_has_its_name_however_it_is_started(cli: Cli) -> None:
    assert cli("run", "--help").stdout.startswith("Usage: distbench run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["redistribute", "llama3_8b"], "llama3_8b is a scenario. Use distbench tune llama3_8b"),
        (["preflight", "--label", "links", "tp_mlp"], "preflight measures only links and rejects the scenario tp_mlp"),
        (["trace", "--quick"], "trace needs a SCENARIO"),
        (["run", "--quick"], "run needs a SCENARIO"),
    ],
)
def test_a_command_that_gets_the_wrong_scenarios_is_one_sentence(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.output
