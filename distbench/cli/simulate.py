"""The command `distbench simulate`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    PATH,
    assume_option,
    check_new_folder,
    check_writable,
    format_option,
    label_option,
    make_folder,
    mesh_option,
    quick_option,
    refuse_with,
    refuse_without,
    results_option,
    say,
    set_option,
    verbose_option,
    width_option,
    write_folder,
)
from distbench.spec.errors import UserError
from distbench.spec.mesh import mesh_size
from distbench.spec.printable_text import count_text

if TYPE_CHECKING:
    from distbench.simulate.recording import Recording

MAX_SIMULATED, MAX_DIGITS = 16, 8  # of --rank
RECORDINGS_SHOWN = 20  # of --against, per line of progress


@click.command()
@click.argument("scenario", required=False)
@mesh_option("Any size, because no rank is started. Default: the scenario's mesh.")
@click.option("--hardware", default="h100", show_default=True, metavar="NAME|FILE", help="Predict for this machine.")
@set_option
@quick_option("The mesh is the scenario's full mesh.")
@assume_option
@click.option("--rank", "ranks", metavar="N,...", help="Simulate these ranks. Default: 0, and ranks with other steps.")
@click.option(
    "--float8",
    metavar="MODULES",
    help="Simulate matmuls of these modules in float8, such as 'layers.*'. Float8 times are estimates.",
)
@click.option("--expandable-segments", is_flag=True, help="Simulate PYTORCH_ALLOC_CONF=expandable_segments:True.")
@click.option("--save", type=PATH, metavar="FILE", help="Write the recording, for --recording.")
@click.option(
    "--chakra", type=PATH, metavar="DIR", help="Write a Chakra trace per rank of the mesh, for ASTRA-sim, to DIR."
)
@click.option("--recording", type=PATH, metavar="FILE", help="Replay this recording instead of a SCENARIO.")
@click.option(
    "--against",
    type=PATH,
    metavar="SOURCE",
    help="Compare with these figures. A CSV file of published steps, or a folder of such files; 'published': "
    "the record in distbench. --save FILE writes the residuals, --picture FILE draws them.",
)
@click.option(
    "--picture",
    type=PATH,
    metavar="FILE",
    help="Also draw a picture (.svg, .png). It shows the residuals of --against by class.",
)
@results_option("")
@label_option
@format_option("table", "markdown", "json")
@verbose_option
@width_option
def simulate(
    scenario: str | None,
    mesh: dict[str, int] | None,
    hardware: str,
    choices: tuple[str, ...],
    quick: bool,
    assume: tuple[str, ...],
    ranks: str | None,
    float8: str | None,
    expandable_segments: bool,
    save: Path | None,
    chakra: Path | None,
    recording: Path | None,
    against: Path | None,
    picture: Path | None,
    out: Path,
    label: str,
    form: str,
) -> None:
    """Predict the time and memory of a step of SCENARIO on other hardware.

    A step of one rank is recorded on tensors without values, then replayed with a simulated clock and allocator. No
    rank is started, and models of any size work. docs/simulation.md describes the simulation and its accuracy.

    The prediction is written to a run file with status `simulated`. report (also --paths and --diff), compare and
    signature check read this file.

    \b
    Examples:
      distbench simulate llama3_8b --mesh dp_shard=128 --set batch=256
      distbench simulate llama3_70b --mesh dp_shard=32,tp=8 --save 70b.jsonl
      distbench simulate --recording 70b.jsonl --hardware mine.json
      distbench simulate llama_2d --rank 0,3
      distbench simulate --against published
    """
    from distbench.simulate.compile_float8 import patterns_of
    from distbench.simulate.hardware_file import load_hardware
    from distbench.simulate.recording import load_recordings, save_recordings
    from distbench.simulate.simulated_run import write_simulated_run
    from distbench.simulate.simulation import Simulation, steps_of

    if against is not None:
        options = (
            "mesh",
            "choices",
            "quick",
            "assume",
            "ranks",
            "float8",
            "expandable_segments",
            "chakra",
            "recording",
        )
        refuse_with("--against", "scenario", "hardware", *options, "label")
        _against(str(against), out, save, picture, form)
        return
    refuse_without("--against", "picture")
    environment: dict[str, Any] = {}  # empty for a recording, which has another commit and machine
    left_out: Mapping[str, str] = {}
    machine = load_hardware(hardware)
    in_8 = patterns_of(float8, machine) if float8 is not None else ()
    if (scenario is None) == (recording is None):
        raise UserError("simulate needs either a SCENARIO or --recording FILE; give one of the two")
    if recording is not None:
        refuse_with("--recording", "mesh", "choices", "quick", "assume", "ranks", "save")
    make_folder(out, "--results")
    if chakra is not None:
        check_new_folder(chakra, "--chakra")
    if recording is not None:
        recordings = load_recordings(recording)
    else:
        arguments = mesh, choices, quick, save, chakra, _ranks(ranks), assume
        recordings, left_out, environment = _recorded(str(scenario), *arguments)
    simulations = Simulation.all_of(recordings, machine, expandable_segments, in_8)
    # The result is printed before it is written, because a full disk must not destroy a result of minutes.
    if form == "json":
        click.echo(json.dumps([simulation.to_record() for simulation in simulations], indent=1))
    else:
        from distbench.show.terminal import shown
        from distbench.simulate.simulation_text import blocks_of

        say(shown([block for ranks_of_step in steps_of(simulations) for block in blocks_of(ranks_of_step)], form))
    _warn_of(left_out)  # after the tables, which are longer than a screen
    try:
        if save is not None:
            save_recordings(recordings, save)
            say(f"recording: {save}", err=True)
        if chakra is not None:
            from distbench.show.units import disk_text
            from distbench.simulate.chakra_trace import chakra_files

            count, num_bytes = write_folder(chakra, "--chakra", chakra_files(simulations))
            say(f"Chakra traces: {chakra} ({count_text(count, 'file')}, {disk_text(num_bytes)})", err=True)
        say(f"run file: {write_simulated_run(simulations, out, environment, STARTED_AT, label)}", err=True)
    except OSError as error:
        raise UserError(
            f"{error.filename or out} cannot be written ({error.strerror}); give another file or folder"
        ) from error
    if form == "table":
        elsewhere = [] if out == Path("results") else ["--results", str(out)]
        say(f"Next: {shlex.join(['distbench', 'report', '--paths', *elsewhere])}   (shows each collective of the step)")


def _against(path: str, out: Path, save: Path | None, picture: Path | None, form: str) -> None:
    """Simulate published steps, and print the comparison."""
    from distbench.records.machine import git_state
    from distbench.search.published_comparison import (
        blocks_of,
        compared,
        record_of,
        residual_figure,
        residuals_of,
        residuals_text,
    )
    from distbench.show.plots import save_figure, styled
    from distbench.show.terminal import shown
    from distbench.simulate.published import published_rows
    from distbench.spec.file_io import write_whole

    rows = published_rows(path, lambda text: say(f"warning: {text}", err=True))
    make_folder(out, "--results")
    for option, file in (("--save", save), ("--picture", picture)):
        if file is not None:
            check_writable(file, option)
    counts = [0, 0]

    def on_progress(more: int, done: int) -> None:
        counts[0] += more
        counts[1] += done
        if more or counts[1] % RECORDINGS_SHOWN == 0 or counts[0] == counts[1]:
            say(f"steps recorded: {counts[1]} of {counts[0]}", err=True)

    results = compared(rows, out / "recordings", on_progress)
    if form == "json":
        click.echo(json.dumps(record_of(results), indent=1))
    else:
        say(shown(blocks_of(results), form))
    if all(result.step_s is None for result in results):
        raise UserError(f"no row of --against {path} can be simulated; correct the rows by the reasons (-v shows them)")
    if save is not None:
        write_whole(save, residuals_text(residuals_of(results, str(git_state().get("git_commit") or ""))))
        say(f"residuals: {save}", err=True)
    if picture is not None:
        with styled():
            save_figure(residual_figure(results), picture)
        say(f"picture: {picture}", err=True)


def _warn_of(left_out: Mapping[str, str]) -> None:
    for label, reason in left_out.items():
        say(f"warning: left out: {label}: {reason}", err=True)


def _ranks(text: str | None) -> list[int] | None:
    """The ranks of `--rank`, or None for the default."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < MAX_DIGITS for part in parts) or len(set(parts)) < len(parts):
        raise UserError(f"--rank {text!r} is not a list of ranks; give different integers >= 0, such as --rank 0,3")
    if len(parts) > MAX_SIMULATED:
        raise UserError(
            f"--rank has {len(parts)} ranks; give at most {MAX_SIMULATED}, because each rank is recorded separately"
        )
    return [int(part) for part in parts]


