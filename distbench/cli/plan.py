"""The commands that answer without measuring: `plan`, `signature`, `simulate`; and `sweep`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    PATH,
    FiniteRange,
    check_writable,
    format_option,
    make_folder,
    mesh_option,
    refuse_with,
    say,
    scenario_names,
    width_option,
    write,
)
from distbench.spec.errors import INTERRUPTED, UserError
from distbench.spec.mesh import MAX_RANKS, mesh_size

if TYPE_CHECKING:
    from distbench.search.sweep_result import SweepResult
    from distbench.simulate.recording import Recording


@click.command()
@click.argument("source", required=False)
@click.argument("target", required=False)
@click.option("--shape", required=True, metavar="N,...", help="Shape of the full tensor, e.g. 4096,4096.")
@click.option("--dtype", default="bf16", show_default=True, help="f64, f32, bf16 or f16.")
@click.option("--mesh", required=True, metavar="2x4|DIM=N,...", help="Mesh, e.g. 2x4 or dp_shard=2,tp=4.")
@click.option("--profile", type=PATH, help="Cost profile; without one, torch's own constants.")
@click.option(
    "--devices-per-host",
    type=click.IntRange(1, MAX_RANKS),
    metavar="N",
    help="What torch prices hosts as. [default: 8 under an NCCL profile, else 1]",
)
@click.option("--picture", type=PATH, metavar="FILE", help="Also draw the path there, .png or .svg.")
@format_option("table", "json")
@click.option("--all-pairs", is_flag=True, help="Every ordered pair of layouts instead of SOURCE and TARGET.")
@width_option
def plan(
    source: str | None,
    target: str | None,
    profile: Path | None,
    picture: Path | None,
    form: str,
    all_pairs: bool,
    **of_setting: Any,
) -> None:
    """Say how each planner would redistribute a tensor from SOURCE to TARGET, what that costs, and which to use.

    No ranks are started. SOURCE and TARGET are placements as torch writes them, one a mesh dim: R, S(0), P(sum), and
    S(0)[1]S(0)[0] where the second mesh dim cuts first.

    \b
    Examples:
      distbench plan "S(0)S(1)" "S(1)S(0)" --shape 4096,4096 --mesh 2x4
      distbench plan "S(0)R" "RS(1)" --shape 4096,4096 --mesh 2x8 --profile profiles/h100_8x_ib.json --picture path.png
      distbench plan --all-pairs --shape 1024,1024 --mesh 4x4
    """
    from distbench.launch.display import display_for
    from distbench.planning.advice import plan_all_pairs, plan_pair
    from distbench.planning.redistribution_plans import setting_of

    setting = setting_of(profile_path=profile, **of_setting)
    if all_pairs:
        if source or picture:
            raise UserError("--all-pairs takes neither SOURCE and TARGET nor --picture; leave one of them out")
        with display_for("plan", quiet=False) as display:
            text = plan_all_pairs(setting, form, display.event)
    elif source is None or target is None:
        raise UserError('plan needs two layouts, e.g. distbench plan "S(0)R" "RS(0)" ..., or --all-pairs')
    else:
        text = plan_pair(setting, source, target, form, picture)
    say(text)


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...", shell_complete=scenario_names)
@click.option("--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the scenario.")
@mesh_option("Mesh, of any size: no rank is started. Default: the scenario's own.")
@click.option("--quick", is_flag=True, help="The scenario's quick sizes, on its full mesh.")
@click.option(
    "-o",
    "--output",
    type=PATH,
    help="A file with a suffix, or a folder for one file per scenario. Default: print.",
)
def signature(
    scenarios: tuple[str, ...], choices: tuple[str, ...], mesh: dict[str, int] | None, quick: bool, output: Path | None
) -> None:
    """Write what scenarios communicate: each path's phase, mesh dim, bytes, module and redistribution.

    It is exact, the same on every machine, and made for git: distbench gate --signature compares two of them.

    \b
    Examples:
      distbench signature llama_2d --mesh dp_shard=64,tp=8 -o llama_2d.signature
      distbench signature bench.py tp_mlp --quick -o signatures
    """
    from distbench.judge.communication_signature import signatures_of
    from distbench.launch import Request, jobs_of

    request = Request(scenarios, choices, mesh, device="cpu", quick=quick, started_at=STARTED_AT, full_mesh=True)
    jobs = jobs_of(request, None)
    files = _files([job.scenario for job in jobs], output)
    answers = signatures_of(jobs)
    for case_id, reason in (item for _, left_out in answers for item in left_out.items()):
        say(f"distbench: left out: {case_id} raises {reason}", err=True)
    if not files:
        say(answers[0][0].to_text(), nl=False)
    for file, (scenario_signature, _) in zip(files, answers, strict=False):
        write(file, scenario_signature.to_text())
        say(f"signature: {file}", err=True)


def _files(names: Sequence[str], output: Path | None) -> list[Path]:
    """The file of each scenario's signature, known to be writable; none where it is printed."""
    from distbench.judge.communication_signature import SUFFIX

    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two files hold a scenario {min(twice)}; write their signatures apart: FILE::NAME -o FILE")
    if output is None:
        if len(names) == 1:
            return []
        raise UserError(f"{len(names)} scenarios are given, a signature is of one; give a folder for them: -o FOLDER")
    # A name that does not exist yet is a file's only with a suffix, and for one scenario.
    if len(names) == 1 and (output.suffix if not output.exists() else not output.is_dir()):
        check_writable(output, "-o")
        return [output]
    make_folder(output, "-o")
    return [output / f"{name}{SUFFIX}" for name in names]


