"""Layers, read from imports: which package may import which, where torch and private names may stand, no cycles; and
what importing the command line must not load."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children

PACKAGE = ROOT / "distbench"
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "jinja2")
# Package (or file of the top level) to the packages that it may import; docs/architecture.md has the same table.
MAY_IMPORT = {
    "__init__": {
        "cli",
        "communication_assertions",
        "loop_watch",
        "planning",
        "redistribute",
        "spec",
        "torch_private",
        "version",
    },
    "__main__": {"cli", "processes"},
    "cases": {"observe", "planning", "plans", "ranks", "records", "redistribute", "spec", "torch_private"},
    "cli": {
        "judge",
        "launch",
        "planning",
        "processes",
        "records",
        "report",
        "search",
        "show",
        "simulate",
        "spec",
        "statistics",
        "version",
    },
    "communication_assertions": {"judge", "observe", "plans", "spec", "torch_private"},
    "judge": {"processes", "records", "show", "spec", "statistics"},
    "launch": {"planning", "processes", "records", "spec"},
    "loop_watch": {"judge", "observe", "ranks", "spec", "torch_private"},
    "observe": {"plans", "ranks", "records", "spec", "statistics", "torch_private"},
    "planning": {"processes", "records", "show", "spec"},
    "plans": {"ranks", "redistribute", "spec", "statistics", "torch_private"},
    "processes": {"spec"},
    "pytest_plugin": {"communication_assertions", "launch", "records", "spec", "statistics"},
    "ranks": {"planning", "records", "spec", "statistics"},
    "records": {"spec", "statistics"},
    "redistribute": {"planning", "ranks", "records", "spec", "statistics", "torch_private"},
    "report": {"judge", "planning", "records", "show", "spec", "statistics"},
    "search": {"launch", "processes", "records", "report", "show", "simulate", "spec", "statistics", "version"},
    "show": {"spec"},
    "simulate": {
        "cases",
        "observe",
        "planning",
        "plans",
        "processes",
        "ranks",
        "records",
        "show",
        "spec",
        "torch_private",
    },
    "spec": set(),
    "statistics": {"spec"},
    "torch_private": {"planning", "spec"},
    "worker": {
        "cases",
        "observe",
        "planning",
        "plans",
        "processes",
        "ranks",
        "records",
        "simulate",
        "spec",
        "statistics",
        "torch_private",
    },
    "version": set(),
}
# Where torch may be imported: packages of code that ranks run, and the files of simulate/ that record a step.
TORCH_PACKAGES = {"cases", "observe", "plans", "ranks", "redistribute", "torch_private", "worker"}
TORCH_FILES = {
    "communication_assertions.py",
    "loop_watch.py",
    "simulate/recorded_step.py",
    "simulate/operator_recorder.py",
}
# Packages that draw or hold frames; each imports pandas and matplotlib inside functions.
FRAMES = {"cli", "judge", "planning", "records", "report", "search", "show"}
# Not ours nor torch's, and without a public name (the last are pytest-benchmark's and transformers').
NO_PUBLIC_NAME = {
    "_fields",
    "_field_defaults",
    "_replace",
    "_asdict",
    "_exit",
    "_benchmarksession",
    "_no_split_modules",
    "_attn_implementation",
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_of(path): path for path in FILES}
PACKAGES = sorted({package_of(path) for path in FILES})


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path, inside_functions: bool = True) -> set[str]:
    """Modules, and what is taken from each, as `module.name`."""
    nodes = ast.walk(tree_of(path)) if inside_functions else iter(tree_of(path).body)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def our_modules(path: Path) -> set[str]:
    """The modules of distbench that a file imports."""
    ours = {name for name in imported(path) if name == "distbench" or name.startswith("distbench.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in ours} - {module_of(path)}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    assert package in MAY_IMPORT, f"package {package} is new: add what it may import here and to docs/architecture.md"
    for path in FILES:
        if package_of(path) == package:
            assert broken_rules(path, package) == []


def broken_rules(path: Path, package: str) -> list[str]:
    """What a file imports and may not, each with what to do about it."""
    name = path.relative_to(PACKAGE).as_posix()
    broken = []
    for module in sorted(our_modules(path)):
        other = package_of(MODULES[module])
        if other != package and other not in MAY_IMPORT[package]:
            broken.append(
                f"{name} may not import {module}: move what it needs to a package that {package} may import, or add "
                f"{other!r} to {package!r} in MAY_IMPORT and docs/architecture.md with a reason"
            )
    for imports in sorted(imported(path)):
        library = imports.split(".")[0]
        if library == "torch" and package not in TORCH_PACKAGES and name not in TORCH_FILES:
            broken.append(
                f"{name} may not import torch: send a verb to worker/child.py (see processes/), or move the code "
                "to a package of ranks"
            )
        if library in ("pandas", "matplotlib") and package not in FRAMES:
            broken.append(f"{name} may not import {library}: move the frame to report/ and the picture to show/")
    return broken


def test_a_broken_rule_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    path = PACKAGE / "cases" / "user_call.py"
    monkeypatch.setitem(MAY_IMPORT, "cases", set())
    assert any("cases/user_call.py may not import distbench.ranks" in line for line in broken_rules(path, "cases"))
    assert broken_rules(path, "spec")  # a package without torch


def test_neither_packages_nor_files_import_one_another_in_a_cycle() -> None:
    files = {module: our_modules(path) for module, path in MODULES.items()}
    packages: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for module, path in MODULES.items():
        packages[package_of(path)] |= {package_of(MODULES[other]) for other in files[module]} - {package_of(path)}
    for graph in (files, packages):
        assert (cycle := cycle_in(graph)) is None, (
            f"{' -> '.join(cycle)}: move what the first needs of the second to the lower of the two, or to spec/"
        )


def cycle_in(graph: dict[str, set[str]]) -> list[str] | None:
    """Nodes that import one another, one after the other; None where there are none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node not in done:
            for other in sorted(graph[node]):
                if result := visit(other, [*trail, node]):
                    return result
            done.add(node)
        return None

    return next((result for node in sorted(graph) if (result := visit(node, []))), None)


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every name with one leading underscore that is taken out of another module or object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield node.lineno, str(name.value)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NO_PUBLIC_NAME


