"""The command `distbench redistribute`."""

from pathlib import Path
from typing import Any

import click

from distbench.cli.options import (
    MESH_HELP,
    PATH,
    format_option,
    say,
    width_option,
)
from distbench.spec.errors import UserError
from distbench.spec.mesh import MAX_RANKS


@click.command()
@click.argument("source", required=False)
@click.argument("target", required=False)
@click.option("--shape", required=True, metavar="N,...", help="Shape of the full tensor, such as 4096,4096.")
@click.option("--dtype", default="bf16", show_default=True, help="Data type: f64, f32, bf16 or f16.")
@click.option("--mesh", required=True, metavar="DIM=N,...", help=f"{MESH_HELP} 2x4 is a mesh without names.")
@click.option("--profile", type=PATH, metavar="FILE", help="Cost profile. Default: torch's own constants.")
@click.option(
    "--devices-per-host",
    type=click.IntRange(1, MAX_RANKS),
    metavar="N",
    help="Devices per host for torch's prices. [8 with an NCCL profile, else 1]",
)
@click.option("--picture", type=PATH, metavar="FILE", help="Also draw a picture (.svg, .png). It shows the path.")
@format_option("table", "json")
@click.option("--all-pairs", is_flag=True, help="Plan every ordered pair of layouts, instead of SOURCE and TARGET.")
@width_option
def redistribute(
    source: str | None,
    target: str | None,
    profile: Path | None,
    picture: Path | None,
    form: str,
    all_pairs: bool,
    **of_setting: Any,
) -> None:
    """Show how each planner would redistribute a tensor from SOURCE to TARGET, its cost, and which planner to use.

    No ranks are started. SOURCE and TARGET are placements in torch's notation, one per mesh dim: R, S(0), P(sum).
    S(0)[1]S(0)[0] shards over the second mesh dim first.

    \b
    Examples:
      distbench redistribute "S(0)S(1)" "S(1)S(0)" --shape 4096,4096 --mesh 2x4
      distbench redistribute "S(0)" R --shape 64,64 --mesh tp=8 --profile p.json
      distbench redistribute --all-pairs --shape 1024,1024 --mesh 4x4
    """
    from distbench.launch.display import display_for
    from distbench.planning.recommendation_text import plan_all_pairs, plan_pair
    from distbench.planning.redistribution_request import setting_of

    setting = setting_of(profile_path=profile, **of_setting)
    if all_pairs:
        if source or picture:
            raise UserError("--all-pairs cannot be combined with SOURCE, TARGET or --picture; leave one of them out")
        with display_for("plan", quiet=False) as display:
            text = plan_all_pairs(setting, form, display.event)
    elif source is None or target is None:
        raise UserError(
            'redistribute needs two layouts, e.g. distbench redistribute "S(0)R" "RS(0)" ..., or --all-pairs'
        )
    else:
        text = plan_pair(setting, source, target, form, picture)
    say(text)
