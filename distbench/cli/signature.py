"""The commands `distbench signature write`, `check` and `update`."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from distbench.cli import STARTED_AT
from distbench.cli.main import WholeSentences
from distbench.cli.options import (
    PATH,
    OutputOptions,
    check_writable,
    format_option,
    make_folder,
    mesh_option,
    options_of,
    quick_option,
    say,
    say_files,
    scenario_names,
    set_option,
    width_option,
    write,
)
from distbench.spec.errors import UserError


@click.group(cls=WholeSentences)
def signature() -> None:
    """Write, check and update signatures: the exact communication of a step, as text for git.

    A signature lists phase, mesh dim, bytes, module and redistribution of each path, and is the same on every
    machine. `distbench signature SCENARIO` is short for `distbench signature write SCENARIO`.

    \b
    Examples:
      distbench signature write bench.py --output-dir signatures
      distbench signature check signatures new
    """


@signature.command("write")
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...", shell_complete=scenario_names)
@set_option
@mesh_option("Any size, because no rank is started. Default: the scenario's mesh.")
@quick_option("The mesh is the scenario's full mesh.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Output file. Only for one scenario. Default: print.")
@click.option("--output-dir", type=PATH, metavar="DIR", help="Folder to write. Each scenario has a file.")
def write_signature(
    scenarios: tuple[str, ...],
    choices: tuple[str, ...],
    mesh: dict[str, int] | None,
    quick: bool,
    output: Path | None,
    output_dir: Path | None,
) -> None:
    """Write the signature of each SCENARIO. If a scenario is rejected, the command continues with the next scenario.

    Exit code: 0, or 2 if a scenario is rejected.

    \b
    Examples:
      distbench signature write llama_2d --mesh dp_shard=64,tp=8 -o l.signature
      distbench signature write bench.py tp_mlp --quick --output-dir signatures
    """
    from distbench.judge.communication_signature import signatures_of
    from distbench.launch import Request, jobs_of

    request = Request(scenarios, choices, mesh, device="cpu", quick=quick, started_at=STARTED_AT, full_mesh=True)
    jobs = jobs_of(request, None)
    files = _files([job.scenario for job in jobs], output, output_dir)
    refused = []
    for job, answer in zip(jobs, signatures_of(jobs), strict=True):
        if isinstance(answer, str):
            refused.append(f"no signature of {job.scenario}: {answer}")
            continue
        scenario_signature, left_out = answer
        for case_id, reason in left_out.items():
            say(f"warning: left out: {case_id}: {reason}", err=True)
        if file := files.get(job.scenario):
            write(file, scenario_signature.to_text())
            say(f"signature: {file}", err=True)
        else:
            say(scenario_signature.to_text(), nl=False)
    if refused:
        raise UserError("; ".join(refused))


@signature.command("check")
@click.argument("base", type=PATH)
@click.argument("new", type=PATH)
@options_of(OutputOptions, "output")
@width_option
@click.pass_context
def check_signature(ctx: click.Context, base: Path, new: Path, output: OutputOptions) -> None:
    """Fail if the communication of NEW differs from BASE. Both are files, or both are folders of *.signature files.

    BASE or NEW may be a run file of run --trace-paths or simulate. There is no tolerance.

    Exit code: 0 unchanged, 1 changed, 2 usage error, 4 not comparable or missing.

    \b
    Examples:
      distbench signature check signatures/llama_2d.signature new.signature
      distbench signature check signatures new --github --write junit=junit.xml
    """
    from distbench.judge.communication_signature import FORMS, compare

    output.files()  # rejected before anything is read
    comparison = compare(base, new)
    output.show(lambda form: FORMS[form](comparison))
    if comparison.exit_code:
        say(f"Next: {shlex.join(['distbench', 'signature', 'update', str(base), str(new)])}   (accepts NEW)", err=True)
    elif output.form == "table":
        say("Next: distbench ab REF_A REF_B -- SCENARIO   (compares times)", err=True)
    ctx.exit(comparison.exit_code)


@signature.command("update")
@click.argument("base", type=PATH)
@click.argument("new", type=PATH)
@format_option("table", "json")
def update_signature(base: Path, new: Path, form: str) -> None:
    """Replace BASE by NEW. Both are files, or both are folders of *.signature files.

    If only the torch versions differ, NEW is stored next to BASE, for the version of NEW and newer versions.

    \b
    Example:
      distbench signature update signatures new
    """
    from distbench.judge.communication_signature import update

    say_files(update(base, new), form)


def _files(names: Sequence[str], output: Path | None, folder: Path | None) -> dict[str, Path]:
    """The writable file of each scenario's signature; {} if the signature is printed."""
    from distbench.judge.communication_signature import SUFFIX

    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"two files declare a scenario {min(twice)}; write one signature per command, with FILE::NAME -o FILE"
        )
    # For one release, -o also accepts a folder: an existing folder, or a new folder without suffix or for several
    # scenarios.
    if output and (output.is_dir() or (not output.exists() and not output.suffix) or len(names) > 1):
        say(f"warning: -o {output} is a folder; -o FILE is for files. Use --output-dir {output}.", err=True)
        output, folder = None, output
    if output:
        check_writable(output, "-o")
        return {names[0]: output}
    if folder:
        make_folder(folder, "--output-dir")
        return {name: folder / f"{name}{SUFFIX}" for name in names}
    if len(names) > 1:
        raise UserError(
            f"{len(names)} scenarios are given, but only one signature can be printed; add --output-dir DIR"
        )
    return {}