MAX_SIMULATED, MAX_DIGITS = 16, 8  # of --rank


@click.command()
@click.argument("scenario", required=False)
@mesh_option("Mesh, of any size: no rank is started. Default: the scenario's own.")
@click.option("--hardware", default="h100", show_default=True, metavar="NAME|FILE", help="What it would run on.")
@click.option("--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the scenario.")
@click.option("--quick", is_flag=True, help="The scenario's quick sizes, on its full mesh.")
@click.option("--rank", "ranks", metavar="N,...", help="Simulate these. Default: 0, and those that differ.")
@click.option("--float8", metavar="MODULES", help="Their matmuls in float8, by a rule; patterns such as 'layers.*'.")
@click.option("--expandable-segments", is_flag=True, help="As with PYTORCH_ALLOC_CONF=expandable_segments:True.")
@click.option("--save", type=PATH, metavar="FILE", help="Keep the recording, to replay it later.")
@click.option("--recording", type=PATH, metavar="FILE", help="Replay this one; record nothing.")
@click.option("--out", type=PATH, default=Path("results"), help="Results folder. [results]")
@click.option("--label", default="", metavar="TEXT", help="Remembered with the results; `report --label` finds it.")
@format_option("table", "markdown", "json")
@width_option
def simulate(
    scenario: str | None,
    mesh: dict[str, int] | None,
    hardware: str,
    choices: tuple[str, ...],
    quick: bool,
    ranks: str | None,
    float8: str | None,
    expandable_segments: bool,
    save: Path | None,
    recording: Path | None,
    out: Path,
    label: str,
    form: str,
) -> None:
    """Say how long a step of SCENARIO would take on a machine that is not here, and how much memory it would need.

    One rank's real step is recorded on tensors without values, then replayed by a clock and an allocator; no rank is
    started, and no model is too large. docs/simulation.md says what is simulated, and how well.

    It is written to a run file, whose rows say `simulated`: report, report --paths and --diff, compare and gate
    --signature read it.

    \b
    Examples:
      distbench simulate llama3_8b --mesh dp_shard=128 --set batch=256
      distbench simulate llama3_70b --mesh dp_shard=32,tp=8 --float8 'layers.*' --save 70b.jsonl
      distbench simulate --recording 70b.jsonl --hardware mine.json
      distbench simulate llama_2d --rank 0,3
    """
    from distbench.simulate.compile_float8 import patterns_of
    from distbench.simulate.hardware_file import load_hardware
    from distbench.simulate.recording import load_recordings, save_recordings
    from distbench.simulate.replay import Simulation, steps_of
    from distbench.simulate.simulated_run import write_simulated_run

    environment: dict[str, Any] = {}  # of a recording, whose commit and machine are not these
    machine = load_hardware(hardware)
    in_8 = patterns_of(float8, machine) if float8 is not None else ()
    if (scenario is None) == (recording is None):
        raise UserError("simulate takes a SCENARIO or --recording FILE; give one of them")
    if recording is not None:
        refuse_with("--recording", "mesh", "choices", "quick", "ranks", "save")
    make_folder(out, "--out")
    if recording is not None:
        recordings = load_recordings(recording)
    else:
        recordings, environment = _recorded(str(scenario), mesh, choices, quick, save, _ranks(ranks))
    simulations = Simulation.all_of(recordings, machine, expandable_segments, in_8)
    # Printed before it is written: a full disk must not cost a result that took minutes.
    if form == "json":
        click.echo(json.dumps([simulation.to_record() for simulation in simulations], indent=1))
    else:
        from distbench.show.terminal import shown
        from distbench.simulate.simulation_text import blocks_of

        say(shown([block for ranks_of_step in steps_of(simulations) for block in blocks_of(ranks_of_step)], form))
    try:
        if save is not None:
            save_recordings(recordings, save)
            say(f"recording: {save}", err=True)
        say(f"run file: {write_simulated_run(simulations, out, environment, STARTED_AT, label)}", err=True)
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written ({error.strerror}); give another place") from error


