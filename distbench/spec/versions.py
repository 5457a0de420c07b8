"""The torch versions that distbench supports, and the version of the installed torch, without importing torch."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from distbench.spec.errors import UserError

OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
REQUIREMENT = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
INSTALL = f"run pip install '{REQUIREMENT}'"


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a torch version.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    return major, minor


def outside_of_support(version: str) -> str:
    """Return a sentence about an unsupported version of torch; "" for a supported version."""
    if release(version) < OLDEST:
        return f"torch {version} is older than {SUPPORTED}, which distbench supports; {INSTALL}"
    if release(version) > NEWEST:
        return f"torch {version} is newer than {SUPPORTED}, which distbench supports; run distbench doctor --deep"
    return ""


def installed_torch() -> str:
    """Return the version of the installed torch.

    Raises:
        UserError: torch is not installed, older than the supported versions, or hidden by another torch.
    """
    try:
        installed = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"torch is not installed; {INSTALL}") from error
    version, module = installed.version, importlib.util.find_spec("torch")
    folder = Path(module.origin).parent if module is not None and module.origin is not None else None
    imported = (folder and _version_of(folder)) or version
    if imported.partition("+")[0] != version.partition("+")[0]:
        raise UserError(
            f"Python's path has two versions of torch: `import torch` loads {imported} in {folder}, but the package is "
            f"{version} in {installed.locate_file('torch')}; remove one of them"
        )
    if release(version) < OLDEST:
        raise UserError(outside_of_support(version))
    return version


def _version_of(folder: Path) -> str | None:
    """Return the version in a torch package's version.py; None without a version."""
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    stated = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return stated and stated[1]
