"""Assumptions of a simulated step about values that depend on parameters: `--assume PATTERN=VALUE`."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from distbench.spec.errors import UserError
from distbench.spec.file_io import opened, parse_json

UNIFORM = "uniform"
# A list contains how often each choice is made; UNIFORM means equally often. A number is the value that code reads, or
# the share that a mask keeps.
Assumption = str | float | list[float]


def assumptions_of(texts: Sequence[str]) -> dict[str, Assumption]:
    """Return glob patterns over module names, each with its assumption.

    Args:
        texts: texts PATTERN=VALUE. VALUE is `uniform`, a number, or a JSON file: a list with one count per choice, or
            an object of module names to such lists.

    Raises:
        UserError: a text is not valid, or a file cannot be read.
    """
    assumed: dict[str, Assumption] = {}
    for text in texts:
        pattern, equals, value = text.rpartition("=")
        if not equals or not pattern or not value:
            raise UserError(f"--assume {text!r} is not PATTERN=VALUE; give for example 'layers.*=uniform'")
        if value == UNIFORM:
            assumed[pattern] = UNIFORM
            continue
        try:
            number = float(value)
        except ValueError:
            assumed |= _recorded(pattern, Path(value))
            continue
        if not math.isfinite(number):
            raise UserError(f"--assume {text!r} is not a finite number; give a number, 'uniform' or a file")
        assumed[pattern] = number
    return assumed


def _recorded(pattern: str, path: Path) -> Mapping[str, Assumption]:
    with opened(path, "--assume file") as file:
        try:
            content: Any = parse_json(file.read())
        except ValueError as error:
            raise UserError(f"--assume file {path}: {error}; give a JSON list of counts, one per choice") from error
    by_name = content if isinstance(content, dict) else {pattern: content}
    chosen = {name: loads for name, loads in by_name.items() if content is not by_name or fnmatchcase(name, pattern)}
    if not chosen:
        raise UserError(f"--assume file {path} has no module that matches {pattern!r}; use one of {', '.join(by_name)}")
    for name, loads in chosen.items():
        is_list = isinstance(loads, list) and bool(loads)
        if not is_list or any(type(load) not in (int, float) or load < 0 for load in loads) or not sum(loads):
            raise UserError(
                f"--assume file {path}, {name}: this is not a list of counts; give one number >= 0 per choice, such as "
                "[120, 80, 95, 105]"
            )
    return {name: [float(load) for load in loads] for name, loads in chosen.items()}


def assumption_text(pattern: str, assumed: Assumption) -> str:
    """Describe an assumption, in a clause for the note of a simulated step."""
    if assumed == UNIFORM:
        return f"modules {pattern} make each choice equally often"
    if isinstance(assumed, list):
        return f"modules {pattern} make {len(assumed)} choices by recorded counts"
    return f"modules {pattern} read the value {assumed:g}, or their masks keep this share"
