"""The command `distbench signature`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distbench.cli import STARTED_AT
from distbench.cli.options import (
    PATH,
    check_writable,
    make_folder,
    mesh_option,
    say,
    scenario_names,
    write,
)
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...", shell_complete=scenario_names)
@click.option("--set", "choices", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the scenario.")
@mesh_option("Mesh, of any size: no rank is started. Default: the scenario's own.")
@click.option("--quick", is_flag=True, help="The scenario's quick sizes, on its full mesh.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="The file, for one scenario. Default: print.")
@click.option("--output-dir", type=PATH, metavar="DIR", help="Folder for one file per scenario.")
def signature(
    scenarios: tuple[str, ...],
    choices: tuple[str, ...],
    mesh: dict[str, int] | None,
    quick: bool,
    output: Path | None,
    output_dir: Path | None,
) -> None:
    """Write what scenarios communicate: each path's phase, mesh dim, bytes, module and redistribution.

    It is exact, the same on every machine, and made for git: distbench gate --signature compares two of them.

    \b
    Examples:
      distbench signature llama_2d --mesh dp_shard=64,tp=8 -o llama_2d.signature
      distbench signature bench.py tp_mlp --quick --output-dir signatures
    """
    from distbench.judge.communication_signature import signatures_of
    from distbench.launch import Request, jobs_of

    request = Request(scenarios, choices, mesh, device="cpu", quick=quick, started_at=STARTED_AT, full_mesh=True)
    jobs = jobs_of(request, None)
    files = _files([job.scenario for job in jobs], output, output_dir)
    answers = signatures_of(jobs)
    for case_id, reason in (item for _, left_out in answers for item in left_out.items()):
        say(f"distbench: left out: {case_id} raises {reason}", err=True)
    if not files:
        say(answers[0][0].to_text(), nl=False)
    for file, (scenario_signature, _) in zip(files, answers, strict=False):
        write(file, scenario_signature.to_text())
        say(f"signature: {file}", err=True)


def _files(names: Sequence[str], output: Path | None, folder: Path | None) -> list[Path]:
    """The file of each scenario's signature, known to be writable; none where it is printed."""
    from distbench.judge.communication_signature import SUFFIX

    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two files hold a scenario {min(twice)}; write their signatures apart: FILE::NAME -o FILE")
    # For one release, -o takes a folder too: any that exists, and a new one without a suffix or for several scenarios.
    if output and (output.is_dir() or (not output.exists() and not output.suffix) or len(names) > 1):
        say(f"warning: -o {output} is a folder; -o FILE is for files. Use --output-dir {output}.", err=True)
        output, folder = None, output
    if output:
        check_writable(output, "-o")
        return [output]
    if folder:
        make_folder(folder, "--output-dir")
        return [folder / f"{name}{SUFFIX}" for name in names]
    if len(names) > 1:
        raise UserError(f"{len(names)} scenarios are given, a signature is of one; give a folder: --output-dir DIR")
    return []
