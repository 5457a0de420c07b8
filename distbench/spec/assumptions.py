"""Assumptions of a simulated step about values that depend on parameters: `--assume PATTERN=VALUE`."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from distbench.spec.errors import UserError
from distbench.spec.expert_loads import STEADY, UNIFORM, VARYING, advice_of, recorded_loads

# A list contains how often each choice is made; a text is a name of LOADS. A number is the value that code reads, or
# the share that a mask keeps.
Assumption = str | float | list[float]


def assumptions_of(texts: Sequence[str]) -> dict[str, Assumption]:
    """Return glob patterns over module names, each with its assumption.

    Args:
        texts: texts PATTERN=VALUE. VALUE is a name of LOADS, a number, or a JSON file: a list with one count per
            choice, or an object of module names to such lists.

    Raises:
        UserError: a text is not valid, or a file cannot be read.
    """
    assumed: dict[str, Assumption] = {}
    advice = advice_of(STEADY)
    for text in texts:
        pattern, equals, value = text.rpartition("=")
        if not equals or not pattern or not value:
            raise UserError(f"--assume {text!r} is not PATTERN=VALUE; give for example 'layers.*=uniform'")
        if value in VARYING:
            raise UserError(f"--assume {text!r}: steps or ranks of {value} differ, but one step is simulated; {advice}")
        if value in STEADY:
            assumed[pattern] = value
            continue
        try:
            number = float(value)
        except ValueError:
            if not Path(value).suffix and not Path(value).exists():
                raise UserError(f"--assume {text!r}: {value!r} is neither a load nor a number; {advice}") from None
            assumed |= _recorded(pattern, Path(value))
            continue
        if not math.isfinite(number):
            raise UserError(f"--assume {text!r} is not a finite number; give a number, 'uniform' or a file")
        assumed[pattern] = number
    return assumed


def _recorded(pattern: str, path: Path) -> Mapping[str, Assumption]:
    content = recorded_loads(path, "--assume")
    if not isinstance(content, dict):
        return {pattern: content}
    if chosen := {name: counts for name, counts in content.items() if fnmatchcase(name, pattern)}:
        return chosen
    raise UserError(f"--assume file {path} has no module that matches {pattern!r}; use one of {', '.join(content)}")


def assumption_text(pattern: str, assumed: Assumption) -> str:
    """Describe an assumption, in a clause for the note of a simulated step."""
    if assumed == UNIFORM:
        text = "make each choice equally often"
    elif isinstance(assumed, str):
        text = f"make choices by load {assumed}"
    elif isinstance(assumed, list):
        text = f"make {len(assumed)} choices by recorded counts"
    else:
        text = f"read the value {assumed:g}, or their masks keep this share"
    return f"modules {pattern} {text}; all ranks make the same choices"
