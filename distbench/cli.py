"""Arguments to calls, `UserError` to a message and an exit code; nothing else happens here.

Imports stand inside the commands: `--help` and `list` must not pay for what they do not use.
"""

import sys
import time
from pathlib import Path
from typing import Any

import click

from distbench import __version__
from distbench.spec.errors import UserError

STARTED_AT = time.time()


class Commands(click.Group):
    """Turns the one error a user can mend into its message and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"distbench: {error}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("distbench: interrupted", err=True)
            ctx.exit(130)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="distbench")
def main() -> None:
    """Benchmark distributed PyTorch: what a parallelism plan costs on this hardware, and which part of it costs that.

    \b
    Example:
      distbench run llama_2d --quick
      distbench report
    """


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a scenario.")
def list_command(as_json: bool) -> None:
    """List the shipped scenarios: mesh, tags and what each measures.

    \b
    Example:
      distbench list --json
    """
    from distbench.spec import format_mesh, list_entries

    entries = list_entries()
    if as_json:
        import json

        fields = ("name", "mesh", "tags", "axes", "params", "summary")
        rows = [{name: getattr(entry, name) for name in fields} | {"file": str(entry.file)} for entry in entries]
        click.echo(json.dumps(rows, indent=1))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    meshes = max((len(format_mesh(entry.mesh)) for entry in entries), default=0)
    for entry in entries:
        click.echo(
            f"{entry.name:<{width}}  {format_mesh(entry.mesh):<{meshes}}  {entry.summary} [{', '.join(entry.tags)}]"
        )


@main.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@click.option("--set", "choices", multiple=True, metavar="AXIS=VALUE", help="Pin an axis or parameter; A,B sweeps it.")
@click.option("--mesh", metavar="DIM=N,...", help="Mesh, e.g. dp_shard=2,tp=2. Default: the scenario's own.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda where there is a GPU, else cpu.")
@click.option("--quick", is_flag=True, help="Quick sizes and few samples: a look, not a measurement to keep.")
@click.option("--pipelined", type=click.IntRange(1), default=1, metavar="N", help="Time N iterations back to back.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=300.0, metavar="S", help="Give up after S s of no progress."
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder for the ranks' logs.")
@click.option("--profile", type=click.Path(path_type=Path), metavar="FILE", help="Plan and predict by this profile.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def run(
    scenarios: tuple[str, ...],
    choices: tuple[str, ...],
    mesh: str | None,
    device: str | None,
    quick: bool,
    pipelined: int,
    out: Path,
    timeout: float,
    log_dir: Path | None,
    profile: Path | None,
    quiet: bool,
) -> None:
    """Measure scenarios: one torchrun launch each, all cases of all their variants.

    A SCENARIO is a name (`distbench list`), path/to/file.py, or path/to/file.py::name. Under torchrun or srun, this
    process joins as a rank instead of starting any.

    \b
    Examples:
      distbench run llama_2d --quick
      distbench run cp_attention --set rotate=alltoall --mesh cp=4
      distbench run redistribute --profile profile.json --set planners=greedy+calibrated+direct
      torchrun --nnodes 2 --nproc-per-node 8 ... -m distbench run llama_2d --mesh dp_shard=4,tp=4
    """
    import os

    from distbench.launch import Request, jobs_of
    from distbench.launch.ranks import joined_ranks
    from distbench.spec import parse_mesh

    joined = joined_ranks(os.environ)
    request = Request(
        targets=scenarios,
        choices=choices,
        mesh=parse_mesh(mesh) if mesh else None,
        device=device,
        quick=quick,
        pipelined=pipelined,
        out=out,
        log_dir=log_dir,
        timeout_s=timeout,
        started_at=STARTED_AT,
        profile=profile,
    )
    silent = quiet or (joined is not None and joined.rank != 0)
    sys.exit(_run_all(jobs_of(request, joined), joined, silent))


@main.command()
@click.option("--mesh", metavar="DIM=N,...", help="Mesh to measure, e.g. dp_shard=2,tp=2, which is the default.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda where there is a GPU, else cpu.")
@click.option("--quick", is_flag=True, help="Fewer sizes and samples: a look, not a profile to plan by.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder.")
@click.option("-o", "output", type=click.Path(path_type=Path), default=Path("profile.json"), help="The profile's file.")
@click.option("--plots", type=click.Path(path_type=Path), metavar="DIR", help="Draw points on lines there.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=300.0, metavar="S", help="Give up after S s of no progress."
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
def calibrate(
    mesh: str | None,
    device: str | None,
    quick: bool,
    out: Path,
    output: Path,
    plots: Path | None,
    timeout: float,
    quiet: bool,
) -> None:
    """Measure what each step of a redistribution costs on this machine, and fit a profile to plan by.

    Every collective over every mesh dim, all groups of a mesh dim at once, as DTensor runs it, by size.

    \b
    Examples:
      distbench calibrate --mesh dp_shard=2,tp=4 -o profile.json --plots plots
      distbench run redistribute --mesh dp_shard=2,tp=4 --profile profile.json
    """
    import os

    from distbench.launch import Request, jobs_of
    from distbench.launch.ranks import joined_ranks
    from distbench.spec import parse_mesh

    if not output.resolve().parent.is_dir():
        raise UserError(f"-o {output}: there is no folder {output.parent}; make it, or give another file")
    joined = joined_ranks(os.environ)
    request = Request(
        targets=("calibrate",),
        mesh=parse_mesh(mesh) if mesh else None,
        device=device,
        quick=quick,
        out=out,
        timeout_s=timeout,
        started_at=STARTED_AT,
    )
    jobs = jobs_of(request, joined)
    is_first = joined is None or joined.rank == 0
    exit_code = _run_all(jobs, joined, quiet or not is_first)
    if exit_code == 0 and is_first:
        _write_profile(Path(jobs[0].run_file), output, plots)
    sys.exit(exit_code)


@main.command()
@click.argument("scenario")
@click.option("--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the scenario.")
@click.option("--mesh", metavar="DIM=N,...", help="Mesh, of any size: no rank is started. Default: the scenario's own.")
@click.option("--quick", is_flag=True, help="The scenario's quick sizes.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="The signature's file; none, it is printed.")
def signature(scenario: str, choices: tuple[str, ...], mesh: str | None, quick: bool, output: Path | None) -> None:
    """Write what a scenario communicates: each path's phase, mesh dim, bytes, module and redistribution.

    It is exact, the same on every machine, and made for git: distbench gate --signature compares two of them.

    \b
    Example:
      distbench signature llama_2d --mesh dp_shard=64,tp=8 -o llama_2d.signature
    """
    from distbench.launch import Request, jobs_of
    from distbench.signature import signature_of
    from distbench.spec import parse_mesh

    asked = parse_mesh(mesh) if mesh else None
    jobs = jobs_of(Request((scenario,), choices, asked, device="cpu", quick=quick, started_at=STARTED_AT), None)
    if len(jobs) > 1:
        raise UserError(f"{scenario} holds {len(jobs)} scenarios, a signature is of one; give FILE::NAME")
    text = signature_of(jobs[0]).to_text()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"-o {output} cannot be written: {error.strerror}; give another file") from error
    click.echo(f"signature: {output}", err=True)


def _write_profile(run_file: Path, output: Path, plots: Path | None) -> None:
    from distbench.calibrate import draw, measured_in, profile_of, profile_text
    from distbench.results import read_run

    run = read_run(run_file)
    profile = profile_of(run)
    try:
        profile.save(output)
    except OSError as error:
        raise UserError(f"-o {output} cannot be written: {error.strerror}; give another file") from error
    click.echo(profile_text(profile))
    if plots:
        for path in draw(profile, measured_in(run), plots):
            click.echo(f"drawn: {path}", err=True)
    click.echo(f"profile: {output}", err=True)


def _run_all(jobs: list[Any], joined: Any, silent: bool) -> int:
    from distbench.display import display_for
    from distbench.launch import launch

    exit_codes = []
    for job in jobs:
        with display_for(job.scenario, silent) as display:
            outcome = launch(job, joined, display)
        if outcome.message:
            click.echo(f"distbench: {job.scenario}: {outcome.message}", err=True)
        if not silent and Path(job.run_file).exists():
            counts = ", ".join(f"{count} {status}" for status, count in sorted(outcome.num_by_status.items()))
            click.echo(f"{job.scenario}: {counts or 'no case finished'} -> {_relative(job.run_file)}", err=True)
        exit_codes.append(outcome.exit_code)
        if outcome.exit_code in (2, 130):
            break
    return max(exit_codes, default=0)


def _relative(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


@main.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN...]")
@click.option("--format", "form", type=click.Choice(["table", "markdown", "csv", "json"]), default="table")
@click.option("--plots", type=click.Path(path_type=Path), metavar="DIR", help="Also draw plots there, PNG and SVG.")
@click.option("--group-by", metavar="COLUMN,...", help="Summarise cases by these columns instead of listing them.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), help="Results folder to look in.")
def report(runs: tuple[Path, ...], form: str, plots: Path | None, group_by: str | None, out: Path) -> None:
    """Show measured runs; without RUN, every scenario of the latest `distbench run`.

    A RUN is a run file or a folder of run files.

    \b
    Examples:
      distbench report --plots plots
      distbench report results --format csv
      distbench report --group-by kind,status
    """
    from distbench.report import render

    by = tuple(name.strip() for name in group_by.split(",")) if group_by else ()
    shown = render(runs, out, form, plots, by)
    for warning in shown.warnings:
        click.echo(f"distbench: {warning}", err=True)
    click.echo(shown.text)


@main.command()
@click.argument("source", required=False)
@click.argument("target", required=False)
@click.option("--shape", required=True, metavar="N,...", help="Shape of the full tensor, e.g. 4096,4096.")
@click.option("--dtype", default="bf16", show_default=True, help="f64, f32, bf16 or f16.")
@click.option("--mesh", required=True, metavar="2x4|DIM=N,...", help="Mesh, e.g. 2x4 or dp_shard=2,tp=4.")
@click.option("--profile", type=click.Path(path_type=Path), help="Cost profile; without one, torch's own constants.")
@click.option(
    "--devices-per-host",
    type=click.IntRange(1),
    metavar="N",
    help="What torch prices hosts as. [default: 8 under an NCCL profile, else 1]",
)
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the path there, .png or .svg."
)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table")
@click.option("--all-pairs", is_flag=True, help="Every ordered pair of layouts instead of SOURCE and TARGET.")
def plan(
    source: str | None,
    target: str | None,
    shape: str,
    dtype: str,
    mesh: str,
    profile: Path | None,
    devices_per_host: int | None,
    picture: Path | None,
    form: str,
    all_pairs: bool,
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
    from distbench.advise import plan_all_pairs, plan_pair
    from distbench.advise.question import setting_of

    setting = setting_of(shape, dtype, mesh, profile, devices_per_host)
    if all_pairs:
        if source or picture:
            raise UserError("--all-pairs takes neither SOURCE and TARGET nor --picture; leave one of them out")
        click.echo(plan_all_pairs(setting, form))
        return
    if source is None or target is None:
        raise UserError('plan needs two layouts, e.g. distbench plan "S(0)R" "RS(0)" ..., or --all-pairs')
    click.echo(plan_pair(setting, source, target, form, picture))


@main.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@click.option("--set", "choices", multiple=True, metavar="AXIS=VALUE", help="Pin an axis or parameter; A,B sweeps it.")
@click.option("--mesh", metavar="DIM=N,...", help="Mesh of any size, e.g. dp_shard=512,tp=8. Default: the scenario's.")
@click.option("--quick", is_flag=True, help="Check the quick sizes.")
def check(scenarios: tuple[str, ...], choices: tuple[str, ...], mesh: str | None, quick: bool) -> None:
    """Say whether plans can work on a mesh of any size, every problem at once; no ranks are started.

    Exits with 2 where there are problems.

    \b
    Examples:
      distbench check llama_2d --mesh dp_shard=512,tp=8 --set batch=512
      distbench check my_model.py --mesh tp=3
    """
    from distbench.check import check_plans
    from distbench.launch import Request
    from distbench.spec import parse_mesh

    asked = parse_mesh(mesh) if mesh else None
    found = check_plans(Request(scenarios, choices, mesh=asked, device="cpu", quick=quick, started_at=STARTED_AT))
    click.echo("\n".join(found.lines))
    sys.exit(2 if found.num_problems else 0)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can run: devices, backends, torch, and each torch internal that distbench leans on.

    \b
    Example:
      distbench doctor
    """
    from distbench.doctor import examine, lines_of

    found = examine()
    if as_json:
        import json

        click.echo(json.dumps(found, indent=1))
    else:
        click.echo("\n".join(lines_of(found)))
    sys.exit(0 if found["usable"] else 1)