def _ranks(text: str | None) -> list[int] | None:
    """The ranks of `--rank`; None for the usual ones."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < MAX_DIGITS for part in parts) or len(set(parts)) < len(parts):
        raise UserError(f"--rank {text!r} names no ranks; give whole numbers from 0 on, each once, such as --rank 0,3")
    if len(parts) > MAX_SIMULATED:
        raise UserError(f"--rank names {len(parts)} ranks; give {MAX_SIMULATED} at most, for each is recorded alone")
    return [int(part) for part in parts]


def _recorded(
    scenario: str,
    mesh: dict[str, int] | None,
    choices: tuple[str, ...],
    quick: bool,
    save: Path | None,
    ranks: Sequence[int] | None,
) -> "tuple[list[Recording], dict[str, Any]]":
    """The recordings of a scenario's step, and the environment in which they were made."""
    from distbench.launch import Request, jobs_of
    from distbench.simulate.recording import record_steps

    if save is not None:
        check_writable(save, "--save")
    request = Request((scenario,), choices, mesh, "cpu", quick, started_at=STARTED_AT, full_mesh=True, shapes_only=True)
    jobs = jobs_of(request, None)
    if len(jobs) > 1 or (save is not None and len(jobs[0].variants) > 1):
        description = "a file of several scenarios" if len(jobs) > 1 else f"{len(jobs[0].variants)} variants"
        raise UserError(f"{scenario} is {description}; choose one with FILE::NAME or --set NAME=VALUE")
    world_size = mesh_size(jobs[0].mesh)
    if beyond := [rank for rank in ranks or () if rank >= world_size]:
        raise UserError(f"--rank {beyond[0]}: the mesh has ranks 0 to {world_size - 1}; give one of these")
    ((recordings, left_out),) = record_steps(jobs, ranks=ranks)
    for label, reason in left_out.items():
        say(f"distbench: left out: {label}: {reason}", err=True)
    return recordings, jobs[0].environment


