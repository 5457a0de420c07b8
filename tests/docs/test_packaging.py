"""What is installed: every package and data file of the repository, found and not listed."""

import json
import runpy
import shutil
import socket
import sys
import tomllib
import zipfile
from pathlib import Path

import click
import pytest
from conftest import ROOT
from gate_runs import taking_turns
from processes import Children, Ranks
from test_container_and_action import SHELL, STEPS
from test_project_files import RUN_LINES

from distbench.version import __version__

# Repository folder to the package that it is installed as.
SOURCES = {"distbench": "distbench", "scenarios": "distbench.scenarios"}


def files_on_disk() -> dict[str, set[str]]:
    """Package to the names of its files; those of a folder that is no package belong to the package above it."""
    result: dict[str, set[str]] = {}
    for source, package in SOURCES.items():
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                above = path.parent
                while above != ROOT / source and not (above / "__init__.py").exists():
                    above = above.parent
                below = above.relative_to(ROOT / source).parts
                result.setdefault(".".join((package, *below)), set()).add(path.relative_to(above).as_posix())
    return result


def test_setup_finds_every_folder_and_the_data_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    on_disk = files_on_disk()
    assert set(given["packages"]) == set(on_disk)  # type: ignore[call-overload]
    assert given["package_dir"] == {"distbench.scenarios": "scenarios"}
    listed = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    data = {(package, name) for package, names in on_disk.items() for name in names if not name.endswith(".py")}
    assert data == {
        (package, path.relative_to(folder).as_posix())
        for package, patterns in listed.items()
        for folder in [ROOT / package.replace(".", "/")]
        for pattern in patterns
        for path in folder.glob(pattern)
    }


@pytest.fixture(scope="module")
def wheel(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the commands of release.yml, in a repository with what stands here."""
    source, tag = tmp_path_factory.mktemp("source"), f"v{__version__}"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    for git in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "all")):
        children.run("git", *git, cwd=source, check=True)
    build, archive = (release_command(word) for word in ("pip wheel", "git archive"))
    offline = "--no-build-isolation --no-deps --quiet --disable-pip-version-check"
    build = build.replace("python3 ", f"{sys.executable} ").replace("--no-deps", offline)
    for command in (build, archive):
        done = children.run("bash", "-c", command, cwd=source, variables={"GITHUB_REF_NAME": tag})
        assert done.returncode == 0, done.stderr
    built, archived = sorted((source / "build" / "release").iterdir(), key=lambda path: path.suffix, reverse=True)
    assert (built.name, archived.name) == (f"distbench-{__version__}-py3-none-any.whl", f"distbench-{tag}.tar.gz")
    return built


def release_command(word: str) -> str:
    return next(command for workflow, command in RUN_LINES if workflow == "release.yml" and word in command)


def test_the_release_rejects_a_tag_of_another_version(children: Children) -> None:
    for name, code in ((f"v{__version__}", 0), ("v999.0.0", 1)):
        done = children.run("bash", "-c", release_command("test "), cwd=ROOT, variables={"GITHUB_REF_NAME": name})
        assert done.returncode == code, done.stderr


def test_the_wheel_holds_them(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"{package.replace('.', '/')}/{name}" for package, names in files_on_disk().items() for name in names}
    assert held == wanted


@pytest.mark.long
def test_what_is_installed_measures_a_shipped_scenario_from_an_empty_folder(
    ranks: Ranks, wheel: Path, tmp_path: Path
) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    to = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet", "--target", site)
    done = ranks.python("-m", "pip", "install", *to, wheel)
    assert done.returncode == 0, done.stderr
    (command,) = (site / "bin").glob("distbench")
    small = ("--mesh", "tp=1", "--set", "hidden=64", "--budget", "0.1", "--check", "none", "--device", "cpu")
    # As the one rank of a launcher: torchrun would import torch once more.
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(site)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    done = ranks.run(command, "run", "tp_mlp", "--quick", *small, cwd=empty, variables=rank)
    assert done.returncode == 0, done.stderr
    (run_file,) = (empty / "results").rglob("*-tp_mlp-*.jsonl")
    header = json.loads(run_file.read_text().splitlines()[0])
    assert header["job"]["file"] == str(site / "distbench" / "scenarios" / "tp_mlp.py")


@pytest.mark.long
def test_the_steps_of_the_action_work_in_an_empty_environment(children: Children, wheel: Path, tmp_path: Path) -> None:
    """The action installs the wheel by pip, and judges a scenario and run files; only the network is left out."""
    code, bin_folder = tmp_path / "code", tmp_path / "python" / "bin"
    children.python("-m", "venv", "--without-pip", bin_folder.parent, check=True)
    (site,) = bin_folder.parent.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{Path(click.__file__).parent.parent}\n")
    runner = {"HOME": str(tmp_path), "RUNNER_TEMP": str(tmp_path), "PATH": f"{bin_folder}:/usr/bin:/bin"}
    runner |= {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_IGNORE_INSTALLED": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    done = children.run(
        *SHELL, STEPS[0]["run"], cwd=tmp_path, env=runner | offline | {"INSTALL": str(wheel), "TORCH": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "distbench" / "__init__.py").exists()
    code.mkdir()
    (code / "bench.py").write_text((ROOT / "tests" / "data" / "tiny.py").read_text())
    taking_turns(code, before=1.0, after=1.3)
    inputs = dict.fromkeys(STEPS[1]["env"], "") | {"SCENARIOS": "bench.py", "BADGE": "badge.json"}
    write = [*SHELL, "python3 -m distbench signature write bench.py --output-dir signatures"]
    assert children.run(*write, cwd=code, env=runner).returncode == 0
    for mode, baseline, exit_code, answer in (
        ("signature", "signatures", 0, "PASS: 1 signature unchanged"),
        ("gate", "base", 1, "FAIL: 1 regression"),
    ):
        given = inputs | {"MODE": mode, "BASELINE": baseline, "CANDIDATE": "new"}
        done = children.run(*SHELL, STEPS[1]["run"], cwd=code, env=runner | given)
        assert done.returncode == exit_code and answer in done.stdout, done.stdout + done.stderr
        assert json.loads((code / "badge.json").read_text())["message"] == answer
        assert answer in (tmp_path / "distbench.md").read_text() and answer in (tmp_path / "summary.md").read_text()
