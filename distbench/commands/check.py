"""`distbench check`: scenarios to what is wrong with their plans."""

import sys

import click

from distbench.commands import STARTED_AT
from distbench.commands.completion import scenario_names
from distbench.commands.say import say_lines
from distbench.commands.width import width_option


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...", shell_complete=scenario_names)
@click.option("--set", "choices", multiple=True, metavar="AXIS=VALUE", help="Pin an axis or parameter; A,B sweeps it.")
@click.option("--mesh", metavar="DIM=N,...", help="Mesh, e.g. dp_shard=512,tp=8, up to 65536 ranks. Default: its own.")
@click.option("--quick", is_flag=True, help="Check the quick sizes.")
@width_option
def check(scenarios: tuple[str, ...], choices: tuple[str, ...], mesh: str | None, quick: bool) -> None:
    """Say whether plans can work on a mesh of any size, every problem at once; no ranks are started.

    Exits with 2 where there are problems.

    \b
    Examples:
      distbench check llama_2d --mesh dp_shard=512,tp=8 --set batch=512
      distbench check my_model.py --mesh tp=3
    """
    from distbench.check_plans import check_plans
    from distbench.launch import Request
    from distbench.spec import parse_mesh

    asked = parse_mesh(mesh) if mesh is not None else None
    request = Request(scenarios, choices, asked, "cpu", quick, started_at=STARTED_AT, shapes_only=True)
    found = check_plans(request)
    say_lines(found.lines)
    sys.exit(2 if found.num_problems else 0)
