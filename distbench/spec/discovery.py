"""Discovery of scenarios by parsing source with `ast`: a list takes milliseconds and imports no scenario file."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import read_text
from distbench.spec.mesh import check_mesh_dims
from distbench.spec.recipes import INSTALLS, is_small, recipe_configs

MAX_SCENARIO_BYTES = 16 << 20
PACKAGE = Path(__file__).resolve().parent.parent
# A shipped scenario to the end of its docstring. To parse whole files would take most of the time of `distbench list`.
DECLARATION = re.compile(r'^@scenario\(.*?\ndef .*?""".*?"""\n', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """The declaration of one scenario, as parsed from its source.

    Args:
        mesh: default mesh, mesh dim name to size.
        quick_mesh: mesh under --quick, or None for `mesh`.
        axes: parameter name to its values.
        quick: parameter name to its value under --quick.
        summary: first paragraph of the docstring, on one line.
        params: parameter name to default value.
    """

    name: str
    file: Path
    mesh: dict[str, int]
    axes: dict[str, tuple[Any, ...]]
    quick: dict[str, Any]
    tags: tuple[str, ...]
    summary: str
    params: dict[str, Any]
    quick_mesh: dict[str, int] | None = None


def scenario_folder() -> Path:
    """Return the folder of shipped scenarios: next to the package in a checkout, inside the package in a wheel."""
    inside = PACKAGE / "scenarios"
    return inside if inside.is_dir() else PACKAGE.parent / "scenarios"


def list_entries() -> list[Entry]:
    """Return all shipped scenarios, sorted by name."""
    # The other files contain code that several scenarios share.
    declared = {file: DECLARATION.findall(file.read_text(encoding="utf-8")) for file in scenario_folder().glob("*.py")}
    entries = [entry for file, texts in declared.items() for entry in _entries(_parsed("".join(texts)), file)]
    return sorted(entries, key=lambda entry: entry.name)


def find(target: str) -> list[Entry]:
    """Return the scenarios of a target: a name, a recipe `SOURCE:CONFIG`, `path/file.py` (all its scenarios) or
    `path/file.py::name`. Raise UserError without a scenario."""
    path, separator, name = target.partition("::")
    source, colon, config = target.partition(":")
    if source in INSTALLS:
        return [_recipe(source, config if colon else None)]
    if separator or path.endswith(".py"):
        file = Path(path)
        if not file.is_file():
            reason = "is not a file" if file.exists() else "does not exist"
            raise UserError(f"scenario file {path!r} {reason}; give a path to a .py file, or a name")
        entries, where = read_entries(file), f"in {path}"
        name = name or "*"
    else:
        entries, where, name = list_entries(), "among the shipped scenarios", target
    if chosen := [entry for entry in entries if name in ("*", entry.name)]:
        return chosen
    if name == "*":
        advice = "decorate a function (at its top level) with @scenario(mesh={...})"
        raise UserError(f"{path} declares no scenario; {advice}")
    if not separator and Path(target).is_dir():
        raise UserError(f"{target!r} is a folder; give a .py file of this folder, or the name of a scenario")
    hint = nearest(name, [entry.name for entry in entries])
    raise UserError(f"no scenario {name!r} {where} ({hint}); `distbench list` shows all")


def argument_of(scenario: str) -> str:
    """Return the argument of commands for a run file's scenario: `NAME`, or `FILE.py::NAME` if it is not a shipped
    scenario."""
    name = scenario.partition(" (")[0]
    return name if name in {entry.name for entry in list_entries()} else f"FILE.py::{name}"


def _recipe(source: str, config: str | None) -> Entry:
    """Return the scenario of a recipe source with this configuration; with None, with all configurations."""
    (entry,) = (entry for entry in list_entries() if entry.name == source)
    configs = recipe_configs(source)
    if config is None:
        return replace(entry, axes={"config": tuple(configs)})
    if config not in configs:
        hint = nearest(config, configs)
        raise UserError(f"no recipe {source}:{config} ({hint}); `distbench list {source}` shows all")
    tags = tuple(tag for tag in entry.tags if tag != "real-size" or not is_small(config))
    return replace(entry, axes={"config": (config,)}, params=entry.params | {"config": config}, tags=tags)


@cache
def _parsed(text: str) -> ast.Module:
    # Programs that use the Python API read the same files many times.
    return ast.parse(text)


def read_entries(file: Path) -> list[Entry]:
    """Return the scenarios of a file, in order. Raise UserError if the file is not Python, or a header is not
    literal."""
    text = read_text(file, "scenario file", MAX_SCENARIO_BYTES)
    try:
        tree = _parsed(text)
    except SyntaxError as error:
        where = f"{file}, line {error.lineno or 1}"
        raise UserError(f"scenario file {where} is not valid Python: {error.msg}; fix that line") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"scenario file {file} cannot be read: {error}; give a Python file") from error
    return _entries(tree, file)


def _entries(tree: ast.Module, file: Path) -> list[Entry]:
    return [
        _entry(node, decorator, file)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and "scenario" in (getattr(decorator.func, "attr", ""), getattr(decorator.func, "id", ""))
    ]


def _entry(node: ast.FunctionDef, decorator: ast.Call, file: Path) -> Entry:
    where = f"{file}:{decorator.lineno}, scenario {node.name!r}"
    header = _header(decorator, where)
    params = {
        argument.arg: _literal(default, where)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is not None
    }
    if node.args.args or node.args.posonlyargs or len(params) != len(node.args.kwonlyargs):
        raise UserError(f"{where}: every parameter must be keyword-only with a literal default; write def f(*, x=1)")
    axes = {name: tuple(values) for name, values in header.get("axes", {}).items()}
    quick = header.get("quick", {})
    for name in (*axes, *quick):
        if name not in params:
            raise UserError(f"{where}: {name!r} is not a parameter of the function ({nearest(str(name), params)})")
    summary = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    tags = tuple(header.get("tags", ()))
    quick_mesh = header.get("quick_mesh")
    return Entry(node.name, file.resolve(), header["mesh"], axes, quick, tags, summary, params, quick_mesh)


def _header(decorator: ast.Call, where: str) -> dict[str, Any]:
    """Return the given arguments of @scenario(...), each checked."""
    header = {keyword.arg or "**": _literal(keyword.value, where) for keyword in decorator.keywords}
    for argument, value in header.items():
        if argument not in FITS:
            raise UserError(f"{where}: @scenario has no argument {argument!r}; use {', '.join(FITS)}")
        fits, example = FITS[argument]
        if not fits(value):
            raise UserError(f"{where}: {argument}={value!r} is not valid; write for example {argument}={example}")
    if decorator.args or "mesh" not in header:
        raise UserError(f"{where}: @scenario needs a mesh; write for example @scenario(mesh={{'tp': 2}})")
    for name in ("mesh", "quick_mesh"):
        check_mesh_dims(header.get(name, {}), f"{where}: ")
    return header


def _is_mesh(value: Any) -> bool:
    sizes = value.items() if isinstance(value, dict) else ()
    return bool(sizes) and all(isinstance(name, str) and type(size) is int and size > 0 for name, size in sizes)


def _is_axes(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(values, list | tuple) and values for values in value.values())


def _is_tags(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(tag, str) for tag in value)


# Argument of @scenario to a check of its value, and an example of a valid value.
FITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mesh": (_is_mesh, "{'dp_shard': 2, 'tp': 2}"),
    "axes": (_is_axes, "{'rotate': ('allgather', 'alltoall')}"),
    "quick": (lambda value: isinstance(value, dict), "{'dim': 64}"),
    "quick_mesh": (_is_mesh, "{'tp': 2}"),
    "tags": (_is_tags, "('tp', 'fsdp')"),
}


def _literal(node: ast.expr, where: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        text = ast.unparse(node)
        raise UserError(
            f"{where}: {text!r} is not a literal, but headers and defaults are not executed; write a literal"
        ) from error
