"""The torch versions that distbench supports: the only place that says so, beside pyproject.toml."""

import re

OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
REQUIREMENT = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a torch version.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def outside_of_support(version: str) -> str:
    """Return what to print about a torch outside of the bound; empty for a supported one."""
    if release(version) < OLDEST:
        return f"torch {version} is older than {SUPPORTED}; run pip install '{REQUIREMENT}'"
    if release(version) > NEWEST:
        return f"torch {version} is newer than {SUPPORTED}, which are tested; distbench doctor --deep shows what works"
    return ""
