"""Amounts with a unit, as the command line takes them: `80GB`, `10min`."""

import math
import re

from distbench.spec.errors import UserError
from distbench.spec.printable import cut

BYTES = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SECONDS = {"s": 1, "min": 60, "h": 3600}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([A-Za-z]*)")


def amount(text: str, option: str, units: dict[str, int], default: str, most: float) -> float:
    """A positive number of the smallest unit, at most `most` of it; UserError for anything else.

    Args:
        default: the unit of a bare number.
    """
    found = _AMOUNT.fullmatch(text.strip())
    by_name = {name.lower(): size for name, size in units.items()}
    size = by_name.get((found[2] or default).lower()) if found else None
    value = float(found[1]) * size if found and size else math.nan
    if value > most:
        raise UserError(f"{option} {cut(text)} is too much; give at most {most / units[default]:g}{default}")
    if not value > 0:
        known = ", ".join(units)
        raise UserError(f"{option} {cut(text)} cannot be used; give a positive number with one of {known}")
    return value
