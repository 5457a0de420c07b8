"""Plug-ins: planners, launchers and other parts (GROUPS) that installed packages provide as entry points.

An entry point's name is the name that users give. A built-in name takes precedence over an entry point's equal name.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from distbench.spec.errors import UserError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Group to its name in messages. CONTRIBUTING.md describes the object of each group.
GROUPS = {
    "planners": "planner",
    "launchers": "launcher",
    "exporters": "export format",
    "hardware": "hardware file",
    "cases": "kind of case",
}


@cache
def _entry_points(group: str) -> "dict[str, list[EntryPoint]]":
    # This import takes as long as the start of a command.
    from importlib import metadata

    entries: dict[str, list[EntryPoint]] = {}
    for entry in sorted(metadata.entry_points(group=f"distbench.{group}"), key=lambda entry: (entry.name, entry.value)):
        entries.setdefault(entry.name, []).append(entry)
    return entries


def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names of a group's plug-ins, sorted, without importing them."""
    return tuple(_entry_points(group))


def load_plugin(group: str, name: str) -> Any:
    """Import a plug-in and return its object.

    Raises:
        UserError: no installed package provides the name, several packages do, or the import fails.
    """
    kind, entries = GROUPS[group], _entry_points(group).get(name, [])
    if not entries:
        raise UserError(f"{kind} {name!r} is unknown ({nearest(name, plugin_names(group))}); install its package")
    owners = sorted({entry.dist.name if entry.dist else entry.value for entry in entries})
    if len(owners) > 1:
        raise UserError(f"{kind} {name!r} is provided by {' and '.join(owners)}; uninstall all but one of them")
    try:
        return entries[0].load()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{kind} {name!r} of {owners[0]} cannot be imported ({problem}); update {owners[0]}") from error
