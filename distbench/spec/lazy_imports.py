"""Packages whose names are imported when they are asked for: who needs one does not pay for the others."""

import importlib
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any


def import_when_asked(package: str, names_of: Mapping[str, Iterable[str]]) -> None:
    """Have a package's names imported from its modules when they are asked for, and kept.

    A name that a module of the package has too stays what was taken, also once that module was imported; the module
    itself stays importable.

    Args:
        package: its ``__name__``; called while it is being imported.
        names_of: module, by its name below the package, to what is taken from it.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in module_of:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            exported = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
            setattr(self, name, exported)
            return exported

        def __setattr__(self, name: str, value: Any) -> None:
            # Importing a module puts it here.
            if not (name in module_of and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
