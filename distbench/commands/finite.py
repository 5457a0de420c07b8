"""Numbers of the command line."""

import math
from typing import Any

import click

MONTH_S = 30 * 86_400.0  # nobody waits longer for a command
MAX_LAUNCHES = 100_000


class FiniteRange(click.FloatRange):
    """A number within bounds; nan and inf, which every comparison with a limit would let through, are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; click.BadParameter where it is none, or out of bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
