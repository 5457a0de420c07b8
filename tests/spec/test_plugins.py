"""Plug-ins by entry points: tests/data/example_plugin is installed, and each of its parts is used by its name."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import DATA
from processes import Children, Ranks

from distbench.cli.main import main
from distbench.simulate.hardware_file import load_hardware
from distbench.spec import UserError, plugins
from distbench.spec.plugins import GROUPS, load_plugin, plugin_names

SCENARIO = '''
from distbench.spec import Redistributions, Scenario, scenario


@scenario(mesh={"tp": 2})
def with_plugins() -> Scenario:
    """Barriers, and one redistribution by a planner of a plug-in."""
    pair = (("S(0)",), ("S(1)",))
    moves = Redistributions(shape=(64, 64), pairs=(pair,), planners=("greedy", "gather_first"))
    return Scenario(plugins={"barrier": (1, 4)}, redistributions=(moves,))
'''
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def site(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installs the example package into."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(DATA / "example_plugin", folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    done = children.python("-m", "pip", "install", *OFFLINE, "--target", folder / "site", folder / "source")
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have entry points looked up again, here and after the test."""
    monkeypatch.setattr(plugins, "_entry_points", plugins._entry_points.__wrapped__)


def package(folder: Path, name: str, entries: str) -> None:
    """The metadata of an installed package."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


def test_the_example_has_a_plug_in_of_each_kind(installed: None) -> None:
    assert {group: plugin_names(group) for group in GROUPS} == {
        "planners": ("gather_first",),
        "launchers": ("mpirun",),
        "exporters": ("means",),
        "hardware": ("example_gpu",),
        "cases": ("barrier",),
    }


def test_an_export_format(installed: None, tmp_path: Path) -> None:
    record = {"type": "case", "case": {"id": "x"}, "samples_s": [1.0, 3.0]}
    (tmp_path / "run.jsonl").write_text(json.dumps(record) + "\n")
    done = CliRunner().invoke(main, ["export", "means", str(tmp_path / "run.jsonl")])
    assert (done.exit_code, done.stdout) == (0, "x 2\n")
    refused = CliRunner().invoke(main, ["export", "medians", str(tmp_path / "run.jsonl")])
    assert refused.exit_code == 2 and "means" in refused.stderr and "pytest-benchmark" in refused.stderr


def test_a_launcher_of_nodes(installed: None) -> None:
    where = ("--nodes", "2", "--ranks-per-node", "2", "--launcher", "mpirun", "--device", "cpu", "--dry-run")
    done = CliRunner().invoke(main, ["run", "tp_mlp", "--quick", *where])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("mpirun --npernode 2 -np 4 sh -c ")
    assert done.stdout.rstrip().endswith("-m distbench run tp_mlp --quick --device cpu")


def test_a_hardware_file(installed: None) -> None:
    assert load_hardware("example_gpu").name == "example_gpu"
    with pytest.raises(UserError, match="nearest: example_gpu"):
        load_hardware("example_gpus")


@pytest.mark.long
def test_a_planner_and_a_kind_of_case_run_on_ranks(ranks: Ranks, site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCENARIO)
    words = ("run", "mine.py", "--budget", "0.1", "--device", "cpu", "--results", "out")
    done = ranks.python("-m", "distbench", *words, cwd=tmp_path, variables={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stdout + done.stderr
    (run_file,) = (tmp_path / "out").rglob("*-with_plugins-*.jsonl")
    records = [json.loads(line) for line in run_file.read_text().splitlines()]
    cases = {record["case"]["id"]: record for record in records if record["type"] == "case"}
    assert {record["status"] for record in cases.values()} == {"ok"}
    assert [name for name in cases if name.startswith("barrier/")] == [
        "barrier/1/with_plugins",
        "barrier/4/with_plugins",
    ]
    by_planner = {
        record["case"]["params"]["planner"]: record
        for record in cases.values()
        if record["case"]["kind"] == "redistribute"
    }
    ours, greedy = by_planner["gather_first"], by_planner["greedy"]
    assert ours["counters"]["path"] == "S(0)->R->S(1)" and ours["counters"]["num_collectives"] == 1
    # Two ranks: an all-gather sends half of the tensor from each rank, an all-to-all a quarter.
    assert (ours["wire_bytes"], greedy["wire_bytes"]) == (64 * 64 * 4 // 2, 64 * 64 * 4 // 4)


def test_a_name_without_a_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    with pytest.raises(UserError, match=r"kind of case 'barriers' is unknown .*; install its package"):
        load_plugin("cases", "barriers")


def test_two_packages_of_one_name_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        package(tmp_path, name, "[distbench.exporters]\nmeans = json:dumps\n")
    monkeypatch.syspath_prepend(tmp_path)
    forget(monkeypatch)
    with pytest.raises(UserError, match="'means' is provided by first and second; uninstall all but one"):
        load_plugin("exporters", "means")


def test_a_plug_in_that_fails_to_import_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "broken", "[distbench.planners]\nlost = no_such_module:plan\n")
    monkeypatch.syspath_prepend(tmp_path)
    forget(monkeypatch)
    assert plugin_names("planners") == ("lost",)
    with pytest.raises(UserError, match=r"planner 'lost' of broken cannot be imported \(ModuleNotFoundError"):
        load_plugin("planners", "lost")


def test_a_name_of_distbench_hides_a_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "shadow", "[distbench.hardware]\nh100 = no_such_module:H100\n")
    monkeypatch.syspath_prepend(tmp_path)
    forget(monkeypatch)
    assert load_hardware("h100").name == "h100"