def test_private_names_are_taken_in_one_package_only() -> None:
    """Of torch, and of one another: what begins with an underscore belongs to the file that defines it."""
    for path in FILES:
        if package_of(path) != "torch_private":
            assert list(private_names(tree_of(path))) == [], (
                f"{path}: move the use of these names to torch_private/ and list them in its probe.py; a private name "
                "of distbench becomes public in its file"
            )


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.tensor import _redistribute",
        "from torch.distributed.tensor._redistribute import redistribute_local_tensor",
        "import torch._C",
        "torch._C._distributed_c10d",
        "getattr(mesh, '_flatten_mapping')",
        "other._secret",
    ],
)
def test_a_private_name_is_seen(line: str) -> None:
    assert list(private_names(ast.parse(line)))
    assert not list(private_names(ast.parse("self._own; cls._own; x.__class__; from a import b; t._replace(x=1)")))


LIGHT = (
    "distbench",
    "distbench.cli",
    "distbench.planning.cost_profile",
    "distbench.cli.list",
    "distbench.planning.recommendation_text",
    "distbench.cli.gate",
    "distbench.launch",
    "distbench.pytest_plugin.fixture",
    "distbench.records.run_file",
    "distbench.simulate.simulation",
    "distbench.spec",
)
# One process for all, which forks for each.
IMPORTS = """
import importlib, os, sys
for name in sys.argv[2].split(","):
    if os.fork() == 0:
        importlib.import_module(name)
        print(name, *(heavy for heavy in sys.argv[1].split(",") if heavy in sys.modules), flush=True)
        os._exit(0)
    os.wait()
"""


def test_importing_a_light_module_loads_nothing_heavy(children: Children) -> None:
    done = children.python("-c", IMPORTS, ",".join(HEAVY), ",".join(LIGHT), check=True)
    assert done.stdout.splitlines() == list(LIGHT), done.stderr


