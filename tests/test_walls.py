"""The walls between rooms, held by reading imports; and what importing the command line must not load."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children

PACKAGE = ROOT / "distbench"
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "ruptures", "jinja2")
# Room to the rooms of distbench it may import, itself apart. A room is a folder of distbench/, a folder of
# distbench/worker/, or a file that lies in neither. A new one is named in docs/architecture.md too.
MAY_IMPORT = {
    "__init__": {"version", "api", "spec", "costmodel", "worker.redistribute", "worker.torch_internals"},
    "__main__": {"cli", "spec"},
    "ab": {"spec", "runs", "compare", "gate", "processes"},
    "api": {"cli", "commands", "spec", "runs", "gate"},
    "advise": {"spec", "runs", "costmodel", "planning", "render", "ask_child"},
    "ask_child": {"spec", "processes"},
    "check_plans": {"spec", "launch", "render", "ask_child"},
    "cli": {"version", "spec", "commands", "doctor"},
    "commands": {
        *("spec", "runs", "compare", "render", "launch", "costmodel", "check_plans", "dry_run"),
        *("report", "advise", "signature", "simulate", "sweep", "gate", "ab", "history", "nodes", "links"),
    },
    "compare": {"spec"},
    "costmodel": {"spec", "runs", "compare", "render", "simulate"},
    "doctor": {"spec", "runs", "launch", "ask_child"},
    "dry_run": {"spec", "runs", "ask_child"},
    "gate": {"spec", "runs", "compare", "render"},
    "history": {"spec", "runs", "render"},
    "laboratory": {"spec", "runs", "compare", "planning", "render"},
    "launch": {"spec", "runs", "costmodel", "processes"},
    "links": {"spec", "runs", "compare", "render"},
    "nodes": {"spec", "launch", "processes"},
    "planning": {"spec", "costmodel"},
    "processes": set(),
    "pytest_plugin": {"spec", "runs", "compare", "launch"},
    "render": {"spec"},
    "report": {"spec", "runs", "compare", "costmodel", "render", "traces", "laboratory", "links"},
    "runs": {"spec", "compare"},
    "signature": {"spec", "runs", "render", "ask_child"},
    "simulate": {"spec", "runs", "render", "ask_child"},
    "spec": set(),
    "sweep": {"spec", "runs", "compare", "render", "traces", "launch", "simulate", "version", "processes"},
    "traces": {"spec", "runs", "compare", "render"},
    "version": set(),
    "worker": {"spec"},
    "worker.__main__": {"spec", "processes", "worker.session", "worker.rank"},
    "worker.writing_rows": {"spec", "runs", "worker.rank"},
    "worker.changed_plan": {"spec"},
    "worker.plan_code": {"spec"},
    "worker.launcher": {"spec", "runs", "processes", "worker.rank", "worker.session", "worker.torch_internals"},
    "worker.session": {
        *("spec", "runs", "costmodel", "worker.pass_plan", "worker.writing_rows", "worker.runner", "worker.cases"),
        *("worker.changed_plan", "worker.hosts", "worker.rank", "worker.torch_internals"),
    },
    "worker.hosts": {"spec", "worker.rank"},
    "worker.pass_plan": {"spec", "compare", "worker.rank"},
    "worker.runner": {
        "spec",
        "runs",
        "compare",
        "worker.pass_plan",
        "worker.writing_rows",
        "worker.tracing",
        "worker.rank",
        "worker.torch_internals",
    },
    "worker.children": {
        *(
            "spec",
            "costmodel",
            "planning",
            "simulate",
            "worker.session",
            "worker.changed_plan",
            "worker.cases",
            "worker.tracing",
        ),
        *("worker.plans", "worker.rank", "worker.redistribute", "worker.simulated", "worker.torch_internals"),
        *("worker.inference", "worker.plan_code", "worker.models"),
    },
    "worker.cases": {
        *("spec", "runs", "costmodel", "planning", "worker.tracing", "worker.plans", "worker.redistribute"),
        *("worker.rank", "worker.links", "worker.dtensor_operators", "worker.inference", "worker.pipelines"),
        "worker.models",
        "worker.torch_internals",
    },
    "worker.dtensor_operators": {
        *("spec", "runs", "worker.redistribute", "worker.rank", "worker.tracing", "worker.torch_internals"),
    },
    "worker.inference": {"spec", "worker.models", "worker.plans", "worker.rank", "worker.torch_internals"},
    "worker.models": {"spec", "worker.rank"},
    "worker.links": {"spec", "runs", "worker.rank"},
    "worker.tracing": {
        *("spec", "runs", "compare", "worker.plans", "worker.pipelines", "worker.rank", "worker.torch_internals"),
        "worker.models",
    },
    "worker.plans": {
        *("spec", "worker.models", "worker.pipelines", "worker.redistribute", "worker.rank", "worker.torch_internals"),
    },
    "worker.pipelines": {"spec", "compare", "worker.rank", "worker.torch_internals"},
    "worker.redistribute": {
        "spec",
        "runs",
        "compare",
        "costmodel",
        "planning",
        "worker.rank",
        "worker.torch_internals",
    },
    "worker.simulated": {
        *("spec", "simulate", "worker.cases", "worker.inference", "worker.plans", "worker.rank", "worker.tracing"),
        "worker.models",
        "worker.torch_internals",
    },
    "worker.rank": {"spec", "runs", "compare", "costmodel"},
    "worker.torch_internals": {"spec", "costmodel", "planning"},
}
# Rooms that draw or hold frames; each imports pandas and matplotlib inside functions.
FRAMES = ("advise", "api", "costmodel", "gate", "history", "laboratory", "links", "render", "report", "runs", "sweep")
FRAMES += ("traces",)
# Not ours nor torch's, and without a public name (the last two are pytest-benchmark's and transformers').
NO_PUBLIC_NAME = {
    "_fields",
    "_field_defaults",
    "_replace",
    "_asdict",
    "_exit",
    "_benchmarksession",
    "_no_split_modules",
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] != "worker":
        return parts[0]
    return "worker" if parts == ("worker", "__init__") else ".".join(parts[:2])


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_of(path): path for path in FILES}
ROOMS = sorted({room_of(path) for path in FILES})


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert room in MAY_IMPORT, f"room {room} is new: say in MAY_IMPORT and docs/architecture.md what it may import"
    for path in FILES:
        if room_of(path) != room:
            continue
        for module in our_modules(path):
            other = room_of(MODULES[module])
            assert other == room or other in MAY_IMPORT[room], f"{path} imports {module}"
        for name in imported(path):
            package = name.split(".")[0]
            assert package != "torch" or room.startswith("worker"), f"{path} imports torch"
            assert package not in ("pandas", "matplotlib") or room in FRAMES, f"{path} imports {name}"


def test_rooms_and_files_stand_in_no_circle() -> None:
    files = {module: our_modules(path) for module, path in MODULES.items()}
    rooms: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, path in MODULES.items():
        rooms[room_of(path)] |= {room_of(MODULES[other]) for other in files[module]} - {room_of(path)}
    assert circle_in(files) is None
    assert circle_in(rooms) is None


def circle_in(graph: dict[str, set[str]]) -> list[str] | None:
    """Nodes that import one another, one after the other; None where there are none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node not in done:
            for other in sorted(graph[node]):
                if found := visit(other, [*trail, node]):
                    return found
            done.add(node)
        return None

    return next((found for node in sorted(graph) if (found := visit(node, []))), None)


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


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


