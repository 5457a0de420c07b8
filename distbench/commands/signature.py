"""`distbench signature`: a scenario to its signature file."""

from pathlib import Path

import click

from distbench.commands import STARTED_AT
from distbench.commands.files import check_writable, write
from distbench.spec.errors import UserError


@click.command()
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

    if output is not None:
        check_writable(output, "-o")
    asked = parse_mesh(mesh) if mesh else None
    jobs = jobs_of(Request((scenario,), choices, asked, device="cpu", quick=quick, started_at=STARTED_AT), None)
    if len(jobs) > 1:
        raise UserError(f"{scenario} holds {len(jobs)} scenarios, a signature is of one; give FILE::NAME")
    found, left_out = signature_of(jobs[0])
    for case_id, reason in left_out.items():
        click.echo(f"distbench: left out: {case_id} raises {reason}", err=True)
    text = found.to_text()
    if output is None:
        click.echo(text, nl=False)
        return
    write(output, text)
    click.echo(f"signature: {output}", err=True)
