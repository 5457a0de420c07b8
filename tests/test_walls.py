"""The walls between rooms, held by reading imports; and what importing the command line must not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "distbench"
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "ruptures")
# Room to the rooms of distbench it may import; rooms not listed here are leaves of the standard library.
MAY_IMPORT = {
    "cli": {"spec", "doctor", "commands", "__version__"},
    "commands": {
        "spec",
        "launch",
        "display",
        "results",
        "calibrate",
        "report",
        "advise",
        "check",
        "signature",
        "gate",
        "ab",
        "history",
        "commands",
    },
    "launch": {"spec", "results", "environment", "progress", "costmodel", "launch"},
    "history": {"spec", "gate", "report", "history"},
    "ab": {"spec", "gate", "ab"},
    "signature": {"spec", "ask_child", "ci", "signature"},
    "advise": {"spec", "results", "costmodel", "planning", "choice", "report", "ask_child", "advise"},
    "report": {"spec", "results", "choice", "report"},
    "calibrate": {"spec", "results", "costmodel", "report"},
    "gate": {"spec", "results", "environment", "report", "ci", "gate"},
    "ci": set(),
    "results": {"spec"},
    "check": {"spec", "launch", "ask_child"},
    "ask_child": {"spec"},
    "spec": {"spec"},
    "worker": {"spec", "results", "progress", "costmodel", "planning", "worker"},
    "doctor": {"spec", "launch", "environment", "ask_child"},
    "choice": set(),
    "display": set(),
    "environment": set(),
    "progress": set(),
    "planning": {"costmodel", "planning"},
    "costmodel": {"spec", "results"},
    "pytest_plugin": {"spec", "launch", "results", "display", "pytest_plugin"},
    "__main__": {"cli"},
    "__init__": {"worker"},
}


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found.setdefault(room, []).append(path)
    return found


def imported(path: Path, inside_functions: bool = True) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if inside_functions else iter(tree.body)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "distbench":
            names |= {f"distbench.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert room in MAY_IMPORT, f"room {room} is new: say in MAY_IMPORT and docs/architecture.md what it may import"
    for path in rooms()[room]:
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "distbench" and len(parts) > 1:
                assert parts[1] in MAY_IMPORT[room], f"{path} imports {name}"
            if parts[0] == "torch":
                assert room == "worker", f"{path} imports torch"
            if parts[0] in ("pandas", "matplotlib"):
                assert room in ("report", "calibrate", "advise", "history"), f"{path} imports {name}"


def test_private_torch_names_live_in_one_room() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "torch_internals" in path.parts:
            continue
        for name in imported(path):
            private = [part for part in name.split(".")[1:] if part.startswith("_")]
            assert not (name.startswith("torch.") and private), f"{path} imports {name}"


@pytest.mark.parametrize(
    "module",
    [
        "distbench",
        "distbench.cli",
        "distbench.calibrate",
        "distbench.check",
        "distbench.advise",
        "distbench.commands.gate",
        "distbench.launch",
        "distbench.pytest_plugin.fixture",
        "distbench.results",
        "distbench.spec",
    ],
)
def test_importing_a_light_room_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_scenarios_never_imports_torch() -> None:
    code = "import sys; sys.argv = ['distbench', 'list']; from distbench.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and "llama_2d" in done.stdout


def test_the_gate_judges_without_knowing_how_it_is_shown() -> None:
    """Of the report, the gate's pages take the layout, and its reader the search for run files; its judging nothing."""
    shown = {"page.py", "show.py", "launches.py", "series.py"}
    for path in rooms()["gate"]:
        if path.name not in shown:
            assert not any(name.startswith("distbench.report") for name in imported(path)), path


def test_loading_the_pytest_plugin_imports_nothing_of_ours() -> None:
    """Every pytest run of an environment with distbench in it loads that module."""
    path = PACKAGE / "pytest_plugin" / "__init__.py"
    assert imported(path, inside_functions=False) == {"pathlib", "typing", "pytest"}


def test_nothing_imports_the_scenarios_by_name() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] == "scenarios" for name in imported(path)), path