def test_private_names_are_taken_in_one_room_only() -> None:
    """Of torch, and of one another: what begins with an underscore belongs to the file that defines it."""
    for path in FILES:
        if room_of(path) != "worker.torch_internals":
            assert list(private_names(tree_of(path))) == [], path


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
    "distbench.planning.calibration",
    "distbench.cli.check",
    "distbench.planning.advice",
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


def test_importing_a_light_room_loads_nothing_heavy(children: Children) -> None:
    done = children.python("-c", IMPORTS, ",".join(HEAVY), ",".join(LIGHT), check=True)
    assert done.stdout.splitlines() == list(LIGHT), done.stderr


def test_help_and_list_import_neither_torch_nor_other_commands_nor_plans(children: Children) -> None:
    code = "import sys; from distbench.cli import main\n"
    code += "for word in ('--help', 'list'):\n try: main([word])\n except SystemExit: pass\n"
    code += "print([name for name in sys.argv[1:] if name in sys.modules])"
    files = ("distbench.cli.run", "distbench.cli.report", "distbench.spec.plan", "distbench.spec.job")
    done = children.python("-c", code, "torch", *files, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "llama_2d" in done.stdout and "calibrate" in done.stdout


def test_the_gate_judges_without_knowing_how_it_is_shown() -> None:
    shown = {"comparison_text.py", "side_by_side_text.py", "baseline_text.py", "machine_forms.py", "rates_text.py"}
    for path in FILES:
        if room_of(path) == "gate" and path.name not in shown:
            assert not any(module.startswith("distbench.show") for module in our_modules(path)), path


def test_loading_the_pytest_plugin_imports_nothing_of_ours() -> None:
    """Every pytest run of an environment with distbench in it loads that module."""
    path = PACKAGE / "pytest_plugin" / "__init__.py"
    packages = {name.split(".")[0] for name in imported(path, inside_functions=False)}
    assert packages == {"pathlib", "typing", "pytest"}


def test_nothing_imports_the_scenarios_by_name() -> None:
    for path in FILES:
        assert not any(name.split(".")[0] == "scenarios" for name in imported(path)), path


# What a file says that asks for one accelerator: names of types, of backends, and torch's own modules of them.
ACCELERATORS = {"cuda", "hip", "rocm", "xpu", "npu", "hpu", "mtia", "nccl", "rccl", "xccl", "hccl"}
OF_TORCH = {f"torch.{name}" for name in (*ACCELERATORS, "accelerator", "get_device_module")}
# The simulated device stands for CUDA's and its NCCL; nccl-tests' files have no other; headers say which versions ran.
SAYS_SO = ("simulate/recorded_step.py", "records/nccl_tests.py", "records/run_file_fields.py")
SAYS_SO += ("judge/gate_text.py",)


def test_one_table_and_one_file_of_the_worker_know_the_accelerators() -> None:
    """Another one means touching these two; CUDA may be written about, and torch's own private names may need it."""
    know = {PACKAGE / "spec" / "devices.py", PACKAGE / "worker" / "rank" / "device.py"}
    for path in FILES:
        if path not in know and room_of(path) != "worker.torch_internals":
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
