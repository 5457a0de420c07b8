"""The command line's edge: help, exit codes, one sentence for what a user can mend. No ranks are started."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import DATA, ROOT, Cli
from processes import Children, Ranks

from distbench.cli.main import main

COMMANDS = ("list", "run", "calibrate", "report", "redistribute", "doctor")


def here(*arguments: str, **variables: str) -> Result:
    """`distbench ARGUMENTS` in this process."""
    return CliRunner().invoke(main, arguments, env=variables)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = here(command, "--help")
    assert done.exit_code == 0
    assert re.search(r"Examples?:", done.stdout) and f"distbench {command}" in done.stdout


def our_options() -> set[str]:
    return {
        option
        for command in main.commands.values()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("-")
    }


def test_no_option_is_a_prefix_of_a_torchrun_option(torchrun_options: set[str]) -> None:
    """torchrun expands abbreviations: an option that abbreviates one of its own would be taken away from us."""
    assert len(torchrun_options) > 20
    clashes = {(ours, their) for ours in our_options() for their in torchrun_options if their.startswith(ours)}
    # --log-dir is torchrun's very name for the same thing, asked for by name; it abbreviates nothing.
    assert clashes == {("--log-dir", "--log-dir")}


def test_options_reach_us_when_torchrun_starts_the_command(ranks: Ranks, tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "distbench")
    done = ranks.python(*command, "run", "nosuch", "--log-dir", tmp_path, "--quick")
    assert "no scenario 'nosuch'" in done.stderr


def test_list_as_json_is_complete() -> None:
    rows = json.loads(here("list", "--format", "json").stdout)
    row = next(row for row in rows if row["name"] == "cp_attention")
    assert row["mesh"] == {"cp": 4}
    assert row["axes"] == {
        "rotate": ["allgather", "alltoall", "ulysses"],
        "load_balance": [True, False],
        "unshard_output": [False, True],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "lama_2d"], "nearest: llama_2d"),
        (["run", str(DATA / "missing.py")], "does not exist"),
        (["run", "llama_2d", "--mesh", "dp=2"], "'dp' is unknown"),
        (["run", "llama_2d", "--set", "rotate=x"], "no axis or parameter 'rotate'"),
        (["run", "llama_2d", "--set", "dim=big"], "give int values"),
        (["run", "llama_2d", "--device", "cuda"], "no CUDA device"),
        (["run", "llama_2d", "--results", "/dev/null/x"], "cannot be written"),
        (["calibrate", "-o", "/nowhere/profile.json"], "the folder /nowhere does not exist"),
        (["calibrate", "--mesh", "dp=2"], "'dp' is unknown"),
        (["report", "nothing.jsonl"], "nothing.jsonl"),
        (["report", "--results", "/nowhere"], "distbench run"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(
    known_host: None, arguments: list[str], message: str
) -> None:
    done = here(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("distbench: ") and len(done.stderr.strip().splitlines()) == 1


def test_a_scenario_file_with_a_syntax_error_is_named_with_its_line(cli: Cli, tmp_path: Path) -> None:
    """As a process of its own, which would print a traceback."""
    file = tmp_path / "broken.py"
    file.write_text("x = 1\ndef broken(:\n")
    done = cli("run", str(file))
    assert done.returncode == 2 and "line 2 is not valid Python" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_option_is_an_error() -> None:
    done = here("run", "llama_2d", "--frobnicate")
    assert done.exit_code == 2 and "No such option" in done.stderr


@pytest.mark.parametrize(("mesh", "world_size"), [("dp_shard=2,tp=2", "3"), ("dp_shard=2", "4")])
@pytest.mark.long
def test_a_mesh_that_does_not_multiply_to_the_ranks_is_refused(known_host: None, mesh: str, world_size: str) -> None:
    done = here("run", "llama_2d", "--mesh", mesh, RANK="0", WORLD_SIZE=world_size)
    assert done.exit_code == 2
    assert f"the launcher started {world_size}" in done.stderr and f"multiply to {world_size}" in done.stderr


def test_rank_variables_that_are_no_numbers_are_refused() -> None:
    done = here("run", "llama_2d", RANK="first", WORLD_SIZE="4")
    assert done.exit_code == 2 and "unset RANK" in done.stderr


def test_doctor_lists_every_internal_and_says_this_machine_is_fine(cli: Cli) -> None:
    import torch

    from distbench.spec.versions import release
    from distbench.torch_private.probe import INTERNALS, NEEDLESS_BEFORE

    done = cli("doctor", "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = {check["name"]: check["ok"] or check.get("mark") == "TOO OLD" for check in result["checks"]}
    this = release(torch.__version__)
    assert all(names[one.name] for one in INTERNALS if this >= NEEDLESS_BEFORE.get(one.feature, this))
    assert result["usable"] and names["gloo"]


def test_doctor_without_torch_says_what_to_install(children: Children, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = children.python("-m", "distbench", "doctor", env=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "no torch here" in done.stdout and "pip install" in done.stdout


def test_a_torch_internal_that_moved_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.tensor._redistribute as redistribute

    from distbench.torch_private import Unsupported, probe, require

    before = {result.internal for result in probe() if result.missing}
    monkeypatch.delattr(redistribute, "_optimize_transform_infos")
    missing = {result.internal for result in probe() if result.missing} - before
    assert [internal.name for internal in missing] == ["_optimize_transform_infos"]
    with pytest.raises(Unsupported, match=r"has no .*_optimize_transform_infos"):
        require("redistribution planners")
