"""`distbench simulate`: a scenario's step on hardware that is not here."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distbench.commands import STARTED_AT
from distbench.commands.files import check_writable
from distbench.commands.say import say
from distbench.commands.width import width_option
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    from distbench.simulate.recording import Recording


@click.command()
@click.argument("scenario", required=False)
@click.option("--mesh", metavar="DIM=N,...", help="Mesh, of any size: no rank is started. Default: the scenario's own.")
@click.option("--hardware", default="h100", show_default=True, metavar="NAME|FILE", help="What it would run on.")
@click.option("--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the scenario.")
@click.option("--quick", is_flag=True, help="The scenario's quick sizes, on its full mesh.")
@click.option("--expandable-segments", is_flag=True, help="As with PYTORCH_ALLOC_CONF=expandable_segments:True.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Keep the recording, to replay it later.")
@click.option("--recording", type=click.Path(path_type=Path), metavar="FILE", help="Replay this one; record nothing.")
@click.option(
    "--format", "form", type=click.Choice(["table", "markdown", "json"]), default="table", help="What to print. [table]"
)
@width_option
def simulate(
    scenario: str | None,
    mesh: str | None,
    hardware: str,
    choices: tuple[str, ...],
    quick: bool,
    expandable_segments: bool,
    save: Path | None,
    recording: Path | None,
    form: str,
) -> None:
    """Say how long a step of SCENARIO would take on a machine that is not here, and how much memory it would need.

    One rank's real step is recorded on tensors without values, then replayed by a clock and an allocator; no rank is
    started, and no model is too large. docs/simulation.md says what is simulated, and how well.

    \b
    Examples:
      distbench simulate llama3_8b --mesh dp_shard=128 --set batch=256
      distbench simulate llama3_70b --mesh dp_shard=32,tp=8 --save 70b.jsonl
      distbench simulate --recording 70b.jsonl --hardware mine.json
    """
    from distbench.simulate.hardware.hardware_file import load_hardware
    from distbench.simulate.recording_file import load_recording
    from distbench.simulate.simulation import Simulation

    machine = load_hardware(hardware)
    if (scenario is None) == (recording is None):
        raise UserError("simulate takes a SCENARIO or --recording FILE; give one of them")
    if recording is not None:
        if mesh or choices or quick or save:
            raise UserError(
                "--recording replays a step as it was recorded; leave --mesh, --set, --quick and --save out"
            )
        found = [load_recording(recording)]
    else:
        found = _recorded(str(scenario), mesh, choices, quick, save)
    simulations = [Simulation(one, machine, expandable_segments) for one in found]
    if form == "json":
        click.echo(json.dumps([simulation.to_record() for simulation in simulations], indent=1))
        return
    from distbench.render.terminal import shown
    from distbench.simulate.simulation_text import blocks_of

    say(shown([block for simulation in simulations for block in blocks_of(simulation)], form))


def _recorded(
    scenario: str, mesh: str | None, choices: tuple[str, ...], quick: bool, save: Path | None
) -> "list[Recording]":
    from distbench.launch import Request, jobs_of
    from distbench.simulate.record_steps import record_steps
    from distbench.simulate.recording_file import save_recording
    from distbench.spec import parse_mesh

    if save is not None:
        check_writable(save, "--save")
    asked = parse_mesh(mesh) if mesh else None
    request = Request(
        (scenario,), choices, asked, "cpu", quick, started_at=STARTED_AT, full_mesh=True, shapes_only=True
    )
    jobs = jobs_of(request, None)
    if len(jobs) > 1 or (save is not None and len(jobs[0].variants) > 1):
        what = "a file of several scenarios" if len(jobs) > 1 else f"{len(jobs[0].variants)} variants"
        raise UserError(f"{scenario} is {what}; choose one with FILE::NAME or --set NAME=VALUE")
    ((found, left_out),) = record_steps(jobs)
    for label, reason in left_out.items():
        say(f"distbench: left out: {label}: {reason}", err=True)
    if save is not None:
        save_recording(found[0], save)
        say(f"recording: {save}", err=True)
    return found
