"""What is installed: every package and data file of the repository, found and not listed."""

import runpy
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children

# Repository folder to the package that it is installed as.
SOURCES = {"distbench": "distbench", "scenarios": "distbench.scenarios"}


def files_on_disk() -> dict[str, set[str]]:
    """Package to the names of its files, of every folder that holds any."""
    found: dict[str, set[str]] = {}
    for source, package in SOURCES.items():
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                below = path.parent.relative_to(ROOT / source).parts
                found.setdefault(".".join((package, *below)), set()).add(path.name)
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
    data = {
        f"{package.replace('.', '/')}/{name}"
        for package, names in on_disk.items()
        for name in names
        if not name.endswith(".py")
    }
    assert data == {f"{package.replace('.', '/')}/{name}" for package, names in listed.items() for name in names}


def test_the_wheel_holds_them(children: Children, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    done = children.python("-m", "pip", "wheel", *offline, "--wheel-dir", tmp_path, source)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("distbench-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"{package.replace('.', '/')}/{name}" for package, names in files_on_disk().items() for name in names}
    assert held == wanted