def test_help_and_list_import_neither_torch_nor_other_commands_nor_plans(children: Children) -> None:
    code = "import sys; from distbench.cli.main import main\n"
    code += "for word in ('--help', 'list'):\n try: main([word])\n except SystemExit: pass\n"
    code += "print([name for name in sys.argv[1:] if name in sys.modules])"
    files = ("distbench.cli.run", "distbench.cli.report", "distbench.spec.plan", "distbench.spec.job")
    done = children.python("-c", code, "torch", *files, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "llama_2d" in done.stdout and "calibrate" in done.stdout


def test_verdicts_know_nothing_of_how_they_are_shown() -> None:
    for name in ("ab", "gate", "paired_launches", "links"):
        path = PACKAGE / "judge" / f"{name}.py"
        shown = [module for module in our_modules(path) if module.startswith("distbench.show")]
        assert shown == [], f"judge/{name}.py may not import {shown}: put texts into judge/{name}_text.py"


def test_loading_the_pytest_plugin_imports_nothing_of_ours() -> None:
    """Every pytest run of an environment with distbench in it loads that module."""
    path = PACKAGE / "pytest_plugin" / "__init__.py"
    packages = {name.split(".")[0] for name in imported(path, inside_functions=False)}
    assert packages == {"collections", "contextlib", "pathlib", "typing", "pytest"}


def test_nothing_imports_the_scenarios_by_name() -> None:
    for path in FILES:
        assert not any(name.split(".")[0] == "scenarios" for name in imported(path)), path


# What a file says that asks for one accelerator: names of types, of backends, and torch's own modules of them.
ACCELERATORS = {"cuda", "hip", "rocm", "xpu", "npu", "hpu", "mtia", "nccl", "rccl", "xccl", "hccl"}
OF_TORCH = {f"torch.{name}" for name in (*ACCELERATORS, "accelerator", "get_device_module")}
# The simulated device stands for CUDA's and its NCCL; nccl-tests' files have no other; headers say which versions ran.
SAYS_SO = ("simulate/recorded_step.py", "records/nccl_tests.py", "records/run_file.py", "judge/gate_text.py")


def test_one_table_and_one_file_of_ranks_know_the_accelerators() -> None:
    """Another one means touching these two; CUDA may be written about, and torch's own private names may need it."""
    know = {PACKAGE / "spec" / "devices.py", PACKAGE / "ranks" / "device.py"}
    for path in FILES:
        if path not in know and package_of(path) != "torch_private":
            assert "cuda" not in path.read_text() and "CUDA_" not in path.read_text(), path
            names = asked_for(tree_of(path))
            assert not names or (path.relative_to(PACKAGE).as_posix() in SAYS_SO and names == {"nccl"}), (path, names)
    for path in (ROOT / "scenarios").glob("*.py"):
        assert not asked_for(ast.parse(path.read_text())), path


@pytest.mark.parametrize(
    "source",
    [
        "device.type == 'xpu'",
        "backend != 'nccl'",
        "FAST = ('cpu', 'mtia')",
        "torch.cuda.synchronize()",
        "torch.npu.Event(enable_timing=True)",
        "torch.accelerator.current_stream()",
        "torch.get_device_module(name)",
        "f'cuda:{rank}'",
        "from torch.cuda import Event",
        "import torch.xpu",
        "getattr(torch, 'hpu')",
        "tensor.cuda()",
    ],
)
def test_what_asks_for_one_accelerator_is_seen(source: str) -> None:
    assert asked_for(ast.parse(source))


def asked_for(tree: ast.Module) -> set[str]:
    """The accelerators, or torch's modules of them, that code names; what it says of them in words is nothing."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {word for text in texts if len(words := text.split(":")) <= 2 for word in words if word in ACCELERATORS}
    methods = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"cuda", "xpu", "npu", "hpu"}
    modules = {
        module
        for node in ast.walk(tree)
        for module in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    return named | methods | (OF_TORCH & (dotted_names(tree) | modules))


def dotted_names(tree: ast.Module) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