def _recorded(
    scenario: str,
    mesh: dict[str, int] | None,
    choices: tuple[str, ...],
    quick: bool,
    save: Path | None,
    chakra: Path | None,
    ranks: Sequence[int] | None,
    assume: Sequence[str],
) -> "tuple[list[Recording], dict[str, str], dict[str, Any]]":
    """The recordings of a scenario's step, the reasons of variants without one, and the environment."""
    from distbench.launch import Request, jobs_of
    from distbench.simulate.recording import record_steps
    from distbench.spec.assumptions import assumptions_of

    if save is not None:
        check_writable(save, "--save")
    request = Request((scenario,), choices, mesh, "cpu", quick, started_at=STARTED_AT, full_mesh=True, shapes_only=True)
    jobs = jobs_of(request, None)
    if len(jobs) > 1 or ((save or chakra) and len(jobs[0].variants) > 1):
        description = "several scenarios" if len(jobs) > 1 else f"{len(jobs[0].variants)} variants"
        raise UserError(f"{scenario} has {description}; choose a variant with FILE::NAME or --set NAME=VALUE")
    world_size = mesh_size(jobs[0].mesh)
    if beyond := [rank for rank in ranks or () if rank >= world_size]:
        raise UserError(f"--rank {beyond[0]} is not on the mesh; give ranks from 0 to {world_size - 1}")
    ((recordings, left_out),) = record_steps(jobs, ranks=ranks, assume=assumptions_of(assume))
    return recordings, left_out, jobs[0].environment
