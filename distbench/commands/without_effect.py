"""Options that were given and would have no effect are refused before anything is read or measured."""

import click
from click.core import ParameterSource

from distbench.spec.errors import UserError


def given() -> dict[str, str]:
    """The parameters that the command line gives, by name, as it writes them.

    Without defaults of [tool.distbench], and without --width, which any output may need.
    """
    ctx = click.get_current_context()
    return {
        str(one.name): max(one.opts, key=len) if isinstance(one, click.Option) else one.make_metavar(ctx)
        for one in ctx.command.params
        if ctx.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE and one.name != "width"
    }


def refuse_with(mode: str, *parameters: str) -> None:
    """UserError where one of the parameters is given, which `mode` ignores."""
    for option in _given_of(parameters):
        raise UserError(f"{option} does not go with {mode}, which ignores it; leave one of them out")


def refuse_without(needed: str, *parameters: str) -> None:
    """UserError where one of the parameters is given, which has no effect without `needed`."""
    for option in _given_of(parameters):
        raise UserError(f"{option} has no effect without {needed}; add {needed}, or leave {option} out")


def _given_of(parameters: tuple[str, ...]) -> list[str]:
    return [option for name, option in given().items() if name in parameters]
