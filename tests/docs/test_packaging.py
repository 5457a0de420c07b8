"""What is installed: every package and data file of the repository, found and not listed."""

import json
import runpy
import shutil
import socket
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children, Ranks

# Repository folder to the package that it is installed as.
SOURCES = {"distbench": "distbench", "scenarios": "distbench.scenarios"}


def files_on_disk() -> dict[str, set[str]]:
    """Package to the names of its files; those of a folder that is no package belong to the package above it."""
    found: dict[str, set[str]] = {}
    for source, package in SOURCES.items():
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                above = path.parent
                while above != ROOT / source and not (above / "__init__.py").exists():
                    above = above.parent
                below = above.relative_to(ROOT / source).parts
                found.setdefault(".".join((package, *below)), set()).add(path.relative_to(above).as_posix())
    return found


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
    """Built from a git URL, as docs/install.md has it, of a repository with what stands here."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "all")):
        children.run("git", *command, cwd=source, check=True)
    offline = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    done = children.python("-m", "pip", "wheel", *offline, "--wheel-dir", folder, f"git+file://{source}")
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("distbench-*.whl")
    return built


def test_the_wheel_holds_them(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"{package.replace('.', '/')}/{name}" for package, names in files_on_disk().items() for name in names}
    assert held == wanted


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