@click.command()
@click.argument("scenario", shell_complete=scenario_names)
@click.option("--world", type=int, metavar="N", help="Devices (ranks) in all. Default: those of the scenario's mesh.")
@click.option("--hardware", metavar="NAME|FILE", help="Predict for this machine. Default: measure on this one.")
@click.option("--memory", metavar="AMOUNT", help="Memory of a device, such as 80GB. Default: the hardware file's.")
@click.option(
    "--budget", default="10min", show_default=True, metavar="TIME", help="How long it may take, such as 5min."
)
@click.option(
    "--plans", "max_plans", type=click.IntRange(1, 10_000), default=80, show_default=True, help="Tried at most."
)
@click.option("--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set a parameter; A,B tries each.")
@click.option("--mesh", metavar="DIM=N,...", help="The mesh of --around-my-plan. Default: the scenario's own.")
@click.option("--around-my-plan", is_flag=True, help="Try one change at a time of the plan as written.")
@click.option(
    "--price", type=FiniteRange(0, 1e6, min_open=True), metavar="AMOUNT", help="Of a device and hour: adds costs."
)
@click.option("--float8", metavar="MODULES", help="With --hardware: their matmuls in float8, such as 'layers.*'.")
@click.option("--quick", is_flag=True, help="The scenario's quick sizes.")
@click.option("--resume", is_flag=True, help="Take what an earlier sweep left in --out.")
@click.option("--out", type=PATH, help="Folder. [results/sweep/SCENARIO-WORLD]")
@click.option("--page", type=PATH, metavar="FILE", help="Write all of it as an HTML page.")
@format_option("table", "markdown", "json")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@width_option
@click.pass_context
def sweep(
    ctx: click.Context, /, scenario: str, form: str, page: Path | None, out: Path | None, **of_request: Any
) -> None:
    """Say which plan to use for SCENARIO on so many devices: mesh, resharding, checkpointing, micro-batches and more.

    With --hardware, plans are predicted by recording and replaying their step, and no rank is started, unless the file
    is this machine's own: then the best of them are measured. Without, all are measured in turn on this machine. It
    ends with a recommendation, a picture of time against memory, and the plan as code. What is known is kept where it
    is interrupted, and --resume goes on.

    \b
    Examples:
      distbench sweep llama3_8b --world 64 --hardware h100
      distbench sweep llama3_70b --world 256 --hardware h100 --memory 80GB --price 2.50
      distbench sweep llama_2d --world 4
      distbench sweep bench.py::mine --hardware h200 --around-my-plan
    """
    from distbench.search.sweep import AskedSweep, run_sweep
    from distbench.search.sweep_text import blocks_of, pareto_figures, record_of_result
    from distbench.show import plots
    from distbench.show.terminal import shown

    request = AskedSweep.of(scenario, out, **of_request)
    make_folder(request.out, "--out")
    if page is not None:
        check_writable(page, "--page")
    result, interrupted = run_sweep(request, lambda line: say(line, err=True))
    # Printed before it is written, as by simulate.
    record = json.dumps(record_of_result(result), indent=1)
    if form == "json":
        click.echo(record)
    else:
        say(shown(blocks_of(result), form))
    write(request.out / "plans.json", record)
    figures = pareto_figures(result.title, result.plans, result.best, result.capacity_bytes)
    if files := plots.draw(figures, request.out):
        say(f"picture: {files[0]}", err=True)
    if page is not None:
        write(page, _page(result))
        say(f"page: {page}", err=True)
    ctx.exit(INTERRUPTED if interrupted else 0)


def _page(result: "SweepResult") -> str:
    """The whole result as HTML: the recommendation first, then the picture."""
    from distbench.search.sweep_text import blocks_of, pareto_figures
    from distbench.show import plots
    from distbench.show.blocks import Heading, Lines
    from distbench.show.html import Picture, Verdict, page_of

    _, *rest = blocks_of(result)
    recommendation = next(block for block in rest if isinstance(block, Lines))
    rest.remove(recommendation)
    with plots.styled():
        figures = pareto_figures(result.title, result.plans, result.best, result.capacity_bytes)
        pictures = [Picture(figure) for _, figure in figures]
        head = (Heading(result.title, 1), Heading("which plan"), Verdict(recommendation.texts))
        return page_of(result.title, [*head, *pictures, *rest])
