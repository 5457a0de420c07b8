"""The options of a comparison, which `gate` and `ab` share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from distbench.commands.finite import MAX_LAUNCHES

if TYPE_CHECKING:
    from distbench.compare.options import Options

tolerance = click.option(
    "--tolerance", multiple=True, metavar="[METRIC=]X", help="Slowdown still fine: 5%, 0.05, p10=3%. [5%]"
)
min_launches = click.option(
    "--min-launches",
    type=click.IntRange(2, MAX_LAUNCHES),
    default=5,
    show_default=True,
    help="No verdict below so many.",
)
allow_different = click.option(
    "--allow-different", multiple=True, metavar="FIELD", help="Compare although this field differs."
)
strict = click.option("--strict", is_flag=True, help="Exit with 3 when a case is inconclusive.")


def options_of(tolerance: Sequence[str], allow_different: Sequence[str], **more: Any) -> "Options":
    """What was given as the terms of a comparison, or a UserError; `more` are fields of Options."""
    from distbench.compare.options import Options, tolerances_of
    from distbench.gate.comparable import check_allowed

    return Options(tolerances=tolerances_of(tolerance), allowed=check_allowed(allow_different), **more)
